"""A window of a browser: one context, its tabs, what happens in them, and when a page is ready.

Purpose: everything about a session that is no observation and no step: tabs and their ids, dialogs,
downloads, the allow-list at work, and the answers that `execute` and `controls` need. A session that is reset
or recovers gets a new window.

ours: a page is ready, without a fixed sleep, once it is parsed, has its data, and is still for a moment.
ours: alert, confirm and beforeunload are accepted, prompt is dismissed; the next state says so.
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
from rmsweb.browser.extract import splice_frames, to_markdown
from rmsweb.browser.files import AgentFiles
from rmsweb.browser.guard import BLANK, SEARCH_URLS, Guard, Secrets
from rmsweb.browser.page import SCRIPT, ActionProblem, Target, call, first_line
from rmsweb.browser.protocol import Extractor
from rmsweb.browser.snapshot import FrameBook
from rmsweb.records import Observation

NAVIGATION_WAIT_S = 8.0  # longest wait for a page that an action started to load
QUIET_S = 0.05  # a document without a change for so long is ready
PAGE_LIMIT_S = 15.0  # a page that does not answer for so long is taken for dead
_DATA = {"document", "xhr", "fetch", "script"}
LOCALE = "en-US"
MAX_PDF_BYTES = 20_000_000
_FETCH = """async (limit) => {
  const data = new Uint8Array(await (await fetch(location.href)).arrayBuffer());
  let text = "";
  for (let i = 0; data.length <= limit && i < data.length; i += 32768)
    text += String.fromCharCode(...data.subarray(i, i + 32768));
  return btoa(text);
}"""
QUIET = "([ms, max, ago]) => (window.__rms ? window.__rms.quiet(ms, max, ago) : 0)"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """What a session does beyond its browser's options."""

    image_format: Literal["png", "jpeg"] = "png"
    quiet_limit_s: float = 1.5  # longest wait for a page that keeps changing
    pause_s: float = 0.5  # between the actions of a step
    waits: bool = True  # False: `wait` takes no time, where nothing can happen meanwhile
    allow_domains: tuple[str, ...] | None = None  # None: those of the browser
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # domain -> name -> value
    uploads: tuple[Path, ...] = ()
    engines: Mapping[str, str] = field(default_factory=lambda: SEARCH_URLS)  # name -> URL with {query}


@dataclass(slots=True, eq=False)
class OpenTab:
    """One tab, with what is remembered of its page."""

    tab_id: str
    page: Page
    book: FrameBook = field(default_factory=FrameBook)
    cdp: CDPSession | None = None
    title: str = ""
    loading: Request | None = None  # a navigation of the main frame that is under way
    crashed: bool = False
    pdf: str = ""  # URL of the PDF that was stored last


async def nobody(query: str, page_text: str, extract_links: bool) -> str:
    """Refuse an extraction that no step asked for."""
    raise ActionProblem("there is nobody to answer an extraction")


@dataclass(frozen=True, slots=True)
class Step:
    """What the actions of one step refer to."""

    keys: Mapping[int, str] = field(default_factory=dict)  # index in the observation -> node key
    engines: Mapping[str, str] = field(default_factory=dict)
    extractor: Extractor = nobody


class Window:
    """A browser context with its tabs, from `open` to `close`.

    `folder` is the run folder. `guard` and `secrets` are the session's, `files` are the agent's own.
    """

    def __init__(
        self,
        browser: Browser,
        folder: Path,
        options: SessionOptions,
        guard: Guard,
        files: AgentFiles,
    ) -> None:
        self.browser, self.folder, self.options = browser, folder, options
        self.guard, self.files, self.secrets = guard, files, Secrets(options.secrets)
        self.context: BrowserContext | None = None
        self.tabs: dict[str, OpenTab] = {}  # in the order in which they were opened
        self.active = ""  # id of the tab that is observed and acted on
        self.dialogs: list[str] = []  # since the last observation, as downloads and warnings
        self.downloads: list[str] = []
        self.warnings: list[str] = []
        self.file_choosers = 0  # how often a page has asked for a file
        self.step = Step()
        self.work: set[asyncio.Task[None]] = set()  # downloads and the like that are under way
        self._count = 0
        self._empty_pages = 0  # tabs that opened for a download and were closed again
        self._requests: dict[Request, float] = {}
        self._quiet_from = 0.0
        self._opened = 0  # how often the active document had called window.open when it was quiet last

    async def open(self, cookies: list[Any]) -> None:
        """Open the context and its first page. Playwright's Error if the browser does not let it."""
        options = self.browser.options
        width, height = options.viewport
        context = await self.browser.process.new_context(
            viewport={"width": width, "height": height},
            device_scale_factor=1,
            user_agent=options.user_agent,
            locale=LOCALE,
            reduced_motion="reduce",
            accept_downloads=True,
        )
        self.context = context
        await context.add_init_script(SCRIPT)
        context.on("page", self._on_page)
        context.on("dialog", self._on_dialog)
        context.on("request", self._on_request)
        context.on("requestfinished", self._on_request_end)
        context.on("requestfailed", self._on_request_end)
        self.browser.guards.add(self.guard)
        if self.guard.domains is not None:
            await self.browser.judge_redirects()
            await context.route(lambda url: self.guard.problem(url) is not None, self._on_forbidden)
        if cookies:
            await context.add_cookies(cookies)
        await self.open_tab()

    async def close(self) -> None:
        """Close the context with its pages."""
        for task in self.work:
            task.cancel()
        self.browser.guards.discard(self.guard)
        context, self.context, self.tabs = self.context, None, {}
        if context is not None:
            with suppress(Error):
                await context.close()

    def _on_page(self, page: Page) -> None:
        if page.url == "" and self.tabs:  # it was opened for something that became a download
            self._empty_pages += 1
            self._later(self._close(page))
        else:
            self._register(page)

    async def _close(self, page: Page) -> None:
        with suppress(Error):
            await page.close()

    def _tab_of(self, page: Page) -> OpenTab | None:
        return next((tab for tab in self.tabs.values() if tab.page is page), None)

    def _register(self, page: Page) -> OpenTab:
        known = self._tab_of(page)
        if known is not None:
            return known
        self._count += 1
        tab = OpenTab(f"{self._count:04x}", page)
        self.tabs[tab.tab_id] = tab
        page.on("close", lambda _: self.forget(tab))
        page.on("crash", self._on_crash)
        page.on("filechooser", self._on_chooser)
        page.on("download", lambda download: self._later(self._save(download)))
        page.on("framenavigated", lambda frame: self._on_navigated(tab, frame))
        return tab

    def forget(self, tab: OpenTab) -> None:
        """Drop a tab; if it was the active one, the tab opened last follows."""
        self.tabs.pop(tab.tab_id, None)
        if self.active == tab.tab_id:
            self.active = next(reversed(self.tabs), "")

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.work.add(task)
        task.add_done_callback(self.work.discard)

    # ------------------------------------------------------------------------------------------------- events

    def _on_crash(self, page: Page) -> None:
        tab = self._tab_of(page)
        if tab is not None:
            tab.crashed = True

    async def _on_dialog(self, dialog: Dialog) -> None:
        accept = dialog.type != "prompt"
        answer = "accepted" if accept else "dismissed"
        self.dialogs.append(self.secrets.mask(f"{dialog.type} {dialog.message!r} ({answer})"))
        with suppress(Error):
            await (dialog.accept() if accept else dialog.dismiss())

    def _on_chooser(self, chooser: FileChooser) -> None:
        self.file_choosers += 1  # a listener alone keeps the browser's own dialog shut

    def _on_request(self, request: Request) -> None:
        if request.resource_type in _DATA:
            self._requests[request] = time.monotonic()
        if not request.is_navigation_request():
            return
        try:
            page, main = request.frame.page, request.frame.parent_frame is None
        except Error:  # the first request of a new tab has no page yet
            return
        tab = self._tab_of(page)
        if tab is not None and main:
            tab.loading = request

    def _on_request_end(self, request: Request) -> None:
        self._requests.pop(request, None)
        if request.is_navigation_request() and (problem := self.guard.problem(request.url)):
            self.warnings.append(f"not opened: {problem}")
        for tab in self.tabs.values():
            if tab.loading is request:
                tab.loading = None

    def _on_navigated(self, tab: OpenTab, frame: Frame) -> None:
        if frame.parent_frame is None:
            tab.loading = None
        if frame.url.startswith("http") and (problem := self.guard.problem(frame.url)):
            self._later(self._leave(frame, problem))

    async def _on_forbidden(self, route: Route) -> None:
        """Apply the allow-list to pages and frames; what an allowed page loads for itself passes."""
        with suppress(Error):
            if route.request.is_navigation_request():
                await route.abort("aborted")  # the old page stays
            else:
                await route.continue_()

    async def _leave(self, frame: Frame, problem: str) -> None:
        self.warnings.append(f"left again: {problem}")
        with suppress(Error):
            await frame.goto(BLANK)

    async def _save(self, download: Download) -> None:
        path = self.files.download_path(download.suggested_filename)
        path.touch()  # the name is taken from now on
        try:
            await download.save_as(path)
            self.downloads.append(path.name)
        except Error as error:
            path.unlink(missing_ok=True)
            self.warnings.append(f"the download of {path.name} failed: {first_line(error)[:100]}")

    # ----------------------------------------------------------------------------------- what actions may use

    @property
    def tab(self) -> OpenTab:
        """The active tab; ActionProblem if no page is open."""
        tab = self.tabs.get(self.active)
        if tab is None:
            raise ActionProblem("there is no open page")
        return tab

    @property
    def page(self) -> Page:
        """The active tab's page."""
        return self.tab.page

    def begin_step(self, observation: Observation, engines: Mapping[str, str], extractor: Extractor) -> None:
        """Let the following actions refer to this observation."""
        keys = {node.index: node.node_key for node in observation.nodes if node.index is not None}
        self.step = Step(keys, engines, extractor)

    def target(self, index: int) -> Target:
        """Return the node behind an index of the observation that the running step was decided on."""
        key = self.step.keys.get(index)
        if key is None:
            raise ActionProblem(f"there is no element {index} in the state")
        number, node = map(int, key.split(":"))
        book = self.tab.book
        if number not in book.frames:
            raise ActionProblem(f"element {index} is no longer on the page")
        return Target(f"element {index}", book.frames[number], book.tokens[number], node)

    def owner(self, frame: Frame) -> Target:
        """Return the element that holds a frame, in the parent's document."""
        book, parent = self.tab.book, frame.parent_frame
        if parent is None or frame not in book.owners:
            raise ActionProblem("a frame is no longer on the page")
        return Target("the frame", parent, book.tokens[book.number(parent)], book.owners[frame])

    async def cdp(self) -> CDPSession:
        """Return the active page's DevTools session."""
        tab = self.tab
        if tab.cdp is None:
            tab.cdp = await tab.page.context.new_cdp_session(tab.page)
        return tab.cdp

    async def settle(self) -> int:
        """Wait until the last action has shown its effect; return how often it called window.open."""
        self._quiet_from, self._opened = time.monotonic(), 0
        await self.ready()
        return self._opened

    async def ready(self, *, stop: bool = False) -> None:
        """Wait until the page is parsed, its data has come and nothing changed for a moment.

        A navigation is waited for NAVIGATION_WAIT_S; with `stop`, one that still has no answer is given up.
        TimeoutError if the page hangs.
        """
        limit = time.monotonic() + NAVIGATION_WAIT_S
        soft = time.monotonic() + self.options.quiet_limit_s
        while time.monotonic() < limit and self.tabs:
            tab = self.tab
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
            young = (now - since < self.options.quiet_limit_s for since in self._requests.values())
            if now >= soft or not any(young):
                return
            await asyncio.sleep(0.01)
            self._quiet_from = time.monotonic() - QUIET_S / 2
        if stop and self.tabs and self.tab.loading is not None:
            url = self.tab.loading.url[:200]
            self.warnings.append(self.secrets.mask(f"{url} did not answer, so loading it was stopped"))
            self.tab.loading = None
            with suppress(Error, TimeoutError):
                await asyncio.wait_for((await self.cdp()).send("Page.stopLoading"), PAGE_LIMIT_S)

    async def _quiet(self, tab: OpenTab, soft: float, limit: float) -> None:
        """Ask the page to say when it is quiet.

        evaluate() blocks during a navigation, so give up at `limit`.
        """
        started = time.monotonic()

        async def ask() -> int:
            await tab.page.wait_for_load_state("domcontentloaded", timeout=max(1.0, (limit - started) * 1000))
            now = time.monotonic()
            times = [QUIET_S, max(0.0, soft - now), now - self._quiet_from]
            return int(await tab.page.main_frame.evaluate(QUIET, [1000 * t for t in times]))

        asked = asyncio.ensure_future(ask())
        try:
            while not asked.done():
                await asyncio.wait({asked}, timeout=0.05)
                now = time.monotonic()
                if tab.tab_id not in self.tabs or (tab.loading is not None and now >= limit):
                    return
                if tab.loading is None and now - started > PAGE_LIMIT_S:
                    raise TimeoutError
            self._opened = await asked
        finally:
            asked.cancel()

    async def keep_pdf(self, tab: OpenTab) -> None:
        """Store the PDF that a tab shows among the agent's files, once for its URL."""
        if tab.pdf == tab.page.url:
            return
        tab.pdf = tab.page.url
        with suppress(Error, TimeoutError):  # a PDF that cannot be had is still shown
            data = await asyncio.wait_for(tab.page.evaluate(_FETCH, MAX_PDF_BYTES), PAGE_LIMIT_S)
            if data:
                name = unquote(urlsplit(tab.pdf).path).rsplit("/", 1)[-1]
                path = self.files.download_path(name or "document.pdf")
                path.write_bytes(b64decode(data))
                self.downloads.append(path.name)

    async def new_tab_within(self, seconds: float, known: set[str]) -> str | None:
        """Wait at most `seconds` for a tab that is not among `known`; return its id."""
        end, empty = time.monotonic() + seconds, self._empty_pages
        while (
            not (new := [tab_id for tab_id in self.tabs if tab_id not in known])
            and time.monotonic() < end
            and self._empty_pages == empty
        ):
            await asyncio.sleep(0.01)
        return new[-1] if new else None

    async def open_tab(self) -> None:
        """Open a blank tab and make it the active one."""
        if self.context is None:
            raise ActionProblem("the browser is not running")
        self.active = self._register(await self.context.new_page()).tab_id

    async def switch_tab(self, tab_id: str) -> None:
        """Make a tab the active one."""
        self.active = tab_id
        page = self.page
        with suppress(Error):  # a tab that closed itself
            await asyncio.wait_for(page.bring_to_front(), PAGE_LIMIT_S)
        await self.settle()

    async def close_tab(self, tab_id: str) -> None:
        """Close a tab; if it was the active one, the tab opened last follows, or a blank one."""
        tab, was_active = self.tabs[tab_id], tab_id == self.active
        await tab.page.close()
        self.forget(tab)
        if not self.tabs:
            await self.open_tab()
        elif was_active:
            await self.switch_tab(self.active)

    async def markdown(self, links: bool) -> str:
        """Return the whole page with its frames as markdown."""

        async def html(frame: Frame) -> str:
            own: str = await call(frame, "html")
            inner = {}
            for child in frame.child_frames:
                with suppress(Error):  # a frame that is being loaded has no text
                    inner[await self.tab.book.owner(child)] = await html(child)
            return splice_frames(own, inner)

        source = await html(self.page.main_frame)
        return self.secrets.mask(await asyncio.to_thread(to_markdown, source, links=links))
