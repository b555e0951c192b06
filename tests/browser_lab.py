"""A browser and a web server for the tests of the browser layer: the pages of tests/pages under every
*.localhost name, and a few made answers.
"""

import asyncio
import http.server
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from rmsweb.browser.chromium import Browser, BrowserOptions
from rmsweb.browser.session import Session
from rmsweb.browser.state import render_nodes
from rmsweb.records import Action, ActionResult, Element, Observation

T = TypeVar("T")
PAGES = Path(__file__).parent / "pages"
VIEWPORT = (640, 480)
_SILENCE = threading.Event()  # set when the tests are over
MADE: dict[str, str] = {}  # path -> HTML of pages that a test makes itself


REQUESTS: list[tuple[str, str]] = []  # host and path of every request
REDIRECTS = {
    "to-c": "http://c.localhost/next.html",
    "to-b-to-c": "http://b.localhost/to-c",
    "to-a": "http://a.localhost/next.html",
}


def pdf(text: str) -> bytes:
    """A PDF of one page with a line of text."""
    writer, file, stream = PdfWriter(), BytesIO(), DecodedStreamObject()
    page = writer.add_blank_page(200, 200)
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    fonts = DictionaryObject(
        {
            NameObject("/F1"): DictionaryObject(
                {NameObject(key): NameObject(value) for key, value in font.items()}
            )
        }
    )
    stream.set_data(f"BT /F1 24 Tf 20 100 Td ({text}) Tj ET".encode())
    page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    page[NameObject("/Contents")] = stream
    writer.write(file)
    return file.getvalue()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.split("?")[0].lstrip("/")
        REQUESTS.append((self.headers["Host"].split(":")[0], path))
        if path == "slow":
            time.sleep(0.3)
            self._answer(b"Slow answer", "text/plain")
        elif path == "silent":
            _SILENCE.wait(20)
        elif path == "events":
            self._answer(b": open\n\n", "text/event-stream", length=None)
            _SILENCE.wait(20)
        elif path == "paper.pdf":
            self._answer(pdf("Forty two"), "application/pdf")
        elif path == "attached.pdf":
            self._answer(
                pdf("Forty three"),
                "application/pdf",
                **{"Content-Disposition": 'attachment; filename="report 1.pdf"'},
            )
        elif path == "no-content":
            self._answer(b"", "text/plain", 204)
        elif path == "private":
            self._answer(b"<p>Log in first</p>", "text/html", 401, **{"WWW-Authenticate": 'Basic realm="x"'})
        elif path in REDIRECTS:
            self._answer(b"", "text/plain", 302, Location=REDIRECTS[path])
        elif path in MADE:
            self._answer(MADE[path].encode(), "text/html; charset=utf-8")
        elif (PAGES / path).is_file():
            self._answer(
                (PAGES / path).read_bytes(),
                "text/javascript" if path.endswith(".js") else "text/html; charset=utf-8",
            )
        else:
            self._answer(b"<title>Missing</title><p>no such page</p>", "text/html", 404)

    def _answer(
        self, body: bytes, kind: str, status: int = 200, length: int | None = -1, **headers: str
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Silent."""


async def extractor(query: str, page_text: str, extract_links: bool) -> str:
    """Answers with the text itself."""
    return page_text


class Lab:
    """Synchronous hands on one browser: a session for each test."""

    def __init__(self, port: int, folder: Path) -> None:
        self.folder, self.loop, self._stack = folder, asyncio.new_event_loop(), AsyncExitStack()
        options = BrowserOptions(viewport=VIEWPORT, host_map=f"MAP *.localhost 127.0.0.1:{port}")
        self.browser = self.run(self._stack.enter_async_context(Browser.launch(options)))
        self.session: Session = self.run(Session.open(self.browser, folder, image_format="jpeg", pause_s=0))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of an async call."""
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        """Ends everything."""
        self.run(self.session.close())
        self.run(self._stack.aclose())
        self.loop.close()

    def open(self, page: str, **options: Any) -> Observation:
        """A fresh session on a page; `options` are those of the session."""
        self.run(self.session.close())
        self.session = self.run(
            Session.open(self.browser, self.folder, **({"image_format": "jpeg", "pause_s": 0} | options))
        )
        self.run(self.session.goto(page if "://" in page else f"http://a.localhost/{page}"))
        return self.see()

    def see(self) -> Observation:
        """The state now."""
        return self.run(self.session.observe())

    def act(self, seen: Observation, *actions: Action) -> tuple[ActionResult, ...]:
        """Carries out actions decided on `seen`."""
        return self.run(self.session.act(actions, seen, extractor))

    def one(self, seen: Observation, name: str, **params: Any) -> ActionResult:
        """Carries out one action."""
        return self.act(seen, Action(name=name, params=params))[0]

    def js(self, code: str) -> Any:
        """The value of an expression in the page."""
        return self.run(self.session.window.page.evaluate(code))

    def log(self, *types: str) -> list[Any]:
        """Events that the page's log.js has noted."""
        return [entry for entry in self.js("window.__log") if not types or entry[0] in types]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A browser on the local pages."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    _SILENCE.clear()
    made = Lab(server.server_port, tmp_path_factory.mktemp("run"))
    yield made
    made.close()
    _SILENCE.set()
    server.shutdown()
    server.server_close()
    thread.join()


def find(seen: Observation, *, text: str = "", name: str = "", tag: str = "") -> Element:
    """The one indexed element with that accessible name, name attribute or tag."""
    found = [
        node
        for node in seen.nodes
        if node.index is not None
        and (not text or node.text == text)
        and (not name or node.attributes.get("name") == name)
        and (not tag or node.tag == tag)
    ]
    assert len(found) == 1, (
        text,
        name,
        tag,
        [(node.index, node.tag, node.text) for node in seen.nodes if node.index],
    )
    return found[0]


def index(seen: Observation, text: str = "", **by: str) -> int:
    """Its index."""
    number = find(seen, text=text, **by).index
    assert number is not None
    return number


def lines(seen: Observation) -> list[str]:
    """The state's lines without the edges."""
    return [line.text.rstrip("\n") for line in render_nodes(seen, edges=False)]


def texts(seen: Observation) -> list[str]:
    """What can be read."""
    return [node.text for node in seen.nodes if node.tag == "#text"]


def click(lab: Lab, seen: Observation, text: str = "", **by: str) -> ActionResult:
    """Clicks the element of that name."""
    return lab.one(seen, "click_element_by_index", index=index(seen, text, **by))


def names(seen: Observation) -> list[str]:
    """Names of what has an index."""
    return [node.text for node in seen.nodes if node.index is not None]
