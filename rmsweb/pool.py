"""A pool of browsers over jobs.

Purpose: App. A runs 16 episodes at a time in real browsers. A job is an async function that gets a `Worker`
(its session) and writes what it has to write; `run_jobs` starts browsers, replaces dead ones, and keeps going
when a single job cannot be finished.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from rmsweb.browser.chromium import BrowserDied
from rmsweb.llm import ChatRefused

MAX_TRIES = 3  # of a job whose browser died
MAX_FAILURES_IN_A_ROW = 10

Launch = Callable[[], AbstractAsyncContextManager[Any]]
OpenSession = Callable[[Any, str], Awaitable[Any]]  # (browser, name of the job) -> session with `close`


def unused_name(job: str) -> str:
    """Return a name for a job's files; an attempt that was killed may have left some under the job's own."""
    return f"{job}.{time.time_ns():x}"


@dataclass(frozen=True, slots=True)
class Worker:
    """What a job gets: a new session, and whether it is run for the last time."""

    session: Any
    last_try: bool


Job = Callable[[Worker], Awaitable[None]]


@dataclass(slots=True)
class Outcome:
    """What became of the jobs: the reason for each that was not finished, and how often a browser died."""

    failed: dict[str, str] = field(default_factory=dict)
    browser_restarts: int = 0

    def exit_code(self, kind: str) -> int:
        """Say on stderr which jobs are unfinished; 1 where there are some."""
        for name, problem in self.failed.items():
            print(f"{kind} {name} is unfinished: {problem}", file=sys.stderr)
        if self.failed:
            print(f"{len(self.failed)} unfinished; --resume goes on with them", file=sys.stderr)
        return 1 if self.failed else 0


class _Slot:
    """A browser that several workers share, started when first needed; its sessions restart a dead one."""

    def __init__(self, launch: Launch, stack: AsyncExitStack) -> None:
        self._launch, self._stack, self._lock = launch, stack, asyncio.Lock()
        self._browser: Any = None

    async def browser(self) -> Any:
        """Return the browser."""
        async with self._lock:
            if self._browser is None:
                self._browser = await self._stack.enter_async_context(self._launch())
            return self._browser

    @property
    def restarts(self) -> int:
        """How often the browser was started again."""
        return self._browser.restarts if self._browser else 0


async def _try(name: str, job: Job, slot: _Slot, open_session: OpenSession) -> str | None:
    """Run a job, again in a fresh session where the browser died; return why it failed."""
    for number in range(1, MAX_TRIES + 1):
        try:
            session = await open_session(await slot.browser(), name)
            try:
                await job(Worker(session, number == MAX_TRIES))
                return None
            finally:
                await session.close()
        except BrowserDied as error:
            problem = f"the browser died {number} times: {error}"
    return problem


async def run_jobs(
    jobs: Mapping[str, Job],
    *,
    launch: Launch,
    open_session: OpenSession,
    concurrency: int,
    sessions_per_browser: int,
    on_done: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run the jobs, `concurrency` at a time, and return what became of them; call `on_done` after each.

    A job that raises BrowserDied runs again in a fresh session, three times in all. A job that raises
    ConnectionError (an endpoint that does not answer) is left for a later --resume; ten such in a row end the
    run with the last error. Other exceptions are the user's or ours and end the run at once. Cancelling
    (SIGINT) closes the browsers; what was written stays.

    Args: jobs: by name, which is fit for a file name.
    """
    stack = AsyncExitStack()
    slots = [_Slot(launch, stack) for _ in range(-(-concurrency // sessions_per_browser))]

    async def run(number: int, name: str) -> str | None:
        return await _try(name, jobs[name], slots[number % len(slots)], open_session)

    async with stack:
        failed = await work_off(jobs, run, concurrency=concurrency, on_done=on_done)
    return Outcome(failed, sum(slot.restarts for slot in slots))


async def work_off(
    names: Iterable[str],
    run: Callable[[int, str], Awaitable[str | None]],
    *,
    concurrency: int,
    on_done: Callable[[], object] = lambda: None,
) -> dict[str, str]:
    """Call `run(number of the worker, name)` for each name, and return why those that failed did.

    A ConnectionError fails one name, and ten in a row all of them; what an endpoint refused is no sign that
    it is gone. Other exceptions end everything.
    """
    failed: dict[str, str] = {}
    queue, in_a_row = iter(names), 0

    async def work(number: int) -> None:
        nonlocal in_a_row
        for name in queue:  # one iterator for all workers: whoever is free takes the next name
            refused = False
            try:
                problem = await run(number, name)
            except ConnectionError as error:
                refused = isinstance(error, ChatRefused)
                if not refused and in_a_row + 1 >= MAX_FAILURES_IN_A_ROW:
                    raise
                problem = str(error)
            if problem is None:
                in_a_row = 0
            else:
                in_a_row += not refused
                failed[name] = problem
            on_done()

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(work(number))
    except BaseExceptionGroup as errors:  # the first one is why the others were cancelled
        raise errors.exceptions[0] from None
    return failed
