"""The playground without a browser: what the browser layer asks of Chromium, answered from pages' widgets.

Purpose: the whole loop in minutes, with the states of the browser. `Session`, `Window` and every action are
the browser layer's own, so that words, stop rules, indices and errors exist once. Only the engine below them
is another one: a `ReplayBrowser` opens contexts, a context opens tabs, and a tab has the few methods of
Playwright that the browser layer calls. A `Document` answers what act.js and observe.js answer in Chromium.

ours: a page's own scripts are known by what they do (a dropdown that leads on, suggestions by first letter);
of the agent's scripts only those of SCRIPTS run. Where browser and replay differ, the browser is right.
The two are held equal in a viewport that a page fits into (640 x 480 and larger). In a smaller one, heights
may differ by a few pixels, keys scroll at once, and `go_back` does not restore how far a page was scrolled.
"""

import itertools
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urljoin, urlsplit

from playwright.async_api import Error
from playwright.async_api import TimeoutError as Overdue

from rmsweb.browser.chromium import BrowserOptions
from rmsweb.browser.guard import BLANK
from rmsweb.browser.page import CALL
from rmsweb.browser.session import Session
from rmsweb.browser.snapshot import OBSERVE
from rmsweb.browser.window import QUIET
from rmsweb.playground.document import Document, Lead
from rmsweb.playground.screen import draw
from rmsweb.playground.server import Sessions
from rmsweb.playground.sites.page import Page

ERROR_PAGE = "chrome-error://chromewebdata/"
MAX_REDIRECTS = 20
MAX_PICTURES = 300  # kept in memory, for pages that are seen again
SCRIPTS: dict[str, Callable[[Document], str]] = {
    "document.title": lambda document: document.title,
    "document.URL": lambda document: document.url,
    "location.href": lambda document: document.url,
    "window.location.href": lambda document: document.url,
}
_IN_PATH = "/%:@!$&'()*+,;=~[]|"
_IN_QUERY = "/%:@!$&()*+,;=~[]|?{}^`\\"


def normal_url(url: str) -> str:
    """Return a URL as a browser writes it.

    >>> normal_url("http://Shop.localhost:80?q=a b"), normal_url("http://shop.localhost/a?")
    ('http://shop.localhost/?q=a%20b', 'http://shop.localhost/a?')
    """
    scheme, colon, rest = url.partition("://")
    if scheme.lower() not in ("http", "https"):
        return url
    rest, hash_sign, fragment = rest.partition("#")
    place, question, query = rest.partition("?")
    host, _, path = place.partition("/")
    host = host.lower().removesuffix(":80" if scheme.lower() == "http" else ":443")
    query, fragment = quote(query, safe=_IN_QUERY), quote(fragment, safe=_IN_QUERY + "'")
    path = quote(f"/{path}", safe=_IN_PATH)
    return f"{scheme.lower()}{colon}{host}{path}{question}{query}{hash_sign}{fragment}"


def _bare(url: str) -> str:
    """Return a URL without its fragment."""
    return url.partition("#")[0]


def _failure(url: str) -> str:
    """Return why a browser with the playground's host map cannot reach a URL, "" if it can."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host.endswith(".localhost"):
        return "SSL_PROTOCOL_ERROR" if parts.scheme == "https" else ""
    return "CONNECTION_REFUSED" if host == "localhost" or host.startswith("127.") else "NAME_NOT_RESOLVED"


@dataclass(frozen=True, slots=True)
class Response:
    """What a tab got for a URL."""

    status: int


class Context:
    """A browser context: cookies, and the tabs that it opens."""

    def __init__(self, browser: "ReplayBrowser") -> None:
        self.browser, self.cookies = browser, dict[str, str]()
        self.handlers: dict[str, Callable[[Any], object]] = {}

    async def add_init_script(self, script: str) -> None:
        """Do nothing: a document answers without scripts."""

    def on(self, event: str, handler: Callable[[Any], object]) -> None:
        """Call `handler` for each tab that opens; other events do not happen."""
        self.handlers[event] = handler

    async def add_cookies(self, cookies: list[dict[str, str]]) -> None:
        """Keep cookies by host."""
        self.cookies |= {urlsplit(cookie["url"]).netloc: cookie["value"] for cookie in cookies}

    async def new_page(self) -> "ReplayTab":
        """Open a blank tab."""
        return self.open(None)

    def open(self, lead: Lead | None) -> "ReplayTab":
        """Open a tab, and in it what a link leads to."""
        tab = ReplayTab(self)
        if lead:
            tab.entries.clear()
            with suppress(Error):
                tab.show(lead)
        self.handlers["page"](tab)
        return tab

    async def new_cdp_session(self, tab: "ReplayTab") -> "ReplayTab":
        """Return the tab, which answers DevTools' commands."""
        return tab

    async def close(self) -> None:
        """Do nothing: a context holds nothing that must be freed."""

    def request(self, url: str, fields: Mapping[str, str] | None) -> tuple[str, Page]:
        """Return what a URL leads to, and its own URL; `fields` are those of a POST.

        Raises Playwright's Error where a browser reaches nothing.
        """
        _, hash_sign, fragment = url.partition("#")
        body = dict(fields or {})
        for _ in range(MAX_REDIRECTS):
            if failure := _failure(url):
                raise Error(f"Page.go_back: net::ERR_{failure}")
            parts = urlsplit(url)
            host = parts.hostname or ""
            key = self.cookies.get(host, f"demo-{host.split('.')[0]}")
            params = dict(parse_qsl(parts.query, keep_blank_values=True)) | body
            answer = self.browser.sites.request(key, host, parts.path, params)
            if isinstance(answer, Page):
                return url, answer
            url, body = urljoin(url, answer) + hash_sign + fragment, {}
        raise Error("Page.go_back: net::ERR_TOO_MANY_REDIRECTS")


class Keyboard:
    """The keyboard of a tab."""

    def __init__(self, tab: "ReplayTab") -> None:
        self.tab, self.held = tab, list[str]()

    async def down(self, key: str) -> None:
        """Hold a key."""
        self.held.append(key)

    async def up(self, key: str) -> None:
        """Let a key go."""
        self.held.remove(key)

    async def press(self, keys: str) -> None:
        """Press a key or a chord in Playwright's names."""
        *held, key = keys.split("+") if len(keys) > 1 else [keys]
        self.tab.document.press(key, tuple(held))
        self.tab.follow("Control" in held)

    async def type(self, text: str) -> None:
        """Type a text letter by letter."""
        for letter in text:
            await self.press({" ": "Space", "\r": "Enter"}.get(letter, letter))

    async def insert_text(self, text: str) -> None:
        """Put a text into the focused field."""
        self.tab.document.insert(text)


class ReplayTab:
    """A tab, and all that Playwright calls page, frame, mouse and DevTools session of it.

    A click, a key or a choice that leads to another document takes effect when the page is waited for. As in
    a browser, the old document still answers until then.
    """

    parent_frame = None
    child_frames: tuple[()] = ()

    def __init__(self, context: Context) -> None:
        self.context, self.browser = context, context.browser
        self.entries, self.document = [BLANK], self._document(BLANK, None)
        self.handlers: dict[str, Callable[[Any], object]] = {}
        self.keyboard, self.mouse, self.main_frame, self.frames = Keyboard(self), self, self, [self]

    def _document(self, url: str, page: Page | None) -> Document:
        return Document(url, page, f"d{next(self.browser.numbers)}", self.browser.options.viewport)

    @property
    def url(self) -> str:
        """The document's URL."""
        return self.document.url

    async def title(self) -> str:
        """Return the document's title."""
        return self.document.title

    def on(self, event: str, handler: Callable[[Any], object]) -> None:
        """Call `handler` when the tab is closed; other events do not happen."""
        self.handlers[event] = handler

    async def bring_to_front(self) -> None:
        """Do nothing: there is no window."""

    async def close(self) -> None:
        """Close the tab."""
        self.handlers["close"](self)

    # ------------------------------------------------------------------------------------------- navigation

    def _enter(self, url: str, document: Document, replace: bool) -> None:
        """Show a document, as a new entry of the history or in place of the newest."""
        if replace and self.entries:
            self.entries.pop()
        self.entries.append(url)
        self.document = document

    def show(self, lead: Lead, *, replace: bool = False) -> int:
        """Show what a URL leads to and return its status.

        A document that cannot be had leaves the browser's error page. Raises Playwright's Error then.
        """
        try:
            url, page = self.context.request(lead.url, lead.fields)
        except Error:
            self._enter(lead.url, self._document(ERROR_PAGE, None), replace)
            raise
        self._enter(url, self._document(url, page), replace)
        return page.status

    async def goto(self, url: str, **_: object) -> Response | None:
        """Open a URL as if typed; the same one again is loaded anew."""
        url = normal_url(url)
        again = url == self.entries[-1]
        if url == BLANK:
            self._enter(url, self._document(url, None), again)
            return None
        if "#" in url and _bare(url) == _bare(self.url):
            self.document.url = url
            self._enter(url, self.document, again)
            return None
        return Response(self.show(Lead(url), replace=again))

    async def go_back(self, **_: object) -> None:
        """Load the entry before the newest."""
        self.entries.pop()
        url = self.entries[-1]
        if url != self.url and _bare(url) == _bare(self.url):
            self.document.url = url
        else:
            self.show(Lead(url), replace=True)

    def follow(self, ctrl: bool = False) -> None:
        """Open a new tab where the last action leads to one."""
        lead = self.document.lead
        if lead and (ctrl or lead.new_tab):
            self.document.lead = None
            self.context.open(lead)

    async def wait_for_load_state(self, *_: object, **__: object) -> None:
        """Go where the last action leads."""
        if lead := self.document.lead:
            with suppress(Error):
                self.show(lead, replace=lead.link and lead.url == self.url)

    # ------------------------------------------------------------------------------- what the layer asks for

    async def evaluate(self, script: str, argument: Any = None) -> Any:
        """Answer a script of the browser layer, or one of the agent's that SCRIPTS knows."""
        if script == CALL:
            return self.document.answer(*argument)
        if script == OBSERVE:
            return self.document.report()
        if script == QUIET:
            return 0  # how often window.open was called
        known = SCRIPTS.get(script.strip().removeprefix("return ").rstrip("; "))
        if known is None:
            raise Error("Page.evaluate: Error: without a browser, scripts do not run")
        return known(self.document)

    async def evaluate_handle(self, *_: object) -> "ReplayTab":
        """Look for a file field."""
        return self

    def as_element(self) -> None:
        """Return None: no page has a file field."""

    @asynccontextmanager
    async def expect_file_chooser(self, **_: object) -> AsyncIterator[None]:
        """Raise Playwright's TimeoutError at the end: no page asks for a file."""
        yield
        raise Overdue("no file chooser")

    async def move(self, x: float, y: float) -> None:
        """Move the mouse, which changes nothing."""

    async def down(self) -> None:
        """Press the mouse button, which alone changes nothing."""

    async def up(self) -> None:
        """Click what the browser layer aimed at."""
        if self.document.aim:
            self.document.click(self.document.aim)
        self.follow("Control" in self.keyboard.held)

    async def send(self, method: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Answer a command of DevTools: the history, or a screenshot."""
        if method == "Page.captureScreenshot":
            return {"data": b64encode(self.browser.picture(self.document, (settings or {})["format"]))}
        entries = [{"url": url} for url in self.entries]
        return {"currentIndex": len(entries) - 1, "entries": entries}


class ReplayBrowser:
    """A browser for the playground's sites alone."""

    alive = True

    def __init__(self, sites: Sessions, options: BrowserOptions) -> None:
        self.sites, self.options, self.process = sites, options, self
        self.guards, self.restarts, self.sessions = set[object](), 0, 0
        self.numbers = itertools.count(1)  # of documents
        self._pictures: dict[tuple[object, ...], bytes] = {}

    async def new_context(self, **_: object) -> Context:
        """Open a context without cookies."""
        return Context(self)

    def picture(self, document: Document, kind: str) -> bytes:
        """Return a screenshot, drawn once for what it shows."""
        height, shown = document.full, [node for node in document.nodes if node.shown]
        look = tuple((node.tag, node.text, node.value, node.box) for node in shown)
        key = (kind, document.title, document.scroll, height, look)
        if key not in self._pictures:
            if len(self._pictures) >= MAX_PICTURES:
                self._pictures.clear()
            size = self.options.viewport
            self._pictures[key] = draw(document.page, shown, size, document.scroll, kind)
        return self._pictures[key]


def open_session(browser: ReplayBrowser, folder: Path, **fields: Any) -> Session:
    """Return a session of the browser layer without a page; `fields` are those of `Session`."""
    stand_in: Any = browser
    return Session(stand_in, folder, pause_s=0.0, waits=False, **fields)
