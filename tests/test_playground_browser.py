"""Laws of the playground in a real browser: an episode there is the episode of the replay."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from without_browser import replay_session

from rmsweb.agent import Episode
from rmsweb.browser.chromium import Browser, BrowserOptions
from rmsweb.browser.session import Session
from rmsweb.playground import expert, teacher
from rmsweb.playground.environment import PlaygroundEnvironment, ReplayEnvironment
from rmsweb.playground.tasks import TEMPLATES, UNSEEN, World, make_worlds
from rmsweb.prompt import PromptConfig, build_prompt, render_text
from rmsweb.records import Action, Message, Reply, Source, Trajectory

pytestmark = pytest.mark.browser
VIEWPORT = (640, 480)
WORLDS = make_worlds("held-out", len(TEMPLATES + UNSEEN))  # one of each template


async def no_extractor(query: str, page_text: str, extract_links: bool) -> str:
    return ""


async def episodes(folder: Path, worlds: Sequence[World]) -> list[tuple[Trajectory, bool, Trajectory, bool]]:
    """Run the teacher's first round on each task, in the browser and in the replay."""
    environment, found = PlaygroundEnvironment(), []
    config = PromptConfig(viewport=VIEWPORT, thinking=False)

    async def policy(messages: list[Message], *, seed: int, purpose: str, max_tokens: int) -> Reply:
        return Reply(text=teacher.teacher(render_text(messages), seed))

    async def run(
        session: Session, place: PlaygroundEnvironment | ReplayEnvironment, world: World
    ) -> tuple[Trajectory, bool]:
        task = world.task()
        start = await place.reset(session, task)
        source = Source(script="test", policy="scripted-teacher")
        episode = Episode(
            policy=policy,
            session=session,
            task=task,
            trajectory_id="x",
            source=source,
            seed=1,
            config=config,
            max_steps=12,
        )
        trajectory = await episode.run(start)
        return trajectory, (await place.check(session, trajectory)).verdict == "success"

    await environment.start()
    try:
        async with Browser.launch(
            BrowserOptions(host_map=environment.host_map, viewport=VIEWPORT)
        ) as browser:
            session = await Session.open(browser, folder)
            for world in worlds:
                beside, replayed = replay_session()
                real = await run(session, environment, world)
                found.append((*real, *await run(replayed, beside, world)))
            await session.close()
    finally:
        await environment.stop()
    return found


def test_an_episode_in_the_browser_is_the_replayed_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and answers are those of the replay, and every page fits into the small viewport."""
    monkeypatch.setattr(expert, "HABIT", 0.0)
    monkeypatch.setattr(expert, "WRONG_ROW", 0.0)
    config = PromptConfig(blocks=("title",), viewport=VIEWPORT, thinking=False)
    for real, success, replayed, expected in asyncio.run(episodes(tmp_path, WORLDS)):
        assert success, real.task.text
        assert expected
        assert [step.response_text for step in real.steps] == [step.response_text for step in replayed.steps]
        for number, step in enumerate(real.steps):
            prompts = [
                build_prompt(config, task_text="x", history=[], observation=s.observation)
                for s in (step, replayed.steps[number])
            ]
            assert render_text(prompts[0].messages) == render_text(prompts[1].messages)
            assert all(node.in_viewport for node in step.observation.nodes)
            assert step.observation.screenshot is not None


async def pictures_of_a_focused_field(folder: Path) -> set[str]:
    """Take pictures of a page whose field has the focus, over more than a second."""
    environment, world = PlaygroundEnvironment(), make_worlds("train", 1)[0]
    await environment.start()
    try:
        async with Browser.launch(
            BrowserOptions(host_map=environment.host_map, viewport=VIEWPORT)
        ) as browser:
            session = await Session.open(browser, folder, name="caret")
            await session.goto((await environment.reset(session, world.task())).replace("shop", "search"))
            page = await session.observe()
            field = next(node.index for node in page.nodes if node.tag == "input")
            await session.act(
                [Action(name="click_element_by_index", params={"index": field})], page, no_extractor
            )
            pictures = set[str]()
            for _ in range(6):
                seen = await session.observe()
                assert seen.screenshot is not None
                pictures.add(seen.screenshot.sha256)
                await asyncio.sleep(0.27)
            await session.close()
            return pictures
    finally:
        await environment.stop()


def test_a_picture_does_not_depend_on_the_moment(tmp_path: Path) -> None:
    """No caret blinks in a field that was clicked, so equal runs have equal prompts."""
    assert len(asyncio.run(pictures_of_a_focused_field(tmp_path))) == 1
