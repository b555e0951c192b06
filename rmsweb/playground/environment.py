"""The playground as an environment: a server of its own, a session a task, the site's check as the verdict."""

import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from rmsweb.benchmarks.environments import SessionLike
from rmsweb.playground.server import COOKIE, Server
from rmsweb.playground.tasks import world_of
from rmsweb.records import Judgement, Task, Trajectory

TODAY = datetime.date(2026, 1, 15)  # the playground's calendar stands still, so that prompts are repeatable


class PlaygroundEnvironment:
    """Implements benchmarks.environments.Environment over a running Server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.host_map: str | None = f"MAP *.localhost 127.0.0.1:{server.port}"
        self._keys: WeakKeyDictionary[SessionLike, str] = WeakKeyDictionary()

    async def reset(self, session: SessionLike, task: Task) -> str:
        """A fresh browser context with a cookie that selects this task's world; ValueError for a task of another benchmark."""
        world = world_of(task)
        await session.reset()
        self.server.sessions.pop(self._keys.pop(session, ""), None)
        self._keys[session] = self.server.open(world)
        start = task.start_url or f"http://{world.site}.localhost/"
        await session.set_cookie(start, COOKIE, self._keys[session])
        return start

    async def check(self, session: SessionLike, trajectory: Trajectory) -> Judgement:
        """The site's verdict on answer text and server state."""
        success, reason = self.server.sessions[self._keys[session]].check(trajectory.final_text)
        return Judgement(trajectory_id=trajectory.trajectory_id, judge="check", model="", verdict="success" if success else "not_success", reason=reason)

    def now(self) -> datetime.date:
        return TODAY


@asynccontextmanager
async def open_environment() -> AsyncIterator[PlaygroundEnvironment]:
    """Starts a server on a free loopback port for as long as the context lasts."""
    server = Server().start()
    try:
        yield PlaygroundEnvironment(server)
    finally:
        server.stop()
