"""Ranks: the processes that `torchrun` starts, sums over them, and weights sharded over them.

Purpose: App. F trains on 8 to 16 GPUs. Every rank plans the same packs and works on its share of them.
Gradients are summed (not averaged) with global constant denominators, so that one rank and N ranks take the
same step. There are two ways to hold the weights: replicated (adapters are small, their gradients are summed
here), or sharded with FSDP2, one unit a decoder layer. A sharded model is built on the meta device, and every
rank reads only its own slices of the checkpoint, so that no rank ever holds the whole.

1. ours: the vision tower is replicated, because a rank whose packs hold no picture would miss its
   collectives.
2. ours: adapters are replicated too and stay float32; frozen weights are only gathered, never reduced.
3. ours: gradients of adapters are summed once a mini-batch. Those of sharded weights (`--lora-rank 0`) are
   reduced after every pack, because unreduced ones are as large as the whole model; they are summed like all
   others (FSDP2 averages by default).
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rmsweb.config import Config, opt, rank, world_size
from rmsweb.engine.lora import lora_layers, lora_parameters
from rmsweb.engine.packing import dummy_pack
from rmsweb.engine.policy import PolicyModel, check_weights

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # of a collective: one rank may write a checkpoint while the others wait
WHOLE_SHARE = 0.5  # largest share of a GPU's memory that whole weights may take while ranks sample
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Config):
    """How processes hold and compute the model."""

    dtype: Literal["auto", "float32", "bfloat16"] = opt(
        "auto", "dtype of the frozen weights; auto: bfloat16 on a GPU (paper), float32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "where to compute")
    shard: bool = opt(False, "shard the weights over the ranks (FSDP2); off: every rank holds them all")
    recompute: bool | None = opt(
        None,
        "recompute decoder layers in backward: less memory, about a third slower (without it: on a GPU)",
    )
    check_memory: bool = opt(True, "on a GPU: refuse a run whose plan exceeds the free memory")
    threads: int = opt(0, "torch threads of a process; 0: torch's default", at_least=0)

    def recomputes(self, device: str) -> bool:
        """Return whether layers are recomputed on a kind of device, cpu or cuda."""
        return device == "cuda" if self.recompute is None else self.recompute


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all: rank in [0, world_size), and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the (picklable) values of all ranks, in order of rank, on every rank; all ranks wait."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def merge(self, own: dict[Any, T]) -> dict[Any, T]:
        """Return the entries of all ranks, sorted by key, on every rank; no two ranks have the same key."""
        merged = {key: value for found in self.gather(own) for key, value in found.items()}
        return {key: merged[key] for key in sorted(merged)}

    def agree(self, what: dict[str, Any]) -> None:
        """Raise ValueError on every rank where an entry is not the same on all ranks.

        The error names the entry and two of its values.
        """
        first, *others = self.gather(what)
        for number, other in enumerate(others, 1):
            for name in first:
                if first[name] != other[name]:
                    raise ValueError(
                        f"ranks disagree on {name}: {first[name]!r} on rank 0, {other[name]!r} on rank "
                        f"{number}; start all of them with the same flags and data"
                    )

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of the parameters over the ranks; a missing one counts as zero.

        FSDP2 has averaged those of sharded weights already.
        """
        plain: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                # without pictures the vision tower has gradient zero, on one rank as on many
                parameter.grad = torch.zeros_like(parameter)
            if isinstance(parameter, DTensor):
                parameter.grad.mul_(self.world_size)
            else:
                plain.append(parameter.grad)
        if self.world_size > 1:
            # trained weights are all float32, so that one collective takes them together
            flat = torch.cat([gradient.reshape(-1) for gradient in plain])
            dist.all_reduce(flat)
            for gradient, part in zip(plain, flat.split([x.numel() for x in plain]), strict=True):
                gradient.copy_(part.view_as(gradient))


def _device(name: str) -> torch.device:
    """Return the device of this process; raises ValueError where there is no such device."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {name}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise ValueError(
            f"--nproc_per_node: process {local} of this machine has no GPU of its own, torch sees {count}"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextmanager
def ranks(device: str = "auto", threads: int = 0) -> Iterator[Ranks]:
    """Join the processes that torchrun started (NCCL on GPUs, gloo on CPUs) and leave them at the end.

    One process needs nothing. `device` is auto (a GPU if there is one), cpu or cuda; `threads` are those of
    torch, 0 for its default. Raises ValueError for an impossible device or half an environment of torchrun;
    SystemExit with one line (exit code 1) on the ranks that are left when another one has died.
    """
    here, count, meeting = rank(), world_size(), os.environ.get("MASTER_ADDR", "")
    if here >= count or (count > 1 and not meeting):
        raise ValueError(
            f"RANK={here}, WORLD_SIZE={count}, MASTER_ADDR={meeting}: start several processes with torchrun"
        )
    if threads:
        torch.set_num_threads(threads)
    place = _device(device)
    gpu = place.type == "cuda"
    if count > 1:
        dist.init_process_group("nccl" if gpu else "gloo", device_id=place if gpu else None, timeout=TIMEOUT)
    try:
        yield Ranks(here, count, place)
    except RuntimeError as error:
        # NCCL and the store have errors of their own for a lost process, gloo has a plain one
        own = isinstance(error, (dist.DistBackendError, dist.DistNetworkError))
        if not own and not any(text in str(error) for text in LOST_PEER):
            raise
        first = str(error).splitlines()[0]
        raise SystemExit(
            f"rank {here} of {count}: another rank has ended ({first}); --resume goes on from the newest "
            "state"
        ) from None
    if count > 1:  # after an error the others may be gone, and leaving would wait for them
        dist.destroy_process_group()


# -------------------------------------------------------------------------------------------- sharded weights


def shard_policy(policy: PolicyModel, ranks: Ranks, compute_dtype: torch.dtype | None = None) -> None:
    """Shard decoder layers, embeddings and head over the ranks (FSDP2).

    Adapters and vision tower are replicated. Call after `add_lora`, with a policy on the meta device; it gets
    its weights from the checkpoint `policy.name` and fresh adapters, and its parameters are other objects
    afterwards. Sharded weights are cast to `compute_dtype` when they are gathered. Raises ValueError in a
    single process, or where the checkpoint does not fit.
    """
    if ranks.world_size == 1:
        raise ValueError("--shard: there is one process; start several with torchrun, or leave it out")
    model, device = policy.model, ranks.device
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    replicated = {*lora_parameters(model).values(), *model.model.visual.parameters()}
    cast = MixedPrecisionPolicy(param_dtype=compute_dtype, cast_forward_inputs=False)
    for unit in (*policy.text.layers, policy.scorer):
        # resharded after forward, so that parameters() are always the shards
        fully_shard(unit, mesh=mesh, ignored_params=replicated, reshard_after_forward=True, mp_policy=cast)
    model.to_empty(device=device)
    read_weights(model, policy.name)
    policy.device = device
    weights = sum(p.numel() * (compute_dtype or p.dtype).itemsize for p in model.parameters())
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    policy.by_layer = any(ranks.gather(samples_by_layer(weights, memory)))
    with torch.no_grad():  # the first forward settles which unit is the root
        policy.scorer(dummy_pack(device))


def samples_by_layer(weights: int, memory: int | None) -> bool:
    """Return whether ranks with `memory` bytes each gather one layer at a time while they sample.

    Otherwise they gather all `weights` bytes once. `memory` is None on a CPU.
    """
    return memory is not None and weights > WHOLE_SHARE * memory


def read_weights(model: nn.Module, source: str) -> None:
    """Fill an empty model from a checkpoint folder or hub name.

    It gets this rank's slices of the weights, converted to its dtype, fresh adapters, and the tables of the
    rotary embedding. Raises ValueError naming a tensor that is missing, too many, or has another shape.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{folder}: no model.safetensors there")
    reader, fresh = HuggingFaceStorageReader(str(folder)), lora_parameters(model)
    stored = reader.read_metadata().state_dict_metadata
    wanted = {name: parameter for name, parameter in model.named_parameters() if name not in fresh}
    tied = {"lm_head.weight"} - wanted.keys()  # a tied head has no name of its own
    check_weights(folder, wanted.keys() ^ (stored.keys() - tied))
    for name, parameter in wanted.items():
        found, expected = tuple(getattr(stored[name], "size", ())), tuple(parameter.shape)
        if found != expected:
            raise ValueError(f"{folder}: {name} has shape {found}, expected {expected}")
    load_distributed(wanted, storage_reader=reader)
    for layer in lora_layers(model).values():
        layer.reset()
    for module in model.modules():
        if module._non_persistent_buffers_set:  # not in a checkpoint: the model's class computes them
            model._init_weights(module)  # type: ignore[operator]


@contextmanager
def unsharded(policy: PolicyModel) -> Iterator[None]:
    """Let ranks sample on their own, each as many steps as it needs; does nothing without sharded weights.

    Every rank holds the whole weights meanwhile. A policy that gathers `by_layer` holds whole embeddings and
    head alone, and each forward gathers one layer after another. Before each forward the ranks vote; idle
    ranks run a dummy pack so that collectives match.
    """
    scorer = policy.scorer
    if not isinstance(scorer, FSDPModule):
        yield
        return
    units = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
    units = units[:1] if policy.by_layer else units  # the scorer itself comes first
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)

    def vote(*_: Any) -> None:
        _anyone(policy.device, True)

    try:
        if not policy.by_layer:
            yield
            return
        hook = policy.text.register_forward_pre_hook(vote)
        try:
            yield
        finally:
            hook.remove()
        with torch.no_grad():
            while _anyone(policy.device, False):
                scorer.hidden(dummy_pack(policy.device))
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def _anyone(device: torch.device, busy: bool) -> bool:
    """Return whether any rank is busy."""
    flag = torch.tensor(float(busy), device=device)
    dist.all_reduce(flag)
    return bool(flag)


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered (all ranks must call it), any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
