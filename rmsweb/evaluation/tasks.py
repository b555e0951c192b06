"""Task files: what collection and evaluation run.

Purpose: one entry, `load_tasks`, for every shape of task file. Our own is the JSONL of `records.Task` that
`python -m rmsweb.playground tasks` writes; loaders of the published benchmark files are added to LOADERS by
their suffix and content.
"""

from collections.abc import Callable
from pathlib import Path

from rmsweb.records import RecordError, Split, Task, read_records

Loader = Callable[[Path], list[Task]]


def load_task_records(path: Path) -> list[Task]:
    """Our own task files."""
    return list(read_records(path, Task))


LOADERS: dict[str, Loader] = {".jsonl": load_task_records}


def load_tasks(path: Path, *, split: Split | None = None, limit: int | None = None) -> list[Task]:
    """Tasks of a file in its order, those of `split` alone where one is given, at most `limit`.

    FileNotFoundError where there is no file; RecordError naming the file for an unknown kind, a task id that
    stands twice, or no task left.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such task file")
    loader = LOADERS.get(path.suffix)
    if loader is None:
        raise RecordError(
            f"{path}: found a {path.suffix or 'nameless'} file, expected one of {', '.join(LOADERS)}"
        )
    tasks = loader(path)
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            raise RecordError(f"{path}: task id {task.task_id!r} stands twice")
        seen.add(task.task_id)
    chosen = [task for task in tasks if split is None or task.split == split][:limit]
    if not chosen:
        raise RecordError(f"{path}: holds {len(tasks)} tasks, none of split {split!r}")
    return chosen
