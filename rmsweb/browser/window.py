"""A window of a browser: one context, its tabs, what happens in them, and when a page is ready.

Purpose: everything about a session that is no observation and no step: tabs and their ids, dialogs,
downloads, the allow-list at work, and the answers that `execute` and `controls` need.

ours: readiness is no fixed sleep: the document is parsed, its requests for data are answered, and nothing
changed for a moment.
ours: alert, confirm and beforeunload are accepted, prompt is dismissed; what was said and done stands in the
next state.
ours: tab ids count 0001, 0002, ... in hexadecimal, in the order in which the tabs were opened.
"""

import asyncio
import time
from base64 import b64decode
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from playwright.async_api import (
    BrowserContext,
    CDPSession,
    Dialog,
    Download,
    Error,
    FileChooser,
    Frame,
    Page,
    Request,
    Route,
)

from rmsweb.browser.chromium import Browser
from rmsweb.browser.controls import ActionProblem, Target, call
from rmsweb.browser.extract import splice_frames, to_markdown
from rmsweb.browser.files import AgentFiles
from rmsweb.browser.guard import BLANK, SEARCH_URLS, Guard, Secrets
from rmsweb.browser.snapshot import SCRIPT, FrameBook
from rmsweb.records import sha256_text

NAVIGATION_WAIT_S = 8.0  # longest wait for a page that an action started to load
PAGE_LIMIT_S = 15.0  # a page that does not answer for so long is taken for dead
_DATA = {"document", "xhr", "fetch", "script"}
MAX_PDF_BYTES = 20_000_000
_FETCH = """async (limit) => {
  const data = new Uint8Array(await (await fetch(location.href)).arrayBuffer());
  let text = "";
  for (let i = 0; data.length <= limit && i < data.length; i += 32768) text += String.fromCharCode(...data.subarray(i, i + 32768));
  return btoa(text);
}"""
_QUIET = "([ms, max, ago]) => (window.__rms ? window.__rms.quiet(ms, max, ago) : 0)"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """What a session does beyond its browser's options."""

    image_format: Literal["png", "jpeg"] = "png"
    image_quality: int = 60  # of a JPEG
    quiet_s: float = 0.05  # without a change of the document
    quiet_limit_s: float = 1.5  # longest wait for that
    pause_s: float = 0.5  # between the actions of a step
    allow_domains: tuple[str, ...] | None = None  # None: those of the browser
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # domain -> name -> value
    uploads: tuple[Path, ...] = ()
    engines: Mapping[str, str] = field(
        default_factory=lambda: SEARCH_URLS
    )  # search engine -> URL with {query}


@dataclass(slots=True, eq=False)
class OpenTab:
    tab_id: str
    page: Page
    book: FrameBook = field(default_factory=FrameBook)
    cdp: CDPSession | None = None
    title: str = ""
    loading: Request | None = None  # a navigation of the main frame that is under way
    crashed: bool = False
    pdf: str = ""  # URL of the PDF that was stored last


class TabbedWindow:
    """A browser context with its tabs. `name` names the folder of the agent's files below `folder`."""

    def __init__(self, browser: Browser, folder: Path, name: str, options: SessionOptions) -> None:
        self.browser, self.folder, self.name, self.options = browser, folder, name, options
        self.guard = Guard(
            options.allow_domains if options.allow_domains is not None else browser.options.allow_domains
        )
        self.secrets, self.engines = Secrets(options.secrets), options.engines
        self._resets = 0
        self._cookies: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self._context: BrowserContext | None = None
        self._tabs: dict[str, OpenTab] = {}
        self._active = ""
        self._count = 0
        self._empty_pages = 0  # tabs that opened for a download and were closed again
        self._keys: dict[int, str] = {}
        self._requests: dict[Request, float] = {}
        self._dialogs: list[str] = []
        self._downloads: list[str] = []
        self._warnings: list[str] = []
        self.file_choosers = 0
        self._work: set[asyncio.Task[None]] = set()
        self._quiet_from = 0.0
        self._opened = 0  # how often the active document had called window.open when it was quiet last

    async def _open_context(self) -> None:
        options = self.browser.options
        width, height = options.viewport
        context = await self.browser.process.new_context(
            viewport={"width": width, "height": height},
            device_scale_factor=1,
            user_agent=options.user_agent,
            locale=options.locale,
            timezone_id=options.timezone,
            ignore_https_errors=options.ignore_https_errors,
            reduced_motion="reduce",
            accept_downloads=True,
        )
        self._context = context
        await context.add_init_script(SCRIPT)
        context.on("page", self._on_page)
        context.on("dialog", self._on_dialog)
        context.on("request", self._on_request)
        context.on("requestfinished", self._on_request_end)
        context.on("requestfailed", self._on_request_end)
        self.browser.judges[self] = lambda url: self.guard.problem(url) is None
        if self.guard.domains is not None:
            await self.browser.judge_redirects()
            await context.route(lambda url: self.guard.problem(url) is not None, self._on_forbidden)
        if self._cookies:
            await context.add_cookies(self._cookies)
        await self.open_tab()

    def _on_page(self, page: Page) -> None:
        if page.url == "" and self._tabs:  # what it was opened for became a download
            self._empty_pages += 1
            self._later(self._close(page))
        else:
            self._register(page)

    async def _close(self, page: Page) -> None:
        with suppress(Error):
            await page.close()

    def _register(self, page: Page) -> OpenTab:
        known = next((tab for tab in self._tabs.values() if tab.page is page), None)
        if known is not None:
            return known
        self._count += 1
        tab = OpenTab(f"{self._count:04x}", page)
        self._tabs[tab.tab_id] = tab
        page.on("close", lambda _: self._forget(tab))
        page.on("crash", lambda _: setattr(tab, "crashed", True))
        page.on("filechooser", self._on_chooser)
        page.on("download", lambda download: self._later(self._save(download)))
        page.on("framenavigated", lambda frame: self._on_navigated(tab, frame))
        return tab

    def _forget(self, tab: OpenTab) -> None:
        self._tabs.pop(tab.tab_id, None)
        if self._active == tab.tab_id:
            self._active = next(reversed(self._tabs), "")

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    # ------------------------------------------------------------------------------------------------- events

    async def _on_dialog(self, dialog: Dialog) -> None:
        accept = dialog.type != "prompt"
        self._dialogs.append(
            self.secrets.mask(f"{dialog.type} {dialog.message!r} ({'accepted' if accept else 'dismissed'})")
        )
        with suppress(Error):
            await (dialog.accept() if accept else dialog.dismiss())

    def _on_chooser(
        self, chooser: FileChooser
    ) -> None:  # that somebody listens keeps the browser's own dialog shut
        self.file_choosers += 1

    def _on_request(self, request: Request) -> None:
        if request.resource_type in _DATA:
            self._requests[request] = time.monotonic()
        if not request.is_navigation_request():
            return
        try:
            page, main = request.frame.page, request.frame.parent_frame is None
        except Error:  # the first request of a new tab has no page yet
            return
        tab = next((tab for tab in self._tabs.values() if tab.page is page), None)
        if tab is not None and main:
            tab.loading = request

    def _on_request_end(self, request: Request) -> None:
        self._requests.pop(request, None)
        if request.is_navigation_request() and (problem := self.guard.problem(request.url)):
            self._warnings.append(f"not opened: {problem}")
        for tab in self._tabs.values():
            if tab.loading is request:
                tab.loading = None

    def _on_navigated(self, tab: OpenTab, frame: Frame) -> None:
        if frame.parent_frame is None:
            tab.loading = None
        if frame.url.startswith("http") and self.guard.problem(frame.url):
            self._later(self._leave(frame, frame.url))

    async def _on_forbidden(self, route: Route) -> None:
        """The allow-list is one of pages and frames; what an allowed page loads for itself passes."""
        with suppress(Error):
            await (
                route.abort("aborted") if route.request.is_navigation_request() else route.continue_()
            )  # the old page stays

    async def _leave(self, frame: Frame, url: str) -> None:
        self._warnings.append(f"left again: {self.guard.problem(url)}")
        with suppress(Error):
            await frame.goto(BLANK)

    async def _save(self, download: Download) -> None:
        path = self.files.download_path(download.suggested_filename)
        path.touch()  # the name is taken from now on
        try:
            await download.save_as(path)
            self._downloads.append(path.name)
        except Error as error:
            path.unlink(missing_ok=True)
            self._warnings.append(
                f"the download of {path.name} failed: {error.message.splitlines()[0][:100]}"
            )

    # ----------------------------------------------------------------------------------- what actions may use

    @property
    def _tab(self) -> OpenTab:
        tab = self._tabs.get(self._active)
        if tab is None:
            raise ActionProblem("there is no open page")
        return tab

    @property
    def page(self) -> Page:
        """The active tab's page."""
        return self._tab.page

    @property
    def files(self) -> AgentFiles:
        """The agent's files of the present episode."""
        name = self.name if self._resets == 0 else f"{self.name}-{self._resets}"
        return AgentFiles(self.folder / "files" / name, self.options.uploads)

    @property
    def tab_ids(self) -> list[str]:
        """Ids of the open tabs, in the order in which they were opened."""
        return list(self._tabs)

    @property
    def active_tab(self) -> str:
        """Id of the tab that is observed and acted on."""
        return self._active

    def target(self, index: int) -> Target:
        """The node behind an index of the observation that the running step was decided on."""
        key = self._keys.get(index)
        if key is None:
            raise ActionProblem(f"there is no element {index} in the state")
        number, node = map(int, key.split(":"))
        book = self._tab.book
        if number not in book.frames:
            raise ActionProblem(f"element {index} is no longer on the page")
        return Target(f"element {index}", book.frames[number], book.tokens[number], node)

    def owner(self, frame: Frame) -> Target:
        """The element that holds a frame, in the parent's document."""
        book, parent = self._tab.book, frame.parent_frame
        if parent is None or frame not in book.owners:
            raise ActionProblem("a frame is no longer on the page")
        return Target("the frame", parent, book.tokens[book.number(parent)], book.owners[frame])

    async def cdp(self) -> CDPSession:
        """The active page's DevTools session."""
        tab = self._tab
        if tab.cdp is None:
            tab.cdp = await tab.page.context.new_cdp_session(tab.page)
        return tab.cdp

    async def settle(self) -> int:
        """Waits until what was just done has shown its effect; returns how often the document has called
        window.open.
        """
        self._quiet_from, self._opened = time.monotonic(), 0
        await self._ready()
        return self._opened

    async def _ready(self, *, stop: bool = False) -> None:
        """Waits until the page is parsed, its requests for data are answered and nothing changed since
        `_quiet_from` for a moment.

        A navigation is waited for NAVIGATION_WAIT_S; with `stop` one that is still not answered is given up.
        TimeoutError where the page hangs.
        """
        limit = time.monotonic() + NAVIGATION_WAIT_S
        soft = time.monotonic() + self.options.quiet_limit_s
        while (now := time.monotonic()) < limit and self._tabs:
            tab = self._tab
            if tab.loading is not None:
                await asyncio.sleep(0.005)
                soft = time.monotonic() + self.options.quiet_limit_s
                continue
            try:
                await self._quiet(tab, soft, limit)
            except Error:  # the document was replaced, or the tab closed itself
                if tab.crashed or not self.browser.alive or time.monotonic() >= soft:
                    return
                await asyncio.sleep(0.01)
                continue
            if tab.loading is not None:
                continue
            now = time.monotonic()
            if now >= soft or not any(
                now - since < self.options.quiet_limit_s for since in self._requests.values()
            ):
                return
            await asyncio.sleep(0.01)
            self._quiet_from = time.monotonic() - self.options.quiet_s / 2
        if stop and self._tabs and self._tab.loading is not None:
            self._warnings.append(
                self.secrets.mask(f"{self._tab.loading.url[:200]} did not answer, so loading it was stopped")
            )
            self._tab.loading = None
            with suppress(Error, TimeoutError):
                await asyncio.wait_for((await self.cdp()).send("Page.stopLoading"), PAGE_LIMIT_S)

    async def _quiet(self, tab: OpenTab, soft: float, limit: float) -> None:
        """Waits for the document's own word that it is quiet.

        Chromium answers no question while a navigation is under way: then not beyond `limit`.
        """
        started = time.monotonic()

        async def ask() -> int:
            await tab.page.wait_for_load_state("domcontentloaded", timeout=max(1.0, (limit - started) * 1000))
            now = time.monotonic()
            times = [self.options.quiet_s, max(0.0, soft - now), now - self._quiet_from]
            return int(await tab.page.main_frame.evaluate(_QUIET, [1000 * t for t in times]))

        asked = asyncio.ensure_future(ask())
        try:
            while not asked.done():
                await asyncio.wait({asked}, timeout=0.05)
                now = time.monotonic()
                if tab.tab_id not in self._tabs or (tab.loading is not None and now >= limit):
                    return
                if tab.loading is None and now - started > PAGE_LIMIT_S:
                    raise TimeoutError
            self._opened = await asked
        finally:
            asked.cancel()

    async def _keep_pdf(self, tab: OpenTab) -> None:
        """Stores the PDF that a tab shows among the agent's files, once for its URL."""
        if tab.pdf == tab.page.url:
            return
        tab.pdf = tab.page.url
        with suppress(Error, TimeoutError):  # a PDF that cannot be had is still shown
            data = await asyncio.wait_for(tab.page.evaluate(_FETCH, MAX_PDF_BYTES), PAGE_LIMIT_S)
            if data:
                path = self.files.download_path(
                    unquote(urlsplit(tab.pdf).path).rsplit("/", 1)[-1] or "document.pdf"
                )
                path.write_bytes(b64decode(data))
                self._downloads.append(path.name)

    async def new_tab_within(self, seconds: float, known: set[str]) -> str | None:
        """Id of a tab that was opened since `known`, waiting for it at most `seconds`."""
        end, empty = time.monotonic() + seconds, self._empty_pages
        while (
            not (new := [tab_id for tab_id in self._tabs if tab_id not in known])
            and time.monotonic() < end
            and self._empty_pages == empty
        ):
            await asyncio.sleep(0.01)
        return new[-1] if new else None

    async def open_tab(self) -> None:
        """Opens a blank tab and makes it the active one."""
        if self._context is None:
            raise ActionProblem("the browser is not running")
        self._active = self._register(await self._context.new_page()).tab_id

    async def switch_tab(self, tab_id: str) -> None:
        """Makes a tab the active one."""
        self._active = tab_id
        page = self.page
        with suppress(Error):  # a tab that closed itself
            await asyncio.wait_for(page.bring_to_front(), PAGE_LIMIT_S)
        await self.settle()

    async def close_tab(self, tab_id: str) -> None:
        """Closes a tab; where it was the active one the tab opened last follows, or a blank one."""
        tab, was_active = self._tabs[tab_id], tab_id == self._active
        await tab.page.close()
        self._forget(tab)
        if not self._tabs:
            await self.open_tab()
        elif was_active:
            await self.switch_tab(self._active)

    async def markdown(self, links: bool) -> str:
        """The whole page with its frames as markdown."""

        async def html(frame: Frame) -> str:
            own: Any = await call(frame, "html")
            inner = {}
            for child in frame.child_frames:
                with suppress(Error):  # a frame that is being loaded has no text
                    inner[await self._tab.book.owner(child)] = await html(child)
            return splice_frames(str(own), inner)

        return self.secrets.mask(
            await asyncio.to_thread(to_markdown, await html(self.page.main_frame), links=links)
        )

    def store_page(self, text: str) -> str:
        """Keeps a page text in the run folder; returns its relative path."""
        path = Path("pages") / f"{sha256_text(text)[:16]}.md"
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text, encoding="utf-8", newline="")
        return path.as_posix()
