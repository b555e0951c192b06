"""Salvage-DS reinforcement learning on mined states (App. G): mined.jsonl and the SFT checkpoint -> merged RL
checkpoint.

Training is offline: at each mined state the policy samples answers, which are scored against the verified
action without a browser. One step is
`rmsweb.salvage.step.rl_step`. Runs on one CPU process and under `torchrun --nproc_per_node 8 train_rl.py`;
the number of ranks changes no sample.

The adapters start on the merged SFT checkpoint, which without them is the reference of the KL. Every
--save-every steps success in --dev-episodes, or else the greedy reward on --dev-states, decides whether the
weights become checkpoint-best; step 0, the SFT policy itself, takes part, and among equals the latest wins.
`--plan` prints parameters, memory and work of a run on GPUs instead of training (see `--plan --help`).

ours: constant learning rate without warm-up, AdamW with weight decay 0.01, gradient clip 1.0: the paper does
not say. ours: dev states are half mined and half ordinary, because the reward on mined states alone rises
while episodes get worse.
"""

import dataclasses
import json
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from rmsweb.config import Config as BaseConfig
from rmsweb.config import main_guard, opt, parse_config, progress
from rmsweb.engine.distributed import Ranks, ranks
from rmsweb.engine.plan import SHAPES, PlanSizes, plan, render, shape_config
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.training import (
    Optimizer,
    check_data,
    constant,
    data_digest,
    load_training_state,
    prepare_policy,
    read_samples,
    save_checkpoint,
    save_training_state,
)
from rmsweb.jsonl import write_json
from rmsweb.prompt import PromptConfig, load_shared_prompt_config
from rmsweb.records import MinedState, Split
from rmsweb.runs import RunWriter
from rmsweb.salvage.gating import MIN_STD
from rmsweb.salvage.objective import CLIP_HIGH, CLIP_LOW, KL_WEIGHT, SALVAGE_WEIGHT, ObjectiveConfig
from rmsweb.salvage.states import State, make_state
from rmsweb.salvage.step import DAPO_CLIP_HIGH, StepConfig, greedy_rewards, rl_step

EVALUATE = Path(__file__).with_name("evaluate.py")


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """Salvage-DS on mined states. Defaults are the paper's (App. G)."""

    model: str = opt(
        help="checkpoint folder of the merged SFT policy; without adapters it is the reference of the KL"
    )
    states: tuple[Path, ...] = opt(
        help="mined.jsonl files (or samples.jsonl for the full-corpus ablation), each in its run folder beside screenshots/"
    )
    out: Path = opt(help="run folder to write")
    dev_states: tuple[Path, ...] = opt(
        (),
        "mined.jsonl and samples.jsonl files of split dev: greedy reward on equally many of each chooses checkpoint-best",
    )
    dev_episodes: Path | None = opt(
        None,
        "task file of split dev: evaluate.py runs the policy on it, and success chooses checkpoint-best instead of reward",
    )
    dev_flags: str = opt(
        "", "with --dev-episodes: further flags of evaluate.py, such as '--runs 1 --max-steps 12'"
    )
    dev_count: int = opt(200, "dev states at most, half mined and half ordinary where both are there")
    max_steps: int = opt(100, "training steps")
    train_batch: int = opt(64, "accepted groups a step (B); paper: 64")
    mini_batch: int = opt(16, "groups an optimizer step (M); paper: 16")
    num_rollouts: int = opt(8, "rollouts a prompt (n); paper: 8")
    max_generation_batches: int = opt(16, "generation batches of B prompts a step at most; paper: 16")
    lr: float = opt(8e-6, "learning rate, constant; paper: 8e-6")
    weight_decay: float = opt(0.01, "AdamW weight decay")
    clip: float = opt(1.0, "largest gradient norm")
    lora_rank: int = opt(64, "rank of the adapters; paper: 64")
    lora_alpha: float = opt(128.0, "scale of the adapters is alpha / rank; paper: 128")
    lora_scope: Literal["attn", "attn+vision"] = opt(
        "attn",
        "linear layers with adapters: q, k, v, o of the language model, or the vision tower's qkv and proj too",
    )
    algorithm: Literal["salvage-ds", "dapo"] = opt(
        "salvage-ds", "dapo: no competence gate, no salvage anchor, clip [0.2, 0.28] (Table 2)"
    )
    salvage_weight: float = opt(
        SALVAGE_WEIGHT, "weight of the salvage anchor; 0: anchor-free ablation; paper: 0.10"
    )
    kl_weight: float = opt(KL_WEIGHT, "weight of the KL brake; paper: 1e-3")
    clip_low: float = opt(CLIP_LOW, "lower clip of the importance ratio; paper: 0.2")
    clip_high: float | None = opt(
        None, f"upper clip of the importance ratio; default {CLIP_HIGH} (paper), with dapo {DAPO_CLIP_HIGH}"
    )
    dual_clip: float | None = opt(
        None, "bound c of the loss of negative advantages (3 is usual); default: none"
    )
    min_std: float = opt(
        MIN_STD, "smallest within-group standard deviation of an accepted group; 0: any above 0; paper: 0.10"
    )
    aggregation: Literal["seq-mean-token-mean", "token-mean"] = opt(
        "seq-mean-token-mean", "how token losses are averaged; paper: seq-mean-token-mean"
    )
    response_budget: int = opt(2048, "longest rollout in tokens; paper: 2048")
    token_budget: int = opt(
        20_480, "tokens of a packed row on one rank; changes speed and memory, never the loss; paper: 20480"
    )
    save_every: int = opt(10, "steps between dev evaluations and training states")
    seed: int = opt(42, "seed of prompt order, rollouts and adapters")
    dtype: Literal["auto", "float32", "bfloat16"] = opt(
        "auto", "dtype of the frozen weights; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "where to compute")
    shard: bool = opt(False, "shard the weights over the ranks (FSDP2); off: every rank holds them all")
    recompute: bool = opt(False, "recompute decoder layers in backward: less memory, about a third slower")
    threads: int = opt(0, "torch threads of a process; 0: torch's default")
    resume: bool = opt(False, "go on with the run in --out")

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = (
            "train_batch",
            "mini_batch",
            "max_generation_batches",
            "response_budget",
            "token_budget",
            "save_every",
            "max_steps",
            "lora_rank",
            "dev_count",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        if self.num_rollouts < 2:
            raise ValueError(
                f"--num-rollouts {self.num_rollouts}: expected at least 2, a single rollout has no contrast"
            )
        if self.lr <= 0 or self.clip <= 0 or self.threads < 0 or not 0 <= self.min_std < 1:
            raise ValueError("--lr and --clip must be positive, --threads not negative, --min-std in [0, 1)")
        self.step_config()

    def step_config(self) -> StepConfig:
        """The part of the configuration that is the algorithm."""
        return StepConfig(
            train_batch=self.train_batch,
            mini_batch=self.mini_batch,
            num_rollouts=self.num_rollouts,
            max_generation_batches=self.max_generation_batches,
            response_budget=self.response_budget,
            token_budget=self.token_budget,
            algorithm=self.algorithm,
            min_std=self.min_std,
            objective=ObjectiveConfig(
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                dual_clip=self.dual_clip,
                salvage_weight=self.salvage_weight,
                kl_weight=self.kl_weight,
                aggregation=self.aggregation,
            ),
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """Parameters, memory and work of a run on GPUs, without weights, data or a GPU. The flags of the run may
    stay.
    """

    model: str = opt("", "checkpoint folder whose config.json gives the shape where --model-shape does not")
    states: tuple[Path, ...] = opt((), "not read")
    out: Path = opt(Path("-"), "not written")
    model_shape: Literal["", "qwen3-vl-8b", "qwen3-vl-32b"] = opt("", "published shape")
    world_size: int = opt(8, "GPUs")
    gpu_gib: float = opt(80.0, "memory of a GPU in GiB")
    prompt_tokens: int = opt(12_000, "tokens of a prompt; paper: at most 12000")
    response_tokens: int = opt(
        300, "tokens of an answer, for the work of a step; memory is counted with the longest one"
    )
    shard: bool = opt(True, Config.__dataclass_fields__["shard"].metadata["help"])
    recompute: bool = opt(True, Config.__dataclass_fields__["recompute"].metadata["help"])

    def sizes(self) -> PlanSizes:
        """What the plan depends on."""
        return PlanSizes(**{field.name: getattr(self, field.name) for field in dataclasses.fields(PlanSizes)})


def print_plan(config: PlanConfig) -> None:
    """Prints the plan; ValueError where no shape is named."""
    if not config.model_shape and not config.model:
        raise ValueError(f"--plan needs --model-shape ({' or '.join(SHAPES)}) or --model")
    shape = (
        shape_config(config.model_shape)
        if config.model_shape
        else PolicyModel.load(config.model, device="meta").model.config
    )
    print(render(config.model_shape or config.model, config.sizes(), plan(shape, config.sizes())))


def read_prompt_config(config: Config) -> PromptConfig:
    """The prompt configuration beside the first states; ValueError naming the file and the field where
    another file's differs.
    """
    return load_shared_prompt_config((*config.states, *config.dev_states))


def read_states(
    files: Sequence[Path], policy: PolicyModel, config: Config, split: Split
) -> tuple[list[State], Counter[str]]:
    """States of the files in order, and how many records were left out for which reason."""
    assert policy.prompt_config is not None
    states: list[State] = []
    left_out: Counter[str] = Counter()
    make = partial(
        make_state,
        policy=policy,
        prompt_budget=policy.prompt_config.prompt_budget,
        response_budget=config.response_budget,
    )
    for sample, root in progress(read_samples(files, policy.prompt_config, split), label=f"{split} states"):
        state = make(sample, root)
        if isinstance(state, str):
            left_out[state] += 1
        else:
            states.append(state)
    if not states:
        raise ValueError(f"{', '.join(map(str, files))}: no usable state ({dict(left_out)})")
    return states, left_out


def choose_dev(states: Sequence[State], count: int, seed: int) -> tuple[list[State], list[State]]:
    """Equally many mined and ordinary dev states, at most `count` together, drawn by seed; all of one kind
    where the other is missing.
    """
    kinds = [
        [state for state in states if isinstance(state.sample, MinedState) == mined]
        for mined in (True, False)
    ]
    half = min(count // 2, *map(len, kinds)) if all(kinds) else count
    mined, ordinary = (random.Random(seed).sample(kind, min(half, len(kind))) for kind in kinds)
    return mined, ordinary


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory of this process so far, in GiB: the GPU's where there is one, else resident memory."""
    used = (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return used / 2**30


class Run:
    """A training run: its policy, states, folder, and how far it got."""

    def __init__(self, config: Config, group: Ranks) -> None:
        self.config, self.group, self.step_config = config, group, config.step_config()
        group.agree({name: value for name, value in vars(config).items() if name != "threads"})
        self.policy, parameters = prepare_policy(
            config.model,
            group,
            prompt_config=read_prompt_config(config),
            dtype=config.dtype,
            lora_rank=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_scope=config.lora_scope,
            recompute=config.recompute,
            sharded=config.shard,
            seed=config.seed,
        )
        self.states, self.left_out = read_states(config.states, self.policy, config, "train")
        self.mined_dev, self.ordinary_dev = [], []  # type: list[State], list[State]
        if config.dev_states:
            self.mined_dev, self.ordinary_dev = choose_dev(
                read_states(config.dev_states, self.policy, config, "dev")[0], config.dev_count, config.seed
            )
        self.data = data_digest(
            (state.sample.sample_id, state.prompt_length, len(state.target_ids)) for state in self.states
        )
        group.agree({"the states (digest)": self.data})
        self.folder = RunWriter(
            config.out,
            config,
            resume=config.resume,
            may_differ=("threads", "token_budget", "save_every", "max_steps"),
        )
        rate = partial(constant, total=config.max_steps, peak=config.lr)
        self.optimizer = Optimizer(
            parameters, group, rate, weight_decay=config.weight_decay, clip=config.clip
        )
        self.step, self.position, self.best, self.best_step = 0, 0, -1.0, 0
        if config.resume:
            state = load_training_state(config.out / "state", self.policy, self.optimizer, group)
            if state is not None:
                check_data(state["data"], self.data, config.out)
                self.step, self.position, self.best, self.best_step = (
                    state["step"],
                    state["position"],
                    state["best"],
                    state["best_step"],
                )
            self.folder.cut_metrics(self.step if state else -1)

    @property
    def chooses(self) -> bool:
        """Whether anything chooses the best checkpoint."""
        return bool(self.config.dev_states or self.config.dev_episodes)

    def log(self, values: dict[str, Any]) -> None:
        if self.group.is_main:
            self.folder.log({"step": self.step, **values})

    def save(self, name: str, *, adapter: bool = False) -> None:
        out = self.config.out
        save_checkpoint(
            self.policy,
            self.group,
            out / name,
            adapter=out / "adapter" if adapter else None,
            base_name=self.config.model,
        )

    def evaluate(self) -> None:
        """Success on the dev episodes and greedy reward on the dev states; the best checkpoint so far is
        kept.
        """
        measured: dict[str, float] = {}
        if self.config.dev_episodes:
            measured["dev_success"] = self.success_on_episodes(self.config.dev_episodes)
        if self.mined_dev or self.ordinary_dev:
            values = greedy_rewards(
                self.policy,
                self.group,
                [*self.mined_dev, *self.ordinary_dev],
                response_budget=self.config.response_budget,
            )
            parts = {
                "dev_reward": values,
                "dev_mined": values[: len(self.mined_dev)],
                "dev_ordinary": values[len(self.mined_dev) :],
            }
            measured |= {name: sum(part) / len(part) for name, part in parts.items() if part}
        if not measured:
            return
        self.log(measured)
        if next(iter(measured.values())) >= self.best:
            self.best, self.best_step = next(iter(measured.values())), self.step
            self.save("checkpoint-best", adapter=True)

    def success_on_episodes(self, tasks: Path) -> float:
        """pass@1 of the present weights on the dev tasks, by evaluate.py in a process of its own on the first
        rank; in [0, 1].
        """
        self.save("candidate")
        success = 0.0
        if self.group.is_main:
            out = self.config.out / "dev-episodes" / f"step{self.step}"
            command: list[object] = [
                sys.executable,
                EVALUATE,
                "--policy",
                self.config.out / "candidate",
                "--tasks",
                tasks,
                "--split",
                "dev",
                "--out",
                out,
            ]
            command += [*shlex.split(self.config.dev_flags), *(["--resume"] if out.exists() else [])]
            alone = {
                name: value
                for name, value in os.environ.items()
                if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            }
            done = subprocess.run(
                [*map(str, command)], env=alone, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            if done.returncode:
                raise ValueError(
                    f"--dev-episodes {tasks}: evaluate.py ended with exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
                )
            shutil.rmtree(self.config.out / "candidate")
            success = float(json.loads((out / "summary.json").read_text(encoding="utf-8"))["pass1"])
        return self.group.sum({"success": success})["success"]

    def save_state(self) -> None:
        extra = {
            "step": self.step,
            "position": self.position,
            "best": self.best,
            "best_step": self.best_step,
            "data": self.data,
        }
        save_training_state(
            self.config.out / "state", self.policy, self.optimizer, self.group, step=self.step, extra=extra
        )

    def __call__(self) -> None:
        """Trains to the end and writes the checkpoints."""
        start, bar = time.perf_counter(), progress(total=self.config.max_steps, initial=self.step, label="rl")
        if self.step == 0:
            self.log(
                {
                    "states": len(self.states),
                    "left_out": self.left_out,
                    "trained_parameters": sum(p.numel() for p in self.optimizer.parameters),
                }
            )
            self.evaluate()
        figures = ""
        while self.step < self.config.max_steps:
            begun = time.perf_counter()
            values, self.position = rl_step(
                self.policy,
                self.group,
                self.states,
                self.optimizer,
                self.step_config,
                step=self.step,
                position=self.position,
                report=lambda phase: bar.set_postfix_str(f"{figures}{phase}"),  # noqa: B023 (used within the iteration)
            )
            self.step += 1
            seconds = time.perf_counter() - begun
            values |= {
                "epoch": self.position / len(self.states),
                "step_s": seconds,
                "memory_gb": peak_memory_gb(self.group.device),
            }
            self.log(values | {"sampled_tokens_per_s": values["sampled_tokens"] / values["sample_s"]})
            if self.step % self.config.save_every == 0 or self.step == self.config.max_steps:
                self.evaluate()
                self.save_state()
            groups = f"{values['accepted']}+{values['retained']} groups"
            figures = f"reward {values['reward_mean']:.3f}, {groups}, gap {values['gap']:+.2f}, kl {values['kl']:.4f}, "
            bar.update()
        bar.close()
        self.save("checkpoint-last", adapter=not self.chooses)
        if not self.chooses:
            self.save("checkpoint-best")
        if self.group.is_main:
            dev = {
                "best_dev": self.best,
                "best_step": self.best_step,
                "dev_mined": len(self.mined_dev),
                "dev_ordinary": len(self.ordinary_dev),
            }
            counts = {
                "states": len(self.states),
                "left_out": self.left_out,
                "steps": self.step,
                "updates": self.optimizer.num_steps,
                "prompts": self.position,
            }
            write_json(
                self.config.out / "summary.json",
                counts | (dev if self.chooses else {}) | {"seconds": time.perf_counter() - start},
            )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--plan" in arguments:
        arguments.remove("--plan")
        print_plan(
            parse_config(
                PlanConfig, arguments, prog="train_rl.py --plan", description=PlanConfig.__doc__ or ""
            )
        )
        return 0
    config = parse_config(Config, arguments, prog="train_rl.py", description=f"{__doc__}\n{Config.__doc__}")
    if config.threads:
        torch.set_num_threads(config.threads)
    with ranks(config.device) as group:
        run = Run(config, group)
        with run.folder:
            run()
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
