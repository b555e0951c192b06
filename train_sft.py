"""Supervised fine-tuning on the flattened successes (App. F): samples.jsonl -> adapter and merged checkpoint.

The loss is the mean over all answer tokens of the effective batch, <|im_end|> included; how samples are
packed into rows and dealt to ranks does not change it. Runs on one CPU process and under `torchrun
--nproc_per_node 8 train_sft.py`. `--plan` prints parameters and memory of a run on GPUs instead of training.

ours: warm-up step s (from 0) of W has the rate peak x (s + 1) / W, so that the first step is not lost.
Dropout draws from (seed, step, pack), so that the number of ranks changes nothing. A sample beyond the cutoff
is dropped and counted, never cut, because a cut at the end would lose the page or the answer.
"""

import math
import operator
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from rmsweb.config import main_guard, opt, parse_config, part, progress
from rmsweb.engine.distributed import Ranks, ranks
from rmsweb.engine.lora import LoraConfig
from rmsweb.engine.packing import Bundle, Packable
from rmsweb.engine.plan import (
    MachineConfig,
    Sizes,
    Tables,
    check_run,
    plan_memory,
    read_shape,
    render_plan,
)
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.training import (
    Optimizer,
    Trainer,
    TrainerConfig,
    answer_logprobs,
    checked_samples,
    prepare_policy,
    rank_packs,
)
from rmsweb.prompt import load_shared_prompt_config
from rmsweb.records import Split, StepSample, derive_seed
from rmsweb.runs import Inputs, check_out

DEV_CHUNK = 64  # dev samples scored at a time


@dataclass(frozen=True, kw_only=True)
class Adapters(LoraConfig):
    """Adapters."""

    lora_dropout: float = opt(0.05, "dropout on the input of the adapters", paper=0.05, at_least=0, below=1)
    lora_scope: Literal["language", "all"] = opt(
        "language", "linear layers with adapters: the language model's, or all (vision tower and mergers too)"
    )


@dataclass(frozen=True, kw_only=True)
class Config(TrainerConfig):
    """Supervised fine-tuning of a Qwen3-VL policy. Defaults are the paper's (App. F, 8B)."""

    samples: tuple[Path, ...] = opt(
        help="samples.jsonl files (or mined.jsonl), each in its run folder beside prompt_config.json and "
        "screenshots/"
    )
    dev_samples: tuple[Path, ...] = opt(
        (), "samples.jsonl files of split dev: their loss chooses checkpoint-best; never trained on"
    )
    epochs: int = opt(3, "passes over the samples", paper=3, at_least=1)
    warmup_ratio: float = opt(
        0.03, "share of the steps with rising rate", paper="0.03; 32B: 0.1", at_least=0, below=1
    )
    per_device_batch: int = opt(1, "samples of one rank in a micro-batch", paper=1, at_least=1)
    accumulation: int = opt(
        4,
        "micro-batches a step: the effective batch is per-device batch x accumulation x ranks",
        paper="4 on 8 GPUs = 32",
        at_least=1,
    )
    cutoff: int = opt(
        12_000,
        "longest sample in tokens, prompt and answer; longer ones are dropped and counted",
        paper=12000,
        at_least=1,
    )
    token_budget: int = opt(
        12_000, "tokens of a packed row; changes speed and memory, never the loss", at_least=1
    )
    max_steps: int = opt(0, "stop after so many optimizer steps; 0: after all epochs", at_least=0)
    seed: int = opt(42, "seed of sample order, adapters and dropout", paper=42)
    prompt_config: Path | None = opt(
        None, "prompt configuration; default: prompt_config.json beside the samples"
    )
    save_every: int = opt(
        0, "steps between training states that --resume goes on from; 0: one an epoch", at_least=0
    )
    lora: Adapters = part(Adapters)

    def inputs(self) -> Inputs:
        """Return the files that a resumed run must find unchanged, by flag."""
        given = (self.prompt_config,) if self.prompt_config else ()
        own = {"samples": self.samples, "dev_samples": self.dev_samples, "prompt_config": given}
        return {**super().inputs(), **own}


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """Parameters and memory of a run on GPUs, without weights, data or a GPU.

    The flags of the run may stay.
    """

    model: str = opt("", "checkpoint folder whose config.json gives the shape where --model-shape does not")
    samples: tuple[Path, ...] = opt((), "not read")
    out: Path = opt(Path("-"), "not written")
    machine: MachineConfig = part(MachineConfig)


def sizes_of(config: Config) -> Sizes:
    """Return what memory depends on beside the model."""
    dropout = config.lora.lora_dropout
    return Sizes(token_budget=config.token_budget, longest=config.cutoff, lora_dropout=dropout)


def make_plan(config: PlanConfig) -> Tables:
    """Return the tables of a plan; raises ValueError where no shape is named."""
    model = read_shape(config.model, config.machine.model_shape)
    return plan_memory(model, config.machine, sizes_of(config), lora=config.lora, engine=config.engine)


def render(config: PlanConfig) -> str:
    """Return a plan as text."""
    machine = config.machine
    head = f"{machine.model_shape or config.model}: samples of at most {config.cutoff} tokens"
    return render_plan(head, make_plan(config), machine, config.engine)


@dataclass(frozen=True, slots=True)
class Item(Packable):
    """A sample that can be packed."""

    sample_id: str

    @property
    def num_targets(self) -> int:
        """Trained tokens: the answer with its end."""
        return sum(self.lengths[1])

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.lengths[0] + self.num_targets


def make_item(sample: StepSample, root: Path, policy: PolicyModel) -> Item:
    """Return a sample that knows its lengths in tokens and is encoded when it is packed."""

    def encode() -> Bundle:
        response = policy.encode_response(sample.target_text)
        return Bundle(policy.encode_prompt(sample.messages, root), (response,))

    answer = policy.count_tokens(sample.target_text) + 1
    return Item((policy.prompt_length(sample.messages), (answer,)), encode, sample.sample_id)


def read_items(
    files: Sequence[Path], policy: PolicyModel, cutoff: int, split: Split
) -> tuple[list[Item], int]:
    """Return the samples of the files in order, and how many were dropped because of the cutoff."""
    samples = progress(checked_samples(files, policy.prompt_config, split), label=f"{split} samples")
    found = [make_item(sample, root, policy) for sample, root in samples]
    items = [item for item in found if item.num_tokens <= cutoff]
    dropped = len(found) - len(items)
    if files and not items:
        names = ", ".join(map(str, files))
        raise ValueError(f"{names}: no sample of at most --cutoff {cutoff} tokens ({dropped} longer)")
    return items, dropped


def dev_loss(policy: PolicyModel, here: Ranks, items: Sequence[Item], token_budget: int) -> float:
    """Return the mean negative log-probability of the answers' tokens, without dropout."""
    total = 0.0
    for start in range(0, len(items), DEV_CHUNK):
        found = answer_logprobs(policy, here, items[start : start + DEV_CHUNK], token_budget)
        total -= sum(float(values.double().sum()) for values in found.values())
    return total / sum(item.num_targets for item in items)


def train_step(
    policy: PolicyModel, here: Ranks, batch: Sequence[Item], optimizer: Optimizer, config: Config
) -> dict[str, float]:
    """Make one optimizer step: the loss is the mean over all answer tokens of the batch, over all ranks."""
    num_targets, total = sum(item.num_targets for item in batch), 0.0
    for row in rank_packs(policy, here, batch, config.token_budget):
        torch.manual_seed(derive_seed(config.seed, "dropout", optimizer.num_steps, row.number))
        loss = -policy.response_logprobs(row.pack).sum() / num_targets * bool(row.answers)
        loss.backward()
        total += float(loss.detach())
    norm, rate = optimizer.step()
    return {"loss": sum(here.gather(total)), "grad_norm": norm, "lr": rate}


def cosine_with_warmup(step: int, total: int, peak: float, warmup_ratio: float) -> float:
    """Return the learning rate of step `step` in [0, total).

    It is linear over the first W = ceil(total x warmup_ratio) steps, then half a cosine down to 0.

    >>> [round(cosine_with_warmup(step, 5, 1.0, 0.4), 3) for step in range(5)]
    [0.5, 1.0, 1.0, 0.75, 0.25]
    """
    warmup = math.ceil(total * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    """Return the order of the samples in an epoch: a function of seed and epoch alone."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(count, generator=generator).tolist()


def train(config: Config, here: Ranks) -> None:
    """Train to the end and write the run folder."""
    check_out(config.out, config.resume)
    prompt_config = load_shared_prompt_config((*config.samples, *config.dev_samples), config.prompt_config)
    dropout = config.lora.lora_dropout
    check_run(config, here, sizes_of(config), config.cutoff)
    policy = prepare_policy(config, here, prompt_config=prompt_config, seed=config.seed, lora_dropout=dropout)
    items, dropped = read_items(config.samples, policy, config.cutoff, "train")
    dev, dev_dropped = read_items(config.dev_samples, policy, config.cutoff, "dev")
    size = config.per_device_batch * config.accumulation * here.world_size
    epoch_steps = math.ceil(len(items) / size)
    num_steps = min(config.epochs * epoch_steps, config.max_steps or sys.maxsize)
    peak, warmup = config.optimizer.lr, config.warmup_ratio
    trainer = Trainer(
        config,
        policy,
        here,
        rate=partial(cosine_with_warmup, total=num_steps, peak=peak, warmup_ratio=warmup),
        num_steps=num_steps,
        evaluate_every=epoch_steps,
        save_every=config.save_every or epoch_steps,
        best_by="dev_loss",
        better=operator.lt,
        data=[(item.sample_id, item.lengths) for item in items],
    )
    done = trainer.progress

    def step() -> dict[str, Any]:
        epoch, number = divmod(done.step, epoch_steps)
        order = epoch_order(config.seed, epoch, len(items))[number * size : (number + 1) * size]
        batch, begun = [items[i] for i in order], time.perf_counter()
        values = train_step(policy, here, batch, trainer.optimizer, config)
        tokens = sum(item.num_tokens for item in batch)
        done.consumed += tokens
        speed = {"tokens": done.consumed, "tokens_per_s": tokens / (time.perf_counter() - begun)}
        return {"epoch": (done.step + 1) / epoch_steps, **values, **speed}

    def evaluate() -> dict[str, float]:
        if not dev:
            return {}
        loss = dev_loss(policy, here, dev, config.token_budget)
        return {"epoch": done.step / epoch_steps, "dev_loss": loss}

    facts: dict[str, Any] = {"samples": len(items), "dropped": dropped, "steps": num_steps}
    with trainer.folder:
        steps = trainer.run(step, evaluate, facts)
        bar = progress(steps, total=num_steps, label="sft", initial=done.step)
        for values in bar:
            bar.set_postfix({name: values[name] for name in ("loss", "tokens_per_s")})
        facts["tokens"] = done.consumed
        if dev:
            facts |= {"dev_samples": len(dev), "dev_dropped": dev_dropped, "best_dev_loss": done.best}
        trainer.finish(facts)
        if here.is_main:
            best = f"best step {done.best_step}, in" if dev else "the last weights are in"
            print(f"{config.out}: {done.step} steps over {len(items)} samples; {best} checkpoint-best")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, then train or print the plan; returns the exit code."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if "--plan" in flags:
        flags.remove("--plan")
        print(render(parse_config(PlanConfig, flags, prog="train_sft.py --plan")))
        return 0
    config = parse_config(Config, flags, prog="train_sft.py", description=f"{__doc__}\n{Config.__doc__}")
    with ranks(config.engine.device, config.engine.threads) as here:
        train(config, here)
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
