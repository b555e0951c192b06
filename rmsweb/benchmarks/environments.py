"""Environments: where an episode happens and whether the place itself can check its outcome.

Purpose: collection and evaluation see the playground, the live web and other local benchmarks through one protocol (CONTRACTS 5).
"""

import datetime
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from typing import Protocol

from rmsweb.records import Judgement, Task, Trajectory


class SessionLike(Protocol):
    """What an environment needs of a browser session."""

    async def reset(self) -> None: ...

    async def set_cookie(self, url: str, name: str, value: str) -> None: ...


class Environment(Protocol):
    """`host_map` is what Chromium's --host-resolver-rules gets; `reset` prepares a session for a task and gives the start URL."""

    host_map: str | None

    async def reset(self, session: SessionLike, task: Task) -> str: ...

    async def check(self, session: SessionLike, trajectory: Trajectory) -> Judgement | None: ...

    def now(self) -> datetime.date: ...


class LiveWeb:
    """The web as it is: no check, today's date."""

    host_map: str | None = None

    async def reset(self, session: SessionLike, task: Task) -> str:
        """A fresh context; a task without a start URL begins on a blank page."""
        await session.reset()
        return task.start_url or "about:blank"

    async def check(self, session: SessionLike, trajectory: Trajectory) -> None:
        return None

    def now(self) -> datetime.date:
        return datetime.date.today()


@asynccontextmanager
async def _live() -> AsyncIterator[Environment]:
    yield LiveWeb()


ENVIRONMENTS: dict[str, str] = {"playground": "rmsweb.playground.environment"}  # name -> module with `open_environment()`


def open_environment(name: str) -> AbstractAsyncContextManager[Environment]:
    """The environment of that name, started; ValueError where there is none. Local ones are looked up by module name when asked for."""
    if name == "live":
        return _live()
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment {name!r}: expected one of {', '.join(['live', *ENVIRONMENTS])}")
    open_it: Callable[[], AbstractAsyncContextManager[Environment]] = import_module(ENVIRONMENTS[name]).open_environment
    return open_it()
