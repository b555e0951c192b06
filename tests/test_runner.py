"""Laws of the pool: every job once, no more at a time than asked for, dead browsers replaced."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rmsweb.browser.chromium import BrowserDied
from rmsweb.llm import ChatRefused
from rmsweb.pool import Job, Outcome, Worker, run_jobs
from rmsweb.runner import EpisodeConfig


class FakeBrowser:
    def __init__(self) -> None:
        self.alive, self.restarts = True, 0


class FakeSession:
    def __init__(self, browser: FakeBrowser) -> None:
        self.browser, self.closed = browser, False

    async def close(self) -> None:
        self.closed = True


class Pool:
    """Counts what the runner opens and closes."""

    def __init__(self) -> None:
        self.launched, self.open, self.sessions = 0, 0, []

    @asynccontextmanager
    async def launch(self) -> AsyncIterator[FakeBrowser]:
        self.launched, self.open = self.launched + 1, self.open + 1
        try:
            yield FakeBrowser()
        finally:
            self.open -= 1

    async def session(self, browser: FakeBrowser, name: str) -> FakeSession:
        if not browser.alive:  # as a session does
            browser.alive, browser.restarts = True, browser.restarts + 1
        self.sessions.append(FakeSession(browser))
        return self.sessions[-1]

    def run(self, work: Callable[[str, Worker], Any], count: int = 9, **settings: Any) -> Outcome:
        jobs: dict[str, Job] = {str(number): partial(work, str(number)) for number in range(count)}
        settings = {"concurrency": 3, "sessions_per_browser": 2} | settings
        outcome = asyncio.run(run_jobs(jobs, launch=self.launch, open_session=self.session, **settings))
        assert self.open == 0
        assert all(session.closed for session in self.sessions)
        return outcome


def test_every_job_once_and_no_more_at_a_time_than_asked_for() -> None:
    """All jobs finish, each in a session of its own, `concurrency` at a time, in as few browsers as that
    takes.
    """
    pool, running, most, seen = Pool(), 0, 0, []

    async def work(name: str, worker: Worker) -> None:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.001)
        running -= 1
        seen.append(name)

    outcome = pool.run(work)
    assert sorted(seen) == [str(number) for number in range(9)]
    assert outcome == Outcome()
    assert (most, pool.launched, len(pool.sessions)) == (3, 2, 9)


def test_a_dead_browser_is_replaced_and_the_job_run_again() -> None:
    """The job runs again in a fresh browser; the third try is announced as the last, and a job that fails it
    is left for a resume.
    """
    pool, tries = Pool(), []

    async def work(name: str, worker: Worker) -> None:
        if name == "4":
            tries.append(worker.last_try)
            worker.session.browser.alive = False
            raise BrowserDied("gone")

    outcome = pool.run(work)
    assert tries == [False, False, True]
    assert outcome.browser_restarts == 3 or outcome.browser_restarts == 2
    assert list(outcome.failed) == ["4"]
    assert outcome.exit_code("run") == 1


def test_an_endpoint_that_does_not_answer_fails_the_job_alone() -> None:
    """A job without an answer is left for a resume and the others go on; ten in a row end the run."""

    async def some(name: str, worker: Worker) -> None:
        if int(name) % 2:
            raise ConnectionError("no answer")

    outcome = Pool().run(some, count=30)
    assert outcome.failed == {str(number): "no answer" for number in range(1, 30, 2)}

    async def none(name: str, worker: Worker) -> None:
        raise ConnectionError("no answer")

    with pytest.raises(ConnectionError):
        Pool().run(none, count=30)


def test_refusals_end_no_run() -> None:
    """Requests that an endpoint refuses are left alone, however many there are in a row."""

    async def refused(name: str, worker: Worker) -> None:
        raise ChatRefused("filtered")

    assert len(Pool().run(refused, count=30).failed) == 30


@pytest.mark.parametrize("error", [ValueError("bad"), FileNotFoundError("missing"), KeyError("bug")])
def test_other_errors_end_the_run(error: Exception) -> None:
    """Bad data and bugs end the run with their own exception, and everything is closed."""

    async def work(name: str, worker: Worker) -> None:
        await asyncio.sleep(0 if name == "5" else 0.001)
        if name == "5":
            raise error

    with pytest.raises(type(error)):
        Pool().run(work)


def test_cancelling_closes_everything() -> None:
    """What SIGINT does: sessions and browsers are closed, the cancellation goes through."""
    pool = Pool()

    async def forever(name: str, worker: Worker) -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        jobs: dict[str, Job] = {"a": partial(forever, "a")}
        pool_of_one = {"concurrency": 1, "sessions_per_browser": 1}
        task = asyncio.create_task(
            run_jobs(jobs, launch=pool.launch, open_session=pool.session, **pool_of_one)
        )
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert pool.open == 0
    assert pool.sessions[0].closed


@pytest.mark.parametrize("name", ["concurrency", "sessions_per_browser", "max_steps"])
def test_sizes_of_a_run_are_positive(name: str) -> None:
    """A pool of nothing and an episode without turns are refused by the name of the flag."""
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
        EpisodeConfig(tasks=Path("t"), out=Path("o"), **{name: 0})
