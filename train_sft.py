"""Supervised fine-tuning on the flattened successes (App. F): samples.jsonl -> adapter and merged checkpoint.

The loss is the mean over all answer tokens of the effective batch, <|im_end|> included; how samples are
packed into rows and dealt to ranks does not change it. Runs on one CPU process and under `torchrun
--nproc_per_node 8 train_sft.py`.

ours: dropout draws from (seed, step, pack), so that the number of ranks changes nothing; a sample beyond the
cutoff is dropped and counted, never cut, because a cut at the end would lose the page or the answer.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from rmsweb.config import Config as BaseConfig
from rmsweb.config import main_guard, opt, parse_config, progress
from rmsweb.engine.distributed import Ranks, ranks
from rmsweb.engine.packing import Group, Lengths
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.training import (
    Optimizer,
    check_data,
    cosine_with_warmup,
    data_digest,
    load_training_state,
    prepare_policy,
    rank_packs,
    read_samples,
    save_checkpoint,
    save_training_state,
    score,
)
from rmsweb.jsonl import write_json
from rmsweb.prompt import PromptConfig, load_shared_prompt_config
from rmsweb.records import Split, StepSample, derive_seed
from rmsweb.runs import RunWriter

DEV_CHUNK = 64  # dev samples scored at a time


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """Supervised fine-tuning of a Qwen3-VL policy. Defaults are the paper's (App. F, 8B)."""

    model: str = opt(
        help="checkpoint folder or hub name of the model to start from; paper: Qwen3-VL-8B-Instruct"
    )
    samples: tuple[Path, ...] = opt(
        help="samples.jsonl files (or mined.jsonl), each in its run folder beside prompt_config.json and screenshots/"
    )
    out: Path = opt(help="run folder to write")
    dev_samples: tuple[Path, ...] = opt(
        (), "samples.jsonl files of split dev: their loss chooses checkpoint-best; never trained on"
    )
    epochs: int = opt(3, "passes over the samples; paper: 3")
    lr: float = opt(1e-4, "peak learning rate; paper: 1e-4")
    warmup_ratio: float = opt(0.03, "share of the steps with rising rate; paper: 0.03 (32B: 0.1)")
    weight_decay: float = opt(0.01, "AdamW weight decay; paper: 0.01")
    per_device_batch: int = opt(1, "samples of one rank in a micro-batch; paper: 1")
    accumulation: int = opt(
        4,
        "micro-batches a step: the effective batch is per-device batch x accumulation x ranks; paper: 4 on 8 GPUs = 32",
    )
    lora_rank: int = opt(64, "rank of the adapters; 0 trains all weights; paper: 64")
    lora_alpha: float = opt(128.0, "scale of the adapters is alpha / rank; paper: 128")
    lora_dropout: float = opt(0.05, "dropout on the adapters' input; paper: 0.05")
    lora_scope: Literal["language", "all"] = opt(
        "language", "linear layers with adapters: the language model's, or all (vision tower and mergers too)"
    )
    cutoff: int = opt(
        12_000,
        "longest sample in tokens, prompt and answer; longer ones are dropped and counted; paper: 12000",
    )
    token_budget: int = opt(12_000, "tokens of a packed row; changes speed and memory, never the loss")
    clip: float = opt(1.0, "largest gradient norm")
    max_steps: int = opt(0, "stop after so many optimizer steps; 0: after all epochs")
    seed: int = opt(42, "seed of sample order, adapters and dropout; paper: 42")
    prompt_config: Path | None = opt(
        None, "prompt configuration; default: prompt_config.json beside the samples"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = opt(
        "auto", "dtype of the frozen weights; auto: bfloat16 on a GPU (paper), float32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "where to compute")
    shard: bool = opt(False, "shard the weights over the ranks (FSDP2); off: every rank holds them all")
    recompute: bool = opt(False, "recompute decoder layers in backward: less memory, about a third slower")
    threads: int = opt(0, "torch threads of a process; 0: torch's default")
    save_every: int = opt(0, "steps between training states that --resume goes on from; 0: one an epoch")
    resume: bool = opt(False, "go on with the run in --out")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "per_device_batch", "accumulation", "cutoff", "token_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        if (
            self.lr <= 0
            or self.clip <= 0
            or not 0 <= self.warmup_ratio < 1
            or min(self.lora_rank, self.max_steps, self.save_every, self.threads) < 0
        ):
            raise ValueError(
                "--lr and --clip must be positive, --warmup-ratio in [0, 1), --lora-rank, --max-steps, --save-every, --threads not negative"
            )


@dataclass(frozen=True, slots=True)
class Data:
    """Samples with their folders and their lengths in tokens."""

    samples: list[StepSample]
    roots: list[Path]
    lengths: list[Lengths]
    num_dropped: int

    def group(self, policy: PolicyModel, index: int, first: int = 0) -> Group:
        """Sample `first + index` in tokens."""
        sample, root = self.samples[first + index], self.roots[first + index]
        return Group(
            policy.encode_prompt(sample.messages, root), (policy.encode_response(sample.target_text),)
        )

    def num_targets(self, indices: Sequence[int]) -> int:
        """Trained tokens of some samples."""
        return sum(self.lengths[index][1][0] for index in indices)


def read_prompt_config(config: Config) -> PromptConfig:
    """The one prompt configuration of the run; ValueError naming the file and the field where two files
    differ.
    """
    return load_shared_prompt_config((*config.samples, *config.dev_samples), config.prompt_config)


def read_data(files: Sequence[Path], policy: PolicyModel, config: Config, split: Split, label: str) -> Data:
    """Samples of the files in order, without those beyond the cutoff."""
    assert policy.prompt_config is not None
    samples: list[StepSample] = []
    roots: list[Path] = []
    lengths: list[Lengths] = []
    num_dropped = 0
    for sample, root in progress(read_samples(files, policy.prompt_config, split), label=label):
        prompt, answer = policy.prompt_length(sample.messages), policy.count_tokens(sample.target_text) + 1
        if prompt + answer > config.cutoff:
            num_dropped += 1
            continue
        samples.append(sample)
        roots.append(root)
        lengths.append((prompt, (answer,)))
    if not samples:
        raise ValueError(
            f"{', '.join(map(str, files))}: no sample of at most --cutoff {config.cutoff} tokens ({num_dropped} longer)"
        )
    return Data(samples, roots, lengths, num_dropped)


def dev_loss(policy: PolicyModel, group: Ranks, data: Data, config: Config) -> float:
    """Mean negative log-probability of the answers' tokens, without dropout."""
    policy.model.eval()
    total = 0.0
    for start in range(0, len(data.samples), DEV_CHUNK):
        lengths, encode = data.lengths[start : start + DEV_CHUNK], partial(data.group, policy, first=start)
        logprobs = score(policy, group, lengths, encode, config.token_budget)
        total -= sum(float(values.double().sum()) for values in logprobs.values())
    return total / data.num_targets(range(len(data.samples)))


def train_step(
    policy: PolicyModel, group: Ranks, data: Data, batch: Sequence[int], optimizer: Optimizer, config: Config
) -> dict[str, float]:
    """One optimizer step on the samples `batch`: the loss is the mean over all their answer tokens, over all
    ranks.
    """
    policy.model.train()
    denominator, total = data.num_targets(batch), 0.0
    packs = rank_packs(
        policy,
        group,
        [data.lengths[i] for i in batch],
        lambda number: data.group(policy, batch[number]),
        config.token_budget,
    )
    for item in packs:
        torch.manual_seed(derive_seed(config.seed, "dropout", optimizer.num_steps, item.number))
        loss = -policy.response_logprobs(item.pack).sum() / denominator * bool(item.answers)
        loss.backward()
        total += float(loss.detach())
    norm, rate = optimizer.step()
    return group.sum({"loss": total}) | {"grad_norm": norm, "lr": rate}


def epoch_order(config: Config, epoch: int, count: int) -> list[int]:
    """The samples' order in an epoch: a function of seed and epoch alone."""
    return torch.randperm(
        count, generator=torch.Generator().manual_seed(derive_seed(config.seed, "order", epoch))
    ).tolist()


class Run:
    """A training run: its model, data, folder, and how far it got."""

    def __init__(self, config: Config, group: Ranks) -> None:
        self.config, self.group = config, group
        group.agree({name: value for name, value in vars(config).items() if name != "threads"})
        self.policy, parameters = prepare_policy(
            config.model,
            group,
            prompt_config=read_prompt_config(config),
            dtype=config.dtype,
            lora_rank=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            lora_scope=config.lora_scope,
            recompute=config.recompute,
            sharded=config.shard,
            seed=config.seed,
        )
        self.train = read_data(config.samples, self.policy, config, "train", "samples")
        self.dev = (
            read_data(config.dev_samples, self.policy, config, "dev", "dev samples")
            if config.dev_samples
            else None
        )
        self.data = data_digest(
            (sample.sample_id, length)
            for sample, length in zip(self.train.samples, self.train.lengths, strict=True)
        )
        group.agree({"the samples (digest)": self.data})
        self.folder = RunWriter(
            config.out,
            config,
            resume=config.resume,
            may_differ=("threads", "token_budget", "save_every"),
        )
        self.batch_size = config.per_device_batch * config.accumulation * group.world_size
        self.steps_per_epoch = math.ceil(len(self.train.samples) / self.batch_size)
        self.num_steps = min(config.epochs * self.steps_per_epoch, config.max_steps or sys.maxsize)

        def rate(step: int) -> float:
            return cosine_with_warmup(step, self.num_steps, config.lr, config.warmup_ratio)

        self.optimizer = Optimizer(
            parameters, group, rate, weight_decay=config.weight_decay, clip=config.clip
        )
        self.num_trained = sum(parameter.numel() for parameter in parameters)
        self.best = math.inf
        self.tokens = 0
        if config.resume:
            state = load_training_state(config.out / "state", self.policy, self.optimizer, group)
            if state is not None:
                check_data(state["data"], self.data, config.out)
                self.best, self.tokens = state["best"], state["tokens"]
            self.folder.cut_metrics(self.optimizer.num_steps if state else -1)

    def log(self, values: dict[str, Any]) -> None:
        if self.group.is_main:
            self.folder.log({"step": self.optimizer.num_steps, **values})

    def batch(self, step: int) -> list[int]:
        """The samples of a step."""
        epoch, number = divmod(step, self.steps_per_epoch)
        return epoch_order(self.config, epoch, len(self.train.samples))[
            number * self.batch_size : (number + 1) * self.batch_size
        ]

    def end_epoch(self) -> float | None:
        """Dev loss, and the best checkpoint where it is the lowest so far."""
        if self.dev is None:
            return None
        loss = dev_loss(self.policy, self.group, self.dev, self.config)
        self.log({"epoch": self.optimizer.num_steps / self.steps_per_epoch, "dev_loss": loss})
        if loss < self.best:
            self.best = loss
            self.save("checkpoint-best", adapter=True)
        return loss

    def save(self, name: str, *, adapter: bool) -> None:
        out = self.config.out
        save_checkpoint(
            self.policy,
            self.group,
            out / name,
            adapter=out / "adapter" if adapter else None,
            base_name=self.config.model,
        )

    def save_state(self) -> None:
        extra = {"best": self.best, "tokens": self.tokens, "data": self.data}
        save_training_state(
            self.config.out / "state",
            self.policy,
            self.optimizer,
            self.group,
            step=self.optimizer.num_steps,
            extra=extra,
        )

    def __call__(self) -> None:
        """Trains to the end and writes the checkpoints."""
        if self.optimizer.num_steps == 0:
            self.log(
                {
                    "samples": len(self.train.samples),
                    "dropped": self.train.num_dropped,
                    "trained_parameters": self.num_trained,
                    "steps": self.num_steps,
                }
            )
        start = time.perf_counter()
        bar = progress(total=self.num_steps, initial=self.optimizer.num_steps, label="sft")
        while self.optimizer.num_steps < self.num_steps:
            step, begun = self.optimizer.num_steps, time.perf_counter()
            batch = self.batch(step)
            values = train_step(self.policy, self.group, self.train, batch, self.optimizer, self.config)
            tokens = sum(self.train.lengths[i][0] + self.train.lengths[i][1][0] for i in batch)
            self.tokens += tokens
            speed = tokens / (time.perf_counter() - begun)
            self.log(
                {
                    "epoch": (step + 1) / self.steps_per_epoch,
                    **values,
                    "tokens": self.tokens,
                    "tokens_per_s": speed,
                }
            )
            bar.set_postfix_str(f"loss {values['loss']:.4f}, {speed:.0f} tokens/s")
            bar.update()
            last = step + 1 == self.num_steps
            ends_epoch = (step + 1) % self.steps_per_epoch == 0 or last
            if ends_epoch:
                self.end_epoch()
            if ends_epoch if not self.config.save_every else (step + 1) % self.config.save_every == 0:
                self.save_state()
        bar.close()
        self.save("checkpoint-last", adapter=self.dev is None)
        if self.dev is None:
            self.save("checkpoint-best", adapter=False)
        if self.group.is_main:
            dev = (
                {}
                if self.dev is None
                else {
                    "best_dev_loss": self.best,
                    "dev_samples": len(self.dev.samples),
                    "dev_dropped": self.dev.num_dropped,
                }
            )
            counts = {
                "samples": len(self.train.samples),
                "dropped": self.train.num_dropped,
                "steps": self.num_steps,
                "tokens": self.tokens,
            }
            write_json(
                self.config.out / "summary.json", counts | dev | {"seconds": time.perf_counter() - start}
            )


def main(argv: Sequence[str] | None = None) -> int:
    config = parse_config(Config, argv, prog="train_sft.py", description=f"{__doc__}\n{Config.__doc__}")
    if config.threads:
        torch.set_num_threads(config.threads)
    with ranks(config.device) as group:
        run = Run(config, group)
        with run.folder:
            run()
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
