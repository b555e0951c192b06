"""Laws of the pool and of resume: every job once, no more at a time than asked for, dead browsers replaced,
nothing lost or doubled.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_world import TASK, trajectory
from hypothesis import given
from hypothesis import strategies as st

from rmsweb.browser.chromium import BrowserDied
from rmsweb.records import Judgement, Trajectory, append_record, read_records
from rmsweb.runlog import RunFolder
from rmsweb.runner import (
    Job,
    Outcome,
    Worker,
    commit,
    finished,
    judgements,
    repair,
    run_jobs,
    shard,
    trajectories,
)


class FakeBrowser:
    def __init__(self) -> None:
        self.alive = True


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
        self.sessions.append(FakeSession(browser))
        return self.sessions[-1]

    def run(self, work: Callable[[str, Worker], Any], count: int = 9, **settings: Any) -> Outcome:
        def job(name: str) -> Job:
            return Job(name, lambda worker: work(name, worker))

        jobs = [job(str(number)) for number in range(count)]
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
    assert sorted(seen) == sorted(outcome.done) == [str(number) for number in range(9)]
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
    assert len(outcome.done) == 8


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
        jobs = [Job("a", lambda worker: forever("a", worker))]
        task = asyncio.create_task(
            run_jobs(jobs, launch=pool.launch, open_session=pool.session, concurrency=1)
        )
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert pool.open == 0
    assert pool.sessions[0].closed


def test_concurrency_must_be_positive() -> None:
    """A pool of nothing is refused."""

    async def work(name: str, worker: Worker) -> None:
        return None

    with pytest.raises(ValueError, match="concurrency"):
        Pool().run(work, concurrency=0)


@given(st.integers(0, 50), st.integers(1, 7))
def test_shards_are_a_partition(count: int, size: int) -> None:
    """Every item belongs to exactly one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(size))
        parts = []
        for number in range(size):
            patch.setenv("RANK", str(number))
            parts += shard(list(range(count)))
    assert sorted(parts) == list(range(count))


# ----------------------------------------------------------------------------------------------------- resume


def verdict(number: int) -> Judgement:
    return Judgement(
        trajectory_id=trajectory(number=number).trajectory_id, judge="check", model="", verdict="success"
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.mark.parametrize("kind", ["trajectories", "judgements"])
def test_killed_at_any_byte(folder: RunFolder, kind: str) -> None:
    """Whatever byte the last write stopped at, what was committed before is found, and going on gives each
    record once.
    """
    commit(folder, trajectory(number=1), verdict(1), 0.0)
    path = folder.records(kind)
    before = path.read_bytes()
    append_record(path, trajectory(number=2) if kind == "trajectories" else verdict(2))
    added = path.read_bytes()[len(before) :]
    for size in (0, 1, 5, len(added) // 2, len(added) - 1):
        path.write_bytes(before + added[:size])
        assert list(finished(folder)) == [trajectory(number=1).trajectory_id]
        repair(folder)
        commit(folder, trajectory(number=2), verdict(2), 0.0)
        assert [item.source.round for item in read_records(folder.records("trajectories"), Trajectory)] == [
            1,
            2,
        ]
        assert len(list(read_records(folder.records("judgements"), Judgement))) == 2
        for name, kept in (("trajectories", 1), ("judgements", 1)):
            lines = folder.records(name).read_bytes().splitlines(keepends=True)
            folder.records(name).write_bytes(b"".join(lines[: 1 + kept]))


def test_killed_in_the_first_write(folder: RunFolder) -> None:
    """A file that holds only a piece of its header is an empty one."""
    folder.records("trajectories").write_bytes(b'{"schema')
    assert list(trajectories(folder)) == []
    repair(folder)
    commit(folder, trajectory(), None, 0.0)
    assert list(trajectories(folder)) == [trajectory()]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_killed_just_before_the_trajectory(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """A judgement and a line of metrics whose trajectory never came are dropped on resume, also those of a
    rank that is no more; the others stay.
    """
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", rank)
        writer = RunFolder(folder.path)
        commit(writer, trajectory(number=1), verdict(1), 0.0)
        whole = writer.records("trajectories").read_bytes()
        commit(writer, trajectory(number=2), verdict(2), 0.0)
        writer.records("trajectories").write_bytes(whole)
    repair(folder)
    known = [trajectory(number=1).trajectory_id]
    assert list(judgements(folder)) == known
    assert [json.loads(line)["trajectory"] for line in writer.metrics_path.read_text().splitlines()] == known


def test_files_of_all_ranks_are_read_in_the_order_of_ids(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever WORLD_SIZE was, all attempts are found, in an order that does not depend on who wrote them or
    when.
    """
    monkeypatch.setenv("WORLD_SIZE", "2")
    for number, writer in ((3, "1"), (1, "1"), (2, "0")):
        monkeypatch.setenv("RANK", writer)
        commit(folder, trajectory(number=number), verdict(number), 0.0)
    monkeypatch.setenv("RANK", "0")
    with open(folder.records("trajectories"), "ab") as file:
        file.write(b'{"trajectory_id":"half')  # the other rank is still writing
    assert [item.source.round for item in trajectories(folder)] == [1, 2, 3]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(finished(folder)) == 3
    repair(folder)
    assert folder.records("trajectories").read_bytes().endswith(b"\n")


def test_ids_with_any_characters(folder: RunFolder) -> None:
    """A task id with quotes, escapes and non-Latin letters is found again."""
    odd = 'a"b\\n é 网:{}'
    commit(folder, replace(trajectory(), trajectory_id=odd, task=replace(TASK, task_id=odd)), None, 0.0)
    assert list(finished(folder)) == [odd]
