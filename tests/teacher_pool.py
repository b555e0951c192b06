"""A pool for mining without a browser and without HTTP: the scripted teacher's rounds over the replay."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from without_browser import replay_session

from rmsweb.agent import Episode
from rmsweb.collection.filters import action_sample
from rmsweb.collection.loop import Attempt, LoopConfig, collect_task, reflect
from rmsweb.mining.alignment import AlignedRun
from rmsweb.playground import expert
from rmsweb.playground.tasks import OPTIONS, World, world_by_text
from rmsweb.playground.teacher import ROLES
from rmsweb.prompt import PromptConfig, load_prompt_config, render_text
from rmsweb.records import Judgement, Message, Policy, Reply, Source, StepSample, Trajectory

CONFIG = load_prompt_config(Path(__file__).parent.parent / "scripts" / "demo_prompt.json")


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
    environment, session = replay_session()
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


def sample_of(run: AlignedRun, position: int) -> StepSample | None:
    """Render a step as mine.py does, a token a word."""
    sample = action_sample(run.trajectory, position, CONFIG, lambda text: len(text.split()))
    return sample if isinstance(sample, StepSample) else None


OPTION_MODES = ("constraint", "controls", "interaction")  # Table 5 fits all three to an option left alone


def wrong_moves(trajectory: Trajectory) -> dict[str, tuple[str, ...]]:
    """Return what a failing run had to do and did not: goal -> the failure modes that name it.

    The sites' own knowledge: the decisions that it skipped where the default or the shortcut was wrong, and
    the rows that it should have taken where it took others.
    """
    world = world_by_text(trajectory.task.text)
    assert world is not None
    goals = [step.output.next_goal for step in trajectory.steps if step.output]
    found: dict[str, tuple[str, ...]] = {}
    for label in expert.wrong_decisions(world, goals):
        value = world.want.get(label, "")
        if label in world.want and world.default.get(label) != value:
            moves = {f"select {label} {value}", f"type {label} {value}"}
            modes: tuple[str, ...] = ("boundary",) if label == "code" else OPTION_MODES
            if label in expert.PICKED:
                moves |= {f"click {value}"}
            if label == "day":
                moves, modes = {*moves, "click date"}, ("date",)
            found |= dict.fromkeys(moves, modes)
        elif label not in world.want and not world.lucky:
            found |= {
                expert.SNIPPET: {f"click {name}": ("evidence",) for name in (world.item, world.source)},
                expert.CONFIRM: {f"click {name}": ("endpoint",) for name in ("confirm", "send")},
                expert.NEWS: {f"click {world.source}": ("obstruction",)},
            }[label]
    rows = (*world.others, *world.places, *OPTIONS["day"])
    right = {world.item, world.via, *world.want.values()} - {""}
    if any(
        goal.removeprefix("click ") in rows and goal.removeprefix("click ") not in right for goal in goals
    ):
        found = {f"click {name}": OPTION_MODES for name in right} | found
    return found
