"""The playground as an environment, and the table of environments that the scripts choose from.

Purpose: a server of its own, one server session a task, and the site's own check as the verdict.
"""

import datetime
from typing import ClassVar, Literal
from weakref import WeakKeyDictionary

from rmsweb.browser.protocol import SessionLike
from rmsweb.evaluation.environments import Environment, LiveWeb
from rmsweb.playground.server import COOKIE, Server
from rmsweb.playground.sites import SITES
from rmsweb.playground.tasks import world_of
from rmsweb.records import WORK_CHECK, Judgement, Task, Trajectory

SEARCH_URL = "http://search.localhost/find?query={query}"  # behind every engine name of `search_engine`
TODAY = datetime.date(2026, 1, 15)  # the playground's calendar stands still, so that prompts are repeatable


class PlaygroundEnvironment:
    """The playground's sites on a server of its own, at a free loopback port."""

    checks: ClassVar[bool] = True

    def __init__(self) -> None:
        self.server = Server()
        self.host_map: str | None = f"MAP *.localhost 127.0.0.1:{self.server.port}"
        self._keys: WeakKeyDictionary[SessionLike, str] = WeakKeyDictionary()

    async def start(self) -> None:
        """Begin to serve."""
        self.server.start()

    async def stop(self) -> None:
        """Free the port."""
        self.server.stop()

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

    async def check(self, session: SessionLike, trajectory: Trajectory) -> Judgement:
        """Return the site's verdict on answer text and server state."""
        site = self.server.sessions[self._keys[session]]
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


Place = Literal["playground", "live"]
ENVIRONMENTS: dict[Place, type[Environment]] = {"playground": PlaygroundEnvironment, "live": LiveWeb}
