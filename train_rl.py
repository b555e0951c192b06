"""Salvage-DS reinforcement learning on mined states (App. G): mined.jsonl and the SFT checkpoint -> merged RL
checkpoint.

Training is offline: at each mined state the policy samples answers, which are scored against the verified
action without a browser. One step is `rmsweb.salvage.step.rl_step`. Runs on one CPU process and under
`torchrun --nproc_per_node 8 train_rl.py`; the number of ranks changes no sample.

The adapters start on the merged SFT checkpoint, which without them is the reference of the KL. Every
--save-every steps success in --dev-episodes, or else the greedy reward on --dev-states, decides whether the
weights become checkpoint-best; step 0, the SFT policy itself, takes part, and among equals the latest wins.
`--plan` prints parameters, memory and work of a run on GPUs instead of training (see `--plan --help`).

ours: constant learning rate without warm-up, AdamW with weight decay 0.01, gradient clip 1.0: the paper does
not say. ours: dev states are half mined and half ordinary, because the reward on mined states alone rises
while episodes get worse.
"""

import operator
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rmsweb.config import main_guard, opt, parse_config, part, progress
from rmsweb.engine.distributed import Ranks, ranks
from rmsweb.engine.lora import LoraConfig
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
    OptimizerConfig,
    Trainer,
    TrainerConfig,
    checked_samples,
    prepare_policy,
)
from rmsweb.prompt import load_shared_prompt_config
from rmsweb.records import Split
from rmsweb.runs import ROLLOUTS, Inputs, RunFolder, check_out
from rmsweb.salvage.states import SampledGroup, State, check_unique, choose_dev, make_state
from rmsweb.salvage.step import StepConfig, greedy_rewards, rl_step
from rmsweb.salvage.work import plan_work

SHOWN = ("reward_mean", "accepted", "retained", "gap", "kl")  # metrics in the progress bar
EVALUATE = Path(__file__).with_name("evaluate.py")


@dataclass(frozen=True, kw_only=True)
class Adapters(LoraConfig):
    """Adapters."""

    lora_rank: int = opt(64, "rank of the adapters", paper=64, at_least=1)
    lora_scope: Literal["attn", "attn+vision"] = opt(
        "attn",
        "linear layers with adapters: the language model's q, k, v, o, or the vision tower's qkv and proj "
        "too",
    )


@dataclass(frozen=True, kw_only=True)
class Config(TrainerConfig):
    """Salvage-DS on mined states. Defaults are the paper's (App. G)."""

    model: str = opt(
        help="checkpoint folder of the merged SFT policy; without adapters it is the reference of the KL"
    )
    states: tuple[Path, ...] = opt(
        help="mined.jsonl files (or samples.jsonl for the full-corpus ablation), each in its run folder "
        "beside screenshots/"
    )
    dev_states: tuple[Path, ...] = opt(
        (),
        "mined.jsonl and samples.jsonl files of split dev: greedy reward on equally many of each chooses "
        "checkpoint-best",
    )
    dev_episodes: Path | None = opt(
        None,
        "task file of split dev: evaluate.py runs the policy on it, and success chooses checkpoint-best "
        "instead of reward",
    )
    dev_flags: str = opt(
        "", "with --dev-episodes: further flags of evaluate.py, such as '--runs 1 --max-steps 12'"
    )
    dev_count: int = opt(
        200, "dev states at most, half mined and half ordinary where both are there", at_least=1
    )
    max_steps: int = opt(100, "training steps", at_least=1)
    save_every: int = opt(10, "steps between dev evaluations and training states", at_least=1)
    rollouts_every: int = opt(10, "steps between those whose rollouts are written down", at_least=1)
    step: StepConfig = part(StepConfig)
    lora: Adapters = part(Adapters)
    optimizer: OptimizerConfig = part(OptimizerConfig, lr=8e-6)

    def inputs(self) -> Inputs:
        """Return the files that a resumed run must find unchanged, by flag."""
        tasks = (self.dev_episodes,) if self.dev_episodes else ()
        own = {"states": self.states, "dev_states": self.dev_states, "dev_episodes": tasks}
        return {**super().inputs(), **own}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dev_flags and self.dev_episodes is None:
            raise ValueError(f"--dev-flags {self.dev_flags!r} needs --dev-episodes")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """Parameters, memory and work of a run on GPUs, without weights, data or a GPU.

    The flags of the run may stay.
    """

    model: str = opt("", "checkpoint folder whose config.json gives the shape where --model-shape does not")
    states: tuple[Path, ...] = opt((), "not read")
    out: Path = opt(Path("-"), "not written")
    machine: MachineConfig = part(MachineConfig)


def sizes_of(config: Config, prompt_tokens: int) -> Sizes:
    """Return what memory depends on beside the model."""
    step = config.step
    return Sizes(
        prompts=step.train_batch,
        num_rollouts=step.num_rollouts,
        response_budget=step.response_budget,
        token_budget=step.token_budget,
        longest=prompt_tokens + step.response_budget,
    )


def make_plan(config: PlanConfig) -> Tables:
    """Return the tables of a plan; raises ValueError where no shape is named."""
    machine, model = config.machine, read_shape(config.model, config.machine.model_shape)
    sizes = sizes_of(config, machine.prompt_tokens)
    memory = plan_memory(model, machine, sizes, lora=config.lora, engine=config.engine)
    title = f"a step, with answers of {machine.response_tokens} tokens"
    return {**memory, title: plan_work(config.step, machine)}


def render(config: PlanConfig) -> str:
    """Return a plan as text."""
    machine = config.machine
    head = (
        f"{machine.model_shape or config.model}: prompts of {machine.prompt_tokens} tokens, "
        f"n={config.step.num_rollouts}"
    )
    return render_plan(head, make_plan(config), machine, config.engine)


def read_states(
    files: Sequence[Path], policy: PolicyModel, response_budget: int, split: Split
) -> tuple[list[State], Counter[str]]:
    """Return the states of the files in order, and how many records were left out for which reason."""
    budgets = {"prompt_budget": policy.prompt_config.prompt_budget, "response_budget": response_budget}
    samples = progress(checked_samples(files, policy.prompt_config, split), label=f"{split} states")
    found = [make_state(sample, root, policy, **budgets) for sample, root in samples]
    states = [state for state in found if isinstance(state, State)]
    left_out = Counter(reason for reason in found if isinstance(reason, str))
    if files and not states:
        raise ValueError(f"{', '.join(map(str, files))}: no usable state ({dict(left_out)})")
    return states, left_out


def success_on_episodes(trainer: Trainer, tasks: Path, flags: str) -> float:
    """Return pass@1 of the present weights on the dev tasks, in [0, 1].

    evaluate.py measures it, in a process of its own on the first rank.
    """
    trainer.save("candidate")
    success = 0.0
    if trainer.ranks.is_main:
        candidate = trainer.config.out / "candidate"
        out = trainer.config.out / "dev-episodes" / f"step{trainer.progress.step}"
        command = [sys.executable, EVALUATE, "--policy", candidate, "--tasks", tasks, "--split", "dev"]
        command += ["--out", out, *shlex.split(flags), *(["--resume"] if out.exists() else [])]
        alone = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
        found = subprocess.run([*map(str, command)], env=alone, capture_output=True, text=True)
        if found.returncode:
            raise ValueError(
                f"--dev-episodes {tasks}: evaluate.py ended with exit code {found.returncode}: "
                f"{found.stderr.strip().splitlines()[-1:]}"
            )
        shutil.rmtree(candidate)
        success = RunFolder(out).json("summary.json")["pass1"]
    return max(trainer.ranks.gather(success))


def measure(trainer: Trainer, config: Config, dev: dict[str, list[State]]) -> dict[str, float]:
    """Return success on the dev episodes and the greedy reward on the dev states, of both kinds and each."""
    measured: dict[str, float] = {}
    if config.dev_episodes:
        measured["dev_success"] = success_on_episodes(trainer, config.dev_episodes, config.dev_flags)
    if states := [state for kind in dev.values() for state in kind]:
        longest = config.step.response_budget
        rewards = greedy_rewards(trainer.policy, trainer.ranks, states, response_budget=longest)
        count = len(dev["dev_mined"])
        parts = {"dev_reward": rewards, "dev_mined": rewards[:count], "dev_ordinary": rewards[count:]}
        measured |= {name: sum(part) / len(part) for name, part in parts.items() if part}
    return measured


def train(config: Config, here: Ranks) -> None:
    """Train to the end and write the run folder."""
    check_out(config.out, config.resume)
    budget, seed = config.step.response_budget, config.step.seed
    prompt_config = load_shared_prompt_config((*config.states, *config.dev_states))
    check_run(config, here, sizes_of(config, prompt_config.prompt_budget), prompt_config.prompt_budget)
    policy = prepare_policy(config, here, prompt_config=prompt_config, seed=seed)
    states, left_out = read_states(config.states, policy, budget, "train")
    dev_states, _ = read_states(config.dev_states, policy, budget, "dev")
    check_unique([*states, *dev_states])
    dev = choose_dev(dev_states, config.dev_count, seed)
    trainer = Trainer(
        config,
        policy,
        here,
        rate=lambda step: config.optimizer.lr,
        num_steps=config.max_steps,
        evaluate_every=config.save_every,
        save_every=config.save_every,
        best_by="dev_success" if config.dev_episodes else "dev_reward",
        better=operator.ge,
        evaluate_first=True,
        data=[(item.prompt_key, item.sample.target_text) for item in states],
        may_differ=("max_steps",),
    )
    done = trainer.progress

    def keep(groups: Sequence[SampledGroup]) -> None:
        if here.is_main and done.step % config.rollouts_every == 0:
            for group in groups:
                trainer.folder.log({"step": done.step + 1, **group.described()}, ROLLOUTS)

    def step() -> dict[str, Any]:
        values, done.consumed = rl_step(
            policy,
            here,
            states,
            trainer.optimizer,
            config.step,
            step=done.step,
            position=done.consumed,
            report=bar.set_description_str,
            keep=keep,
        )
        speed = values["sampled_tokens"] / values["sample_s"]
        return {**values, "epoch": done.consumed / len(states), "sampled_tokens_per_s": speed}

    facts: dict[str, Any] = {"states": len(states), "left_out": left_out}
    with trainer.folder:
        steps = trainer.run(step, partial(measure, trainer, config, dev), facts)
        bar = progress(steps, total=config.max_steps, label="rl", initial=done.step)
        for values in bar:
            bar.set_postfix({name: values[name] for name in SHOWN})
        facts |= {"steps": done.step, "updates": trainer.optimizer.num_steps, "prompts": done.consumed}
        if done.best is not None:
            facts |= {name: len(kind) for name, kind in dev.items()}
            facts |= {"best_dev": done.best, "best_step": done.best_step}
        trainer.finish(facts)
        if here.is_main:
            print(closing_line(config.out, facts, trainer.folder.metrics))


def closing_line(out: Path, facts: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """Return what a run came to: groups that trained, updates, the best step, and where it all is."""
    accepted, retained = (sum(line.get(name, 0) for line in lines) for name in ("accepted", "retained"))
    text = (
        f"{out}: {facts['steps']} steps, {accepted + retained} groups trained in {facts['updates']} updates"
    )
    if not accepted + retained:
        text += "; nothing was ever accepted or retained, so the weights are those of --model"
    elif not accepted:
        text += "; no group was ever accepted"
    best = f"best step {facts['best_step']}, in" if "best_step" in facts else "the last weights are in"
    return f"{text}; {best} checkpoint-best"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, then train or print the plan; returns the exit code."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if "--plan" in flags:
        flags.remove("--plan")
        print(render(parse_config(PlanConfig, flags, prog="train_rl.py --plan")))
        return 0
    config = parse_config(Config, flags, prog="train_rl.py", description=f"{__doc__}\n{Config.__doc__}")
    with ranks(config.engine.device, config.engine.threads) as here:
        train(config, here)
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
