"""Laws of reading: an error is one sentence that names the file, and no path leaves its folder."""

import json
from pathlib import Path

import pytest
from fake_world import TASK, trajectory
from hypothesis import given
from hypothesis import strategies as st

from rmsweb.config import main_guard
from rmsweb.evaluation.tasks import load_tasks
from rmsweb.jsonl import (
    RecordError,
    append_record,
    cut_torn_line,
    inside,
    parse_json,
    read_records,
    write_records,
)
from rmsweb.llm import data_url
from rmsweb.pictures import load_picture
from rmsweb.prompt import PromptConfig
from rmsweb.records import Image, Judgement, Task
from rmsweb.runs import RunFolder, RunWriter

HEADER = b'{"schema_version": 1, "kind": "Task"}\n'
LINE = json.dumps(
    {"task_id": "a", "text": "t", "start_url": None, "split": "train", "benchmark": "b"}
).encode()
BROKEN = {
    "a byte order mark": b"\xef\xbb\xbf" + HEADER + LINE,
    "an empty line": HEADER + b"\n" + LINE,
    "UTF-16": "\n".join([HEADER.decode(), LINE.decode()]).encode("utf-16"),
    "NaN": HEADER + LINE[:-1] + b', "environment": {"x": NaN}}',
    "half of a surrogate pair": HEADER + LINE.replace(b'"t"', b'"\\ud83d"'),
    "a key twice": HEADER + LINE[:-1] + b', "text": "other"}',
    "deep nesting": HEADER + b"[" * 60_000,
    "no header": LINE + b"\n" + LINE,
    "half a record": HEADER + LINE[:20],
    "another record": HEADER + b'{"x": 1}',
    "a list": HEADER + b"[1]",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named_with_its_line(kind: str, tmp_path: Path) -> None:
    """The message is one line and starts with file and line."""
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(RecordError, match=r"tasks\.jsonl:[12]: ") as caught:
        list(read_records(path, Task))
    assert "\n" not in str(caught.value)
    assert "--resume" not in str(caught.value)


@given(st.binary(max_size=60))
def test_any_bytes_are_records_or_an_error_that_names_the_place(data: bytes) -> None:
    """Whatever a line holds, parsing ends with a value or a RecordError of one line."""
    try:
        parse_json(data, "file:2")
    except RecordError as error:
        problem = str(error)
    else:
        problem = "file:2: none"
    assert problem.startswith("file:2: ")
    assert "\n" not in problem


@pytest.mark.parametrize("name", ["", "  ", "a\x00b", "a\nb"])
def test_an_id_is_of_printable_characters(name: str, tmp_path: Path) -> None:
    """An id becomes a file name and a key; an empty one, NUL or a line break is refused."""
    path = tmp_path / "tasks.jsonl"
    write_records(path, Task, [Task(**{**json.loads(LINE), "task_id": name})])
    with pytest.raises(RecordError, match="task id"):
        load_tasks(path)


# ----------------------------------------------------------------------------------------------- run folders


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    """A copy that lost the last line break loses no record; half a line goes."""
    path = tmp_path / "judgements.rank0.jsonl"
    verdict = Judgement(trajectory_id="t", judge="check", model="", verdict="success")
    append_record(path, verdict)
    whole = path.read_bytes()
    path.write_bytes(whole.rstrip(b"\n"))
    cut_torn_line(path)
    assert path.read_bytes() == whole
    path.write_bytes(whole + b'{"trajectory_id":"u"')
    cut_torn_line(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", [b"\x00\xff", b"nonsense", b'{"trajectory_id" 1}'])
def test_a_corrupt_middle_line_is_named(damage: bytes, tmp_path: Path) -> None:
    """Resuming over a damaged folder says which line of which file is broken, and changes nothing."""
    with RunWriter(tmp_path) as folder:
        for number in (1, 2):
            folder.commit(trajectory(number=number), None)
        path = folder.records("trajectories")
        lines = path.read_bytes().splitlines()
        path.write_bytes(b"\n".join([lines[0], damage, lines[2]]) + b"\n")
        before = path.read_bytes()
        with pytest.raises(RecordError, match=r"trajectories\.rank0\.jsonl:2: "):
            folder.repair()
    assert path.read_bytes() == before


def test_a_lost_header_is_named(tmp_path: Path) -> None:
    """A record file whose first line is gone is not read with its first record for a header."""
    with RunWriter(tmp_path) as folder:
        folder.commit(trajectory(number=1), None)
        path = folder.records("trajectories")
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(RecordError, match=r"trajectories\.rank0\.jsonl:1: header"):
        list(RunFolder(tmp_path).trajectories())


# ----------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    "name", ["../secret.png", "/etc/passwd", "a/../../secret.png", "link/secret.png", "\0.png"]
)
def test_no_path_of_a_record_leaves_its_folder(name: str, tmp_path: Path) -> None:
    """Absolute paths, `..` and links out are refused wherever a record names a file."""
    root = tmp_path / "run"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path)
    image = Image(path=name, sha256="", width=1, height=1)
    for read in (
        lambda: inside(root, name),
        lambda: load_picture(image, root),
        lambda: data_url(image, root),
    ):
        with pytest.raises(RecordError, match="outside of this folder"):
            read()
    assert inside(root, "screenshots/a.png") == root / "screenshots" / "a.png"


# ------------------------------------------------------------------------------------------------- the system


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(13, "Permission denied", "/x"), 2),
        (NotADirectoryError(20, "Not a directory", "/x"), 2),
        (OSError(28, "No space left on device", "/x"), 2),
        (FileNotFoundError(2, "No such file", "/x"), 3),
        (ConnectionError("no answer after 6 attempts"), 1),
    ],
)
def test_what_the_system_refuses_is_one_line(
    error: OSError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No permission, a full disk or a file where a folder should be: no traceback."""

    def main() -> None:
        raise error

    assert main_guard(main) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_the_hash_of_a_prompt_covers_the_words_that_the_policy_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more action in the schema, or another wording, is another prompt."""
    before = PromptConfig().hash
    with monkeypatch.context() as patch:
        patch.setattr("rmsweb.prompt.SCHEMA", "another schema")
        assert PromptConfig().hash != before
    with monkeypatch.context() as patch:
        patch.setattr("rmsweb.prompt.SYSTEM", "another text %s")
        assert PromptConfig().hash != before
    assert PromptConfig().hash == before
    assert TASK.task_id
