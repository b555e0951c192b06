"""The playground as an environment, and the table of environments that the scripts choose from.

Purpose: one session of the sites a task, and the site's own check as the verdict, in a real browser or in the
replay.
"""

import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

from rmsweb.browser.chromium import BrowserOptions
from rmsweb.browser.protocol import SessionLike
from rmsweb.browser.session import Session
from rmsweb.evaluation.environments import Environment, LiveWeb, Pool
from rmsweb.playground.replay import ReplayBrowser, open_session
from rmsweb.playground.server import COOKIE, Server, Sessions
from rmsweb.playground.sites import SITES, SiteSession
from rmsweb.playground.tasks import world_of
from rmsweb.pool import Launch, OpenSession, unused_name
from rmsweb.prompt import PromptConfig
from rmsweb.records import WORK_CHECK, Judgement, Task, Trajectory

SEARCH_URL = "http://search.localhost/find?query={query}"  # behind every engine name of `search_engine`
TODAY = datetime.date(2026, 1, 15)  # the playground's calendar stands still, so that prompts are repeatable


class _SitesEnvironment:
    """The playground's sites: one of their sessions a task, and the site's own check as the verdict."""

    checks: ClassVar[bool] = True
    host_map: str | None = None
    pool: Pool | None = None

    def __init__(self, server: Sessions) -> None:
        self.server = server
        self._keys: WeakKeyDictionary[SessionLike, str] = WeakKeyDictionary()

    async def reset(self, session: SessionLike, task: Task) -> str:
        """Open a fresh context with a cookie on every site that selects this task's world.

        Raises ValueError for a task of another benchmark.
        """
        world = world_of(task)
        await session.reset()
        self.server.sessions.pop(self._keys.pop(session, ""), None)
        self._keys[session] = self.server.open(world, float(task.environment.get("trouble", 0)))
        await session.set_cookie(
            COOKIE, self._keys[session], *(f"http://{site}.localhost/" for site in SITES)
        )
        session.engines = dict.fromkeys(session.engines, SEARCH_URL)
        return task.start_url or f"http://{world.site}.localhost/"

    def site(self, session: SessionLike) -> SiteSession:
        """Return the sites as the session sees them."""
        return self.server.sessions[self._keys[session]]

    async def check(self, session: SessionLike, trajectory: Trajectory) -> Judgement:
        """Return the site's verdict on answer text and server state."""
        site = self.site(session)
        success, reason = site.check(trajectory.final_text)
        return Judgement(
            trajectory_id=trajectory.trajectory_id,
            # an answer may be a guess; what the server committed is the work itself
            judge=WORK_CHECK if site.world.fact is None else "check",
            model="",
            verdict="success" if success else "not_success",
            reason=reason,
        )

    def now(self) -> datetime.date:
        """Return the playground's date."""
        return TODAY


class PlaygroundEnvironment(_SitesEnvironment):
    """The sites on a server of their own, at a free loopback port, for real browsers."""

    def __init__(self) -> None:
        self._http = Server()
        super().__init__(self._http)
        self.host_map = f"MAP *.localhost 127.0.0.1:{self._http.port}"

    async def start(self) -> None:
        """Begin to serve."""
        self._http.start()

    async def stop(self) -> None:
        """Free the port."""
        self._http.stop()


class ReplayEnvironment(_SitesEnvironment):
    """The sites without a browser and without a server."""

    def __init__(self) -> None:
        super().__init__(Sessions())
        self.pool = self._pool

    async def start(self) -> None:
        """Do nothing: pages come straight from the sites."""

    async def stop(self) -> None:
        """Do nothing: there is no server."""

    def open(self, folder: Path, viewport: tuple[int, int], **fields: Any) -> Session:
        """Return a session in a browser of its own; `fields` are those of `Session`."""
        return open_session(ReplayBrowser(self.server, BrowserOptions(viewport=viewport)), folder, **fields)

    def _pool(self, folder: Path, *, config: PromptConfig) -> tuple[Launch, OpenSession]:
        browser = ReplayBrowser(self.server, BrowserOptions(viewport=config.viewport))

        @asynccontextmanager
        async def launch() -> AsyncIterator[ReplayBrowser]:
            yield browser

        async def session(browser: ReplayBrowser, name: str) -> Session:
            return open_session(browser, folder, name=unused_name(name), image_format=config.image_format)

        return launch, session


Place = Literal["playground", "replay", "live"]
ENVIRONMENTS: dict[Place, type[Environment]] = {
    "playground": PlaygroundEnvironment,
    "replay": ReplayEnvironment,
    "live": LiveWeb,
}
NO_BROWSER: frozenset[Place] = frozenset({"replay"})  # places that need no Chromium
