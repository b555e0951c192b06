"""Laws of run folders: nothing lost or doubled, one writer at a time, readers of all ranks."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fake_world import TASK, trajectory

from rmsweb.config import Config as BaseConfig
from rmsweb.config import opt
from rmsweb.jsonl import append_record, read_records, write_json
from rmsweb.records import Judgement, Trajectory
from rmsweb.runs import RunFolder, RunWriter, environment


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """A config."""

    tasks: Path = opt(help="task file")
    max_steps: int = opt(50, "turns")
    resume: bool = opt(False, "resume")


def test_run_folder_keeps_config_and_metrics(tmp_path: Path) -> None:
    """A new folder holds config.json and env.json; metrics lines are added; a torn last line of a killed run
    is cut on resume.
    """
    config = Config(tasks=Path("t"))
    folder = RunWriter(tmp_path / "run", config)
    folder.log({"step": 1, "path": Path("x")})
    with open(folder.metrics_path, "a") as file:
        file.write('{"step": 2, "lo')
    folder.close()
    again = RunWriter(tmp_path / "run", config, resume=True)
    again.log({"step": 2})
    assert [json.loads(line)["step"] for line in folder.metrics_path.read_text().splitlines()] == [1, 2]
    assert json.loads((tmp_path / "run/config.json").read_text())["tasks"] == "t"
    assert "packages" in json.loads((tmp_path / "run/env.json").read_text())


def test_run_folder_refuses_to_mix_runs(tmp_path: Path) -> None:
    """Without --resume an old run is not touched; with it, a changed flag is named unless it may differ."""
    config, changed = Config(tasks=Path("t")), Config(tasks=Path("t"), max_steps=9, resume=True)
    RunWriter(tmp_path, config).close()
    with RunWriter(tmp_path, config) as folder:  # nothing was recorded before: not a run
        folder.log({"step": 1})
    with pytest.raises(ValueError, match="--resume"):
        RunWriter(tmp_path, config)
    with pytest.raises(ValueError, match=r"--max-steps is 9.*50"):
        RunWriter(tmp_path, changed, resume=True)
    RunWriter(tmp_path, changed, resume=True, may_differ=("max_steps",)).close()


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second writer is refused until the first one is closed; readers and other ranks are not."""
    config = Config(tasks=Path("t"))
    with RunWriter(tmp_path, config):
        with pytest.raises(ValueError, match="another process"):
            RunWriter(tmp_path, config)
        assert RunFolder(tmp_path).json("config.json")["tasks"] == "t"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", "1")
            patch.setenv("WORLD_SIZE", "2")
            RunWriter(tmp_path, config)
    RunWriter(tmp_path, config).close()


def test_ranks_have_their_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank writes its own record files; the files of all ranks are found in numeric order."""
    monkeypatch.setenv("WORLD_SIZE", "12")
    for number in ("10", "2"):
        monkeypatch.setenv("RANK", number)
        RunWriter(tmp_path).records("trajectories").touch()
    folder = RunWriter(tmp_path)
    assert [path.name for path in folder.files("trajectories")] == [
        "trajectories.rank2.jsonl",
        "trajectories.rank10.jsonl",
    ]
    assert folder.metrics_path.name == "metrics.rank2.jsonl"


def test_no_environment_variable_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """env.json never holds a key from the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert "sk-secret" not in json.dumps(environment())


def test_a_json_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Dataclasses, paths and tuples are converted, and no temporary file stays."""
    write_json(tmp_path / "a/b.json", {"x": Config(tasks=Path("t")), "y": ("1", 2.5, None)})
    data = json.loads((tmp_path / "a/b.json").read_text())
    assert data["x"]["tasks"] == "t"
    assert data["y"] == ["1", 2.5, None]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]


# ----------------------------------------------------------------------------------------------------- resume


def verdict(number: int) -> Judgement:
    return Judgement(
        trajectory_id=trajectory(number=number).trajectory_id, judge="check", model="", verdict="success"
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path)


@pytest.mark.parametrize("kind", ["trajectories", "judgements"])
def test_a_kill_at_any_byte_loses_and_doubles_nothing(folder: RunWriter, kind: str) -> None:
    """Whatever byte the last write stopped at, what was committed before is found, and going on gives each
    record once.
    """
    folder.commit(trajectory(number=1), verdict(1))
    path = folder.records(kind)
    before = path.read_bytes()
    append_record(path, trajectory(number=2) if kind == "trajectories" else verdict(2))
    added = path.read_bytes()[len(before) :]
    for size in (0, 1, 5, len(added) // 2, len(added) - 1):
        path.write_bytes(before + added[:size])
        assert list(folder.finished()) == [trajectory(number=1).trajectory_id]
        folder.repair()
        folder.commit(trajectory(number=2), verdict(2))
        assert [item.source.round for item in read_records(folder.records("trajectories"), Trajectory)] == [
            1,
            2,
        ]
        assert len(list(read_records(folder.records("judgements"), Judgement))) == 2
        for name, kept in (("trajectories", 1), ("judgements", 1)):
            lines = folder.records(name).read_bytes().splitlines(keepends=True)
            folder.records(name).write_bytes(b"".join(lines[: 1 + kept]))


def test_a_file_with_a_torn_header_is_empty(folder: RunWriter) -> None:
    """A file that holds only a piece of its header is an empty one."""
    folder.records("trajectories").write_bytes(b'{"schema')
    assert list(folder.trajectories()) == []
    folder.repair()
    folder.commit(trajectory(), None)
    assert list(folder.trajectories()) == [trajectory()]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_judgement_and_metrics_without_a_trajectory_are_dropped(
    folder: RunWriter, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """A judgement and a line of metrics whose trajectory never came are dropped on resume, also those of a
    rank that is no more; the others stay.
    """
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", rank)
        folder.close()
        writer = RunWriter(folder.path)
        writer.commit(trajectory(number=1), verdict(1))
        whole = writer.records("trajectories").read_bytes()
        writer.commit(trajectory(number=2), verdict(2))
        writer.records("trajectories").write_bytes(whole)
    folder.repair()
    known = [trajectory(number=1).trajectory_id]
    assert list(folder.judgements()) == known
    assert [json.loads(line)["trajectory"] for line in writer.metrics_path.read_text().splitlines()] == known


def test_files_of_all_ranks_are_read_in_the_order_of_ids(
    folder: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever WORLD_SIZE was, all attempts are found, in an order that does not depend on who wrote them or
    when.
    """
    monkeypatch.setenv("WORLD_SIZE", "2")
    for number, writer in ((3, "1"), (1, "1"), (2, "0")):
        monkeypatch.setenv("RANK", writer)
        folder.commit(trajectory(number=number), verdict(number))
    monkeypatch.setenv("RANK", "0")
    with open(folder.records("trajectories"), "ab") as file:
        file.write(b'{"trajectory_id":"half')  # the other rank is still writing
    assert [item.source.round for item in folder.trajectories()] == [1, 2, 3]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(folder.finished()) == 3
    folder.repair()
    assert folder.records("trajectories").read_bytes().endswith(b"\n")


def test_an_id_of_any_characters_is_found_again(folder: RunWriter) -> None:
    """A task id with quotes, escapes and non-Latin letters is found again."""
    odd = 'a"b\\n é 网:{}'
    folder.commit(replace(trajectory(), trajectory_id=odd, task=replace(TASK, task_id=odd)), None)
    assert list(folder.finished()) == [odd]
