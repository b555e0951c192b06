"""Evaluation: every task is run a fixed number of times in a real browser and judged (App. A).

A run succeeds only if a `done` was executed and the judge agrees. Writes into --out:
trajectories.rank*.jsonl, judgements.rank*.jsonl, screenshots/, metrics.jsonl, summary.json. With --split
train the run folder is a pool that mine.py reads. Keys come from RMSWEB_POLICY_API_KEY and
RMSWEB_JUDGE_API_KEY, else OPENAI_API_KEY.
"""

import asyncio
import hashlib
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rmsweb.agent import AgentOptions, Episode
from rmsweb.browser.chromium import find_chromium
from rmsweb.config import Config as BaseConfig
from rmsweb.config import main_guard, opt, parse_config, progress, rank, shard
from rmsweb.endpoint import EndpointPolicy, open_endpoint, token_counter
from rmsweb.evaluation.environments import Environment, LiveWeb
from rmsweb.evaluation.judges import judge_run
from rmsweb.evaluation.tasks import load_tasks
from rmsweb.playground.environment import PlaygroundEnvironment
from rmsweb.prompt import PromptConfig, approximate_tokens, load_prompt_config, save_prompt_config
from rmsweb.records import Judgement, Policy, Source, Split, Task, Trajectory, derive_seed, is_success
from rmsweb.runner import Job, Worker, browser_pool, run_jobs
from rmsweb.runs import RunWriter
from rmsweb.stats import cost, load_prices, pass_at_1_estimate, pass_at_k

ARM = "evaluate"


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """Run a policy on benchmark tasks, judge the runs, and print pass@1, pass@k and steps with 95% intervals."""

    tasks: Path = opt(help="task file: records.Task as JSONL (python -m rmsweb.playground tasks writes some)")
    out: Path = opt(help="run folder to write")
    policy: Path | None = opt(
        None,
        "checkpoint folder, run in this process (paper: Qwen3-VL-8B/32B-Instruct, SFT and RL checkpoints)",
    )
    policy_url: str | None = opt(
        None,
        "instead of --policy: OpenAI-compatible endpoint, such as a vLLM server of the merged checkpoint",
    )
    policy_model: str | None = opt(None, "model name at --policy-url")
    benchmark: Literal["playground", "live"] = opt(
        "playground", "where the tasks live: the project's local sites, or the web (paper: the web)"
    )
    split: Split = opt(
        "held-out",
        "split of the tasks to run; train runs of the SFT policy feed the miner, dev chooses checkpoints",
    )
    limit: int | None = opt(None, "run at most so many tasks")
    runs: int = opt(3, "runs of every task (paper: 3)")
    max_steps: int = opt(50, "agent turns of a run at most (paper: not stated)")
    stop_on_stall: bool = opt(
        False, "end a run at a stalled action loop (paper: not stated; off, runs go on to --max-steps)"
    )
    temperature: float = opt(0.7, "sampling temperature (paper: not stated; Qwen3-VL's own)")
    top_p: float = opt(0.8, "nucleus sampling (paper: not stated; Qwen3-VL's own)")
    top_k: int = opt(20, "top-k sampling, 0 for none (paper: not stated; Qwen3-VL's own)")
    concurrency: int = opt(16, "episodes at a time in this process (paper: 16)")
    sessions_per_browser: int = opt(4, "episodes that share one Chromium process")
    headless: bool = opt(True, "run Chromium without a window")
    judge_url: str | None = opt(None, "endpoint of the outcome judge, for tasks without a check of their own")
    judge_model: str = opt("gpt-4o", "model of the outcome judge (paper: GPT-4o)")
    prompt_config: Path | None = opt(
        None,
        "JSON file of a PromptConfig; a checkpoint brings its own and must agree (default: the paper's sizes)",
    )
    tokenizer: Path | None = opt(
        None,
        "with --policy-url: checkpoint folder whose tokenizer counts the prompt budget; without it an upper estimate",
    )
    prices: Path | None = opt(
        None, 'JSON file {"model": {"prompt": X, "completion": Y}}, US dollars for a million tokens'
    )
    dtype: Literal["auto", "float32", "bfloat16"] = opt(
        "auto", "number format of the checkpoint in memory: bfloat16 on a GPU, else float32 (paper: bf16)"
    )
    seed: int = opt(0, "seed; every policy call carries one derived from (seed, task, run)")
    resume: bool = opt(False, "go on with the run in --out; finished runs are kept, nothing is written twice")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("runs", "max_steps", "concurrency", "sessions_per_browser"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if (self.policy is None) == (self.policy_url is None):
            raise ValueError("give either --policy CHECKPOINT_FOLDER or --policy-url URL --policy-model NAME")
        if self.policy_url is not None and not self.policy_model:
            raise ValueError("--policy-url needs --policy-model")
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0):
            raise ValueError(
                f"--temperature {self.temperature}, --top-p {self.top_p} or --top-k {self.top_k} is out of range"
            )
        if self.benchmark == "live" and not self.judge_url:
            raise ValueError(
                "--benchmark live needs --judge-url: tasks of the web have no check of their own"
            )


MAY_DIFFER = ("policy_url", "judge_url", "concurrency", "sessions_per_browser", "headless", "prices")


# ------------------------------------------------------------------------------------------------- the policy


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A policy that is ready to be asked."""

    policy: Policy
    name: str
    sha256: str | None
    prompt_config: PromptConfig
    count_tokens: Callable[[str], int]


def checkpoint_sha256(folder: Path) -> str | None:
    """Hash of a checkpoint: of its weight files' names and bytes; None where `folder` is a hub name."""
    digest, files = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    for path in files:
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest() if files else None


@asynccontextmanager
async def open_policy(
    config: Config, root: Path, prompt_config: PromptConfig | None
) -> AsyncIterator[Opened]:
    """The policy of the flags: an endpoint (no torch is imported) or a checkpoint in this process."""
    decoding: dict[str, Any] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
    }
    if config.policy_url is not None:
        name = config.policy_model or ""
        count = token_counter(config.tokenizer) if config.tokenizer else approximate_tokens
        endpoint = open_endpoint(
            "policy", config.policy_url, name, root, concurrency=config.concurrency, **decoding
        )
        async with endpoint.client:
            yield Opened(
                policy=endpoint,
                name=name,
                sha256=None,
                prompt_config=prompt_config or PromptConfig(),
                count_tokens=count,
            )
        return
    import torch

    from rmsweb.engine.policy import PolicyModel
    from rmsweb.engine.sampler import Decoding
    from rmsweb.engine.serve import CheckpointPolicy

    assert config.policy is not None
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    dtype = (
        torch.bfloat16
        if config.dtype == "bfloat16" or (config.dtype == "auto" and device != "cpu")
        else torch.float32
    )
    model = PolicyModel.load(config.policy, dtype=dtype, device=device, prompt_config=prompt_config)
    policy = CheckpointPolicy(model, root, Decoding(**decoding))
    try:
        yield Opened(
            policy=policy,
            name=str(config.policy),
            sha256=checkpoint_sha256(config.policy),
            prompt_config=model.prompt_config or PromptConfig(),
            count_tokens=model.count_tokens,
        )
    finally:
        policy.close()


# --------------------------------------------------------------------------------------------------- the runs


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that an episode needs."""

    config: Config
    folder: RunWriter
    opened: Opened
    judge: EndpointPolicy | None
    environment: Environment
    on_step: Callable[[], None]

    def job(self, task: Task, number: int) -> Job:
        """Run `number` (from 0) of a task: one episode, judged and committed."""
        config, name, started = self.config, attempt_id(task, number), time.monotonic()

        async def run(worker: Worker) -> None:
            start_url = await self.environment.reset(worker.session, task)
            episode = Episode(
                policy=self.opened.policy,
                session=worker.session,
                task=task,
                trajectory_id=name,
                source=Source(
                    script="evaluate",
                    policy=self.opened.name,
                    checkpoint_sha256=self.opened.sha256,
                    arm=ARM,
                    run=number,
                    seed=config.seed,
                ),
                seed=derive_seed(config.seed, task.task_id, ARM, 1, number),
                config=self.opened.prompt_config,
                options=AgentOptions(
                    max_steps=config.max_steps,
                    stop_on_stall=config.stop_on_stall,
                    record_broken=worker.last_try,
                ),
                date=self.environment.now().isoformat(),
                count_tokens=self.opened.count_tokens,
                on_step=lambda step: self.on_step(),
            )
            trajectory = await episode.run(start_url)
            judgement = await judge_run(
                trajectory, lambda: self.environment.check(worker.session, trajectory), self.judge
            )
            self.folder.commit(trajectory, judgement, time.monotonic() - started)

        return Job(name, run)


def attempt_id(task: Task, number: int) -> str:
    """Key of a run: (task, arm, round, run)."""
    return f"{task.task_id}.{ARM}.r1.n{number}"


# ------------------------------------------------------------------------------------------------ the summary


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the summary needs of a run."""

    task_id: str
    run: int
    site: str
    category: str
    success: bool
    declared: bool  # a done with success true was executed
    verdict: str
    ended: str
    turns: int
    actions: int
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, trajectory: Trajectory, judgement: Judgement | None) -> "Row":
        task = trajectory.task
        return cls(
            task_id=task.task_id,
            run=trajectory.source.run,
            site=str(task.environment.get("site") or urlsplit(task.start_url or "").hostname or "(none)"),
            category=task.category or "(none)",
            success=is_success(trajectory, judgement),
            declared=bool(trajectory.declared_success),
            verdict=judgement.verdict if judgement else "missing",
            ended=trajectory.ended,
            turns=len(trajectory.steps),
            actions=sum(len(step.results) for step in trajectory.steps),
            prompt_tokens=trajectory.usage.prompt_tokens,
            completion_tokens=trajectory.usage.completion_tokens,
        )


def outcomes_of(rows: Iterable[Row]) -> dict[str, list[bool]]:
    """Successes by task, in the order of the runs."""
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.task_id, row.run)):
        outcomes[row.task_id].append(row.success)
    return outcomes


def breakdown(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, Any]:
    """pass@1 with its interval by group; n counts tasks."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return {name: asdict(pass_at_1_estimate(outcomes_of(group))) for name, group in sorted(groups.items())}


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def best_of(outcomes: dict[str, list[bool]], k: int) -> float | None:
    """pass@k over the tasks that have k runs; None where there is none."""
    full = {task: done for task, done in outcomes.items() if len(done) >= k}
    return pass_at_k(full, k) if full else None


def summarize(rows: Sequence[Row], *, tasks: int, runs: int) -> dict[str, Any]:
    """The figures of a run folder. n counts tasks; `missing` runs were planned and are not finished: then the
    figures are those of the finished ones.
    """
    outcomes = outcomes_of(rows)
    estimate = pass_at_1_estimate(outcomes)
    solved = [row for row in rows if row.success]
    return {
        "pass1": estimate.value if rows else None,
        "pass1_interval": [estimate.low, estimate.high] if rows else [None, None],
        **{f"pass{k}": best_of(outcomes, k) for k in sorted({3, runs} - {1})},
        "pass1_by_run": [mean([row.success for row in rows if row.run == number]) for number in range(runs)],
        "steps": mean([row.turns for row in solved]),
        "actions": mean([row.actions for row in solved]),
        "n": len(outcomes),
        "runs": len(rows),
        "missing": tasks * runs - len(rows),
        "declared": sum(row.ended == "done" for row in rows),
        "declared_success": sum(row.declared for row in rows),
        "verdicts": dict(Counter(row.verdict for row in rows)),
        "unparsed": sum(row.verdict == "unparsed" for row in rows),
        "ended": dict(Counter(row.ended for row in rows)),
        "prompt_tokens_per_run": mean([row.prompt_tokens for row in rows]),
        "completion_tokens_per_run": mean([row.completion_tokens for row in rows]),
        "by_site": breakdown(rows, lambda row: row.site),
        "by_category": breakdown(rows, lambda row: row.category),
    }


def print_table(summary: dict[str, Any], runs: int) -> None:
    """The figures for a person."""

    def share(value: float | None) -> str:
        return "-" if value is None or value != value else f"{100 * value:.1f}"

    low, high = summary["pass1_interval"]
    steps = "-" if summary["steps"] is None else f"{summary['steps']:.2f}"
    scripted = f" (scripted: {', '.join(summary['scripted'])})" if summary["scripted"] else ""
    print(
        f"policy {summary['policy']}{scripted}, split {summary['split']}: {summary['n']} tasks, {summary['runs']} runs, {summary['missing']} missing"
    )
    titles = ("pass@1 %", "95% interval", f"pass@{runs} %", "steps", "declared", "unparsed")
    values = (
        share(summary["pass1"]),
        f"{share(low)}-{share(high)}",
        share(summary[f"pass{runs}"]),
        steps,
        summary["declared"],
        summary["unparsed"],
    )
    for line in (titles, values):
        print("".join(f"{item:>14}" for item in line))
    for title in ("site", "category"):
        print(f"by {title}:")
        for name, row in summary[f"by_{title}"].items():
            print(
                f"  {name:<40} {share(row['value']):>6}  {share(row['low'])}-{share(row['high'])}  n={row['n']}"
            )


def write_summary(
    config: Config, folder: RunWriter, opened: Opened, tasks: int, extra: dict[str, Any]
) -> dict[str, Any]:
    """summary.json from the finished runs of all ranks; returns it."""
    verdicts = folder.judgements()
    rows = [
        Row.of(trajectory, verdicts.get(trajectory.trajectory_id)) for trajectory in folder.trajectories()
    ]
    models = (opened.name, config.judge_model if config.judge_url else "")
    summary: dict[str, Any] = {
        "policy": opened.name,
        "checkpoint_sha256": opened.sha256,
        "benchmark": config.benchmark,
        "split": config.split,
    }
    summary |= (
        summarize(rows, tasks=tasks, runs=config.runs)
        | {"scripted": [name for name in models if name.startswith("scripted-")]}
        | extra
    )
    if config.prices and rows:
        price = load_prices(config.prices).get(opened.name)
        tokens = sum(row.prompt_tokens for row in rows), sum(row.completion_tokens for row in rows)
        summary["usd_per_run"] = cost(*tokens, price) / len(rows) if price else None
    folder.write_json("summary.json", summary)
    if len(folder.finished()) > len(
        rows
    ):  # another rank has finished more meanwhile: the last one to look sees all
        return write_summary(config, folder, opened, tasks, extra)
    return summary


# ------------------------------------------------------------------------------------------------- the script


async def evaluate(config: Config, folder: RunWriter, tasks: list[Task]) -> int:
    """Runs this rank's share, then writes and prints the summary; exit code 1 where an endpoint left runs
    unfinished.
    """
    started, given = (
        time.monotonic(),
        load_prompt_config(config.prompt_config) if config.prompt_config else None,
    )
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_policy(config, folder.path, given))
        save_prompt_config(opened.prompt_config, folder.path / "prompt_config.json")
        judge = None
        if config.judge_url:
            judge = open_endpoint(
                "judge",
                config.judge_url,
                config.judge_model,
                folder.path,
                cache=folder.path / "cache",
                temperature=0.0,
            )
            stack.push_async_callback(judge.client.aclose)
        environment: Environment = PlaygroundEnvironment() if config.benchmark == "playground" else LiveWeb()
        await environment.start()
        stack.push_async_callback(environment.stop)
        mine, done = (
            shard([(task, number) for number in range(config.runs) for task in tasks]),
            folder.finished(),
        )
        missing = [(task, number) for task, number in mine if attempt_id(task, number) not in done]
        bar = stack.enter_context(progress(total=len(mine), initial=len(mine) - len(missing), label="runs"))
        counts = Counter[str]()

        def on_step() -> None:
            counts["steps"] += 1
            bar.set_postfix(counts, refresh=False)
            bar.update(0)

        run = Run(
            config=config, folder=folder, opened=opened, judge=judge, environment=environment, on_step=on_step
        )
        launch, open_session = browser_pool(
            folder.path,
            host_map=environment.host_map,
            viewport=opened.prompt_config.viewport,
            image_format=opened.prompt_config.image_format,
            headless=config.headless,
        )
        outcome = await run_jobs(
            [run.job(task, number) for task, number in missing],
            launch=launch,
            open_session=open_session,
            concurrency=min(config.concurrency, max(1, len(missing))),
            sessions_per_browser=config.sessions_per_browser,
            on_done=lambda job, problem: bar.update(1),
        )
    summary = write_summary(
        config,
        folder,
        opened,
        len(tasks),
        {"seconds": round(time.monotonic() - started, 1), "browser_restarts": outcome.browser_restarts},
    )
    if rank() == 0:
        print_table(summary, config.runs)
    for name, problem in outcome.failed.items():
        print(f"run {name} is unfinished: {problem}", file=sys.stderr)
    return 1 if outcome.failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    config = parse_config(Config, argv, prog="evaluate.py")
    if config.prices:
        load_prices(config.prices)
    tasks = load_tasks(config.tasks, split=config.split, limit=config.limit)
    find_chromium()
    with RunWriter(config.out, config, resume=config.resume, may_differ=MAY_DIFFER) as folder:
        folder.repair()
        return asyncio.run(evaluate(config, folder, tasks))


if __name__ == "__main__":
    sys.exit(main_guard(main))
