"""Training: the optimizer step, learning rates, the packs of a step, and the state that a killed run goes on from.

Purpose: what SFT and RL share. A step plans its packs, runs this rank's share forward and backward, sums gradients over the ranks,
clips, and updates (App. F: AdamW, cosine; App. G: constant rate).

Shapes: N answer tokens of a pack.

1. ours: warm-up step s (from 0) has the rate peak x (s + 1) / W, so that the first step is not lost.
2. ours: no weight decay on vectors (norms, biases); adapters are matrices and decay.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rmsweb.engine.distributed import Ranks, whole
from rmsweb.engine.lora import lora_layers, merged_state_dict, save_adapter
from rmsweb.engine.packing import Group, Lengths, Pack, cost, deal, dummy_pack, make_pack, plan_packs, select
from rmsweb.engine.policy import PolicyModel

KEPT_STATES = 2  # newest training states that stay on disk


def cosine_with_warmup(step: int, total: int, peak: float, warmup_ratio: float) -> float:
    """Learning rate of step `step` in [0, total): linear over the first ceil(total x warmup_ratio) steps, then half a cosine down to 0.

    >>> [round(cosine_with_warmup(step, 5, 1.0, 0.4), 3) for step in range(5)]
    [0.5, 1.0, 1.0, 0.75, 0.25]
    """
    warmup = math.ceil(total * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def constant(step: int, total: int, peak: float, warmup_ratio: float = 0.0) -> float:
    """Learning rate of RL: the peak at every step."""
    return peak


@dataclass(frozen=True, slots=True)
class RankPack:
    """A pack of this rank. `number` counts the step's packs over all ranks, -1 for a dummy; `answers` are (group, answer) in the pack's order."""

    number: int
    pack: Pack
    answers: tuple[tuple[int, int], ...]


def rank_packs(policy: PolicyModel, ranks: Ranks, lengths: Sequence[Lengths], group: Callable[[int], Group], token_budget: int) -> Iterator[RankPack]:
    """This rank's packs of a step's groups: equally many on every rank, filled up with dummies that hold no answers.

    The plan is a function of `lengths` alone, so all ranks agree on it and only the rank that needs a group encodes it.
    """
    bins = plan_packs(lengths, token_budget)
    costs = [cost([(lengths[number][0], tuple(lengths[number][1][a] for a in answers)) for number, answers in content]) for content in bins]
    for number in deal(costs, ranks.world_size)[ranks.rank]:
        if number is None:
            yield RankPack(-1, dummy_pack(policy.device), ())
            continue
        content = bins[number]
        groups = {index: group(index) for index, _ in content}
        ordered = select(groups, content)
        yield RankPack(number, make_pack(ordered, policy.device), tuple((index, answer) for index, answers in content for answer in answers))


def score(
    policy: PolicyModel, ranks: Ranks, lengths: Sequence[Lengths], group: Callable[[int], Group], token_budget: int, temperature: float = 1.0
) -> dict[tuple[int, int], Tensor]:
    """Log-probabilities of every answer, [R] float32 on the CPU by (group, answer), without gradient, on all ranks."""
    own: dict[tuple[int, int], Tensor] = {}
    with torch.no_grad():
        for item in rank_packs(policy, ranks, lengths, group, token_budget):
            logprobs = policy.response_logprobs(item.pack, temperature).cpu()
            if item.answers:
                own |= dict(zip(item.answers, logprobs.split(item.pack.response_lengths), strict=True))
    return {key: value for part in ranks.gather(own) for key, value in part.items()}


class Optimizer:
    """AdamW with summed, clipped gradients and a learning rate per step.

    Args:
        parameters: those that require gradients.
        rate: step number (from 0) -> learning rate.
        clip: largest gradient norm.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        ranks: Ranks,
        rate: Callable[[int], float],
        *,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        clip: float = 1.0,
    ) -> None:
        self.parameters, self.ranks, self.rate, self.clip = list(parameters), ranks, rate, clip
        self.num_steps = 0
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.ndim > 1, isinstance(parameter, DTensor)), []).append(parameter)
        self.adam = torch.optim.AdamW(
            [{"params": members, "weight_decay": weight_decay if matrix else 0.0} for (matrix, _), members in groups.items()],
            lr=rate(0),
            betas=betas,
            fused=True,
        )

    def step(self) -> tuple[float, float]:
        """One update from the accumulated gradients, which are cleared; returns the gradient norm before clipping and the learning rate.

        ValueError where the norm is not finite: such a step would destroy the weights.
        """
        self.ranks.sum_gradients(self.parameters)
        norm = self._norm()
        if not math.isfinite(norm):
            raise ValueError(f"step {self.num_steps}: the gradient norm is {norm}; lower the learning rate or look at the data of this step")
        if norm > self.clip:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.clip / norm)
        rate = self.rate(self.num_steps)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.num_steps += 1
        return norm, rate

    def _norm(self) -> float:
        """Norm of all gradients, the parts of sharded ones included."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        squares = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)  # replicated, sharded
        for gradient in gradients:
            part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            squares[int(isinstance(gradient, DTensor))] += part.float().square().sum()
        if self.ranks.world_size > 1 and any(isinstance(gradient, DTensor) for gradient in gradients):
            dist.all_reduce(squares[1:])
        return math.sqrt(float(squares.sum()))


# ------------------------------------------------------------------------------------------------- states and checkpoints


def save_training_state(folder: Path, policy: PolicyModel, optimizer: Optimizer, ranks: Ranks, extra: dict[str, Any]) -> None:
    """Writes folder/state-<step>.rank<r>.pt: trained weights, optimizer, random state and `extra`; the two newest steps stay.

    A file appears whole or not at all, so a run killed at any moment goes on from the newest step that all ranks have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"state-{optimizer.num_steps:08d}.rank{ranks.rank}.pt"
    weights = {name: parameter.detach() for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    state = {"step": optimizer.num_steps, "weights": weights, "adam": optimizer.adam.state_dict(), "rng": torch.get_rng_state(), "extra": extra}
    torch.save(_local(state), path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)
    ranks.barrier()
    for old in _states(folder, ranks.rank)[:-KEPT_STATES]:
        old.unlink()


def load_training_state(folder: Path, policy: PolicyModel, optimizer: Optimizer, ranks: Ranks) -> dict[str, Any] | None:
    """Goes back to the newest state that all ranks have and returns its `extra`; None where there is none.

    ValueError where the state belongs to other parameters or another number of ranks.
    """
    steps = [{path.name.split(".")[0] for path in _states(folder, rank)} for rank in range(ranks.world_size)]
    common = sorted(set.intersection(*steps)) if steps else []
    if not common:
        return None
    path = folder / f"{common[-1]}.rank{ranks.rank}.pt"
    if (folder / f"{common[-1]}.rank{ranks.world_size}.pt").exists():
        raise ValueError(f"{path}: was written by more than {ranks.world_size} ranks; resume with as many as before")
    state = torch.load(path, map_location="cpu", weights_only=True)
    trained = {name: parameter for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    if trained.keys() != state["weights"].keys():
        raise ValueError(f"{path}: trains other parameters than this run; resume with the flags of the run that wrote it")
    for name, parameter in trained.items():
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        target.data.copy_(state["weights"][name])
    shapes = iter([parameter for group in optimizer.adam.param_groups for parameter in group["params"]])
    optimizer.adam.load_state_dict(_like(state["adam"], list(shapes)))
    optimizer.num_steps = state["step"]
    torch.set_rng_state(state["rng"])
    return state["extra"]


def _states(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(f"state-*.rank{rank}.pt"))


def _local(value: Any) -> Any:
    """The same nest of dicts and lists with this rank's part of every sharded tensor."""
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_local(item) for item in value]
    return value.to_local() if isinstance(value, DTensor) else value


def _like(state: dict[str, Any], parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """Optimizer state whose tensors are sharded again as their parameters are."""
    for number, slots in state["state"].items():
        parameter = parameters[number]
        if isinstance(parameter, DTensor):
            for name, value in slots.items():
                if value.ndim:
                    slots[name] = DTensor.from_local(value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride())
    return state


def save_checkpoint(policy: PolicyModel, ranks: Ranks, folder: Path, *, adapter: Path | None = None, base_name: str = "") -> None:
    """Rank 0 writes the merged standard checkpoint to `folder` and, where there are adapters, those to `adapter`; all ranks must call it.

    A folder of the same name is replaced at once, when the new one is complete.
    """
    state = merged_state_dict(policy.model, whole)
    if ranks.is_main:
        _replace(folder, lambda target: policy.save(target, state=state))
        if adapter is not None and lora_layers(policy.model):
            _replace(adapter, lambda target: save_adapter(policy.model, target, base_name))
    ranks.barrier()


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
