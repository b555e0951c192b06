"""Training: the optimizer, the packs of a step, and the one trainer of SFT, RL and the tiny base.

Purpose: a step plans its packs, runs this rank's share forward and backward, sums gradients over the ranks,
clips, and updates (App. F: AdamW, cosine; App. G: constant rate). The trainer owns what lies around a step:
loop, metrics, evaluation, choice of the best checkpoint, training states and resume. Scripts give it `step`
and `evaluate`; the loss is theirs.

Shapes: R tokens of an answer.

ours: no weight decay on vectors (norms, biases); adapters are matrices and decay.
"""

import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rmsweb.config import Config, flat, opt, part, rank
from rmsweb.engine.checkpoints import (
    load_training_state,
    save_checkpoint,
    save_training_state,
    trained_parameters,
)
from rmsweb.engine.distributed import EngineConfig, Ranks, shard_policy, whole
from rmsweb.engine.lora import LoraConfig, add_lora
from rmsweb.engine.packing import (
    Pack,
    Packable,
    bundles_in,
    cost,
    deal_packs,
    dummy_pack,
    lengths_in,
    make_pack,
    plan_packs,
)
from rmsweb.engine.policy import PolicyModel, recompute_layers
from rmsweb.pictures import check_picture
from rmsweb.prompt import PromptConfig
from rmsweb.records import Image, Split, StepSample, sha256_text
from rmsweb.runs import Inputs, RunWriter, read_samples


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """AdamW."""

    lr: float = opt(1e-4, "learning rate (of SFT: its peak)", paper="1e-4 in SFT, 8e-6 in RL", above=0)
    weight_decay: float = opt(0.01, "AdamW weight decay", paper="0.01 in SFT")
    clip: float = opt(1.0, "largest gradient norm", above=0)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Config):
    """What every trainer needs to know."""

    model: str = opt(help="checkpoint folder or hub name of the model to start from")
    out: Path = opt(help="run folder to write")
    resume: bool = opt(False, "go on with the run in --out")
    lora: LoraConfig = part(LoraConfig)
    optimizer: OptimizerConfig = part(OptimizerConfig)
    engine: EngineConfig = part(EngineConfig)

    def inputs(self) -> Inputs:
        """Return the files that a resumed run must find unchanged, by flag."""
        local = Path(self.model)
        return {"model": (local,) if local.is_dir() else ()}


# ------------------------------------------------------------------------------------------ data and policy


def checked_samples(
    files: Iterable[Path], prompt_config: PromptConfig, split: Split
) -> Iterator[tuple[StepSample, Path]]:
    """Yield the samples and mined states of the files in order, each with its run folder.

    Raises RecordError for a file of something else; ValueError naming file and sample where the prompt
    configuration or the split differs, or where a picture is not what the record says (the first rank looks).
    """
    checked = set[tuple[Path, Image]]()
    for file in files:
        for sample in read_samples(file):
            name, made = f"{file}: {sample.sample_id}", sample.prompt_config
            if made != prompt_config.hash:
                raise ValueError(
                    f"{name} was made with prompt config {made}, expected {prompt_config.hash}: "
                    "another config, or a version of the package with another system text"
                )
            if sample.split != split:
                raise ValueError(f"{name} is of split {sample.split}, expected {split}")
            pieces = (piece for message in sample.messages for piece in message.parts)
            for image in (piece for piece in pieces if isinstance(piece, Image)):
                if rank() == 0 and (file.parent, image) not in checked:
                    checked.add((file.parent, image))
                    check_picture(image, file.parent)
            yield sample, file.parent


def prepare_policy(
    config: TrainerConfig,
    ranks: Ranks,
    *,
    prompt_config: PromptConfig,
    seed: int,
    lora_dropout: float = 0.0,
) -> PolicyModel:
    """Load the model with fresh adapters onto this rank's device, whole or its shard.

    Frozen weights have the dtype of the config, trained weights are float32; rank 0 of LoRA trains all
    weights. Raises ValueError where the ranks were started with different flags.
    """
    ranks.agree({name: value for name, value in flat(config).items() if name != "threads"})
    engine, lora = config.engine, config.lora
    half = engine.dtype == "bfloat16" or (engine.dtype == "auto" and ranks.device.type == "cuda")
    policy = PolicyModel.load(
        config.model,
        dtype=torch.bfloat16 if half and lora.lora_rank else torch.float32,
        device="meta" if engine.shard else ranks.device,
        prompt_config=prompt_config,
    )
    torch.manual_seed(seed)
    if lora.lora_rank:
        add_lora(
            policy.model,
            rank=lora.lora_rank,
            alpha=lora.lora_alpha,
            dropout_p=lora_dropout,
            scope=lora.lora_scope,
        )
    if engine.recomputes(ranks.device.type):
        recompute_layers(policy.model)
    if engine.shard:
        shard_policy(policy, ranks, torch.bfloat16 if half else None)
    return policy


# ------------------------------------------------------------------------------------------ packs of a step


@dataclass(frozen=True, slots=True)
class RankPack:
    """A pack of this rank.

    `number` counts the step's packs over all ranks, -1 for a dummy; `answers` are (item, answer) in the
    pack's order.
    """

    number: int
    pack: Pack
    answers: tuple[tuple[int, int], ...]


def rank_packs(
    policy: PolicyModel, ranks: Ranks, items: Sequence[Packable], token_budget: int
) -> Iterator[RankPack]:
    """Yield this rank's packs of a step.

    There are equally many on every rank, filled up with dummies that hold no answers. The plan is a function
    of the lengths alone, so all ranks agree on it and only the rank that needs an item encodes it.
    """
    lengths = [item.lengths for item in items]
    bins = plan_packs(lengths, token_budget)
    costs = [cost(lengths_in(content, lengths)) for content in bins]
    for number in deal_packs(costs, ranks.world_size)[ranks.rank]:
        if number is None:
            yield RankPack(-1, dummy_pack(policy.device), ())
            continue
        pack = make_pack(bundles_in(bins[number], items), policy.device)
        answers = tuple((index, answer) for index, held in bins[number] for answer in held)
        yield RankPack(number, pack, answers)


def answer_logprobs(
    policy: PolicyModel, ranks: Ranks, items: Sequence[Packable], token_budget: int
) -> dict[tuple[int, int], Tensor]:
    """Return the log-probabilities of every answer by (item, answer), [R] float32 on the CPU.

    Without gradient and dropout. The ranks share the work and all get the same result.
    """
    own: dict[tuple[int, int], Tensor] = {}
    with policy.evaluating():
        for row in rank_packs(policy, ranks, items, token_budget):
            logprobs = policy.response_logprobs(row.pack).cpu()
            if row.answers:
                own |= zip(row.answers, logprobs.split(row.pack.response_lengths), strict=True)
    return ranks.merge(own)


# ---------------------------------------------------------------------------------------------- optimizer


class Optimizer:
    """AdamW with summed, clipped gradients and a learning rate per step.

    Args:
        parameters: those that require gradients.
        rate: step number (from 0) -> learning rate.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ranks: Ranks,
        rate: Callable[[int], float],
        config: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        self.parameters, self.ranks, self.rate, self.clip = list(parameters), ranks, rate, config.clip
        self.num_steps = 0
        # fused AdamW takes no mix of sharded and whole parameters
        kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for parameter in self.parameters:
            kinds.setdefault((parameter.ndim > 1, isinstance(parameter, DTensor)), []).append(parameter)
        groups = [
            {"params": members, "weight_decay": config.weight_decay * matrix}
            for (matrix, _), members in kinds.items()
        ]
        self.adam = torch.optim.AdamW(groups, lr=rate(0), fused=True)

    def step(self) -> tuple[float, float]:
        """Make one update from the accumulated gradients and clear them.

        Returns: the gradient norm before clipping, and the learning rate. Raises ValueError for a norm that
        is not finite: such a step would destroy the weights.
        """
        self.ranks.sum_gradients(self.parameters)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            raise ValueError(
                f"step {self.num_steps}: the gradient norm is {norm}; lower the learning rate or look at the "
                "data of this step"
            )
        if norm > self.clip:
            for gradient in gradients:
                gradient.mul_(self.clip / norm)
        rate = self.rate(self.num_steps)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.num_steps += 1
        return norm, rate

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        """Return the norm of all gradients, the parts of sharded ones on other ranks included."""
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for gradient in gradients:
            total += whole(gradient.float().square().sum())
        return math.sqrt(float(total))


# ---------------------------------------------------------------------------------------------- the trainer


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory of this process so far in GiB: of its GPU, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@dataclass(slots=True)
class Progress:
    """How far a run got; every training state holds it."""

    step: int = 0  # training steps, skipped ones included
    consumed: int = 0  # data so far, as the script counts it: tokens of SFT, prompts of RL
    best: float | None = None  # what checkpoint-best reached; None before the first evaluation
    best_step: int = 0


@dataclass
class Trainer:
    """The loop of a run: steps, metrics, evaluations, checkpoints, training states."""

    config: TrainerConfig
    policy: PolicyModel
    ranks: Ranks
    _: KW_ONLY
    rate: Callable[[int], float]  # update (from 0) -> learning rate
    num_steps: int  # training steps in all
    evaluate_every: int  # steps; the last one is followed by an evaluation and a training state
    save_every: int  # steps between training states
    best_by: str  # the metric of an evaluation that chooses checkpoint-best
    better: Callable[[float, float], bool]  # (value, best so far) -> whether the value wins
    evaluate_first: bool = False  # whether the untrained weights take part
    data: Iterable[object] = ()  # what is trained on, in order
    may_differ: tuple[str, ...] = ()  # further flags that a resumed run may change

    def __post_init__(self) -> None:
        config, ranks = self.config, self.ranks
        self.progress, self.started = Progress(), time.perf_counter()
        ranks.agree({"the data": sha256_text("\n".join(map(repr, self.data)))})
        free = ("threads", "token_budget", "save_every", "recompute", "check_memory", *self.may_differ)
        inputs = config.inputs() if ranks.is_main else {}  # one rank compares
        self.folder = RunWriter(config.out, config, resume=config.resume, may_differ=free, inputs=inputs)
        parameters = trained_parameters(self.policy).values()
        self.optimizer = Optimizer(parameters, ranks, self.rate, config.optimizer)
        if not config.resume:
            return
        extra = load_training_state(config.out / "state", self.policy, self.optimizer.adam, ranks)
        if extra is not None:
            self.progress, self.optimizer.num_steps = Progress(**extra["progress"]), extra["updates"]
        self.folder.cut_metrics(self.progress.step if extra else -1)

    def log(self, values: dict[str, Any]) -> None:
        """Write a line of metrics."""
        if self.ranks.is_main:
            self.folder.log({"step": self.progress.step, **values})

    def run(
        self,
        step: Callable[[], dict[str, Any] | None],
        evaluate: Callable[[], dict[str, float]],
        facts: dict[str, Any],
    ) -> Iterator[dict[str, Any]]:
        """Train to the end; yields the metrics of every step.

        Args: step: makes one training step and returns its metrics, None to end the run early. evaluate:
        measures the weights, or returns nothing. facts: the first line of metrics.
        """
        if self.progress.step == 0:
            trained = sum(parameter.numel() for parameter in self.optimizer.parameters)
            self.log({**facts, "trained_parameters": trained})
            if self.evaluate_first:
                self._choose(evaluate())
        while self.progress.step < self.num_steps:
            begun = time.perf_counter()
            self.policy.model.train()
            values = step()
            if values is None:
                return
            self.progress.step += 1
            seconds, memory = time.perf_counter() - begun, peak_memory_gb(self.ranks.device)
            self.log({**values, "step_s": seconds, "memory_gb": memory})
            if self._due(self.evaluate_every):
                self._choose(evaluate())
            if self._due(self.save_every):
                self._save_state()
            yield values

    def _due(self, every: int) -> bool:
        return self.progress.step % every == 0 or self.progress.step == self.num_steps

    def _choose(self, measured: dict[str, float]) -> None:
        """Log an evaluation; weights that beat all before become checkpoint-best."""
        if not measured:
            return
        self.log(measured)
        value, best = measured[self.best_by], self.progress.best
        if best is None or self.better(value, best):
            self.progress.best, self.progress.best_step = value, self.progress.step
            self.save("checkpoint-best", adapter=True)

    def save(self, name: str, *, adapter: bool = False) -> None:
        """Write a checkpoint of the run, and with `adapter` the adapters too."""
        out = self.config.out
        save_checkpoint(self.policy, self.ranks, out / name, adapter=out / "adapter" if adapter else None)

    def _save_state(self) -> None:
        done, adam = self.progress, self.optimizer.adam
        extra = {"progress": asdict(done), "updates": self.optimizer.num_steps}
        folder = self.config.out / "state"
        save_training_state(folder, self.policy, adam, self.ranks, step=done.step, extra=extra)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write checkpoint-last and summary.json; without evaluations the last weights are the best."""
        chosen = self.progress.best is not None
        self.save("checkpoint-last", adapter=not chosen)
        if not chosen:
            self.save("checkpoint-best")
        if self.ranks.is_main:
            self.folder.write_json("summary.json", {**summary, "seconds": time.perf_counter() - self.started})
