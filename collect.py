"""Collection: a teacher attempts every task, each retry guided by a reflection on the last one; the successes
become SFT samples (Sec. 3, App. C-D).

Writes into --out: trajectories.rank*.jsonl, judgements.rank*.jsonl, screenshots/, metrics.jsonl,
samples.jsonl, report.json. Keys come from RMSWEB_TEACHER_API_KEY, RMSWEB_REFLECTION_API_KEY,
RMSWEB_EXTRACTION_API_KEY and RMSWEB_JUDGE_API_KEY, else OPENAI_API_KEY.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from rmsweb.collection.filters import flatten
from rmsweb.collection.loop import Attempt, LoopConfig, collect_task, reflect, yield_report
from rmsweb.config import Config as BaseConfig
from rmsweb.config import main_guard, opt, parse_config, part, rank, shard
from rmsweb.jsonl import write_records
from rmsweb.llm import Endpoint
from rmsweb.playground.environment import ENVIRONMENTS, Place
from rmsweb.records import Judgement, Policy, StepSample, Task, Trajectory, derive_seed, is_success
from rmsweb.runner import MAY_DIFFER, Actor, EpisodeConfig, Episodes, Job, Worker, when_complete
from rmsweb.runs import RunWriter


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """Collect trajectories of a teacher, with reflection between the attempts at a task, and flatten the
    successes into SFT samples.
    """

    policy_url: str = opt(help="OpenAI-compatible endpoint of the teacher, such as https://host/v1")
    policy_model: str = opt("gpt-5.1", "the teacher's model name", paper="GPT-5.1")
    reflection_url: str | None = opt(None, "endpoint of the reflection handler; without it the teacher's")
    reflection_model: str | None = opt(None, "model of the reflection handler; without it the teacher's")
    extraction_url: str | None = opt(
        None, "endpoint that answers extract_structured_data; without it the teacher's"
    )
    extraction_model: str | None = opt(
        None, "model that answers extract_structured_data; without it the teacher's"
    )
    temperature: float | None = opt(
        None, "sampling temperature of the teacher; without it the endpoint's own", paper="not stated"
    )
    environment: Place = opt(
        "playground", "where the tasks live: the project's local sites, or the web", paper="the web"
    )
    loop: LoopConfig = part(LoopConfig)
    episodes: EpisodeConfig = part(EpisodeConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.episodes.judge.check_place("environment", self.environment)


def open_roles(config: Config) -> dict[str, Endpoint]:
    """Return the endpoints of teacher, reflection handler and extraction; nothing is sent yet."""
    flags = {
        "teacher": (None, None),
        "reflection": (config.reflection_url, config.reflection_model),
        "extraction": (config.extraction_url, config.extraction_model),
    }
    return {
        role: Endpoint(
            role=role,
            url=url or config.policy_url,
            model=model or config.policy_model,
            image_root=config.episodes.out,
            concurrency=config.episodes.concurrency,
            options={"temperature": config.temperature} if role == "teacher" else {},
        )
        for role, (url, model) in flags.items()
    }


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
        episodes.folder.commit(trajectory, judgement)
        episodes.counts.update(attempts=1, successes=is_success(trajectory, judgement))

    async def run(worker: Worker) -> None:
        await collect_task(
            attempts,
            loop,
            run=lambda number, guide: episodes.attempt(worker, task, round=number, guide=guide),
            reflect=lambda trajectory, guide: reflect(handler, trajectory, guide, seed=seed),
            commit=commit,
        )

    return run


def write_samples(config: Config, folder: RunWriter, actor: Actor) -> dict[str, Any]:
    """Write samples.jsonl and report.json from the finished attempts of all ranks; return the report."""
    attempts: list[Attempt] = []
    dropped, kinds = Counter[str](), Counter[str]()

    def samples() -> Iterator[StepSample]:
        for trajectory, judgement in folder.judged():
            attempts.append(Attempt.of(trajectory, judgement))
            if attempts[-1].reason is not None:
                continue
            for sample in flatten(trajectory, actor.prompt_config, actor.count_tokens, folder.path):
                if isinstance(sample, str):
                    dropped[sample] += 1
                else:
                    kinds[sample.kind] += 1
                    yield sample

    write_records(folder.path / "samples.jsonl", StepSample, samples())
    report = yield_report(attempts, config.loop) | {
        "arm": config.loop.arm,
        "split": config.episodes.split,
        "samples": dict(kinds),
        "steps_without_sample": dict(dropped),
        "scripted": sorted(folder.scripted),
    }
    folder.write_json("report.json", report)
    return report


async def collect(
    config: Config, folder: RunWriter, tasks: list[Task], roles: dict[str, Endpoint], actor: Actor
) -> int:
    """Run this rank's tasks, then write samples and report; 1 where an endpoint left tasks unfinished."""
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
        if not config.loop.is_over(attempts)
    }
    async with AsyncExitStack() as stack:
        for role in roles.values():
            await stack.enter_async_context(role)
        outcome = await episodes.run(jobs, total=len(mine), label="tasks")
    report = when_complete(folder, lambda: write_samples(config, folder, actor))
    if rank() == 0:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    return outcome.exit_code("task")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    config = parse_config(Config, argv, prog="collect.py")
    own, roles = config.episodes, open_roles(config)
    actor = own.actor(roles["teacher"], extraction=roles["extraction"])
    tasks = own.load_tasks()
    may_differ = (*MAY_DIFFER, "reflection_url", "extraction_url", "limit")
    inputs = own.inputs()
    with RunWriter(own.out, config, resume=own.resume, may_differ=may_differ, inputs=inputs) as folder:
        folder.repair()
        return asyncio.run(collect(config, folder, tasks, roles, actor))


if __name__ == "__main__":
    sys.exit(main_guard(main))
