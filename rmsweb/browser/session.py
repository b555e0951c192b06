"""A browser session: what the agent sees and does, in one context of a shared browser.

Purpose: `observe` gives the state before a step, `act` carries out a step's actions one after the other under
the stop rules of a multi-action step. Sessions of one browser share nothing but the process. Nothing that a
page does leaves here as an exception; only a browser that cannot be started again does.

ours: a page that crashed or hangs, or a dead browser, is replaced by a fresh one at the same URL; the next
state says so.
"""

import asyncio
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
from rmsweb.browser.execute import execute
from rmsweb.browser.files import AgentFiles
from rmsweb.browser.guard import BLANK, Guard
from rmsweb.browser.page import ActionProblem, first_line
from rmsweb.browser.protocol import Extractor
from rmsweb.browser.snapshot import read_page
from rmsweb.browser.state import fingerprint
from rmsweb.browser.window import PAGE_LIMIT_S, SessionOptions, Window
from rmsweb.records import Action, ActionResult, Image, Observation, Tab, sha256_bytes

SCREENSHOT_LIMIT_S = 5.0
TITLE_LIMIT_S = 0.5
JPEG_QUALITY = 60
MAX_TRIES = 5  # to observe a page that changes under it


class PageDied(Exception):
    """The page crashed, or does not answer."""


class Session:
    """One episode's view of a browser.

    Screenshots, page texts and files lie in the run folder. Made by `open` it is ready; made by its class it
    has no page until `reset`. `name` names the folder of the agent's files; `fields` are those of
    SessionOptions.
    """

    def __init__(self, browser: Browser, folder: Path, *, name: str | None = None, **fields: Any) -> None:
        browser.sessions += 1
        self.browser, self.folder, self.options = browser, Path(folder), SessionOptions(**fields)
        self.name = re.sub(r"[^\w.-]", "_", name or f"session-{browser.sessions}").lstrip(".") or "session"
        domains = self.options.allow_domains
        self.guard = Guard(domains if domains is not None else browser.options.allow_domains)
        self.engines = self.options.engines
        self.restarts = 0  # how often a page or the browser was replaced
        self._resets = 0
        self._cookies: list[Any] = []
        self._last_url = BLANK  # of the last observation
        self.window = self._new_window()

    def _new_window(self) -> Window:
        name = self.name if self._resets == 0 else f"{self.name}-{self._resets}"
        files = AgentFiles(self.folder / "files" / name, self.options.uploads)
        return Window(self.browser, self.folder, self.options, self.guard, files)

    @classmethod
    async def open(cls, browser: Browser, folder: Path, *, name: str | None = None, **fields: Any) -> Self:
        """Return a session with a blank page. BrowserDied if none opens."""
        session = cls(browser, folder, name=name, **fields)
        await session._start()
        return session

    async def reset(self) -> None:
        """Begin a fresh context: one blank page, no cookies, no files of earlier episodes."""
        await self.close()
        self._resets += 1
        self._cookies, self._last_url = [], BLANK
        await self._start()

    async def close(self) -> None:
        """Close the context with its pages."""
        await self.window.close()

    async def _start(self) -> None:
        """Open a window with its first page; a dead browser is started again first."""
        for last in (False, True):
            self.window = self._new_window()
            try:
                if not self.browser.alive:
                    await self.browser.restart()
                await self.window.open(self._cookies)
                return
            except Error as error:
                if last or self.browser.alive:
                    self.window = self._new_window()
                    raise BrowserDied(f"no page opens: {first_line(error)}") from None

    async def _recover(self, reason: str, url: str) -> None:
        """Replace what died, the page alone or the browser, and open the URL. BrowserDied if that fails."""
        window = self.window
        self.restarts += 1
        if self.browser.alive and (tab := window.tabs.get(window.active)) is not None:
            window.tabs.pop(tab.tab_id)
            with suppress(Error):
                await asyncio.wait_for(tab.page.close(), PAGE_LIMIT_S)
            await window.open_tab()
        else:
            await self._start()
            self.window.warnings[:0] = window.warnings
        lost = "it was opened again, what was typed is lost"
        self.window.warnings.append(f"{reason}; {lost if url != BLANK else 'a blank page is in its place'}")
        if url != BLANK:
            await self.goto(url)

    # ----------------------------------------------------------------------------------------- for the caller

    async def set_cookie(self, name: str, value: str, *urls: str) -> None:
        """Set a cookie for URLs; it outlives a restart of the browser, not a reset."""
        if self.window.context is None:
            raise BrowserDied("the session is closed")
        cookies: list[Any] = [{"url": url, "name": name, "value": value} for url in urls]
        self._cookies += cookies
        await self.window.context.add_cookies(cookies)

    async def goto(self, url: str) -> ActionResult:
        """Open a URL in the active tab.

        What goes wrong is the result's error and a warning in the next state.
        """
        result = await execute(Action(name="go_to_url", params={"url": url}), self.window)
        if result.error:
            self.window.warnings.append(result.error)
        return result

    async def act(
        self, actions: Sequence[Action], observation: Observation, extractor: Extractor
    ) -> tuple[ActionResult, ...]:
        """Carry out a step's actions in order and return the results of those that were executed.

        The rest is left out after an error, after `done` (which counts only as the first action), when the
        URL or the active tab changed, and before an action on an element that is no longer the node which
        `observation` showed. The extractor's exceptions pass.
        """
        self.window.begin_step(observation, self.engines, extractor)
        results: list[ActionResult] = []
        before = self._place()
        for number, action in enumerate(actions[:MAX_ACTIONS_PER_STEP]):
            stop = await self._stop_before(action, before) if number else None
            if stop:
                left = len(actions) - number
                were = "actions were" if left > 1 else "action was"
                note = f"; {stop}, so {left} more {were} not carried out"
                results[-1] = replace(results[-1], message=results[-1].message + note)
                break
            before = self._place()
            results.append(await execute(action, self.window))
            if results[-1].error or results[-1].is_done:
                break
        return tuple(results)

    def _place(self) -> tuple[str, str]:
        """Return the active tab's id and URL."""
        window = self.window
        tab = window.tabs.get(window.active)
        return window.active, tab.page.url if tab is not None else ""

    async def _stop_before(self, action: Action, before: tuple[str, str]) -> str | None:
        """Return why the next action must not be carried out; wait the pause between two actions."""
        if action.name == "done":
            return "done must stand alone"
        if self.options.pause_s:
            await asyncio.sleep(self.options.pause_s)
        try:
            await self.window.ready()
            if self._place() != before or self.window.tab.loading is not None:
                return "the page changed"
            index = action.params.get("index") or action.params.get("frame_element_index")
            if index:
                await asyncio.wait_for(self.window.target(index).call("check"), PAGE_LIMIT_S)
        except ActionProblem as problem:
            return str(problem)
        except (Error, TimeoutError):
            return "the page does not answer"
        return None

    # ---------------------------------------------------------------------------------------------- observing

    async def observe(self) -> Observation:
        """Return the state of the active tab, with a screenshot in the run folder.

        BrowserDied if no page can be opened any more.
        """
        started, places = time.monotonic(), [BLANK, self._last_url]
        while True:
            try:
                observation = await self._observe()
                return replace(observation, observe_s=round(time.monotonic() - started, 4))
            except (PageDied, ActionProblem) as problem:
                if not places:
                    raise BrowserDied(str(problem)) from None
                # A page that cannot be read is opened again; the second time a blank one takes its place.
                await self._recover(str(problem), places.pop())

    async def _observe(self) -> Observation:
        window, tries = self.window, 0
        while True:
            tries += 1
            try:
                if not window.tabs and window.context is not None and self.browser.alive:
                    await window.open_tab()  # the page closed its own tab
                await window.ready(stop=True)
                tab = window.tab
                reading = read_page(tab.page, tab.book, window.secrets.mask_json)
                read, shot = await asyncio.gather(asyncio.wait_for(reading, PAGE_LIMIT_S), self.screenshot())
                if read.is_pdf:
                    await window.keep_pdf(tab)
                return await self._complete(replace(read, screenshot=shot))
            except TimeoutError:
                raise PageDied("the page did not answer") from None
            except Error as error:
                now = window.tabs.get(window.active)
                if not self.browser.alive or (now is not None and now.crashed):
                    raise PageDied("the page crashed" if self.browser.alive else "the browser died") from None
                if tries == MAX_TRIES:
                    raise PageDied(f"the page cannot be read ({first_line(error)[:100]})") from None
                await asyncio.sleep(0.05)

    async def _complete(self, read: Observation) -> Observation:
        """Add to the page's own observation the tabs, and what happened since the last one."""
        window = self.window
        if window.work:  # a download that is under way is named once it is complete
            await asyncio.wait(window.work, timeout=2)
        tab, mask = window.tab, window.secrets.mask
        tab.title = read.title
        tabs = []
        for other in list(window.tabs.values()):
            if other is not tab:
                with suppress(Error, TimeoutError):  # the title that was known before stays
                    other.title = mask(await asyncio.wait_for(other.page.title(), TITLE_LIMIT_S))
            tabs.append(Tab(tab_id=other.tab_id, url=mask(other.page.url), title=other.title))
        if read.screenshot is None:
            window.warnings.append("there is no screenshot of this page")
        self._last_url = tab.page.url
        url = mask(self._last_url)
        observation = replace(
            read,
            url=url,
            tabs=tuple(tabs),
            active_tab=tab.tab_id,
            viewport=self.browser.options.viewport,
            dialogs=tuple(window.dialogs),
            downloads=tuple(window.downloads),
            warnings=tuple(dict.fromkeys(window.warnings)),
            is_pdf=read.is_pdf or url.split("?")[0].lower().endswith(".pdf"),
            fingerprint=fingerprint(url, tabs, read.nodes, read.scroll_y),
        )
        for told in (window.dialogs, window.downloads, window.warnings):
            told.clear()
        return observation

    async def screenshot(self) -> Image | None:
        """Store a picture of the viewport, once for its content; None if the page gives none in time."""
        kind = self.options.image_format
        settings: dict[str, Any] = {"format": kind, "optimizeForSpeed": True}
        if kind == "jpeg":
            settings["quality"] = JPEG_QUALITY
        try:
            cdp = await self.window.cdp()
            answer = await asyncio.wait_for(cdp.send("Page.captureScreenshot", settings), SCREENSHOT_LIMIT_S)
        except (Error, TimeoutError):
            return None
        data = b64decode(answer["data"])
        digest = sha256_bytes(data)
        path = Path("screenshots") / f"{digest[:16]}.{'jpg' if kind == 'jpeg' else 'png'}"
        whole = self.folder / path
        if not whole.exists():
            whole.parent.mkdir(parents=True, exist_ok=True)
            # A kill in the middle leaves no torn picture under the name of a whole one.
            torn = whole.with_suffix(f".{self.name}.part")
            torn.write_bytes(data)
            torn.replace(whole)
        with Picture.open(BytesIO(data)) as picture:
            width, height = picture.size
        return Image(path=path.as_posix(), sha256=digest, width=width, height=height)
