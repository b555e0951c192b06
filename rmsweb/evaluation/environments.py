"""Environments: where an episode happens and whether the place itself can check its outcome.

Purpose: collection and evaluation see the playground, the live web and other local benchmarks through one
protocol.
"""

import datetime
from collections.abc import Callable
from typing import ClassVar, Protocol

from rmsweb.browser.protocol import SessionLike
from rmsweb.pool import Launch, OpenSession
from rmsweb.records import Judgement, Task, Trajectory

Pool = Callable[..., tuple[Launch, OpenSession]]  # of (run folder, config: the PromptConfig)


class Environment(Protocol):
    """Where tasks live.

    `pool` says how sessions are opened, None for sessions in real browsers. `host_map` is the value of
    Chromium's --host-resolver-rules, known once the environment is started. `reset` prepares a session for a
    task and returns the start URL. `check` returns None where the place cannot tell; `checks` says whether it
    ever can.
    """

    checks: ClassVar[bool]
    host_map: str | None
    pool: Pool | None

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset(self, session: SessionLike, task: Task) -> str: ...

    async def check(self, session: SessionLike, trajectory: Trajectory) -> Judgement | None: ...

    def now(self) -> datetime.date: ...


class LiveWeb:
    """The web as it is: no check, today's date."""

    checks: ClassVar[bool] = False
    host_map: str | None = None
    pool: Pool | None = None

    async def start(self) -> None:
        """Do nothing: the web is there."""

    async def stop(self) -> None:
        """Do nothing: the web stays."""

    async def reset(self, session: SessionLike, task: Task) -> str:
        """Open a fresh context; a task without a start URL begins on a blank page."""
        await session.reset()
        return task.start_url or "about:blank"

    async def check(self, session: SessionLike, trajectory: Trajectory) -> None:
        """Return None: only a judge can tell."""

    def now(self) -> datetime.date:
        """Return today's date."""
        return datetime.date.today()
