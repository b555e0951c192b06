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
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rmsweb.browser.chromium import Browser, BrowserDied, BrowserOptions
from rmsweb.browser.session import Session
from rmsweb.records import Judgement, Trajectory, append_record, cut_torn_line, from_json, is_success
from rmsweb.runlog import RunFolder, rank, world_size

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
        return Session.closed(browser, folder, name=unused, image_format=image_format)

    return (lambda: Browser.launch(options)), open_session


# ------------------------------------------------------------------------------------------ shards and resume


def shard(items: Sequence[T]) -> list[T]:
    """This process's share of the items: every WORLD_SIZE-th from RANK on.

    Cut before finished work is left out, so ranks never overlap.
    """
    return list(items[rank() :: world_size()])


def _number(path: Path) -> int:
    return int(path.name.split(".rank")[1].split(".")[0]) if ".rank" in path.name else 0


def repair(folder: RunFolder) -> None:
    """Cuts torn last lines off this rank's files and drops judgements and metrics without a trajectory; call
    before a resumed run.

    The files of ranks that no longer exist (WORLD_SIZE shrank) are shared out among those that do.
    """
    beside = [*folder.all_records("judgements"), *folder.path.glob("metrics*.jsonl")]
    mine = [
        path
        for path in (*folder.all_records("trajectories"), *beside)
        if _number(path) % world_size() == rank()
    ]
    for path in mine:
        cut_torn_line(path)
    known = finished(folder)
    for path in mine:
        lines = path.read_bytes().splitlines(keepends=True) if path in beside else []
        kept = [line for line in lines if (attempt := _attempt_of(line)) is None or attempt in known]
        if len(kept) < len(lines):
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_bytes(b"".join(kept))
            os.replace(temporary, path)


def _attempt_of(line: bytes) -> str | None:
    """The attempt that a judgement or a line of metrics is about; None for a header."""
    fields = json.loads(line)
    found: str | None = fields.get("trajectory_id", fields.get("trajectory"))
    return found


def _finished_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of a record file's lines, without the header and without a last line that another
    rank is still writing.
    """
    with open(path, "rb") as file:
        offset = len(file.readline())
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def finished(folder: RunFolder) -> dict[str, tuple[Path, int]]:
    """Where the committed attempts of all ranks stand: trajectory id -> (file, byte offset), sorted by id."""
    found: dict[str, tuple[Path, int]] = {}
    for path in folder.all_records("trajectories"):
        for offset, line in _finished_lines(path):
            start = (
                line.index(b":") + 1
            )  # the id is the first field; the rest of a long line need not be parsed
            found[
                json.JSONDecoder().raw_decode(line[start : start + MAX_ID_BYTES].decode("utf-8", "ignore"))[0]
            ] = (path, offset)
    return dict(sorted(found.items()))


def trajectories(folder: RunFolder) -> Iterator[Trajectory]:
    """All committed attempts of all ranks in the order of their ids, one at a time: a long run does not fit
    into memory.
    """
    for path, offset in finished(folder).values():
        with open(path, "rb") as file:
            file.seek(offset)
            yield from_json(Trajectory, json.loads(file.readline()), f"{path} (byte {offset})")


def judgements(folder: RunFolder) -> dict[str, Judgement]:
    """All judgements of all ranks by trajectory id; a later one replaces an earlier one."""
    lines = [(path, line) for path in folder.all_records("judgements") for _, line in _finished_lines(path)]
    found = [from_json(Judgement, json.loads(line), str(path)) for path, line in lines]
    return {item.trajectory_id: item for item in found}


def commit(folder: RunFolder, trajectory: Trajectory, judgement: Judgement | None, seconds: float) -> None:
    """Writes an attempt, `seconds` after the start: its judgement, its line of metrics, then the trajectory,
    which makes it count.
    """
    if judgement is not None:
        append_record(folder.records("judgements"), judgement)
    values = {
        "trajectory": trajectory.trajectory_id,
        "round": trajectory.source.round,
        "success": is_success(trajectory, judgement),
    }
    values |= {
        "ended": trajectory.ended,
        "steps": len(trajectory.steps),
        "prompt_tokens": trajectory.usage.prompt_tokens,
    }
    folder.metrics(
        values | {"completion_tokens": trajectory.usage.completion_tokens, "seconds": round(seconds, 1)}
    )
    append_record(folder.records("trajectories"), trajectory)
