"""Collection: a teacher attempts every task, each retry guided by a reflection on the last one; the successes
become SFT samples (Sec. 3, App. C-D).

Writes into --out: trajectories.rank*.jsonl, judgements.rank*.jsonl, screenshots/, metrics.jsonl,
samples.jsonl, summary.json. --help names the environment variables of the keys.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

from rmsweb.collection.filters import FilterConfig, flatten
from rmsweb.collection.loop import Attempt, LoopConfig, collect_task, reflect, yield_report
from rmsweb.config import Config as BaseConfig
from rmsweb.config import flat, main_guard, opt, part, rank, shard
from rmsweb.jsonl import write_records
from rmsweb.llm import Endpoint, RoleConfig
from rmsweb.playground.environment import ENVIRONMENTS, NO_BROWSER, Place
from rmsweb.pool import Job, Outcome, Worker
from rmsweb.prompt import PromptConfig, load_prompt_config
from rmsweb.records import Judgement, Policy, StepSample, Task, Trajectory, derive_seed, is_success
from rmsweb.runner import (
    Actor,
    EpisodeConfig,
    Episodes,
    judge_stored,
    open_run,
    parse_run_config,
    stored_run,
    when_complete,
)
from rmsweb.runs import RunWriter
from rmsweb.tokens import CountTokens, token_counter


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(RoleConfig):
    """Teacher."""

    role: ClassVar[str] = "teacher"
    prefix: ClassVar[str] = "policy_"
    model: str = opt("gpt-5.1", "the teacher's model name", paper="GPT-5.1")


@dataclass(frozen=True, kw_only=True)
class ReflectionConfig(RoleConfig):
    """Reflection handler; what is not given is the teacher's."""

    role: ClassVar[str] = "reflection"
    prefix: ClassVar[str] = "reflection_"


@dataclass(frozen=True, kw_only=True)
class ExtractionConfig(RoleConfig):
    """What answers extract_structured_data; what is not given is the teacher's."""

    role: ClassVar[str] = "extraction"
    prefix: ClassVar[str] = "extraction_"


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """Collect trajectories of a teacher, with reflection between the attempts at a task, and flatten the
    successes into SFT samples.
    """

    teacher: TeacherConfig = part(TeacherConfig)
    reflection: ReflectionConfig = part(ReflectionConfig)
    extraction: ExtractionConfig = part(ExtractionConfig)
    environment: Place = opt(
        "playground",
        "where the tasks live: the project's local sites, the same without a browser, or the web",
        paper="the web",
    )
    loop: LoopConfig = part(LoopConfig)
    filter: FilterConfig = part(FilterConfig)
    episodes: EpisodeConfig = part(EpisodeConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.teacher.url:
            raise ValueError("--policy-url is missing: the OpenAI-compatible endpoint of the teacher")
        self.episodes.judge.check_place(self.environment, ENVIRONMENTS[self.environment])


def open_roles(config: Config) -> dict[str, Endpoint]:
    """Return the endpoints of teacher, reflection handler and extraction; nothing is sent yet."""
    root, concurrency, teacher = config.episodes.out, config.episodes.concurrency, config.teacher
    roles = {"teacher": teacher.open(root, concurrency)}
    for helper in (config.reflection, config.extraction):
        own = helper.or_else(teacher)
        roles[helper.role] = own.open(root, concurrency, shares_key=own.url == teacher.url)
    return roles


def past_attempts(folder: RunWriter) -> dict[str, list[Attempt]]:
    """Return what a resumed run has already: the committed rounds of each task, in order."""
    found: dict[str, list[Attempt]] = {}
    done = (Attempt.of(trajectory, judgement) for trajectory, judgement in folder.judged())
    for attempt in sorted(done, key=lambda attempt: attempt.round):
        found.setdefault(attempt.task_id, []).append(attempt)
    return found


def rounds_of(
    task: Task, attempts: list[Attempt], episodes: Episodes, loop: LoopConfig, handler: Policy
) -> Job:
    """Return the job of a task: its missing rounds."""
    seed = derive_seed(episodes.config.seed, task.task_id, loop.arm, 0, 0)

    def commit(trajectory: Trajectory, judgement: Judgement | None) -> None:
        episodes.counts.update(attempts=1, successes=is_success(trajectory, judgement))
        episodes.commit(trajectory, judgement)

    async def run(worker: Worker) -> None:
        await collect_task(
            attempts,
            loop,
            run=lambda number, guide: episodes.attempt(worker, task, round=number, guide=guide),
            reflect=lambda trajectory, guide: reflect(handler, trajectory, guide, seed=seed),
            commit=commit,
        )

    return run


def write_samples(
    config: Config, folder: RunWriter, prompt_config: PromptConfig, count_tokens: CountTokens
) -> dict[str, Any]:
    """Write samples.jsonl and summary.json from the finished attempts of all ranks; return the summary."""
    attempts: list[Attempt] = []
    dropped, kinds = Counter[str](), Counter[str]()

    def samples() -> Iterator[StepSample]:
        for trajectory, judgement in folder.judged():
            attempts.append(Attempt.of(trajectory, judgement, config.filter))
            if attempts[-1].reason is not None:
                continue
            for sample in flatten(trajectory, prompt_config, count_tokens, folder.path):
                if isinstance(sample, str):
                    dropped[sample] += 1
                else:
                    kinds[sample.kind] += 1
                    yield sample

    write_records(folder.path / "samples.jsonl", StepSample, samples())
    summary = yield_report(attempts, config.loop) | {
        "arm": config.loop.arm,
        "split": config.episodes.split,
        "samples": dict(kinds),
        "steps_without_sample": dict(dropped),
        "scripted": sorted(folder.scripted),
    }
    folder.write_json("summary.json", summary)
    return summary


async def collect(
    config: Config, folder: RunWriter, tasks: list[Task], roles: dict[str, Endpoint], actor: Actor
) -> int:
    """Run this rank's tasks, then write samples and summary; 1 where an endpoint left tasks unfinished."""
    unjudged = await judge_stored(config.episodes, folder)
    past = past_attempts(folder)
    mine = [(task, past.get(task.task_id, [])) for task in shard(tasks)]
    episodes = Episodes(
        config=config.episodes,
        folder=folder,
        environment=ENVIRONMENTS[config.environment](),
        actor=actor,
        script="collect",
        arm=config.loop.arm,
        stop_on_stall=True,
    )
    jobs = {
        task.task_id: rounds_of(task, attempts, episodes, config.loop, roles["reflection"])
        for task, attempts in mine
        if not config.loop.is_over(attempts) and all(done.reason != "unjudged" for done in attempts)
    }
    async with AsyncExitStack() as stack:
        for role in roles.values():
            await stack.enter_async_context(role)
        outcome = await episodes.run(jobs, total=len(mine), label="tasks")
    outcome.failed |= unjudged
    summary = when_complete(
        folder, lambda: write_samples(config, folder, actor.prompt_config, actor.count_tokens)
    )
    if rank() == 0:
        print(json.dumps(summary, indent=1, ensure_ascii=False))
    return outcome.exit_code("task")


async def rejudge(config: Config, folder: RunWriter) -> int:
    """Judge the stored attempts again, then write samples and summary anew."""
    before = folder.json("summary.json")
    failed = await judge_stored(config.episodes, folder)
    stored = load_prompt_config(folder.path / "prompt_config.json")
    summary = write_samples(config, folder, stored, token_counter(config.episodes.tokenizer))
    changes = [f"{name} {before.get(name, '–')} -> {summary[name]}" for name in ("successes", "kept")]
    print(f"{', '.join(changes)}; samples.jsonl and summary.json are written anew")
    return Outcome(failed).exit_code("attempt")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    config = parse_run_config(Config, argv, prog="collect.py")
    own = config.episodes
    if own.rejudge:
        with stored_run(own) as folder:
            return asyncio.run(rejudge(config, folder))
    roles = open_roles(config)
    actor = own.actor(roles["teacher"], extraction=roles["extraction"])
    tasks = own.load_tasks(browser=config.environment not in NO_BROWSER)
    free = ("reflection_url", "extraction_url", "limit", *flat(config.filter))
    with open_run(config, own, free) as folder:
        return asyncio.run(collect(config, folder, tasks, roles, actor))


if __name__ == "__main__":
    sys.exit(main_guard(main))
