"""Task files: what collection and evaluation run.

Purpose: one entry, `load_tasks`, for every shape of task file. So far there is one: the JSONL of
`records.Task` that `python -m rmsweb.playground tasks` writes.
"""

from collections import Counter
from pathlib import Path

from rmsweb.jsonl import RecordError, read_records
from rmsweb.records import Split, Task


def load_tasks(path: Path, *, split: Split | None = None, limit: int | None = None) -> list[Task]:
    """Return the tasks of a file in its order, those of `split` alone where one is given, at most `limit`.

    Raises FileNotFoundError, and RecordError naming the file for an unknown kind, a task id that is there
    twice, or no task left.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such task file")
    if path.suffix != ".jsonl":
        raise RecordError(f"{path}: found a {path.suffix or 'nameless'} file, expected one of .jsonl")
    tasks = list(read_records(path, Task))
    for task_id, count in Counter(task.task_id for task in tasks).items():
        if count > 1:
            raise RecordError(f"{path}: task id {task_id!r} stands twice")
    chosen = [task for task in tasks if split in (None, task.split)][:limit]
    if not chosen:
        raise RecordError(f"{path}: holds {len(tasks)} tasks, none of split {split!r}")
    return chosen
