"""Laws of the replay: it shows, says and decides what the browser does, at a fraction of the cost. And of
what is built on it: the game in the terminal, and the environment of steps.
"""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import PIL.Image
import pytest
from replay_walks import VIEWPORT, Pair
from without_browser import replay_session

import evaluate
from rmsweb import runner
from rmsweb.browser.chromium import Browser, BrowserOptions
from rmsweb.jsonl import write_records
from rmsweb.playground.__main__ import main
from rmsweb.playground.environment import PlaygroundEnvironment, ReplayEnvironment
from rmsweb.playground.gym import Playground, parse_actions, world_named
from rmsweb.playground.play import play, read_line
from rmsweb.playground.tasks import TEMPLATES, UNSEEN, World, make_worlds
from rmsweb.records import Action, Task
from rmsweb.runs import RunFolder

NUM_TEMPLATES = len(TEMPLATES + UNSEEN)
ONE_OF_A_SITE = make_worlds("held-out", NUM_TEMPLATES)[::3]  # shop, jobs, wiki, travel, office, search


@asynccontextmanager
async def pairs(folder: Path, worlds: Sequence[World], trouble: float = 0.0) -> AsyncIterator[Iterator[Pair]]:
    """Open each world in the browser and in the replay, one after the other."""
    environment = PlaygroundEnvironment()
    await environment.start()
    try:
        async with Browser.launch(
            BrowserOptions(host_map=environment.host_map, viewport=VIEWPORT)
        ) as browser:
            yield (Pair(browser, environment, folder, world, trouble) for world in worlds)
    finally:
        await environment.stop()


async def walks(
    folder: Path, worlds: Sequence[World], steps: int, seed: int = 0, trouble: float = 0.0
) -> int:
    """Walk through each world in the browser and in the replay; return how many actions were compared."""
    async with pairs(folder, worlds, trouble) as opened:
        return sum([await pair.walk(steps, seed) for pair in opened])


@pytest.mark.browser
def test_the_replay_shows_what_the_browser_shows(tmp_path: Path) -> None:
    """Random actions on every site, sensible or not, give the same states, results and verdicts."""
    assert asyncio.run(walks(tmp_path, ONE_OF_A_SITE, 7)) >= 6 * 7


@pytest.mark.browser
def test_pages_in_trouble_are_replayed_too(tmp_path: Path) -> None:
    """If pages answer 503 at first, browser and replay fail and recover alike."""
    asyncio.run(walks(tmp_path, ONE_OF_A_SITE[:2], 6, trouble=0.5))


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "seed", "trouble"), [("train", 1, 0.0), ("held-out", 2, 0.0), ("dev", 3, 0.3)]
)
def test_the_replay_shows_what_the_browser_shows_on_long_walks(
    tmp_path: Path, split: str, seed: int, trouble: float
) -> None:
    """The same over 200 walks of 20 steps in all, with the templates of each split."""
    asyncio.run(walks(tmp_path, make_worlds(split, 67), 20, seed, trouble))  # type: ignore[arg-type]


@pytest.mark.browser
def test_boxes_lie_where_the_browser_draws_them(tmp_path: Path) -> None:
    """Box by box, the replay's layout differs from the browser's by less than a line of text."""

    async def look() -> list[float]:
        async with pairs(tmp_path, ONE_OF_A_SITE) as opened:
            return [found for pair in opened for found in await pair.differences()]

    differences = asyncio.run(look())
    assert len(differences) > 100
    assert max(differences) < 18


def test_a_picture_is_of_the_viewport_and_shows_the_page(tmp_path: Path) -> None:
    """Pages that look different have different pictures; the same page has the same file."""

    async def pictures() -> list[Path]:
        environment, paths = ReplayEnvironment(), []
        session = environment.open(tmp_path, VIEWPORT)
        start = await environment.reset(session, ONE_OF_A_SITE[0].task())
        for url in (start, "http://shop.localhost/cart", start):
            await session.goto(url)
            seen = await session.observe()
            assert seen.screenshot is not None
            paths.append(tmp_path / seen.screenshot.path)
        return paths

    first, second, third = asyncio.run(pictures())
    assert first == third != second
    with PIL.Image.open(first) as picture:
        assert picture.size == VIEWPORT
        assert len(picture.convert("RGB").getcolors(10**6) or []) > 20


def test_waiting_takes_no_time() -> None:
    """Nothing happens on a page by itself, so `wait` says what it would have done and returns."""

    async def wait() -> tuple[str, float]:
        environment, session = replay_session()
        await session.goto(await environment.reset(session, ONE_OF_A_SITE[0].task()))
        seen, started = await session.observe(), time.monotonic()
        action = Action(name="wait", params={"seconds": 30})
        (result,) = await session.act([action], seen, None)  # type: ignore[arg-type]
        return result.message, time.monotonic() - started

    message, seconds = asyncio.run(wait())
    assert message == "waited 30 s"
    assert seconds < 5


def test_a_script_evaluates_on_the_replay_without_chromium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher_url: str
) -> None:
    """With the place `replay`, nobody looks for a browser, and every run has pictures and a verdict."""

    def missing() -> None:
        raise FileNotFoundError("no Chromium found")

    monkeypatch.setattr(runner, "find_chromium", missing)
    tasks = tmp_path / "tasks.jsonl"
    write_records(tasks, Task, [world.task() for world in ONE_OF_A_SITE[:3]])
    flag = next(name for name in ("environment", "benchmark") if name in evaluate.Config.__dataclass_fields__)
    arguments = ["--policy-url", teacher_url, "--policy-model", "scripted-teacher", "--tasks", str(tasks)]
    arguments += ["--split", "held-out", f"--{flag}", "replay", "--runs", "1", "--max-steps", "12"]
    assert evaluate.main([*arguments, "--out", str(tmp_path / "run")]) == 0
    folder = RunFolder(tmp_path / "run")
    assert len(list((folder.path / "screenshots").iterdir())) > 3
    assert len(list(folder.trajectories())) == 3


# ------------------------------------------------------------------------------------------------- the game


def test_a_task_is_played_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Short forms and JSON act, a bad line explains itself, and the site's verdict ends it."""
    world = world_named("wiki.fact-held-out-6")
    answer = world.solved(None, None)[1].rsplit(" ", 1)[-1]
    lines = [
        "?",
        "jump 3",
        "click",
        f"type 5 {world.item}",
        '[{"click": {"index": 6}}]',
        "back",
        f"done {answer}",
    ]
    play(io.StringIO("\n".join(lines)), task_id=world.task_id)
    told = capsys.readouterr().out
    assert world.text in told
    assert "scroll_to_text(text: str)" in told
    assert "'jump' is no short form" in told
    assert "lacks index" in told
    assert f'typed "{world.item}" into <input>' in told
    assert 'clicked <button> "lookup"' in told
    assert "check: success" in told


def test_a_game_ends_politely_with_its_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of the input is no error; an unknown task is one sentence, a missing checkpoint exit code 3."""
    monkeypatch.setattr("sys.stdin", io.StringIO("click 1\n"))
    assert main(["play", "--split", "train", "--seed", "3"]) == 0
    told = capsys.readouterr().out
    assert "the input ended before the task did" in told
    assert "check: no success" in told
    assert main(["play", "shop.nothing-dev-1"]) == 2
    assert main(["play", "--policy", "no/such/place"]) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_a_policy_shows_its_answers_beside_the_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """Up to three different answers, the most frequent first, each with its reward."""
    base = Path(__file__).parent.parent / "rmsweb" / "playground" / "base"
    play(io.StringIO(""), policy=base)
    told = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(told) if line.startswith("the expert: "))
    answers = [line for line in told[start + 1 :] if "  reward " in line]
    shares = [int(line.split("/")[0]) for line in answers]
    assert 1 <= len(answers) <= 3
    assert shares == sorted(shares, reverse=True)
    assert len({line.split(" ", 3)[3] for line in answers}) == len(answers)


@pytest.mark.parametrize(
    ("line", "name"),
    [("back", "go_back"), ("scroll", "scroll"), ("done", "done"), ("select 4 red", "select_dropdown_option")],
)
def test_a_short_form_is_an_action(line: str, name: str) -> None:
    """Each names one action of the schema."""
    assert [action.name for action in read_line(line)] == [name]


# ----------------------------------------------------------------------------------- the environment of steps


def test_an_agent_of_ones_own_gets_its_reward() -> None:
    """The check pays 1 for the right `done`; a bad action costs a step; steps end; a seed repeats."""
    with Playground(split="held-out", max_steps=3) as world:
        observation, info = world.reset(seed=6)
        assert (observation, info["task"]) == (world.reset(seed=6)[0], world.now[0].text)
        assert Path(observation["picture"]).exists()
        assert {element["index"] for element in observation["elements"]} == set(
            range(1, len(observation["elements"]) + 1)
        )
        answer = world.now[0].solved(None, None)[1].rsplit(" ", 1)[-1]
        assert world.step("no JSON")[1:4] == (0.0, False, False)
        done = [Action(name="done", params={"text": answer, "success": True})]
        assert world.step(done)[1:4] == (1.0, True, False)
        with pytest.raises(ValueError, match="call reset"):
            world.step(done)
        world.reset(options={"task_id": "shop.buy-train-0", "trouble": 1.0})
        flags = [world.step('{"go_back": {}}')[1:4] for _ in range(3)]
        assert flags == [(0.0, False, False), (0.0, False, False), (0.0, False, True)]
        with pytest.raises(ValueError, match="expected task_id and trouble"):
            world.reset(options={"task": "x"})


@pytest.mark.parametrize(
    "text", ["[]", "7", '{"jump": {}}', '{"action": []}', '{"click": {"index": "x"}}', ""]
)
def test_what_is_no_action_says_why(text: str) -> None:
    """Whatever a model writes ends in a ValueError with words, which `step` gives back."""
    with pytest.raises(ValueError, match=r"\w"):
        parse_actions(text)
