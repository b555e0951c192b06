"""Laws of the playground in a real browser: the replay shows the same states and gives the same verdicts."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from replay import ReplayEnvironment, ReplaySession

from rmsweb.agent import Episode
from rmsweb.browser.chromium import Browser, BrowserOptions
from rmsweb.browser.session import Session
from rmsweb.playground import expert, teacher
from rmsweb.playground.environment import PlaygroundEnvironment
from rmsweb.playground.tasks import TEMPLATES, UNSEEN, World, make_worlds
from rmsweb.prompt import PromptConfig, build_prompt, render_text
from rmsweb.records import Action, Message, Observation, Reply, Source, Trajectory

pytestmark = pytest.mark.browser
VIEWPORT = (640, 480)
WORLDS = make_worlds("held-out", len(TEMPLATES + UNSEEN))  # one of each template


async def no_extractor(query: str, page_text: str, extract_links: bool) -> str:
    return ""


def state(observation: Observation, number: int) -> list[object]:
    """Return what two observations of one state must agree in: all but node keys, boxes, pictures, time."""
    nodes = [
        (
            n.index,
            n.tag,
            n.role,
            n.attributes,
            n.text,
            n.value,
            n.options,
            n.in_viewport,
            n.is_new,
            n.depth,
            n.marker,
        )
        for n in observation.nodes
    ]
    pages = (observation.scroll_y, observation.pages_above, observation.pages_below)
    return [
        number,
        observation.url,
        observation.title,
        observation.tabs,
        observation.active_tab,
        pages,
        *nodes,
        observation.fingerprint,
    ]


def any_action(r: random.Random, observation: Observation, world: World) -> Action:
    """Draw a click, a text or a choice somewhere on the page, or a step back."""
    nodes = [node for node in observation.nodes if node.index is not None]
    if not nodes or r.random() < 0.15:
        return (
            Action(name="go_back")
            if nodes and r.random() < 0.8
            else Action(name="search_engine", params={"query": world.item})
        )
    node = r.choice(nodes)
    if node.tag == "input":
        return Action(
            name="input_text",
            params={"index": node.index, "text": r.choice([world.item, *world.want.values(), "7"])},
        )
    if node.tag == "select":
        return Action(
            name="select_dropdown_option",
            params={"index": node.index, "text": r.choice([*node.options[1:], "nothing"])},
        )
    return Action(name="click_element_by_index", params={"index": node.index})


async def walk_both(
    browser: Browser,
    environment: PlaygroundEnvironment,
    world: World,
    folder: Path,
    steps: int,
    trouble: float,
) -> None:
    """Take the same random walk in the browser and in the replay."""
    real, replay = await Session.open(browser, folder, name=world.task_id), ReplaySession(viewport=VIEWPORT)
    try:
        start = await environment.reset(real, world.task(trouble))
        await real.goto(start)
        await replay.goto(await ReplayEnvironment().reset(replay, world.task(trouble)))
        r, past = random.Random(world.task_id), []
        for number in range(steps):
            seen, expected = await real.observe(), await replay.observe()
            assert state(seen, number) == state(expected, number), past
            action = any_action(r, expected, world)
            past.append(action)
            one, two = (
                (await real.act([action], seen, no_extractor))[0],
                (await replay.act([action], expected, no_extractor))[0],
            )
            assert bool(one.error) == bool(two.error), (past, one, two)
    finally:
        await real.close()


async def in_browser(folder: Path, worlds: Sequence[World], steps: int, trouble: float = 0.0) -> None:
    environment = PlaygroundEnvironment()
    await environment.start()
    try:
        async with Browser.launch(
            BrowserOptions(host_map=environment.host_map, viewport=VIEWPORT)
        ) as browser:
            for world in worlds:
                await walk_both(browser, environment, world, folder, steps, trouble)
    finally:
        await environment.stop()


def test_the_replay_shows_what_the_browser_shows(tmp_path: Path) -> None:
    """A random walk over every site gives the same URLs, lines, values, fingerprints and errors."""
    asyncio.run(in_browser(tmp_path, WORLDS, 8))


def test_pages_in_trouble_are_replayed_too(tmp_path: Path) -> None:
    """If pages answer 503 at first, browser and replay fail and recover alike."""
    asyncio.run(in_browser(tmp_path, WORLDS[::6], 8, trouble=0.5))


@pytest.mark.slow
def test_the_replay_shows_what_the_browser_shows_on_long_walks(tmp_path: Path) -> None:
    """The same over more tasks and longer walks."""
    asyncio.run(in_browser(tmp_path, make_worlds("train", 2 * len(TEMPLATES)), 25))


async def episodes(folder: Path, worlds: Sequence[World]) -> list[tuple[Trajectory, bool, Trajectory, bool]]:
    """Run the teacher's first round on each task, in the browser and in the replay."""
    environment, found = PlaygroundEnvironment(), []
    config = PromptConfig(viewport=VIEWPORT, thinking=False)

    async def policy(messages: list[Message], *, seed: int, purpose: str, max_tokens: int) -> Reply:
        return Reply(text=teacher.teacher(render_text(messages), seed))

    async def run(
        session: Session | ReplaySession, place: PlaygroundEnvironment | ReplayEnvironment, world: World
    ) -> tuple[Trajectory, bool]:
        task = world.task()
        start = await place.reset(session, task)  # type: ignore[arg-type]
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
        return trajectory, (await place.check(session, trajectory)).verdict == "success"  # type: ignore[arg-type]

    await environment.start()
    try:
        async with Browser.launch(
            BrowserOptions(host_map=environment.host_map, viewport=VIEWPORT)
        ) as browser:
            session = await Session.open(browser, folder)
            for world in worlds:
                found.append(
                    (
                        *await run(session, environment, world),
                        *await run(ReplaySession(), ReplayEnvironment(), world),
                    )
                )
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
