"""Evaluation: every task is run a fixed number of times in a real browser and judged (App. A).

A run succeeds only if a `done` was executed and the judge agrees. Writes into --out:
trajectories.rank*.jsonl, judgements.rank*.jsonl, screenshots/, metrics.jsonl, summary.json. With --split
train the run folder is a pool that mine.py reads. --help names the environment variables of the keys.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from rmsweb.config import Config as BaseConfig
from rmsweb.config import main_guard, opt, part, rank, shard
from rmsweb.evaluation.figures import read_rows, summarize
from rmsweb.llm import EndpointConfig
from rmsweb.playground.environment import ENVIRONMENTS, NO_BROWSER, Place
from rmsweb.pool import Job, Outcome, Worker
from rmsweb.prompt import PromptConfig, load_prompt_config
from rmsweb.records import Task
from rmsweb.report.page import terminal_table
from rmsweb.runner import (
    Actor,
    EpisodeConfig,
    Episodes,
    attempt_id,
    judge_stored,
    open_run,
    parse_run_config,
    stored_run,
    when_complete,
)
from rmsweb.runs import RunWriter
from rmsweb.stats import cost, load_prices

ARM = "evaluate"


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(BaseConfig):
    """How answers are sampled."""

    temperature: float | None = opt(
        0.7,
        "sampling temperature; none, here and below, sends an endpoint no such field",
        paper="not stated; Qwen3-VL's own",
        at_least=0,
    )
    top_p: float | None = opt(0.8, "nucleus sampling", paper="not stated; Qwen3-VL's own", above=0, at_most=1)
    top_k: int | None = opt(20, "top-k sampling, 0 for none", paper="not stated; Qwen3-VL's own", at_least=0)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(EndpointConfig):
    """Policy behind an endpoint, such as a vLLM server of the merged checkpoint, instead of --policy."""

    role: ClassVar[str] = "policy"
    prefix: ClassVar[str] = "policy_"


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """Run a policy on benchmark tasks, judge the runs, print pass@1 with its interval, pass@k and steps."""

    policy: Path | None = opt(
        None,
        "checkpoint folder, run in this process",
        paper="Qwen3-VL-8B/32B-Instruct, SFT and RL checkpoints",
    )
    endpoint: PolicyConfig = part(PolicyConfig)
    environment: Place = opt(
        "playground",
        "where the tasks live: the project's local sites, the same without a browser, or the web",
        paper="the web",
        alias="benchmark",
    )
    runs: int = opt(3, "runs of every task", paper=3, at_least=1)
    stop_on_stall: bool = opt(
        False, "end a run at a stalled action loop; off, runs go on to --max-steps", paper="not stated"
    )
    prices: Path | None = opt(
        None, 'JSON file {"model": {"prompt": X, "completion": Y}}, US dollars for a million tokens'
    )
    dtype: Literal["auto", "float32", "bfloat16"] = opt(
        "auto", "number format of the checkpoint in memory: bfloat16 on a GPU, else float32", paper="bf16"
    )
    threads: int = opt(0, "torch threads of a process with --policy; 0: torch's default", at_least=0)
    decoding: DecodingConfig = part(DecodingConfig)
    episodes: EpisodeConfig = part(EpisodeConfig, split="held-out")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.policy is None) == (self.endpoint.url is None):
            raise ValueError("give either --policy CHECKPOINT_FOLDER or --policy-url URL --policy-model NAME")
        if self.endpoint.url is not None and not self.endpoint.model:
            raise ValueError("--policy-url needs --policy-model")
        if self.policy is not None and None in vars(self.decoding).values():
            raise ValueError("--temperature, --top-p, --top-k: none is for --policy-url")
        self.episodes.judge.check_place(self.environment, ENVIRONMENTS[self.environment])


# ------------------------------------------------------------------------------------------------- the policy


@asynccontextmanager
async def open_actor(config: Config, folder: RunWriter) -> AsyncIterator[Actor]:
    """Open the policy of the flags: an endpoint (no torch is imported) or a checkpoint in this process."""
    own, decoding = config.episodes, vars(config.decoding)
    if config.policy is None:
        async with config.endpoint.open(folder.path, own.concurrency, **decoding) as endpoint:
            yield own.actor(endpoint)
        return
    import torch

    from rmsweb.engine.policy import PolicyModel
    from rmsweb.engine.sampler import Decoding
    from rmsweb.engine.serve import CheckpointPolicy

    if config.threads:
        torch.set_num_threads(config.threads)
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    half = config.dtype == "bfloat16" or (config.dtype == "auto" and device != "cpu")
    model = PolicyModel.load(
        config.policy,
        dtype=torch.bfloat16 if half else torch.float32,
        device=device,
        prompt_config=load_prompt_config(own.prompt_config) if own.prompt_config else None,
    )
    policy = CheckpointPolicy(model, folder.path, Decoding(**decoding))
    try:
        yield Actor(
            policy=policy,
            name=str(config.policy),
            sha256=folder.inputs.get("policy"),
            prompt_config=model.prompt_config or PromptConfig(),
            count_tokens=model.count_tokens,
        )
    finally:
        policy.close()


# --------------------------------------------------------------------------------------------------- the runs


def run_of(task: Task, number: int, episodes: Episodes) -> Job:
    """Return run `number` (from 0) of a task as a job: one episode, judged and committed."""

    async def run(worker: Worker) -> None:
        episodes.commit(*await episodes.attempt(worker, task, run=number))

    return run


def write_summary(config: Config, folder: RunWriter, head: dict[str, Any]) -> dict[str, Any]:
    """Write summary.json from the finished runs of all ranks; return it.

    `head` says what ran: the policy, `tasks`, and what else the figures do not.
    """
    rows = read_rows(folder)
    summary = head | summarize(rows, tasks=head["tasks"], runs=config.runs)
    summary["scripted"] = sorted(folder.scripted)
    if config.prices and rows:
        price = load_prices(config.prices).get(summary["policy"])
        tokens = sum(row.prompt_tokens for row in rows), sum(row.completion_tokens for row in rows)
        if summary["usage_unknown"]:
            price = None
        summary["usd_per_run"] = cost(*tokens, price) / len(rows) if price else None
    folder.write_json("summary.json", summary)
    return summary


def show(summary: dict[str, Any]) -> None:
    """Print the figures."""
    if rank() == 0:
        print(terminal_table({summary["policy"]: summary}, summary["scripted"]), end="")


async def evaluate(config: Config, folder: RunWriter, tasks: list[Task]) -> int:
    """Run this rank's share, then write and print the summary; 1 where an endpoint left runs unfinished."""
    started, unjudged = time.monotonic(), await judge_stored(config.episodes, folder)
    done = folder.finished()
    mine = {
        attempt_id(task, ARM, run=number): (task, number)
        for task, number in shard([(task, number) for number in range(config.runs) for task in tasks])
    }
    async with open_actor(config, folder) as actor:
        episodes = Episodes(
            config=config.episodes,
            folder=folder,
            environment=ENVIRONMENTS[config.environment](),
            actor=actor,
            script="evaluate",
            arm=ARM,
            stop_on_stall=config.stop_on_stall,
        )
        jobs = {name: run_of(*run, episodes) for name, run in mine.items() if name not in done}
        outcome = await episodes.run(jobs, total=len(mine), label="runs")
    outcome.failed |= unjudged
    head = {
        "policy": actor.name,
        "checkpoint_sha256": actor.sha256,
        "environment": config.environment,
        "split": config.episodes.split,
        "tasks": len(tasks),
        "seconds": round(time.monotonic() - started, 1),
        "browser_restarts": outcome.browser_restarts,
    }
    show(when_complete(folder, lambda: write_summary(config, folder, head)))
    return outcome.exit_code("run")


async def rejudge(config: Config, folder: RunWriter) -> int:
    """Judge the stored runs again, then write and print the summary."""
    failed, first = await judge_stored(config.episodes, folder), folder.first
    if first is None:
        raise ValueError(f"{folder.path} holds no run to judge")
    known: dict[str, Any] = {
        "policy": first.source.policy,
        "checkpoint_sha256": first.source.checkpoint_sha256,
    }
    known["tasks"] = len({trajectory.task.task_id for trajectory in folder.trajectories()})
    show(write_summary(config, folder, known | folder.json("summary.json")))
    return Outcome(failed).exit_code("run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    config = parse_run_config(Config, argv, prog="evaluate.py")
    own = config.episodes
    if config.prices:
        load_prices(config.prices)
    if own.rejudge:
        with stored_run(own) as folder:
            return asyncio.run(rejudge(config, folder))
    tasks = own.load_tasks(browser=config.environment not in NO_BROWSER)
    local = (config.policy,) if config.policy is not None and config.policy.is_dir() else ()
    with open_run(config, own, ("prices", "threads"), {"policy": local}) as folder:
        return asyncio.run(evaluate(config, folder, tasks))


if __name__ == "__main__":
    sys.exit(main_guard(main))
