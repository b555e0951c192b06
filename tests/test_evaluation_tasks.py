"""Laws of task files: order kept, splits chosen, and what is wrong with a file is said with its name."""

import re
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


PLAIN = '{"task_id": "a", "text": "look", "start_url": "https://host/"}'


@pytest.mark.parametrize(
    "content",
    [
        PLAIN,
        PLAIN + "\n\n" + PLAIN.replace('"a"', '"b"') + "\n",
        "\ufeff" + PLAIN,
        "\n" + PLAIN,
        PLAIN + "\r\n",
        '{"task_id": "a", "text": "look"}',
        '{"task_id": "a", "text": "look", "start_url": null, "split": "dev", "category": "x"}',
    ],
)
def test_plain_json_lines_are_a_task_file(content: str, tmp_path: Path) -> None:
    """Id and text are enough; blank lines and a byte order mark do no harm; a line may name its split."""
    (tmp_path / "mine.jsonl").write_text(content, encoding="utf-8")
    task = load_tasks(tmp_path / "mine.jsonl", split="dev")[0]
    assert (task.task_id, task.text, task.split, task.benchmark) == ("a", "look", "dev", "mine")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"task_id": "a", "text": "look", "url": "https://host/"}', "mine.jsonl:2: unknown url"),
        ('{"task_id": "a"}', "mine.jsonl:2: Task lacks text"),
        ('{"task_id": 5, "text": "look"}', "mine.jsonl:2.task_id: found 5"),
        ('{"task_id": "a", "text": "look", "start_url": "host/page"}', "mine.jsonl:2: found the start_url"),
        ('{"task_id": "a", "text": "look", "start_url": "file:///etc"}', "mine.jsonl:2: found the start_url"),
        ('{"task_id": "z", "text": "look"}', "'z' stands twice"),
        ('{"task_id": "a", "text": " "}', "'a' has no text"),
        ('{"task_id": "a", "text": "look", "split": "test"}', "mine.jsonl:2.split"),
        ("[1]", "mine.jsonl:2: found list"),
        ('{"task_id": "a",', "mine.jsonl:2: not JSON"),
    ],
)
def test_a_plain_line_that_is_wrong_is_named(line: str, words: str, tmp_path: Path) -> None:
    """One sentence says file and line, and nothing of --resume."""
    (tmp_path / "mine.jsonl").write_text('{"task_id": "z", "text": "t"}\n' + line, encoding="utf-8")
    with pytest.raises(RecordError, match=re.escape(words)) as caught:
        load_tasks(tmp_path / "mine.jsonl", split="train")
    assert "--resume" not in str(caught.value)
