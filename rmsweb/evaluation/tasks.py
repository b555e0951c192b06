"""Task files: what collection and evaluation run.

Purpose: one entry, `load_tasks`, for every shape of task file: the JSONL of `records.Task` that
`python -m rmsweb.playground tasks` writes, and plain JSON lines that a person writes.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rmsweb.jsonl import RecordError, from_json, parse_json, read_records, to_json
from rmsweb.records import Split, Task

UTF8_MARK = b"\xef\xbb\xbf"  # some editors begin a file with it


def _plain_tasks(path: Path, lines: list[bytes], split: Split) -> Iterator[Task]:
    """Yield the tasks of plain JSON lines: task_id and text, and what else a Task has where it is given."""
    usual = {"start_url": None, "split": split, "benchmark": path.stem}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        data = parse_json(line, where)
        task = from_json(Task, usual | data if isinstance(data, dict) else data, where)
        known = to_json(task).keys()
        if data.keys() - known:
            raise RecordError(
                f"{where}: unknown {', '.join(sorted(data.keys() - known))}, expected some of "
                f"{', '.join(known)}"
            )
        address = urlsplit(task.start_url or "http://none")
        if address.scheme not in ("http", "https") or not address.hostname:
            raise RecordError(
                f"{where}: found the start_url {task.start_url!r}, expected one such as https://host/page"
            )
        yield task


def _read(path: Path, split: Split) -> list[Task]:
    """Return the tasks of a file, whose first line says which shape it has."""
    lines = path.read_bytes().removeprefix(UTF8_MARK).splitlines()
    if b'"schema_version"' in next(filter(None, map(bytes.strip, lines)), b""):
        return list(read_records(path, Task))
    return list(_plain_tasks(path, lines, split))


def load_tasks(path: Path, *, split: Split | None = None, limit: int | None = None) -> list[Task]:
    """Return the tasks of a file in its order, those of `split` alone where one is given, at most `limit`.

    A plain line that names no split belongs to `split`.

    Raises FileNotFoundError, and RecordError naming the file for an unknown kind, a task id that is there
    twice, or no task left.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such task file")
    if path.suffix != ".jsonl":
        raise RecordError(f"{path}: found a {path.suffix or 'nameless'} file, expected one of .jsonl")
    tasks = _read(path, split or "train")
    for task in tasks:
        if not task.task_id.strip() or not task.task_id.isprintable():
            raise RecordError(
                f"{path}: found the task id {task.task_id!r}, expected one of printable characters"
            )
        if not task.text.strip():
            raise RecordError(f"{path}: task {task.task_id!r} has no text")
    for task_id, count in Counter(task.task_id for task in tasks).items():
        if count > 1:
            raise RecordError(f"{path}: task id {task_id!r} stands twice")
    chosen = [task for task in tasks if split in (None, task.split)][:limit]
    if not chosen:
        raise RecordError(f"{path}: holds {len(tasks)} tasks, none of split {split!r}")
    return chosen
