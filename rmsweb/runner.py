"""A pool of browsers over keyed jobs: concurrency, shards over processes, restarts, resume. Collection and
evaluation share it.

Purpose: App. A runs 16 episodes at a time in real browsers. A job is an async function that gets a `Worker`
(its session) and writes what it has to write; the runner starts browsers, replaces dead ones, and keeps going
when a single job cannot be finished.

ours: a run folder's commit is the trajectory line. Its judgement and its line of metrics are written just
before; those whose trajectory never came (the process was killed in between) are dropped on resume, so
nothing is written twice and nothing finished is lost.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rmsweb.browser.chromium import Browser, BrowserDied, BrowserOptions
from rmsweb.browser.session import Session

T = TypeVar("T")
MAX_TRIES = 3  # of a job whose browser died
MAX_FAILURES_IN_A_ROW = 10
MAX_ID_BYTES = 4_096


Launch = Callable[[], AbstractAsyncContextManager[Any]]
OpenSession = Callable[[Any, str], Awaitable[Any]]  # (browser, name of the job) -> session with `close`


@dataclass(frozen=True, slots=True)
class Worker:
    """What a job gets: a new session, and whether it is run for the last time."""

    session: Any
    last_try: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A unit of work; `name` is unique in a run and fit for a file name."""

    name: str
    run: Callable[[Worker], Awaitable[None]]


@dataclass(slots=True)
class Outcome:
    """What became of the jobs: names of those finished, and the reason for each that was not."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    browser_restarts: int = 0


class _Slot:
    """One browser process that several workers share; it is started when first needed and again when it died."""

    def __init__(self, launch: Launch, outcome: Outcome) -> None:
        self._launch, self._outcome = launch, outcome
        self._lock = asyncio.Lock()
        self._manager: AbstractAsyncContextManager[Any] | None = None
        self._browser: Any = None

    async def browser(self) -> Any:
        """The running browser."""
        async with self._lock:
            if self._browser is not None and not self._browser.alive:
                await self._close()
                self._outcome.browser_restarts += 1
            if self._browser is None:
                self._manager = self._launch()
                self._browser = await self._manager.__aenter__()
            return self._browser

    async def _close(self) -> None:
        manager, self._manager, self._browser = self._manager, None, None
        if manager is not None:
            await manager.__aexit__(None, None, None)

    async def close(self) -> None:
        async with self._lock:
            await self._close()


async def _attempt(job: Job, slot: _Slot, open_session: OpenSession, last_try: bool) -> None:
    session = await open_session(await slot.browser(), job.name)
    try:
        await job.run(Worker(session, last_try))
    finally:
        await session.close()


async def run_jobs(
    jobs: Iterable[Job],
    *,
    launch: Launch,
    open_session: OpenSession,
    concurrency: int = 16,
    sessions_per_browser: int = 4,
    on_done: Callable[[Job, str | None], None] = lambda job, problem: None,
) -> Outcome:
    """Runs the jobs, `concurrency` at a time, and says what became of them; `on_done(job, problem)` is called
    after each.

    A job that raises BrowserDied runs again in a fresh session, three times in all. A job that raises
    ConnectionError (an endpoint that does not answer) is left for a later --resume; ten such in a row end the
    run with the last error. Other exceptions are the user's or ours and end the run at once. Cancelling
    (SIGINT) closes the browsers; what was written stays.
    """
    if concurrency < 1:
        raise ValueError(f"--concurrency {concurrency} must be at least 1")
    outcome, queue = Outcome(), iter(jobs)
    slots = [_Slot(launch, outcome) for _ in range(-(-concurrency // sessions_per_browser))]
    in_a_row = 0

    async def work(slot: _Slot) -> None:
        nonlocal in_a_row
        for job in queue:  # one iterator for all workers: whoever is free takes the next job
            problem: str | None = None
            for attempt in range(1, MAX_TRIES + 1):
                try:
                    await _attempt(job, slot, open_session, attempt == MAX_TRIES)
                    problem = None
                    break
                except BrowserDied as error:
                    problem = f"the browser died {attempt} times: {error}"
                except ConnectionError as error:
                    problem = str(error)
                    if in_a_row + 1 >= MAX_FAILURES_IN_A_ROW:
                        raise
                    break
            if problem is None:
                outcome.done.append(job.name)
                in_a_row = 0
            else:
                outcome.failed[job.name] = problem
                in_a_row += 1
            on_done(job, problem)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(work(slots[number % len(slots)]))
    except BaseExceptionGroup as errors:  # the first one is why the others were cancelled
        raise errors.exceptions[0] from None
    finally:
        for slot in slots:
            await slot.close()
    return outcome


def browser_pool(
    folder: Path,
    *,
    host_map: str | None,
    viewport: tuple[int, int],
    image_format: Literal["png", "jpeg"],
    headless: bool = True,
) -> tuple[Launch, OpenSession]:
    """What `run_jobs` needs for real browsers: how to start one, and how to open a session whose pictures and
    files lie in the run folder.

    The session has no page until the job's `Environment.reset`, which every episode begins with, opens its
    context.
    """
    options = BrowserOptions(headless=headless, host_map=host_map, viewport=viewport)

    async def open_session(browser: Browser, name: str) -> Session:
        unused = f"{name}.{time.time_ns():x}"  # an attempt that was killed may have left files under its name
        return Session(browser, folder, name=unused, image_format=image_format)

    return (lambda: Browser.launch(options)), open_session
