"""A real Chromium that several sessions share: find it, start it, and start it again after it died.

Purpose: the process below `session`. Flags turn off what talks to the network by itself or makes one run
differ from the next.

ours: the browser may be any Chromium or Chrome that Playwright can drive.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from playwright.async_api import Browser as Process
from playwright.async_api import CDPSession, Error, Playwright, async_playwright

from rmsweb.browser.guard import Guard
from rmsweb.browser.page import first_line

FLAGS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-client-side-phishing-detection",
    "--disable-features=Translate,MediaRouter,OptimizationHints,AutofillServerCommunication,PaintHolding,"
    "HttpsUpgrades,HttpsFirstBalancedModeAutoEnable",
    "--disable-quic",
    "--disable-gpu",
    "--metrics-recording-only",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-pings",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
_COMMANDS = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
START_LIMIT_S = 60.0


class BrowserDied(Exception):
    """The browser is gone and could not be started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BrowserOptions:
    """How the browser is started and how its pages look."""

    executable: str | None = None  # None: find_chromium()
    headless: bool = True
    host_map: str | None = None  # value of --host-resolver-rules, such as "MAP *.localhost 127.0.0.1:8123"
    viewport: tuple[int, int] = (1280, 800)  # CSS px; one device pixel each
    user_agent: str | None = None
    allow_domains: tuple[str, ...] | None = None  # None: any host


def _installed_by_playwright() -> list[Path]:
    """Chromium builds in Playwright's own folder: the headless shell first, the newest build first."""
    root = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    patterns = ("chromium_headless_shell-*/*/*headless?shell", "chromium-*/*/chrome")
    return [path for pattern in patterns for path in sorted(root.glob(pattern), reverse=True)]


def find_chromium() -> Path:
    """Return the browser to use: $RMSWEB_CHROMIUM, then Playwright's builds, then PATH.

    FileNotFoundError if no browser is found.
    """
    given = os.environ.get("RMSWEB_CHROMIUM")
    if given:
        if not Path(given).is_file():
            raise FileNotFoundError(
                f"RMSWEB_CHROMIUM={given} is not a file; expected the path of a Chromium or Chrome"
            )
        return Path(given)
    found = [*_installed_by_playwright(), *(Path(path) for name in _COMMANDS if (path := shutil.which(name)))]
    if not found:
        raise FileNotFoundError(
            "no Chromium found: run scripts/setup.sh, or set RMSWEB_CHROMIUM to the path of a Chromium or "
            "Chrome"
        )
    return found[0]


class Browser:
    """A running Chromium.

    `launch` starts it; `restart` replaces a dead one, once for all sessions that noticed.
    """

    def __init__(self, playwright: Playwright, options: BrowserOptions, executable: Path) -> None:
        self._playwright, self.options, self.executable = playwright, options, executable
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._redirects: CDPSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.guards: set[Guard] = set()  # of the open sessions
        self.restarts = 0
        self.sessions = 0  # opened so far: names the next one's folder of files

    @classmethod
    @asynccontextmanager
    async def launch(cls, options: BrowserOptions | None = None) -> AsyncIterator[Self]:
        """Start a browser and close it at the end.

        FileNotFoundError if no browser is found, BrowserDied if it does not start.
        """
        options = options or BrowserOptions()
        executable = Path(options.executable) if options.executable else find_chromium()
        if not executable.is_file():
            raise FileNotFoundError(f"{executable}: no such browser")
        async with async_playwright() as playwright:
            browser = cls(playwright, options, executable)
            await browser._start()
            try:
                yield browser
            finally:
                await browser.close()

    async def _start(self) -> None:
        args = [*FLAGS]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            args.append("--no-sandbox")
        if self.options.host_map:
            args.append(f"--host-resolver-rules={self.options.host_map}")
        try:
            self._process = await self._playwright.chromium.launch(
                executable_path=str(self.executable),
                headless=self.options.headless,
                args=args,
                timeout=START_LIMIT_S * 1000,
            )
        except Error as error:
            raise BrowserDied(f"{self.executable} does not start: {first_line(error)}") from None

    @property
    def process(self) -> Process:
        """Playwright's handle of the running browser; BrowserDied if it is not running."""
        if self._process is None:
            raise BrowserDied(f"{self.executable} is not running")
        return self._process

    @property
    def alive(self) -> bool:
        """Whether the browser is connected."""
        return self._process is not None and self._process.is_connected()

    async def judge_redirects(self) -> None:
        """Follow a redirect of a page or a frame only if one of the guards accepts its URL from now on.

        A host that none accepts gets no request.

        ours: Playwright's routes do not see redirects. Only documents are held up, for one message each. The
        browser does not say here whose page it is, so sessions of one browser with different lists are told
        apart only when the page was reached.
        """
        if self._redirects is None:
            self._redirects = await self.process.new_browser_cdp_session()
            self._redirects.on("Fetch.requestPaused", self._on_paused)
            patterns = [{"urlPattern": "*", "resourceType": "Document", "requestStage": "Request"}]
            await self._redirects.send("Fetch.enable", {"patterns": patterns})

    def _on_paused(self, event: dict[str, Any]) -> None:
        refused = "redirectedRequestId" in event and not any(
            guard.problem(event["request"]["url"]) is None for guard in self.guards
        )
        task = asyncio.get_running_loop().create_task(self._answer(event["requestId"], refused))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: str, refused: bool) -> None:
        with suppress(Error):  # the page is gone
            if self._redirects is not None and refused:  # the old page stays
                answer = {"requestId": request, "errorReason": "Aborted"}
                await self._redirects.send("Fetch.failRequest", answer)
            elif self._redirects is not None:
                await self._redirects.send("Fetch.continueRequest", {"requestId": request})

    async def restart(self) -> None:
        """Start the browser again if it is not running."""
        async with self._lock:
            if not self.alive:
                await self.close()
                await self._start()
                self.restarts += 1

    async def close(self) -> None:
        """End the browser."""
        process, self._process, self._redirects = self._process, None, None
        if process is not None:
            with suppress(Error):
                await process.close()
