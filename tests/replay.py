"""The playground without a browser: sessions that render pages straight to the state of the browser layer.

For tuning the learning stages in minutes, and for the check that the browser gives the same states.
"""

import datetime
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote_plus, urlencode, urlsplit

import PIL.Image
import pytest

from rmsweb import runner
from rmsweb.browser.actions import with_defaults
from rmsweb.browser.state import fingerprint
from rmsweb.playground.environment import ENVIRONMENTS, SEARCH_URL
from rmsweb.playground.sites import SiteSession
from rmsweb.playground.sites.page import Choice, Form, Line, Link, Page, Suggest, choose_url
from rmsweb.playground.tasks import world_of
from rmsweb.prompt import PromptConfig
from rmsweb.records import (
    Action,
    ActionResult,
    Element,
    Image,
    Judgement,
    Observation,
    Tab,
    Task,
    Trajectory,
    sha256_bytes,
)
from rmsweb.runner import Launch, OpenSession


@dataclass
class ReplayTab:
    """One tab: page, history, what was typed, and the controls of the last observation of this document."""

    tab_id: str
    url: str
    page: Page
    history: list[str]
    typed: dict[str, str] = field(default_factory=dict)
    seen: set[tuple[str, str]] | None = None


class ReplaySession:
    """The surface of a browser session that the agent loop and the playground's environment use."""

    def __init__(self, screenshot: Image | None = None, viewport: tuple[int, int] = (640, 480)) -> None:
        self.screenshot, self.viewport, self.restarts = screenshot, viewport, 0
        self.site: SiteSession | None = None
        self.tabs: list[ReplayTab] = []
        self.active: ReplayTab | None = None
        self.targets: dict[int, tuple[str, Any]] = {}

    # --------------------------------------------------------------------------------------------- navigation

    @property
    def tab(self) -> ReplayTab:
        assert self.active is not None
        return self.active

    def _load(self, url: str) -> tuple[str, Page]:
        assert self.site is not None
        for _ in range(5):
            parts = urlsplit(url)
            answer = self.site.request(
                parts.netloc, parts.path or "/", dict(parse_qsl(parts.query, keep_blank_values=True))
            )
            if isinstance(answer, Page):
                return url, answer
            url = f"http://{parts.netloc}{answer}"
        raise AssertionError("redirects without end")

    async def goto(self, url: str) -> None:
        if self.active is None:
            await self._open(url)
        else:
            self._show(url, enter=True)

    async def _open(self, url: str) -> None:
        url, page = self._load(url)
        self.active = ReplayTab(f"{len(self.tabs) + 1:04x}", url, page, [url])
        self.tabs.append(self.active)

    def _show(self, url: str, *, enter: bool) -> None:
        """Show another document in the active tab; `enter` makes a new entry of the history."""
        tab = self.tab
        tab.url, tab.page = self._load(url)
        tab.typed, tab.seen = {}, None
        if enter:
            tab.history.append(tab.url)

    def _absolute(self, href: str) -> str:
        return href if href.startswith("http") else f"http://{urlsplit(self.tab.url).netloc}{href}"

    def _follow(self, href: str, *, link: bool = False) -> None:
        """Open a URL or a path of the same host.

        A link to the page itself makes no new entry of the history; a form does.
        """
        url = self._absolute(href)
        self._show(url, enter=not (link and url == self.tab.url))

    async def reset(self) -> None:
        self.tabs, self.active = [], None

    async def close(self) -> None:
        self.site = None

    # -------------------------------------------------------------------------------------------- observation

    async def observe(self) -> Observation:
        nodes: list[Element] = []
        tab, shown = self.tab, set[tuple[str, str]]()
        self.targets = {}

        def control(tag: str, target: tuple[str, Any], label: str = "", **fields: Any) -> None:
            index = len(self.targets) + 1
            self.targets[index] = target
            key = (tag, label or fields["attributes"]["name"])
            shown.add(key)
            nodes.append(
                Element(
                    index=index,
                    node_key=str(len(nodes)),
                    tag=tag,
                    text=label,
                    is_new=tab.seen is not None and key not in tab.seen,
                    **fields,
                )
            )
            if label:
                text(label, 1)

        def text(content: str, depth: int) -> None:
            if content:
                nodes.append(
                    Element(index=None, node_key=str(len(nodes)), tag="#text", text=content, depth=depth)
                )

        for widget in (*tab.page.nav, *tab.page.widgets):
            if isinstance(widget, Link):
                control("a", ("link", widget), widget.label)
            elif isinstance(widget, Line):
                text(widget.value, 0)
                text(widget.text, 0)
            elif isinstance(widget, Choice):
                attributes = {"name": widget.name, "autocomplete": "off"}
                control(
                    "select",
                    ("choice", widget),
                    attributes=attributes,
                    value="",
                    options=("choose", *widget.options),
                )
            elif isinstance(widget, Suggest):
                typed = tab.typed.get(widget.name, "")
                control(
                    "input",
                    ("field", widget.name),
                    attributes={"name": widget.name, "autocomplete": "off"},
                    value=typed,
                )
                for option in widget.shown(typed):
                    control(
                        "a", ("link", Link(option, choose_url(tab.page.path, widget.name, option))), option
                    )
            else:
                for name, value in widget.fields.items():
                    control(
                        "input",
                        ("field", name),
                        attributes={"name": name, "autocomplete": "off"},
                        value=tab.typed.get(name, value),
                    )
                control("button", ("form", widget), widget.button)
        tab.seen = shown
        tabs = tuple(Tab(tab_id=other.tab_id, url=other.url, title=other.page.title) for other in self.tabs)
        return Observation(
            url=tab.url,
            title=tab.page.title,
            tabs=tabs,
            active_tab=tab.tab_id,
            viewport=self.viewport,
            nodes=tuple(nodes),
            screenshot=self.screenshot,
            fingerprint=fingerprint(tab.url, tabs, nodes, 0.0),
        )

    # ------------------------------------------------------------------------------------------------ actions

    async def act(
        self, actions: Sequence[Action], observation: Observation, extractor: Any
    ) -> tuple[ActionResult, ...]:
        results: list[ActionResult] = []
        for number, action in enumerate(actions):
            if action.name == "done" and number:
                break
            results.append(await self._one(action.name, with_defaults(action)))
            if (
                results[-1].error
                or results[-1].is_done
                or (self.tab.tab_id, self.tab.url) != (observation.active_tab, observation.url)
            ):
                break
        return tuple(results)

    async def _one(self, name: str, params: dict[str, Any]) -> ActionResult:
        if name == "done":
            return ActionResult(is_done=True, success=params["success"], message="done")
        tab = self.tab
        if name == "go_back":
            if len(tab.history) < 2:
                return ActionResult(error="there is no page to go back to")
            tab.history.pop()
            self._show(tab.history[-1], enter=False)
            return ActionResult(message="went back")
        if name == "search_engine":
            self._show(SEARCH_URL.format(query=quote_plus(params["query"])), enter=True)
        if "index" not in params:
            return ActionResult(message=name)
        kind, target = self.targets.get(params["index"], ("", None))
        if name == "click_element_by_index" and kind == "link" and target.new_tab:
            await self._open(self._absolute(target.href))
        elif name == "click_element_by_index" and kind == "link":
            self._follow(target.href, link=True)
        elif name == "click_element_by_index" and kind == "form":
            self._submit(target)
        elif name == "click_element_by_index" and kind == "field":
            pass
        elif name == "input_text" and kind == "field":
            before = "" if params["clear_existing"] else tab.typed.get(target, "")
            tab.typed[target] = before + params["text"]
        elif (
            name == "select_dropdown_option"
            and kind == "choice"
            and params["text"].lower() in ("choose", *target.options)
        ):
            if params["text"].lower() != "choose":
                self._follow(choose_url(tab.page.path, target.name, params["text"].lower()))
        else:
            return ActionResult(error=f"{name} cannot be done with element {params['index']}")
        return ActionResult(message=name)

    def _submit(self, form: Form) -> None:
        fields = {name: self.tab.typed.get(name, value) for name, value in form.fields.items()}
        if form.post:
            parts = urlsplit(form.action)
            assert self.site is not None
            answer = self.site.request(
                urlsplit(self.tab.url).netloc, parts.path, dict(parse_qsl(parts.query)) | fields
            )
            assert isinstance(answer, str)
            self._follow(answer)
        else:
            self._follow(f"{form.action}?{urlencode(fields)}")


class ReplayEnvironment:
    """The playground's environment over replay sessions."""

    host_map = None
    checks = True

    async def start(self) -> None:
        """Do nothing: there is no server."""

    async def stop(self) -> None:
        """Do nothing: there is no server."""

    async def reset(self, session: ReplaySession, task: Task) -> str:
        await session.reset()
        session.site = SiteSession(world_of(task), float(task.environment.get("trouble", 0)))
        assert task.start_url is not None
        return task.start_url

    async def check(self, session: ReplaySession, trajectory: Trajectory) -> Judgement:
        assert session.site is not None
        success, reason = session.site.check(trajectory.final_text)
        return Judgement(
            trajectory_id=trajectory.trajectory_id,
            judge="check",
            model="",
            verdict="success" if success else "not_success",
            reason=reason,
        )

    def now(self) -> datetime.date:
        return datetime.date(2026, 1, 15)


class NoBrowser:
    """A browser process for sessions that need none."""

    restarts = 0


def replay_pool(folder: Path, *, config: PromptConfig, **options: Any) -> tuple[Launch, OpenSession]:
    """Return what `runner.browser_pool` gives, over replay sessions.

    Every page has the same small picture, which lies in the run folder.
    """
    viewport = config.viewport

    @asynccontextmanager
    async def launch() -> AsyncIterator[NoBrowser]:
        yield NoBrowser()

    async def open_session(browser: NoBrowser, name: str) -> ReplaySession:
        path, drawn = folder / "screenshots" / "page.png", folder / "page.tmp"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            PIL.Image.new("RGB", viewport, "white").save(drawn, format="PNG")
            drawn.replace(path)
        digest, (width, height) = sha256_bytes(path.read_bytes()), viewport
        picture = Image(path="screenshots/page.png", sha256=digest, width=width, height=height)
        return ReplaySession(picture, viewport)

    return launch, open_session


def without_browser(patch: pytest.MonkeyPatch) -> None:
    """Let collect.py and evaluate.py work on the replay; nothing else of them changes."""
    patch.setitem(ENVIRONMENTS, "playground", ReplayEnvironment)
    patch.setattr(runner, "browser_pool", replay_pool)
    patch.setattr(runner, "find_chromium", lambda: None)
