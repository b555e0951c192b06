"""A pool for mining without a browser and without HTTP: the scripted teacher's rounds over the replay."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from replay import ReplayEnvironment, ReplaySession

from rmsweb.agent import Episode
from rmsweb.collection.loop import Attempt, LoopConfig, collect_task, reflect
from rmsweb.mining.alignment import AlignedRun
from rmsweb.playground.tasks import World
from rmsweb.playground.teacher import ROLES
from rmsweb.prompt import PromptConfig, load_prompt_config, render_text
from rmsweb.records import Image, Judgement, Message, Policy, Reply, Source, Trajectory

CONFIG = load_prompt_config(Path(__file__).parent.parent / "scripts" / "demo_prompt.json")
PICTURE = Image(path="screenshots/page.jpeg", sha256="page", width=640, height=480)


def scripted(role: str) -> Policy:
    """Return a scripted role as a policy."""

    async def policy(messages: Sequence[Message], *, seed: int, purpose: str, max_tokens: int) -> Reply:
        return Reply(text=ROLES[role](render_text(messages), seed))

    return policy


async def attempt(
    policy: Policy,
    world: World,
    name: str,
    seed: int,
    guide: str | None = None,
    config: PromptConfig = CONFIG,
) -> tuple[Trajectory, Judgement]:
    """Run one judged episode over the replay; a stalled loop ends it, as in collection."""
    session, environment = ReplaySession(PICTURE), ReplayEnvironment()
    start = await environment.reset(session, world.task())
    source = Source(script="test", policy="replay", seed=seed)
    episode = Episode(
        policy=policy,
        session=session,
        task=world.task(),
        trajectory_id=name,
        source=source,
        seed=seed,
        config=config,
        max_steps=12,
        stop_on_stall=True,
        guide=guide,
    )
    trajectory = await episode.run(start)
    return trajectory, await environment.check(session, trajectory)


async def _rounds(world: World) -> list[tuple[Trajectory, Judgement]]:
    done: list[tuple[Trajectory, Judgement]] = []
    attempts: list[Attempt] = []
    await collect_task(
        attempts,
        LoopConfig(),
        run=lambda number, guide: attempt(
            scripted("scripted-teacher"), world, f"{world.task_id}/{number}", number, guide
        ),
        reflect=lambda trajectory, guide: reflect(scripted("scripted-reflection"), trajectory, guide, seed=0),
        commit=lambda trajectory, judgement: done.append((trajectory, judgement)),  # type: ignore[arg-type]
    )
    return done


async def _collect(worlds: Sequence[World]) -> list[tuple[Trajectory, Judgement]]:
    return [pair for rounds in await asyncio.gather(*map(_rounds, worlds)) for pair in rounds]


def collect_pool(worlds: Sequence[World]) -> list[tuple[Trajectory, Judgement]]:
    """Return every run of the teacher's five rounds (two successes end a task), with the sites' verdicts."""
    return asyncio.run(_collect(worlds))


def runs_of(pool: Sequence[tuple[Trajectory, Judgement]]) -> list[AlignedRun]:
    """Return the pool as mining takes it."""
    return [AlignedRun(trajectory, judgement.verdict == "success") for trajectory, judgement in pool]
