"""The cost of an episode in the browser and in the replay: the scripted teacher on the same tasks.

`python scripts/benchmark.py episode` prints seconds for an episode and for a step of both, and their ratio.
Prompts are built, answers are made and pictures are taken in both.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rmsweb.agent import Episode
from rmsweb.evaluation.environments import Environment
from rmsweb.playground.environment import PlaygroundEnvironment, ReplayEnvironment
from rmsweb.playground.tasks import make_worlds
from rmsweb.playground.teacher import teacher
from rmsweb.prompt import PromptConfig, load_prompt_config, render_text
from rmsweb.records import Message, Reply, Source, Task
from rmsweb.runner import pool_of

PROMPT = load_prompt_config(Path(__file__).parent / "demo_prompt.json")


async def _policy(messages: Sequence[Message], *, seed: int, purpose: str, max_tokens: int) -> Reply:
    return Reply(text=teacher(render_text(messages), seed))


async def run(environment: Environment, tasks: Sequence[Task], config: PromptConfig) -> tuple[float, int]:
    """Return the seconds that the episodes took together, and their steps."""
    await environment.start()
    steps = 0
    with tempfile.TemporaryDirectory() as folder:
        launch, open_session = pool_of(environment, Path(folder), config=config, headless=True)
        async with launch() as browser:
            started = 0.0
            for number, task in enumerate(tasks):
                if number == 1:  # the first one warms up
                    started, steps = time.perf_counter(), 0
                session = await open_session(browser, task.task_id)
                episode = Episode(
                    policy=_policy,
                    session=session,
                    task=task,
                    trajectory_id="x",
                    source=Source(script="benchmark", policy="scripted-teacher"),
                    seed=0,
                    config=config,
                    max_steps=12,
                )
                await episode.run(await environment.reset(session, task))
                steps += len(episode.steps)
                await session.close()
            seconds = time.perf_counter() - started
    await environment.stop()
    return seconds, steps


def episode(tasks: int = 33) -> dict[str, float | str]:
    """Return seconds an episode and a step in both places."""
    chosen = [world.task() for world in make_worlds("train", tasks)]
    browser, browser_steps = asyncio.run(run(PlaygroundEnvironment(), chosen, PROMPT))
    replay, replay_steps = asyncio.run(run(ReplayEnvironment(), chosen, PROMPT))
    return {
        "benchmark": "episode",
        "episodes": tasks - 1,
        "browser_s": round(browser / (tasks - 1), 3),
        "replay_s": round(replay / (tasks - 1), 4),
        "browser_step_ms": round(1000 * browser / browser_steps, 1),
        "replay_step_ms": round(1000 * replay / replay_steps, 1),
        "ratio": round(browser / replay, 1),
    }
