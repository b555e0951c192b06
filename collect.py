"""Collection: a teacher attempts every task, each retry guided by a reflection on the last one; the successes
become SFT samples (Sec. 3, App. C-D).

Writes into --out: trajectories.rank*.jsonl, judgements.rank*.jsonl, screenshots/, metrics.jsonl,
samples.jsonl, report.json. Keys come from RMSWEB_TEACHER_API_KEY, RMSWEB_REFLECTION_API_KEY,
RMSWEB_EXTRACTION_API_KEY and RMSWEB_JUDGE_API_KEY, else OPENAI_API_KEY.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rmsweb.agent import AgentOptions, Episode
from rmsweb.browser.chromium import find_chromium
from rmsweb.collection.loop import (
    Attempt,
    AttemptRow,
    collect_task,
    flatten,
    is_over,
    quality_filter,
    reflect,
    yield_report,
)
from rmsweb.config import Config as BaseConfig
from rmsweb.config import main_guard, opt, parse_config, progress, rank, shard
from rmsweb.endpoint import EndpointPolicy, open_endpoint, token_counter
from rmsweb.evaluation.environments import Environment, LiveWeb
from rmsweb.evaluation.judges import judge_run
from rmsweb.evaluation.tasks import load_tasks
from rmsweb.playground.environment import PlaygroundEnvironment
from rmsweb.prompt import PromptConfig, approximate_tokens, load_prompt_config, save_prompt_config
from rmsweb.records import (
    Judgement,
    Source,
    Split,
    StepSample,
    Task,
    Trajectory,
    derive_seed,
    is_success,
    write_records,
)
from rmsweb.runner import Job, Worker, browser_pool, run_jobs
from rmsweb.runs import RunWriter


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """Collect trajectories of a teacher, with reflection between the attempts at a task, and flatten the
    successes into SFT samples.
    """

    tasks: Path = opt(help="task file: records.Task as JSONL (python -m rmsweb.playground tasks writes some)")
    out: Path = opt(help="run folder to write")
    policy_url: str = opt(help="OpenAI-compatible endpoint of the teacher, such as https://host/v1")
    policy_model: str = opt("gpt-5.1", "the teacher's model name (paper: GPT-5.1)")
    reflection: bool = opt(
        True,
        "retry with a guide distilled from the last attempt; --no-reflection is the control arm (paper: on)",
    )
    reflection_url: str | None = opt(None, "endpoint of the reflection handler; without it the teacher's")
    reflection_model: str | None = opt(None, "model of the reflection handler; without it the teacher's")
    extraction_url: str | None = opt(
        None, "endpoint that answers extract_structured_data; without it the teacher's"
    )
    extraction_model: str | None = opt(
        None, "model that answers extract_structured_data; without it the teacher's"
    )
    judge_url: str | None = opt(None, "endpoint of the outcome judge, for tasks without a check of their own")
    judge_model: str = opt("gpt-4o", "model of the outcome judge (paper: GPT-4o)")
    environment: Literal["playground", "live"] = opt(
        "playground", "where the tasks live: the project's local sites, or the web (paper: the web)"
    )
    split: Split = opt(
        "train", "split of the tasks to run; dev runs give the dev loss of SFT and are never trained on"
    )
    limit: int | None = opt(None, "run at most so many tasks")
    rounds: int = opt(5, "attempts at a task at most (paper: 5)")
    successes: int = opt(2, "successes after which a task is over (paper: 2)")
    max_steps: int = opt(
        50,
        "agent turns of an attempt at most (paper: not stated; only runs of 3-30 effective steps are kept)",
    )
    concurrency: int = opt(16, "episodes at a time in this process (paper: 16 in evaluation)")
    sessions_per_browser: int = opt(4, "episodes that share one Chromium process")
    headless: bool = opt(True, "run Chromium without a window")
    prompt_config: Path | None = opt(
        None,
        "JSON file of a PromptConfig (default: the paper's sizes: 12,000 prompt tokens, 262,144 px, 2,048 answer tokens)",
    )
    tokenizer: Path | None = opt(
        None,
        "checkpoint folder whose tokenizer counts the prompt budget (paper: Qwen3-VL's); without it an upper estimate",
    )
    temperature: float | None = opt(
        None, "sampling temperature of the teacher; without it the endpoint's own (paper: not stated)"
    )
    seed: int = opt(0, "seed; every teacher call carries one derived from (seed, task, arm, round, run)")
    resume: bool = opt(
        False, "go on with the run in --out; finished attempts are kept, nothing is written twice"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rounds", "successes", "max_steps", "concurrency", "sessions_per_browser"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if self.environment == "live" and not self.judge_url:
            raise ValueError(
                "--environment live needs --judge-url: tasks of the web have no check of their own"
            )

    @property
    def arm(self) -> str:
        return "reflection" if self.reflection else "plain"


MAY_DIFFER = (
    "policy_url",
    "reflection_url",
    "extraction_url",
    "judge_url",
    "concurrency",
    "sessions_per_browser",
    "headless",
    "limit",
)


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The endpoints of a run."""

    teacher: EndpointPolicy
    reflection: EndpointPolicy
    extraction: EndpointPolicy
    judge: EndpointPolicy | None

    @classmethod
    def open(cls, config: Config, root: Path) -> "Roles":
        """Clients for all roles; nothing is sent yet. Judges are cached on disk."""
        n = config.concurrency
        judge = config.judge_url and open_endpoint(
            "judge",
            config.judge_url,
            config.judge_model,
            root,
            concurrency=n,
            cache=root / "cache",
            temperature=0.0,
        )
        return cls(
            teacher=open_endpoint(
                "teacher",
                config.policy_url,
                config.policy_model,
                root,
                concurrency=n,
                temperature=config.temperature,
            ),
            reflection=open_endpoint(
                "reflection",
                config.reflection_url or config.policy_url,
                config.reflection_model or config.policy_model,
                root,
                concurrency=n,
            ),
            extraction=open_endpoint(
                "extraction",
                config.extraction_url or config.policy_url,
                config.extraction_model or config.policy_model,
                root,
                concurrency=n,
            ),
            judge=judge or None,
        )

    def all(self) -> list[EndpointPolicy]:
        return [
            role for role in (self.teacher, self.reflection, self.extraction, self.judge) if role is not None
        ]


class Progress:
    """The bar over tasks, with the attempts, successes and steps so far."""

    def __init__(self, total: int, finished: int) -> None:
        self.started = time.monotonic()
        self.bar = progress(total=total, initial=finished, label="tasks")
        self.counts = Counter[str]()

    def step(self) -> None:
        self.counts["steps"] += 1
        self.bar.set_postfix(self.counts, refresh=False)
        self.bar.update(0)

    def attempt(self, trajectory: Trajectory, judgement: Judgement | None) -> None:
        self.counts.update(attempts=1, successes=is_success(trajectory, judgement))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that an attempt needs."""

    config: Config
    folder: RunWriter
    prompt_config: PromptConfig
    count_tokens: Callable[[str], int]
    roles: Roles
    environment: Environment
    progress: "Progress"

    async def attempt(
        self, worker: Worker, task: Task, number: int, guide: str | None
    ) -> tuple[Trajectory, Judgement]:
        """Round `number` of a task, judged: by the site's own check, else by the outcome judge."""
        config = self.config
        seed = derive_seed(config.seed, task.task_id, config.arm, number, 0)
        start_url = await self.environment.reset(worker.session, task)
        episode = Episode(
            policy=self.roles.teacher,
            session=worker.session,
            task=task,
            trajectory_id=f"{task.task_id}.{config.arm}.r{number}.n0",
            source=Source(
                script="collect", policy=config.policy_model, arm=config.arm, round=number, seed=config.seed
            ),
            seed=seed,
            config=self.prompt_config,
            options=AgentOptions(
                max_steps=config.max_steps, stop_on_stall=True, record_broken=worker.last_try
            ),
            extraction_policy=self.roles.extraction,
            guide=guide,
            date=self.environment.now().isoformat(),
            count_tokens=self.count_tokens,
            on_step=lambda step: self.progress.step(),
        )
        trajectory = await episode.run(start_url)
        return trajectory, await judge_run(
            trajectory, lambda: self.environment.check(worker.session, trajectory), self.roles.judge
        )

    def job(self, task: Task, attempts: list[Attempt]) -> Job:
        """The rounds of a task that are missing."""
        seed = derive_seed(self.config.seed, task.task_id, self.config.arm, 0, 0)

        def keep(trajectory: Trajectory, judgement: Judgement | None) -> None:
            self.folder.commit(trajectory, judgement, time.monotonic() - self.progress.started)
            self.progress.attempt(trajectory, judgement)

        async def run(worker: Worker) -> None:
            await collect_task(
                attempts,
                run=lambda number, guide: self.attempt(worker, task, number, guide),
                reflect=(
                    lambda trajectory, guide: reflect(self.roles.reflection, trajectory, guide, seed=seed)
                )
                if self.config.reflection
                else None,
                commit=keep,
                rounds=self.config.rounds,
                successes=self.config.successes,
            )

        return Job(task.task_id, run)


# ------------------------------------------------------------------------------------------------- the folder


def past_attempts(folder: RunWriter, arm: str) -> dict[str, list[Attempt]]:
    """What a resumed run has already: the committed rounds of each task, in order."""
    found: dict[str, dict[int, Attempt]] = {}
    verdicts = folder.judgements()
    for trajectory in folder.trajectories():
        success = is_success(trajectory, verdicts.get(trajectory.trajectory_id))
        found.setdefault(trajectory.task.task_id, {})[trajectory.source.round] = Attempt(
            success, trajectory.guide_out
        )
    return {task: [rounds[number] for number in sorted(rounds)] for task, rounds in found.items()}


def write_samples(run: Run) -> dict[str, Any]:
    """samples.jsonl and report.json from the finished attempts of all ranks; returns the report."""
    verdicts, rows, dropped, kinds = run.folder.judgements(), [], Counter[str](), Counter[str]()

    def samples() -> Iterator[StepSample]:
        for trajectory in run.folder.trajectories():
            judgement = verdicts.get(trajectory.trajectory_id)
            reason = quality_filter(trajectory, judgement)
            task, source = trajectory.task.task_id, trajectory.source
            rows.append(
                AttemptRow(
                    task,
                    source.arm,
                    source.round,
                    is_success(trajectory, judgement),
                    len(trajectory.steps),
                    reason,
                )
            )
            if reason is None:
                flat = flatten(trajectory, run.prompt_config, run.count_tokens, run.folder.path)
                dropped.update(flat.dropped)
                kinds.update(sample.kind for sample in flat.samples)
                yield from flat.samples

    write_records(run.folder.path / "samples.jsonl", StepSample, samples())
    if len(run.folder.finished()) > len(
        rows
    ):  # another rank has finished more meanwhile: the last one to look sees all
        return write_samples(run)
    report = yield_report(rows, rounds=run.config.rounds, successes=run.config.successes) | {
        "arm": run.config.arm,
        "split": run.config.split,
        "samples": dict(kinds),
        "steps_without_sample": dict(dropped),
        "scripted": sorted(
            {role.client.model for role in run.roles.all() if role.client.model.startswith("scripted-")}
        ),
    }
    run.folder.write_json("report.json", report)
    return report


# ------------------------------------------------------------------------------------------------- the script


async def collect(
    config: Config,
    folder: RunWriter,
    prompt_config: PromptConfig,
    count_tokens: Callable[[str], int],
    tasks: list[Task],
) -> int:
    """Runs this rank's tasks, then writes samples and report; exit code 1 where an endpoint left tasks
    unfinished.
    """
    rules = {"rounds": config.rounds, "successes": config.successes}
    past = past_attempts(folder, config.arm)
    mine = [(task, past.get(task.task_id, [])) for task in shard(tasks)]
    missing = [(task, attempts) for task, attempts in mine if not is_over(attempts, **rules)]
    async with AsyncExitStack() as stack:
        roles = Roles.open(config, folder.path)
        for role in roles.all():
            stack.push_async_callback(role.client.aclose)
        environment: Environment = (
            PlaygroundEnvironment() if config.environment == "playground" else LiveWeb()
        )
        await environment.start()
        stack.push_async_callback(environment.stop)
        bar = Progress(len(mine), len(mine) - len(missing))
        stack.callback(bar.bar.close)
        run = Run(
            config=config,
            folder=folder,
            prompt_config=prompt_config,
            count_tokens=count_tokens,
            roles=roles,
            environment=environment,
            progress=bar,
        )
        launch, open_session = browser_pool(
            folder.path,
            host_map=environment.host_map,
            viewport=prompt_config.viewport,
            image_format=prompt_config.image_format,
            headless=config.headless,
        )
        outcome = await run_jobs(
            [run.job(task, attempts) for task, attempts in missing],
            launch=launch,
            open_session=open_session,
            concurrency=min(config.concurrency, max(1, len(missing))),
            sessions_per_browser=config.sessions_per_browser,
            on_done=lambda job, problem: bar.bar.update(1),
        )
    report = write_samples(run)
    if rank() == 0:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    for name, problem in outcome.failed.items():
        print(f"task {name} is unfinished: {problem}", file=sys.stderr)
    return 1 if outcome.failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    config = parse_config(Config, argv, prog="collect.py")
    prompt_config = load_prompt_config(config.prompt_config) if config.prompt_config else PromptConfig()
    count_tokens = token_counter(config.tokenizer) if config.tokenizer else approximate_tokens
    tasks = load_tasks(config.tasks, split=config.split, limit=config.limit)
    find_chromium()
    with RunWriter(config.out, config, resume=config.resume, may_differ=MAY_DIFFER) as folder:
        save_prompt_config(prompt_config, folder.path / "prompt_config.json")
        folder.repair()
        return asyncio.run(collect(config, folder, prompt_config, count_tokens, tasks))


if __name__ == "__main__":
    sys.exit(main_guard(main))
