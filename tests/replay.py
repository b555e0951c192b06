"""The playground without a browser: a session that renders a site's pages straight to the state that the browser layer makes of them.

For tuning the learning stages in minutes, and for the check that the browser gives the same states.
"""

import datetime
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from rmsweb.browser.actions import with_defaults
from rmsweb.browser.state import fingerprint
from rmsweb.playground.sites import SiteSession
from rmsweb.playground.sites.page import Choice, Form, Line, Link, Page, choose_url
from rmsweb.playground.tasks import world_of
from rmsweb.records import Action, ActionResult, Element, Image, Judgement, Observation, Tab, Task, Trajectory


class ReplaySession:
    """The surface of a browser session that the agent loop and the playground's environment use."""

    def __init__(self, screenshot: Image | None = None, viewport: tuple[int, int] = (640, 480)) -> None:
        self.screenshot, self.viewport, self.restarts = screenshot, viewport, 0
        self.site: SiteSession | None = None
        self.history: list[str] = []
        self.typed: dict[str, str] = {}
        self.targets: dict[int, tuple[str, Any]] = {}

    # ------------------------------------------------------------------------------------------------- navigation

    def _load(self, url: str) -> Page:
        assert self.site is not None
        for _ in range(5):
            parts = urlsplit(url)
            answer = self.site.request(parts.netloc, parts.path or "/", dict(parse_qsl(parts.query, keep_blank_values=True)))
            if isinstance(answer, Page):
                self.url = url
                return answer
            url = f"http://{parts.netloc}{answer}"
        raise AssertionError("redirects without end")

    async def goto(self, url: str) -> None:
        self.page, self.typed = self._load(url), {}
        self.history.append(self.url)

    def _follow(self, path: str, *, link: bool = False) -> None:
        """Opens a path of the same host. A link to the page where it stands makes no new entry of the history; a form does."""
        url = f"http://{urlsplit(self.url).netloc}{path}"
        same = link and url == self.url
        self.page, self.typed = self._load(url), {}
        if not same:
            self.history.append(self.url)

    async def reset(self) -> None:
        self.history, self.typed = [], {}

    async def close(self) -> None:
        self.site = None

    # ------------------------------------------------------------------------------------------------ observation

    async def observe(self) -> Observation:
        nodes: list[Element] = []
        self.targets = {}

        def control(tag: str, target: tuple[str, Any], label: str = "", **fields: Any) -> None:
            index = len(self.targets) + 1
            self.targets[index] = target
            nodes.append(Element(index=index, node_key=str(len(nodes)), tag=tag, text=label, **fields))
            if label:
                text(label, 1)

        def text(content: str, depth: int) -> None:
            if content:
                nodes.append(Element(index=None, node_key=str(len(nodes)), tag="#text", text=content, depth=depth))

        for widget in (*self.page.nav, *self.page.widgets):
            if isinstance(widget, Link):
                control("a", ("link", widget), widget.label)
            elif isinstance(widget, Line):
                text(widget.text, 0)
            elif isinstance(widget, Choice):
                attributes = {"name": widget.name, "autocomplete": "off"}
                control("select", ("choice", widget), attributes=attributes, value="", options=("choose", *widget.options))
            else:
                for name, value in widget.fields.items():
                    control("input", ("field", name), attributes={"name": name, "autocomplete": "off"}, value=self.typed.get(name, value))
                control("button", ("form", widget), widget.button)
        tabs = (Tab(tab_id="0001", url=self.url, title=self.page.title),)
        return Observation(
            url=self.url,
            title=self.page.title,
            tabs=tabs,
            active_tab="0001",
            viewport=self.viewport,
            nodes=tuple(nodes),
            screenshot=self.screenshot,
            fingerprint=fingerprint(self.url, tabs, nodes, 0.0),
        )

    # ---------------------------------------------------------------------------------------------------- actions

    async def act(self, actions: Sequence[Action], observation: Observation, extractor: Any) -> tuple[ActionResult, ...]:
        results: list[ActionResult] = []
        for number, action in enumerate(actions):
            if action.name == "done" and number:
                break
            results.append(self._one(action.name, with_defaults(action)))
            if results[-1].error or results[-1].is_done or self.url != observation.url:
                break
        return tuple(results)

    def _one(self, name: str, params: dict[str, Any]) -> ActionResult:
        if name == "done":
            return ActionResult(is_done=True, success=params["success"], message="done")
        if name == "go_back":
            if len(self.history) < 2:
                return ActionResult(error="there is no page to go back to")
            self.history.pop()
            self.page, self.typed = self._load(self.history[-1]), {}
            return ActionResult(message="went back")
        if "index" not in params:
            return ActionResult(message=name)
        kind, target = self.targets.get(params["index"], ("", None))
        if name == "click_element_by_index" and kind == "link":
            self._follow(target.href, link=True)
        elif name == "click_element_by_index" and kind == "form":
            self._submit(target)
        elif name == "click_element_by_index" and kind == "field":
            pass
        elif name == "input_text" and kind == "field":
            before = "" if params["clear_existing"] else self.typed.get(target, "")
            self.typed[target] = before + params["text"]
        elif name == "select_dropdown_option" and kind == "choice" and params["text"].lower() in ("choose", *target.options):
            if params["text"].lower() != "choose":
                self._follow(choose_url(self.page.path, target.name, params["text"].lower()))
        else:
            return ActionResult(error=f"{name} cannot be done with element {params['index']}")
        return ActionResult(message=name)

    def _submit(self, form: Form) -> None:
        fields = {name: self.typed.get(name, value) for name, value in form.fields.items()}
        if form.post:
            parts = urlsplit(form.action)
            assert self.site is not None
            answer = self.site.request(urlsplit(self.url).netloc, parts.path, dict(parse_qsl(parts.query)) | fields)
            assert isinstance(answer, str)
            self._follow(answer)
        else:
            self._follow(f"{form.action}?{urlencode(fields)}")


class ReplayEnvironment:
    """The playground's environment over replay sessions."""

    host_map = None

    async def reset(self, session: ReplaySession, task: Task) -> str:
        await session.reset()
        session.site = SiteSession(world_of(task))
        assert task.start_url is not None
        return task.start_url

    async def check(self, session: ReplaySession, trajectory: Trajectory) -> Judgement:
        assert session.site is not None
        success, reason = session.site.check(trajectory.final_text)
        return Judgement(trajectory_id=trajectory.trajectory_id, judge="check", model="", verdict="success" if success else "not_success", reason=reason)

    def now(self) -> datetime.date:
        return datetime.date(2026, 1, 15)
