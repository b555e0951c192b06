"""Training: the optimizer step, learning rates, the packs of a step, and the state that a killed run goes on
from.

Purpose: what SFT and RL share. A step plans its packs, runs this rank's share forward and backward, sums
gradients over the ranks, clips, and updates (App. F: AdamW, cosine; App. G: constant rate).

Shapes: N answer tokens of a pack.

1. ours: warm-up step s (from 0) has the rate peak x (s + 1) / W, so that the first step is not lost.
2. ours: no weight decay on vectors (norms, biases); adapters are matrices and decay.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rmsweb.engine.distributed import Ranks, shard, whole
from rmsweb.engine.lora import Scope, add_lora, lora_layers, merged_state_dict, save_adapter
from rmsweb.engine.packing import Group, Lengths, Pack, cost, deal, dummy_pack, make_pack, plan_packs, select
from rmsweb.engine.policy import PolicyModel, checkpoint_layers
from rmsweb.jsonl import RecordError, read_records
from rmsweb.prompt import PromptConfig
from rmsweb.records import MinedState, Split, StepSample

KEPT_STATES = 2  # newest training states that stay on disk


def cosine_with_warmup(step: int, total: int, peak: float, warmup_ratio: float) -> float:
    """Learning rate of step `step` in [0, total): linear over the first ceil(total x warmup_ratio) steps,
    then half a cosine down to 0.

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


def read_samples(
    files: Iterable[Path], prompt_config: PromptConfig, split: Split
) -> Iterator[tuple[StepSample, Path]]:
    """Samples and mined states of the files in order, each with its run folder.

    RecordError where a file holds something else; ValueError naming file and sample where the prompt
    configuration or the split differs.
    """
    for file in files:
        with open(file, encoding="utf-8") as lines:
            header = lines.readline().strip()
        kind = next((kind for kind in (MinedState, StepSample) if f'"{kind.__name__}"' in header), None)
        if kind is None:
            raise RecordError(
                f"{file}:1: header is {header[:80]!r}, expected one of a MinedState or StepSample file"
            )
        for sample in read_records(file, kind):
            if sample.prompt_config != prompt_config.hash:
                raise ValueError(
                    f"{file}: {sample.sample_id} was made with prompt config {sample.prompt_config}, expected {prompt_config.hash}"
                )
            if sample.split != split:
                raise ValueError(f"{file}: {sample.sample_id} is of split {sample.split}, expected {split}")
            yield sample, file.parent


def prepare_policy(
    source: str,
    ranks: Ranks,
    *,
    prompt_config: PromptConfig,
    dtype: str,
    lora_rank: int,
    lora_alpha: float,
    lora_scope: Scope,
    lora_dropout: float = 0.0,
    recompute: bool,
    sharded: bool,
    seed: int,
) -> tuple[PolicyModel, list[nn.Parameter]]:
    """The model `source` with fresh adapters on this rank's device, whole or its shard, and the parameters
    that are trained.

    Args:
        dtype: of frozen weights: float32, bfloat16, or auto (bfloat16 on a GPU). Trained weights are float32.
        lora_rank: 0 trains all weights, without adapters.
    """
    half = dtype == "bfloat16" or (dtype == "auto" and ranks.device.type == "cuda")
    frozen = torch.bfloat16 if half and lora_rank else torch.float32
    policy = PolicyModel.load(
        source, dtype=frozen, device="meta" if sharded else ranks.device, prompt_config=prompt_config
    )
    torch.manual_seed(seed)
    if lora_rank:
        add_lora(policy.model, rank=lora_rank, alpha=lora_alpha, dropout_p=lora_dropout, scope=lora_scope)
    if recompute:
        checkpoint_layers(policy.model)
    if sharded:
        shard(policy, ranks, torch.bfloat16 if half else None)
    return policy, [parameter for parameter in policy.model.parameters() if parameter.requires_grad]


@dataclass(frozen=True, slots=True)
class RankPack:
    """A pack of this rank.

    `number` counts the step's packs over all ranks, -1 for a dummy; `answers` are (group, answer) in the
    pack's order.
    """

    number: int
    pack: Pack
    answers: tuple[tuple[int, int], ...]


def rank_packs(
    policy: PolicyModel,
    ranks: Ranks,
    lengths: Sequence[Lengths],
    group: Callable[[int], Group],
    token_budget: int,
) -> Iterator[RankPack]:
    """This rank's packs of a step's groups: equally many on every rank, filled up with dummies that hold no
    answers.

    The plan is a function of `lengths` alone, so all ranks agree on it and only the rank that needs a group
    encodes it.
    """
    bins = plan_packs(lengths, token_budget)
    costs = [
        cost(
            [
                (lengths[number][0], tuple(lengths[number][1][a] for a in answers))
                for number, answers in content
            ]
        )
        for content in bins
    ]
    for number in deal(costs, ranks.world_size)[ranks.rank]:
        if number is None:
            yield RankPack(-1, dummy_pack(policy.device), ())
            continue
        content = bins[number]
        groups = {index: group(index) for index, _ in content}
        ordered = select(groups, content)
        yield RankPack(
            number,
            make_pack(ordered, policy.device),
            tuple((index, answer) for index, answers in content for answer in answers),
        )


def score(
    policy: PolicyModel,
    ranks: Ranks,
    lengths: Sequence[Lengths],
    group: Callable[[int], Group],
    token_budget: int,
    temperature: float = 1.0,
) -> dict[tuple[int, int], Tensor]:
    """Log-probabilities of every answer, [R] float32 on the CPU by (group, answer), without gradient, on all
    ranks.
    """
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
            [
                {"params": members, "weight_decay": weight_decay if matrix else 0.0}
                for (matrix, _), members in groups.items()
            ],
            lr=rate(0),
            betas=betas,
            fused=True,
        )

    def step(self) -> tuple[float, float]:
        """One update from the accumulated gradients, which are cleared; returns the gradient norm before
        clipping and the learning rate.

        ValueError where the norm is not finite: such a step would destroy the weights.
        """
        self.ranks.sum_gradients(self.parameters)
        norm = self._norm()
        if not math.isfinite(norm):
            raise ValueError(
                f"step {self.num_steps}: the gradient norm is {norm}; lower the learning rate or look at the data of this step"
            )
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


# ------------------------------------------------------------------------------------- states and checkpoints


def save_training_state(
    folder: Path, policy: PolicyModel, optimizer: Optimizer, ranks: Ranks, *, step: int, extra: dict[str, Any]
) -> None:
    """Writes folder/state-<step>.rank<r>-of-<ranks>.pt: trained weights, optimizer, random state and `extra`;
    the two newest steps stay.

    A file appears whole or not at all, so a run killed at any moment goes on from the newest step that all
    ranks have. `step` counts training steps, skipped ones included.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"state-{step:08d}.rank{ranks.rank}-of-{ranks.world_size}.pt"
    weights = {
        name: parameter.detach()
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad
    }
    state = {
        "updates": optimizer.num_steps,
        "weights": weights,
        "adam": optimizer.adam.state_dict(),
        "rng": torch.get_rng_state(),
        "extra": extra,
    }
    if ranks.device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(ranks.device)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(_local(state), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    ranks.barrier()
    for _, old in sorted(_states(folder, ranks).items())[:-KEPT_STATES]:
        old.unlink()


def load_training_state(
    folder: Path, policy: PolicyModel, optimizer: Optimizer, ranks: Ranks
) -> dict[str, Any] | None:
    """Goes back to the newest state that all ranks have and returns its `extra`; None where there is none.

    Later states, which some ranks wrote before the run was killed, are deleted. ValueError where the state
    belongs to other parameters or another number of ranks.
    """
    own = _states(folder, ranks)
    if others := set(folder.glob("state-*.pt")) - {
        path for paths in ranks.gather(list(own.values())) for path in paths
    }:
        raise ValueError(
            f"{min(others)}: was written by another number of ranks than {ranks.world_size}; resume with as many as before"
        )
    newest = max(set.intersection(*map(set, ranks.gather(list(own)))), default=-1)
    for step, path in own.items():
        if step > newest:
            path.unlink()
    if newest < 0:
        return None
    path = own[newest]
    state = torch.load(path, map_location="cpu", weights_only=True)
    trained = {
        name: parameter for name, parameter in policy.model.named_parameters() if parameter.requires_grad
    }
    if trained.keys() != state["weights"].keys():
        raise ValueError(
            f"{path}: trains other parameters than this run; resume with the flags of the run that wrote it"
        )
    for name, parameter in trained.items():
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        target.data.copy_(state["weights"][name])
    shapes = [parameter for group in optimizer.adam.param_groups for parameter in group["params"]]
    optimizer.adam.load_state_dict(_like(state["adam"], shapes))
    optimizer.num_steps = state["updates"]
    torch.set_rng_state(state["rng"])
    if "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"], ranks.device)
    return state["extra"]


def data_digest(items: Iterable[Any]) -> str:
    """Short digest of what a run trains on, in order: ranks must agree on it, and a resumed run must find it
    again.
    """
    return hashlib.sha256("\n".join(map(repr, items)).encode()).hexdigest()[:16]


def check_data(before: str, now: str, out: Path) -> None:
    """ValueError where a resumed run would train on other data than before."""
    if before != now:
        raise ValueError(
            f"{out}: the run was started with other data (digest {before}, now {now}); resume with the same files or choose another --out"
        )


def _states(folder: Path, ranks: Ranks) -> dict[int, Path]:
    """Step -> file of this rank's states."""
    return {
        int(path.name.split("-")[1].split(".")[0]): path
        for path in folder.glob(f"state-*.rank{ranks.rank}-of-{ranks.world_size}.pt")
    }


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
                    slots[name] = DTensor.from_local(
                        value,
                        parameter.device_mesh,
                        parameter.placements,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
    return state


def save_checkpoint(
    policy: PolicyModel, ranks: Ranks, folder: Path, *, adapter: Path | None = None, base_name: str = ""
) -> None:
    """Rank 0 writes the merged standard checkpoint to `folder` and, where there are adapters, those to
    `adapter`; all ranks must call it.

    Sharded weights are gathered one tensor at a time and kept by rank 0 alone, in main memory. A folder of
    the same name is replaced when the new one is complete.
    """

    def keep(tensor: Tensor) -> Tensor | None:
        full = whole(tensor)
        return full.cpu() if ranks.is_main else None

    state = merged_state_dict(policy.model, keep)
    if ranks.is_main:
        _replace(folder, lambda target: policy.save(target, state=state))
        if adapter is not None and lora_layers(policy.model):
            _replace(adapter, lambda target: save_adapter(policy.model, target, base_name))
    ranks.barrier()


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    new, old = (folder.with_name(f"{folder.name}.{name}.tmp") for name in ("new", "old"))
    for rest in (new, old):  # of a killed run
        shutil.rmtree(rest, ignore_errors=True)
    write(new)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)
