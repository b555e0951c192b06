"""Laws of flags, exit codes and run folders."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from rmsweb.runlog import (
    RunFolder,
    environment,
    main_guard,
    opt,
    parse_config,
    progress,
    rank,
    world_size,
    write_json,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A config."""

    tasks: Path = opt(help="task file")
    max_steps: int = opt(50, "turns (paper: 50%)")
    rate: float | None = opt(None, "rate")
    kind: Literal["a", "b"] = opt("a", "kind")
    pool: tuple[Path, ...] = opt((), "folders")
    reflection: bool = opt(True, "reflect")
    resume: bool = opt(False, "resume")

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"--max-steps {self.max_steps} must be at least 1")


def test_flags_follow_the_fields() -> None:
    """A field is a flag of its type: underscores become dashes, bools get --no-, tuples take several values,
    None is a default.
    """
    flags = [
        "--tasks",
        "t",
        "--max-steps",
        "3",
        "--rate",
        "0.5",
        "--kind",
        "b",
        "--pool",
        "x",
        "y",
        "--no-reflection",
        "--resume",
    ]
    config = parse_config(Config, flags)
    assert config == Config(
        tasks=Path("t"),
        max_steps=3,
        rate=0.5,
        kind="b",
        pool=(Path("x"), Path("y")),
        reflection=False,
        resume=True,
    )
    assert parse_config(Config, ["--tasks", "t"]) == Config(tasks=Path("t"))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--tasks t --max 3",
        "--tasks t --kind c",
        "--tasks t --max-steps x",
        "--tasks t u",
        "--tasks t --unknown",
    ],
)
def test_wrong_flags_exit_2_with_one_line(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, unknown, shortened and ill-typed flags end with exit code 2 and one line."""
    with pytest.raises(SystemExit) as caught:
        parse_config(Config, flags.split(), prog="x.py")
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("x.py: ")
    assert err.count("\n") == 1


def test_help_shows_every_flag_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    """--help names every flag with its text and default."""
    with pytest.raises(SystemExit) as caught:
        parse_config(Config, ["--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "--tasks PATH",
        "(required)",
        "turns (paper: 50%) (default: 50)",
        "--no-reflection",
        "(default: on)",
        "{a,b}",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (ValueError("bad flag"), 2), (FileNotFoundError("no file"), 3), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(error: BaseException | None, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad data is 2, something missing 3, an interruption 130, each with one line and no traceback."""

    def main() -> None:
        if error:
            raise error

    assert main_guard(main) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.count("\n") == (error is not None)


def test_bugs_keep_their_traceback() -> None:
    """What is nobody's data error leaves the guard as it is."""
    with pytest.raises(ZeroDivisionError):
        main_guard(lambda: 1 // 0)


def test_run_folder_keeps_config_and_metrics(tmp_path: Path) -> None:
    """A new folder holds config.json and env.json; metrics lines are added; a torn last line of a killed run
    is cut on resume.
    """
    config = Config(tasks=Path("t"))
    folder = RunFolder(tmp_path / "run", config=config)
    folder.metrics({"step": 1, "path": Path("x")})
    with open(folder.metrics_path, "a") as file:
        file.write('{"step": 2, "lo')
    again = RunFolder(tmp_path / "run", resume=True, config=config)
    again.metrics({"step": 2})
    assert [json.loads(line)["step"] for line in folder.metrics_path.read_text().splitlines()] == [1, 2]
    assert json.loads((tmp_path / "run/config.json").read_text())["tasks"] == "t"
    assert "packages" in json.loads((tmp_path / "run/env.json").read_text())


def test_run_folder_refuses_to_mix_runs(tmp_path: Path) -> None:
    """Without --resume an old run is not touched; with it, a changed flag is named unless it may differ."""
    RunFolder(tmp_path, config=Config(tasks=Path("t")))
    RunFolder(tmp_path, config=Config(tasks=Path("t"))).metrics(
        {"step": 1}
    )  # nothing was recorded before: not a run
    with pytest.raises(ValueError, match="--resume"):
        RunFolder(tmp_path, config=Config(tasks=Path("t")))
    changed = Config(tasks=Path("t"), max_steps=9, resume=True)
    with pytest.raises(ValueError, match=r"--max-steps is 9.*50"):
        RunFolder(tmp_path, resume=True, config=changed)
    RunFolder(tmp_path, resume=True, config=changed, may_differ=("max_steps",))


def test_ranks_have_their_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank writes its own record files; the files of all ranks are found in numeric order."""
    assert (rank(), world_size()) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "12")
    for number in ("10", "2"):
        monkeypatch.setenv("RANK", number)
        RunFolder(tmp_path).records("trajectories").touch()
    folder = RunFolder(tmp_path)
    assert [path.name for path in folder.all_records("trajectories")] == [
        "trajectories.rank2.jsonl",
        "trajectories.rank10.jsonl",
    ]
    assert folder.metrics_path.name == "metrics.rank2.jsonl"
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ValueError, match="RANK"):
        rank()


def test_no_environment_variable_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """env.json never holds a key from the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert "sk-secret" not in json.dumps(environment())


def test_write_json_and_progress(tmp_path: Path) -> None:
    """JSON files are replaced as a whole; a bar counts what it is given."""
    write_json(tmp_path / "a/b.json", {"x": Config(tasks=Path("t")), "y": ("1", 2.5, None)})
    data = json.loads((tmp_path / "a/b.json").read_text())
    assert data["x"]["pool"] == []
    assert data["y"] == ["1", 2.5, None]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]
    assert list(progress([1, 2], label="x")) == [1, 2]
    with progress(total=2) as bar:
        bar.update(2)
        assert bar.n == 2
