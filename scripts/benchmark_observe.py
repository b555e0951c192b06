"""How long a state takes: `observe` on the playground's pages, on the local pages of the tests and on a
generated page of 20,000 elements.

A line says for a settled page, median of the repeats: `median_s` of observe() with its screenshot,
`screenshot_s` of the screenshot alone (the two are taken at the same time), and `quiet_s` of the wait for a
page on which something was just done, which a settled page does not cost.
"""

import asyncio
import http.server
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from rmsweb.browser.chromium import Browser, BrowserOptions
from rmsweb.browser.session import Session
from rmsweb.playground.environment import PlaygroundEnvironment
from rmsweb.playground.tasks import TEMPLATES, make_worlds

REPEATS = 7
PAGES = Path(__file__).resolve().parent.parent / "tests" / "pages"
ROWS = 3333  # of six elements each
ROW = "<tr><td>{0}<td><a href='#{0}'>Item {0}</a><td><button>Buy</button>"


@contextmanager
def served(pages: dict[str, bytes], root: Path) -> Iterator[int]:
    """A web server on a free loopback port for some made pages and the files below `root`; gives the port."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(root))

        def do_GET(self) -> None:
            body = pages.get(unquote(urlsplit(self.path).path).lstrip("/"))
            if body is None:
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Silent."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def median_s(work: Callable[[], Awaitable[object]], repeats: int = REPEATS) -> float:
    """Median of the seconds that a call takes."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        await work()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times), 4)


async def measure(session: Session, page: str, repeats: int = REPEATS) -> dict[str, Any]:
    """The line of the page that the session shows."""
    await session.window.settle()
    seen = await session.observe()
    return {
        "benchmark": "observe",
        "page": page,
        "nodes": seen.page_stats["total elements"],
        "indexed": seen.page_stats["interactive"],
        "median_s": await median_s(session.observe, repeats),
        "screenshot_s": await median_s(session.screenshot, repeats),
        "quiet_s": await median_s(session.window.settle, repeats),
    }


async def _playground(folder: Path, found: list[dict[str, Any]]) -> None:
    """Every kind of page that is a few links away from a task's start page, once."""
    environment, seen = PlaygroundEnvironment(), set()
    await environment.start()
    try:
        async with Browser.launch(BrowserOptions(host_map=environment.host_map)) as browser:
            session = await Session.open(browser, folder)
            for world in make_worlds("train", len(TEMPLATES)):
                ahead = [await environment.reset(session, world.task())]
                for url in ahead:
                    await session.goto(url)
                    title = await session.window.page.title()
                    if title in seen:
                        continue
                    seen.add(title)
                    found.append(await measure(session, f"playground: {title}"))
                    links = await session.window.page.eval_on_selector_all(
                        "a[href]", "(all) => all.map((a) => a.getAttribute('href'))"
                    )
                    ahead += [
                        link
                        for path in links
                        if (link := urljoin(session.window.page.url, path)) not in ahead
                    ]
            await session.close()
    finally:
        await environment.stop()


async def _local(folder: Path, found: list[dict[str, Any]]) -> None:
    big = f"<!doctype html><title>Big</title><table>{''.join(ROW.format(number) for number in range(ROWS))}</table>".encode()  # noqa: E501
    with served({"generated-20000.html": big}, PAGES) as port:
        async with Browser.launch(BrowserOptions(host_map=f"MAP *.localhost 127.0.0.1:{port}")) as browser:
            for name in [*sorted(path.name for path in PAGES.glob("*.html")), "generated-20000.html"]:
                session = await Session.open(browser, folder)
                await session.goto(f"http://a.localhost/{name}")
                found.append(await measure(session, name))
                await session.close()


def observe() -> list[dict[str, Any]]:
    """A line for each page, in a viewport of 1280 x 800."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_playground(Path(folder), found))
        asyncio.run(_local(Path(folder), found))
    return found
