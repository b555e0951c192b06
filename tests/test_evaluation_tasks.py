"""Laws of task files: order kept, splits chosen, and what is wrong with a file is said with its name."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_world import TASK

from rmsweb.evaluation.tasks import load_tasks
from rmsweb.jsonl import RecordError, write_records
from rmsweb.records import Task


def test_tasks_keep_the_order_of_their_file(tmp_path: Path) -> None:
    """Tasks come in the order of the file, of the wanted split alone, at most as many as wanted."""
    path = tmp_path / "tasks.jsonl"
    tasks = [
        replace(TASK, task_id=str(number), split="dev" if number % 2 else "train") for number in range(6)
    ]
    write_records(path, Task, tasks)
    assert load_tasks(path) == tasks
    assert [task.task_id for task in load_tasks(path, split="dev")] == ["1", "3", "5"]
    assert [task.task_id for task in load_tasks(path, split="dev", limit=2)] == ["1", "3"]


def test_what_is_wrong_with_a_task_file_is_named(tmp_path: Path) -> None:
    """A missing file, an unknown kind, a repeated id and an empty choice are named."""
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        load_tasks(tmp_path / "nowhere.jsonl")
    (tmp_path / "tasks.txt").touch()
    with pytest.raises(RecordError, match=r"\.txt"):
        load_tasks(tmp_path / "tasks.txt")
    path = tmp_path / "tasks.jsonl"
    write_records(path, Task, [TASK, TASK])
    with pytest.raises(RecordError, match="twice"):
        load_tasks(path)
    write_records(path, Task, [TASK])
    with pytest.raises(RecordError, match="held-out"):
        load_tasks(path, split="held-out")
