"""Ranks: what `torchrun` starts, sums over them, and weights sharded over them.

Purpose: App. F trains on 8 to 16 GPUs. Every rank plans the same packs, works on its share of them, and
gradients are summed (not averaged) with global constant denominators, so that one rank and N ranks take the
same step. Two ways to hold the weights: replicated (adapters are small, their gradients are summed here), or
sharded with FSDP2, one unit a decoder layer. A sharded model is built on the meta device, and every rank
reads only its own slices of the checkpoint, so that no rank ever holds the whole.

1. ours: the vision tower is replicated, because a rank whose packs hold no picture would miss its
   collectives.
2. ours: adapters are replicated too and stay float32; frozen weights are only gathered, never reduced.
3. ours: gradients of adapters are summed once a mini-batch. Those of sharded weights (`--lora-rank 0`) are
   reduced after every pack, because unreduced ones are as large as the whole model; they are summed like all
   others (FSDP2 averages by default).
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rmsweb.engine.lora import lora_layers
from rmsweb.engine.packing import dummy_pack
from rmsweb.engine.policy import PolicyModel

TIMEOUT = timedelta(minutes=30)  # of a collective: one rank may write a checkpoint while the others wait
WHOLE_SHARE = 0.5  # largest share of a GPU's memory that whole weights may take while ranks sample


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all: rank in [0, world_size), and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums of each named value over the ranks, the same on all; every rank must give the same names."""
        if self.world_size == 1:
            return dict(values)
        names = sorted(values)
        total = torch.tensor([float(values[name]) for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """The (picklable) values of all ranks, in order of rank, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def agree(self, what: Mapping[str, Any]) -> None:
        """ValueError on every rank, naming the entry and two of its values, where an entry is not the same on
        all ranks.
        """
        first, *others = self.gather(dict(what))
        for rank, other in enumerate(others, 1):
            for name in sorted(first.keys() | other.keys()):
                if first.get(name) != other.get(name):
                    found = f"{first.get(name)!r} on rank 0, {other.get(name)!r} on rank {rank}"
                    raise ValueError(
                        f"ranks disagree on {name}: {found}; start all of them with the same flags and data"
                    )

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients of the parameters over the ranks; a missing one counts as zero.

        Those of sharded weights FSDP2 has averaged.
        """
        plain: list[nn.Parameter] = []
        for parameter in parameters:
            if (
                parameter.grad is None
            ):  # a step without pictures is a step of zero gradient for the vision tower, on one rank as on many
                parameter.grad = torch.zeros_like(parameter)
            if not isinstance(parameter, DTensor):
                plain.append(parameter)
            else:
                parameter.grad.mul_(self.world_size)
        if self.world_size == 1:
            return
        for dtype in sorted({parameter.dtype for parameter in plain}, key=str):  # the same order on all ranks
            same = [parameter for parameter in plain if parameter.dtype == dtype]
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in same if parameter.grad is not None])
            dist.all_reduce(flat)
            for parameter, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
                parameter.grad = part.view_as(parameter)


@contextmanager
def ranks(device: str = "auto") -> Iterator[Ranks]:
    """Joins the processes that torchrun started (NCCL on GPUs, gloo on CPUs) and leaves them at the end; one
    process needs nothing.

    `device` is auto (a GPU where there is one), cpu or cuda. ValueError for an impossible device or half an
    environment of torchrun; SystemExit with one line (exit code 1) on the ranks that are left when another
    one has died.
    """
    rank, world_size, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    if not 0 <= rank < world_size or (world_size > 1 and "MASTER_ADDR" not in os.environ):
        raise ValueError(
            f"RANK={rank}, WORLD_SIZE={world_size}, MASTER_ADDR={os.environ.get('MASTER_ADDR', '')}: start several processes with torchrun"
        )
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device}: expected auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if gpu and local >= torch.cuda.device_count():
        raise ValueError(
            f"--nproc_per_node: process {local} of this machine has no GPU of its own, torch sees {torch.cuda.device_count()}"
        )
    here = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(here)
    if world_size > 1:
        dist.init_process_group("nccl" if gpu else "gloo", device_id=here if gpu else None, timeout=TIMEOUT)
    try:
        yield Ranks(rank, world_size, here)
    except RuntimeError as error:
        if not _lost_peer(error):
            raise
        first = str(error).splitlines()[0]
        raise SystemExit(
            f"rank {rank} of {world_size}: another rank has ended ({first}); --resume goes on from the newest state"
        ) from None
    if world_size > 1:  # after an error the others may be gone, and leaving would wait for them
        dist.destroy_process_group()


def _lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another process is gone: NCCL and the store have their own errors,
    gloo has a plain one.
    """
    return isinstance(error, (dist.DistBackendError, dist.DistNetworkError)) or any(
        text in str(error)
        for text in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
    )


# -------------------------------------------------------------------------------------------- sharded weights


def shard(policy: PolicyModel, group: Ranks, compute_dtype: torch.dtype | None = None) -> None:
    """Shards the decoder layers, embeddings and head over the ranks (FSDP2); adapters and vision tower are
    replicated.

    Call after `add_lora`, with a policy on the meta device; it gets its weights from the checkpoint
    `policy.name` and fresh adapters, and its parameters are other objects afterwards. `compute_dtype` is what
    sharded weights are cast to when they are gathered. ValueError in a single process, or where the
    checkpoint does not fit.
    """
    if group.world_size == 1:
        raise ValueError("--shard: there is one process; start several with torchrun, or leave it out")
    model = policy.model
    apart = {p for layer in lora_layers(model).values() for p in (layer.lora_A, layer.lora_B)} | set(
        model.model.visual.parameters()
    )
    mesh = init_device_mesh(group.device.type, (group.world_size,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": apart,
        "reshard_after_forward": True,
    }  # so that parameters() are always the shards
    if compute_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, cast_forward_inputs=False)
    for layer in model.model.language_model.layers:
        fully_shard(layer, **options)
    fully_shard(policy.scorer, **options)
    model.to_empty(device=group.device)
    read_weights(model, policy.name)
    policy.device = group.device
    weights = sum(
        parameter.numel() * (compute_dtype or parameter.dtype).itemsize for parameter in model.parameters()
    )
    memory = (
        torch.cuda.get_device_properties(group.device).total_memory if group.device.type == "cuda" else None
    )
    policy.scorer.by_layer = any(group.gather(samples_by_layer(weights, memory)))  # type: ignore[assignment]
    with torch.no_grad():  # the first forward settles which unit is the root
        policy.scorer(dummy_pack(group.device))


def samples_by_layer(weights: int, memory: int | None) -> bool:
    """Whether ranks with `memory` bytes each gather one layer at a time while they sample, and not all
    `weights` bytes once.
    """
    return memory is not None and weights > WHOLE_SHARE * memory


def read_weights(model: nn.Module, source: str) -> None:
    """Fills an empty model: this rank's slices of its weights from a checkpoint folder (or hub name), fresh
    adapters, tables of the rotary embedding.

    Weights are converted to the model's dtype. ValueError naming the tensor that is missing, too many, or has
    another shape.
    """
    folder = (
        Path(source)
        if Path(source).is_dir()
        else Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    )
    files = _weight_files(folder)
    fresh = {f"{name}.{leaf}" for name in lora_layers(model) for leaf in ("lora_A", "lora_B")}
    wanted = {
        name: parameter for name, parameter in model.named_parameters() if name not in fresh
    }  # a tied head has no name of its own
    tied = {"lm_head.weight"} - wanted.keys()
    if wrong := sorted(wanted.keys() ^ (files.keys() - tied)):
        raise ValueError(
            f"{folder}: the weights do not fit a Qwen3-VL: {', '.join(wrong[:3])} missing or unexpected ({len(wrong)} in all)"
        )
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as tensors, torch.no_grad():
            for name in tensors.keys() & wanted.keys():
                part, parameter = tensors.get_slice(name), wanted[name]
                if tuple(part.get_shape()) != tuple(parameter.shape):
                    raise ValueError(
                        f"{file}: {name} has shape {tuple(part.get_shape())}, expected {tuple(parameter.shape)}"
                    )
                if isinstance(
                    parameter, DTensor
                ):  # FSDP2 gives every rank equally many rows, the last ones fewer
                    local = parameter.to_local()
                    first = min(
                        dist.get_rank() * math.ceil(len(parameter) / dist.get_world_size()), len(parameter)
                    )
                    local.copy_(part[first : first + len(local)])
                else:
                    parameter.copy_(part[:])
    for layer in lora_layers(model).values():
        layer.reset()
    for module in model.modules():
        if module._non_persistent_buffers_set:  # not in a checkpoint: the model's class computes them
            model._init_weights(module)  # type: ignore[operator]


def _weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file of the checkpoint that holds it: one file, or several with an index."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return {
            name: folder / file
            for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        }
    if not single.is_file():
        raise FileNotFoundError(f"{folder}: no model.safetensors or model.safetensors.index.json there")
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


@contextmanager
def unsharded(policy: PolicyModel) -> Iterator[None]:
    """Inside, ranks can sample on their own, each as many steps as it needs. Nothing happens where nothing is
    sharded.

    Every rank holds the whole weights; or, sharded `by_layer`, embeddings and head alone, and each forward
    pass gathers one layer after another: the ranks then agree before each pass that someone still needs it,
    and those that have finished take part with an empty one.
    """
    scorer = policy.scorer
    if not isinstance(scorer, FSDPModule):
        yield
        return
    by_layer, backbone = scorer.by_layer, policy.model.model.language_model
    units = (
        [scorer] if by_layer else [module for module in scorer.modules() if isinstance(module, FSDPModule)]
    )
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)

    def take_part(*_: Any) -> None:
        _anyone(policy.device, True)

    hook = backbone.register_forward_pre_hook(take_part) if by_layer else None
    try:
        yield
        if hook is not None:
            hook.remove()
            with torch.no_grad():
                while _anyone(policy.device, False):
                    scorer.hidden(dummy_pack(policy.device))
    finally:
        if hook is not None:
            hook.remove()
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def _anyone(device: torch.device, busy: bool) -> bool:
    """Whether any rank says that it is busy."""
    flag = torch.tensor(float(busy), device=device)
    dist.all_reduce(flag)
    return bool(flag)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered (all ranks must call it), any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
