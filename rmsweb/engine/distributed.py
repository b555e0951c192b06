"""Ranks: what `torchrun` starts, sums over them, and weights sharded over them.

Purpose: App. F trains on 8 to 16 GPUs. Every rank plans the same packs, works on its share of them, and gradients are summed (not
averaged) with global constant denominators, so that one rank and N ranks take the same step. Two ways to hold the weights: replicated
(adapters are small, their gradients are summed here), or sharded with FSDP2, one unit a decoder layer.

1. ours: the vision tower is replicated, because a rank whose packs hold no picture would miss its collectives.
2. ours: adapters are replicated too and stay float32; frozen weights are only gathered, never reduced.
3. ours: gradients of sharded weights are summed like all others (FSDP2 averages by default).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rmsweb.engine.lora import lora_layers
from rmsweb.engine.packing import dummy_pack
from rmsweb.engine.policy import PolicyModel


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

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients of the parameters over the ranks; a missing one counts as zero. Those of sharded weights FSDP2 has averaged."""
        plain: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter.grad is None:  # a step without pictures is a step of zero gradient for the vision tower, on one rank as on many
                parameter.grad = torch.zeros_like(parameter)
            if not isinstance(parameter, DTensor):
                plain.append(parameter)
            else:
                parameter.grad.mul_(self.world_size)
        if self.world_size == 1:
            return
        for dtype in {parameter.dtype for parameter in plain}:
            same = [parameter for parameter in plain if parameter.dtype == dtype]
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in same if parameter.grad is not None])
            dist.all_reduce(flat)
            for parameter, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
                parameter.grad = part.view_as(parameter)


@contextmanager
def ranks(device: str = "auto") -> Iterator[Ranks]:
    """Joins the processes that torchrun started (NCCL on GPUs, gloo on CPUs) and leaves them at the end; one process needs nothing.

    `device` is auto (a GPU where there is one), cpu or cuda.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device}: expected auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(here)
    if world_size > 1:
        dist.init_process_group("nccl" if gpu else "gloo", device_id=here if gpu else None)
    try:
        yield Ranks(rank, world_size, here)
    finally:
        if world_size > 1:
            dist.destroy_process_group()


def shard(policy: PolicyModel, group: Ranks, compute_dtype: torch.dtype | None = None) -> None:
    """Shards the decoder layers, embeddings and head over the ranks (FSDP2); adapters and vision tower are replicated.

    Call after `add_lora` and before the optimizer is made. `compute_dtype` is what sharded weights are cast to when they are gathered.
    """
    model = policy.model
    apart = {p for layer in lora_layers(model).values() for p in (layer.lora_A, layer.lora_B)} | set(model.model.visual.parameters())
    mesh = init_device_mesh(group.device.type, (group.world_size,))
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": apart, "reshard_after_forward": True}  # so that parameters() are always the shards
    if compute_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, cast_forward_inputs=False)
    for layer in model.model.language_model.layers:
        fully_shard(layer, **options)
    fully_shard(policy.scorer, **options)
    for tensor in (*apart, *policy.scorer.buffers()):
        tensor.data = tensor.data.to(group.device)
    policy.device = group.device
    with torch.no_grad():  # the first forward settles which unit is the root
        policy.scorer(dummy_pack(group.device))


def _units(policy: PolicyModel) -> list[FSDPModule]:
    return [module for module in policy.scorer.modules() if isinstance(module, FSDPModule)]


@contextmanager
def unsharded(policy: PolicyModel) -> Iterator[None]:
    """Inside, every rank holds the whole weights, so that ranks can sample on their own, each as many steps as it needs."""
    units = _units(policy)
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_forward(False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True)
            unit.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered (all ranks must call it), any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
