"""A browser session: what the agent sees and does, in one context of a shared browser.

Purpose: `observe` gives the state before a step, `act` carries out a step's actions one after the other under
the stop rules of a multi-action step. Sessions of one browser share nothing but the process. Nothing that a
page does leaves here as an exception; only a browser that cannot be started again does.

ours: a page that crashed or hangs, or a dead browser, is replaced by a fresh one at the same URL; the next
state says so.
"""

import asyncio
import hashlib
import re
import time
from base64 import b64decode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Self

from PIL import Image as Picture
from playwright.async_api import Error

from rmsweb.browser.actions import MAX_ACTIONS_PER_STEP
from rmsweb.browser.chromium import Browser, BrowserDied
from rmsweb.browser.controls import ActionProblem
from rmsweb.browser.execute import Extractor, execute
from rmsweb.browser.guard import BLANK
from rmsweb.browser.snapshot import PageRead, read_page
from rmsweb.browser.state import fingerprint
from rmsweb.browser.window import PAGE_LIMIT_S, SessionOptions, TabbedWindow
from rmsweb.records import Action, ActionResult, Image, Observation, Tab

SCREENSHOT_LIMIT_S = 5.0
TITLE_LIMIT_S = 0.5
MAX_TRIES = 5  # of an observation of a page that changes under it


async def _no_extractor(query: str, page_text: str, extract_links: bool) -> str:
    raise ActionProblem("there is nobody to answer an extraction")


class PageDied(Exception):
    """The page crashed, or does not answer."""


class Session(TabbedWindow):
    """One episode's window into a browser.

    Make it with `open`, end it with `close`; `reset` gives a fresh context.
    """

    def __init__(self, browser: Browser, folder: Path, name: str, options: SessionOptions) -> None:
        super().__init__(browser, folder, name, options)
        self.restarts = 0  # how often a page or the browser was replaced
        self._last_url = BLANK  # of the last observation

    @classmethod
    def closed(
        cls,
        browser: Browser,
        folder: Path,
        *,
        name: str | None = None,
        options: SessionOptions | None = None,
        **fields: Any,
    ) -> Self:
        """A session without a context, for an owner who begins with `reset`; the arguments are those of
        `open`.
        """
        browser.sessions += 1
        name = re.sub(r"[^\w.-]", "_", name or f"session-{browser.sessions}").lstrip(".") or "session"
        return cls(browser, Path(folder), name, replace(options or SessionOptions(), **fields))

    @classmethod
    async def open(
        cls,
        browser: Browser,
        folder: Path,
        *,
        name: str | None = None,
        options: SessionOptions | None = None,
        **fields: Any,
    ) -> Self:
        """A session whose screenshots, page texts and files lie in the run folder; `fields` are those of
        SessionOptions. BrowserDied where none opens.
        """
        session = cls.closed(browser, folder, name=name, options=options, **fields)
        await session._start()
        return session

    async def reset(self) -> None:
        """A fresh context: one blank page, no cookies, no files of before."""
        await self.close()
        self._resets += 1
        self._cookies, self._last_url = [], BLANK
        await self._start()

    async def close(self) -> None:
        """Closes the context with its pages."""
        context = self._context
        for task in self._work:
            task.cancel()
        self._clear()
        self.browser.judges.pop(self, None)
        if context is not None:
            with suppress(Error):
                await context.close()

    async def _start(self) -> None:
        """Opens the context and its first page; where the browser is dead it is started again first."""
        for last in (False, True):
            try:
                if not self.browser.alive:
                    await self.browser.restart()
                await self._open_context()
                return
            except Error as error:
                self._clear()
                if last or self.browser.alive:
                    raise BrowserDied(f"no page opens: {error.message.splitlines()[0]}") from None

    async def _recover(self, reason: str, url: str) -> None:
        """Replaces what died: the browser with a new context, or only the page; then opens the URL.
        BrowserDied where that fails.
        """
        tab = self._tabs.get(self._active)
        self.restarts += 1
        if self.browser.alive and tab is not None:
            self._tabs.pop(tab.tab_id, None)
            with suppress(Error):
                await asyncio.wait_for(tab.page.close(), PAGE_LIMIT_S)
            await self.open_tab()
        else:
            warnings = self._warnings
            self._clear()
            self._warnings = warnings
            await self._start()
        then = (
            "it was opened again, what was typed is lost" if url != BLANK else "a blank page is in its place"
        )
        self._warnings.append(f"{reason}; {then}")
        if url != BLANK:
            await self.goto(url)

    # ----------------------------------------------------------------------------------------- for the caller

    async def set_cookie(self, name: str, value: str, *urls: str) -> None:
        """Sets a cookie for URLs; it outlives a restart of the browser, not a reset."""
        if self._context is None:
            raise BrowserDied("the session is closed")
        cookies: list[Any] = [{"url": url, "name": name, "value": value} for url in urls]
        self._cookies += cookies
        await self._context.add_cookies(cookies)

    async def goto(self, url: str) -> ActionResult:
        """Opens a URL in the active tab.

        What goes wrong is the result's error and a warning in the next state.
        """
        result = await execute(Action(name="go_to_url", params={"url": url}), self, _no_extractor)
        if result.error:
            self._warnings.append(result.error)
        return result

    async def act(
        self, actions: Sequence[Action], observation: Observation, extractor: Extractor
    ) -> tuple[ActionResult, ...]:
        """Carries out a step's actions in order; the results are those of the actions that were executed.

        The rest is left out after an error, after `done` (which counts only as the first action), when the
        URL or the active tab changed, and before an action on an element that is no longer the node which
        `observation` showed. The extractor's exceptions pass.
        """
        self._keys = {node.index: node.node_key for node in observation.nodes if node.index is not None}
        results: list[ActionResult] = []
        before = self._place()
        for number, action in enumerate(actions[:MAX_ACTIONS_PER_STEP]):
            if number:
                stop = (
                    "done must stand alone"
                    if action.name == "done"
                    else await self._stop_before(action, before)
                )
                if stop:
                    left = len(actions) - number
                    note = (
                        f"; {stop}, so {left} more action{'s were' if left > 1 else ' was'} not carried out"
                    )
                    results[-1] = replace(results[-1], message=results[-1].message + note)
                    break
            before = self._place()
            results.append(await execute(action, self, extractor))
            if results[-1].error or results[-1].is_done:
                break
        return tuple(results)

    def _place(self) -> tuple[str, str]:
        tab = self._tabs.get(self._active)
        return (self._active, tab.page.url if tab is not None else "")

    async def _stop_before(self, action: Action, before: tuple[str, str]) -> str | None:
        """Why the next action must not be carried out; waits the pause between two actions."""
        if self.options.pause_s:
            await asyncio.sleep(self.options.pause_s)
        try:
            await self._ready()
            if self._place() != before or self._tab.loading is not None:
                return "the page changed"
            index = action.params.get("index") or action.params.get("frame_element_index")
            if index:
                target = self.target(index)
                await asyncio.wait_for(target.call("check"), PAGE_LIMIT_S)
        except ActionProblem as problem:
            return str(problem)
        except (Error, TimeoutError):
            return "the page does not answer"
        return None

    # ---------------------------------------------------------------------------------------------- observing

    async def observe(self) -> Observation:
        """The state of the active tab, with a screenshot in the run folder.

        BrowserDied where no page can be had any more.
        """
        started = time.monotonic()
        for url in (self._last_url, BLANK, None):  # a page that cannot be read is opened again, then left
            try:
                observation = await self._observe()
                return replace(observation, observe_s=round(time.monotonic() - started, 4))
            except (PageDied, ActionProblem) as problem:
                if url is None:
                    raise BrowserDied(str(problem)) from None
                await self._recover(str(problem), url)
        raise BrowserDied("no observation")  # not reached

    async def _observe(self) -> Observation:
        for number in range(MAX_TRIES):
            try:
                if not self._tabs and self._context is not None and self.browser.alive:
                    await self.open_tab()  # the page closed its own tab
                await self._ready(stop=True)
                tab = self._tab
                reading = asyncio.wait_for(
                    read_page(tab.page, tab.book, self.secrets.mask_json), PAGE_LIMIT_S
                )
                read, shot = await asyncio.gather(reading, self._screenshot())
                if read.is_pdf:
                    await self._keep_pdf(tab)
                return await self._observation(read, shot)
            except TimeoutError:
                raise PageDied("the page did not answer") from None
            except Error as error:
                tab_now = self._tabs.get(self._active)
                if not self.browser.alive or (tab_now is not None and tab_now.crashed):
                    raise PageDied("the page crashed" if self.browser.alive else "the browser died") from None
                if number == MAX_TRIES - 1:
                    raise PageDied(
                        f"the page cannot be read ({error.message.splitlines()[0][:100]})"
                    ) from None
                await asyncio.sleep(0.05)
        raise PageDied("the page cannot be read")  # not reached

    async def _observation(self, read: PageRead, shot: Image | None) -> Observation:
        if self._work:  # a download that is under way is named when it is there
            await asyncio.wait(self._work, timeout=2)
        tab = self._tab
        mask = self.secrets.mask
        tab.title = read.title
        tabs = []
        for other in list(self._tabs.values()):
            if other is not tab:
                with suppress(Error, TimeoutError):  # the title that was known before stays
                    other.title = mask(await asyncio.wait_for(other.page.title(), TITLE_LIMIT_S))
            tabs.append(Tab(tab_id=other.tab_id, url=mask(other.page.url), title=other.title))
        dialogs, downloads, warnings = (
            tuple(self._dialogs),
            tuple(self._downloads),
            tuple(dict.fromkeys(self._warnings)),
        )
        self._dialogs, self._downloads, self._warnings = [], [], []
        self._last_url = tab.page.url
        url = mask(self._last_url)
        return Observation(
            url=url,
            title=read.title,
            tabs=tuple(tabs),
            active_tab=tab.tab_id,
            viewport=self.browser.options.viewport,
            scroll_y=read.scroll_y,
            pages_above=read.pages_above,
            pages_below=read.pages_below,
            page_stats=read.stats,
            nodes=read.nodes,
            screenshot=shot,
            dialogs=dialogs,
            downloads=downloads,
            is_pdf=read.is_pdf or url.split("?")[0].lower().endswith(".pdf"),
            warnings=warnings if shot is not None else (*warnings, "there is no screenshot of this page"),
            fingerprint=fingerprint(url, tabs, read.nodes, read.scroll_y),
        )

    async def _screenshot(self) -> Image | None:
        """Picture of the viewport, stored once for its content; None where the page does not give one in
        time.
        """
        kind = self.options.image_format
        settings: dict[str, Any] = {"format": kind, "optimizeForSpeed": True} | (
            {"quality": self.options.image_quality} if kind == "jpeg" else {}
        )
        try:
            answer = await asyncio.wait_for(
                (await self.cdp()).send("Page.captureScreenshot", settings), SCREENSHOT_LIMIT_S
            )
        except (Error, TimeoutError):
            return None
        data = b64decode(answer["data"])
        digest = hashlib.sha256(data).hexdigest()
        path = Path("screenshots") / f"{digest[:16]}.{'jpg' if kind == 'jpeg' else 'png'}"
        if not (self.folder / path).exists():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            torn = (self.folder / path).with_suffix(
                f".{self.name}.part"
            )  # a kill in the middle leaves no picture under a name that says it is whole
            torn.write_bytes(data)
            torn.replace(self.folder / path)
        with Picture.open(BytesIO(data)) as picture:
            width, height = picture.size
        return Image(path=path.as_posix(), sha256=digest, width=width, height=height)
