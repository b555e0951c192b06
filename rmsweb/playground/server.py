"""The playground's web server: every site on one loopback port, told apart by host name.

Purpose: Chromium maps *.localhost to this port, so URLs carry no port. A cookie selects the session, which
the environment opens. A request without a known session gets a demo world, so that a person can look around.
"""

import itertools
import threading
import time
from collections.abc import Callable
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from rmsweb.playground.sites import SITES, SiteSession
from rmsweb.playground.sites.page import Page, render_html
from rmsweb.playground.sites.state import SiteState
from rmsweb.playground.tasks import TEMPLATES, World, make_world

COOKIE = "playground"
SLOW_S = 0.5  # delay of a site in trouble


class Sessions:
    """The sites with their sessions, each under the value of its cookie."""

    def __init__(self) -> None:
        self.sessions: dict[str, SiteSession] = {}
        self._numbers, self._lock = itertools.count(1), threading.Lock()

    def open(self, world: World, trouble: float = 0.0) -> str:
        """Open a session in a world and return its cookie's value.

        Args: trouble: share of the pages that answer late and with status 503 at first.
        """
        with self._lock:
            key = f"s{next(self._numbers)}"
            self.sessions[key] = SiteSession(world, trouble)
        return key

    def request(self, key: str, host: str, path: str, params: dict[str, str]) -> Page | str:
        """Answer one request of a session; requests are answered one at a time."""
        with self._lock:
            site = host.split(".")[0]
            if key not in self.sessions:  # a person without a session: the first task of that site
                template = next((name for name in TEMPLATES if name.startswith(site)), TEMPLATES[0])
                world = make_world(template, 0, "train")
                self.sessions[key] = SiteSession(world, state=SiteState(is_person=True))
            return self.sessions[key].request(host, path, params)


class Server(Sessions):
    """Sites and sessions behind an HTTP server on 127.0.0.1; port 0 takes a free one."""

    def __init__(self, port: int = 0) -> None:
        super().__init__()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )

    def start(self) -> "Server":
        """Begin to serve."""
        self._thread.start()
        return self

    def wait(self) -> None:
        """Serve until the process is interrupted."""
        self._thread.join()

    def stop(self) -> None:
        """Stop serving and free the port."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self, body: Callable[[], dict[str, str]]) -> None:
            parts = urlsplit(self.path)
            host = self.headers.get("Host", "").split(":")[0]
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
            key = cookie.value if cookie else f"demo-{host.split('.')[0]}"
            params = dict(parse_qsl(parts.query, keep_blank_values=True)) | body()
            answer: Page | str = (
                "/"
                if host.split(".")[0] not in SITES and parts.path == "/favicon.ico"
                else server.request(key, host, parts.path, params)
            )
            content = b""
            if isinstance(answer, Page):
                if answer.status == 503:
                    time.sleep(SLOW_S)
                # a person's links to other sites keep the port
                _, colon, port = self.headers.get("Host", "").partition(":")
                content = render_html(answer).replace(".localhost/", f".localhost{colon}{port}/").encode()
            self.send_response(answer.status if isinstance(answer, Page) else 303)
            if isinstance(answer, str):
                self.send_header("Location", answer)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self._respond(dict)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            data = self.rfile.read(length).decode("utf-8", "replace")
            self._respond(lambda: dict(parse_qsl(data, keep_blank_values=True)))

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: the browser's requests are not the user's business."""

    return Handler
