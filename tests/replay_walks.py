"""Random walks in the browser and in the replay at once: the actions, and what must be equal.

Actions are drawn over the whole schema, with plausible and implausible parameters.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rmsweb.browser.chromium import Browser
from rmsweb.browser.session import Session
from rmsweb.playground.environment import PlaygroundEnvironment, ReplayEnvironment
from rmsweb.playground.replay import SCRIPTS
from rmsweb.playground.sites import SITES
from rmsweb.playground.tasks import World
from rmsweb.prompt import PromptConfig, build_prompt, render_text
from rmsweb.records import Action, ActionResult, Observation

VIEWPORT = (640, 480)
CONFIG = PromptConfig(blocks=("statistics", "tabs", "title"), viewport=VIEWPORT, thinking=False)
KEYS = (
    "Tab", "Tab Tab", "Shift+Tab", "Enter", "Escape", "Backspace", "Delete", "Home", "End", "ArrowLeft",
    "ArrowRight", "Shift+Home", "Shift+ArrowRight", "Control+a", "ctrl+a Delete", "x", "word", "two words",
    "Tab Enter", "F2", "nokey+q", "ctrl+nokey", "", "PageDown", "Shift",
)  # fmt: skip
FILES = ("notes.md", "data.json", "no/such.md", "missing.txt", "../up.md", "bad.exe")


async def extractor(query: str, page_text: str, extract_links: bool) -> str:
    """Answer an extraction with all that was asked."""
    return f"{query} {extract_links} {page_text}"


def state(observation: Observation) -> list[object]:
    """Return what two observations of one state must agree in: all but node keys, boxes, picture, time."""
    prompt = build_prompt(CONFIG, task_text="x", history=[], observation=observation)
    bare = replace(observation, screenshot=None, observe_s=0.0)
    nodes = tuple(replace(node, node_key="", box=None) for node in observation.nodes)
    picture = observation.screenshot and (observation.screenshot.width, observation.screenshot.height)
    return [render_text(prompt.messages), picture, replace(bare, nodes=()), *nodes]


def told(result: ActionResult) -> ActionResult:
    """Return what two results must agree in: all but the time."""
    return replace(result, duration_s=0.0)


def any_text(r: random.Random, world: World) -> str:
    """Draw a text that a task names, or one that no page expects."""
    return r.choice(
        [
            world.item,
            world.item,
            *world.want.values(),
            *world.places[:2],
            "7",
            "",
            "a b&c=d",
            "Ü ~*'",
            "x" * 230,
        ]
    )


def any_url(r: random.Random, world: World, here: str) -> str:
    """Draw a URL: of a site, of a page that is not there, of a host that does not answer, or none."""
    site = r.choice([*SITES])
    return r.choice(
        [
            f"{site}.localhost",
            f"http://{site}.localhost/item?name={world.item}",
            f"http://{site}.localhost/nowhere?a=b c",
            f"http://{site}.localhost/#top",
            here,
            f"{here}#part",
            "http://nosite.localhost/",
            "no-such-host.invalid",
            "https://shop.localhost/",
            "http://localhost/",
            "about:blank",
            "file:///etc/passwd",
            "not a url",
            "",
        ]
    )


def any_index(r: random.Random, observation: Observation, *tags: str) -> int:
    """Draw the index of an element, mostly one of the tags; at times one that is not there."""
    nodes = [node for node in observation.nodes if node.index is not None]
    fitting = [node for node in nodes if node.tag in tags] or nodes
    if not nodes or r.random() < 0.04:
        return r.choice([0, 99])
    return r.choice(fitting if r.random() < 0.85 else nodes).index or 0


def any_option(r: random.Random, observation: Observation, index: int) -> str:
    """Draw an option of a dropdown, in any case, or a text that is none."""
    options = [option for node in observation.nodes if node.index == index for option in node.options]
    return r.choice([*options, *map(str.upper, options), "nothing", ""])


def with_ctrl(r: random.Random, observation: Observation) -> dict[str, Any]:
    """Hold Ctrl now and then, but not on links to other sites: Playwright does not always see their tabs."""
    if r.random() > 0.15 or observation.url.startswith("http://search."):
        return {}
    return {"while_holding_ctrl": r.random() < 0.7}


def any_action(r: random.Random, observation: Observation, world: World) -> Action:
    """Draw an action of the schema with its parameters."""
    text, tab = any_text(r, world), r.choice([*(tab.tab_id for tab in observation.tabs), "00ff"])
    index = any_index(r, observation, "a", "button")
    field, dropdown = any_index(r, observation, "input"), any_index(r, observation, "select")
    draws: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
        "click_element_by_index": (
            30,
            lambda: {"index": index} | with_ctrl(r, observation),
        ),
        "input_text": (
            14,
            lambda: {
                "index": field,
                "text": text + ("\n" if r.random() < 0.15 else ""),
                "clear_existing": r.random() < 0.7,
            },
        ),
        "select_dropdown_option": (
            10,
            lambda: {"index": dropdown, "text": any_option(r, observation, dropdown)},
        ),
        "get_dropdown_options": (3, lambda: {"index": dropdown}),
        "go_back": (8, dict),
        "go_to_url": (5, lambda: {"url": any_url(r, world, observation.url), "new_tab": r.random() < 0.3}),
        "search_engine": (
            5,
            lambda: {
                "query": text,
                "engine": r.choice(
                    ["duckduckgo", "Google", "ask", "http://wiki.localhost/search?article={query}"]
                ),
            },
        ),
        "switch_tab": (4, lambda: {"tab_id": tab}),
        "close_tab": (3, lambda: {"tab_id": tab}),
        "wait": (1, lambda: {"seconds": r.choice([0, -3])}),
        "scroll": (
            4,
            lambda: {
                "down": r.random() < 0.6,
                "num_pages": r.choice([0.5, 1.0, 10.0, 0.0, -1.0]),
                "frame_element_index": r.choice([None, index, 0]),
            },
        ),
        "scroll_to_text": (
            3,
            lambda: {
                "text": r.choice(
                    [text, observation.title, "no such words", *(n.text for n in observation.nodes)]
                )
            },
        ),
        "send_keys": (9, lambda: {"keys": r.choice(KEYS)}),
        "extract_structured_data": (
            3,
            lambda: {
                "query": text,
                "extract_links": r.random() < 0.5,
                "start_from_char": r.choice([0, 10, 10_000]),
            },
        ),
        "upload_file_to_element": (1, lambda: {"index": index, "path": r.choice(FILES)}),
        "write_file": (
            2,
            lambda: {"file_name": r.choice(FILES), "content": text, "append": r.random() < 0.5},
        ),
        "replace_file_str": (
            1,
            lambda: {"file_name": r.choice(FILES), "old_str": r.choice([text, ""]), "new_str": "new"},
        ),
        "read_file": (1, lambda: {"file_name": r.choice(FILES)}),
        "execute_js": (2, lambda: {"code": r.choice([*SCRIPTS, "return document.title;"])}),
        "done": (1, lambda: {"text": text, "success": True, "files_to_display": ["notes.md", "no.md"]}),
    }
    name = r.choices([*draws], [weight for weight, _ in draws.values()])[0]
    return Action(name=name, params=draws[name][1]())


class Pair:
    """One task in the browser and in the replay."""

    def __init__(
        self,
        browser: Browser,
        environment: PlaygroundEnvironment,
        folder: Path,
        world: World,
        trouble: float = 0.0,
        viewport: tuple[int, int] = VIEWPORT,
    ) -> None:
        self.world, self.trouble, self.environment, self.beside = (
            world,
            trouble,
            environment,
            ReplayEnvironment(),
        )
        name = world.task_id.replace("/", "-")
        self.real = Session(browser, folder / "browser", name=name, pause_s=0.0)
        self.replay = self.beside.open(folder / "replay", viewport, name=name)

    async def walk(self, steps: int, seed: int) -> int:
        """Walk and compare every state and result; return the number of actions that were executed."""
        r, task, past, number = (
            random.Random(f"{seed}/{self.world.task_id}"),
            self.world.task(self.trouble),
            list[Action](),
            0,
        )
        try:
            for place, session in ((self.environment, self.real), (self.beside, self.replay)):
                await session.goto(await place.reset(session, task))
            for _ in range(steps):
                seen, expected = await self.real.observe(), await self.replay.observe()
                assert state(seen) == state(expected), past
                actions = [any_action(r, seen, self.world) for _ in range(r.choice([1, 1, 1, 2, 3]))]
                past += actions
                results = await self.real.act(actions, seen, extractor)
                repeated = await self.replay.act(actions, expected, extractor)
                assert list(map(told, results)) == list(map(told, repeated)), past
                number += len(results)
            answer = await self._checks()
            assert answer[0] == answer[1]
        finally:
            await self.real.close()
        return number

    async def differences(self) -> list[float]:
        """Return how far the replay's boxes are off on the pages that the first controls lead to, in px."""
        found, task = [], self.world.task()
        for place, session in ((self.environment, self.real), (self.beside, self.replay)):
            await session.goto(await place.reset(session, task))
        for number in range(4):
            seen, expected = await self.real.observe(), await self.replay.observe()
            for one, two in zip(seen.nodes, expected.nodes, strict=True):
                assert one.box is not None
                assert two.box is not None
                found += [abs(a - b) for a, b in zip(one.box, two.box, strict=True)]
            last = len([node for node in seen.nodes if node.index is not None])
            for session, state in ((self.real, seen), (self.replay, expected)):
                action = Action(name="click_element_by_index", params={"index": max(1, last - number)})
                await session.act([action], state, extractor)
        await self.real.close()
        return found

    async def _checks(self) -> list[tuple[bool, str]]:
        places = ((self.environment, self.real), (self.beside, self.replay))
        return [place.site(session).check("7") for place, session in places]
