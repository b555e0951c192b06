"""Laws of configs, flags and exit codes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsweb.config import Config as BaseConfig
from rmsweb.config import (
    argv_of,
    flat,
    main_guard,
    opt,
    parse_config,
    part,
    progress,
    rank,
    shard,
    world_size,
)
from rmsweb.jsonl import to_json


@dataclass(frozen=True, kw_only=True)
class Engine(BaseConfig):
    """How a model is held."""

    lora_rank: int = opt(64, "rank of the adapters", paper=64, at_least=0)
    warmup: float = opt(0.03, "share of the steps", at_least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """A config."""

    tasks: Path = opt(help="task file")
    max_steps: int = opt(50, "turns", paper="50%", at_least=1)
    rate: float | None = opt(None, "rate", above=0)
    kind: Literal["a", "b"] = opt("a", "kind")
    pool: tuple[Path, ...] = opt((), "folders")
    reflection: bool = opt(True, "reflect")
    resume: bool = opt(False, "resume")
    engine: Engine = part(Engine, lora_rank=32)


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
        "turns (paper: 50%; default: 50)",
        "--no-reflection",
        "(default: on)",
        "{a,b}",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (ValueError("bad flag"), 2), (FileNotFoundError("no file"), 3), (KeyboardInterrupt(), 130)],
)
def test_bad_data_exits_2_a_missing_file_3_an_interruption_130(
    error: BaseException | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_part_is_declared_once_and_its_fields_are_flags() -> None:
    """Flags of a part fill its config; a default given to `part` replaces the declared one."""
    config = parse_config(Config, ["--tasks", "t", "--warmup", "0.1"])
    assert config.engine == Engine(lora_rank=32, warmup=0.1)
    assert Config(tasks=Path("t")).engine == Engine(lora_rank=32)
    assert flat(config)["warmup"] == 0.1
    assert "engine" not in flat(config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-steps 0", r"--max-steps 0: expected at least 1"),
        ("--rate 0", r"--rate 0.0: expected more than 0"),
        ("--warmup 1", r"--warmup 1.0: expected less than 1"),
        ("--lora-rank -1", r"--lora-rank -1: expected at least 0"),
        ("--rate nan", r"--rate nan: expected more than 0"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_name(flags: str, message: str) -> None:
    """The bounds that a field declares hold on the command line and in the package."""
    with pytest.raises(ValueError, match=message):
        parse_config(Config, ["--tasks", "t", *flags.split()])


def test_a_progress_bar_counts_what_it_is_given() -> None:
    """It passes items on, and counts updates."""
    assert list(progress([1, 2], label="x")) == [1, 2]
    with progress(total=2) as bar:
        bar.update(2)
        assert bar.n == 2


def test_a_rank_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun there is one process; a variable that is no number is named."""
    assert (rank(), world_size()) == (0, 1)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ValueError, match="RANK"):
        rank()


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


@dataclass(frozen=True, kw_only=True)
class Helper(BaseConfig):
    """Helper."""

    prefix = "helper_"
    rate: float | None = opt(0.5, "rate", at_least=0)
    extra: dict[str, Any] | None = opt(None, "fields")
    off: bool = opt(True, "off")


@dataclass(frozen=True, kw_only=True)
class Whole(BaseConfig):
    """A script."""

    tasks: Path = opt(help="task file", alias="list")
    pool: tuple[Path, ...] = opt((), "folders")
    helper: Helper = part(Helper)


@pytest.mark.parametrize(
    "flags",
    [
        ["--list", "t"],
        ["--tasks", "t", "--helper-rate", "none", "--no-helper-off"],
        ["--tasks", "-", "--pool", "a", "b", "--helper-rate", "2"],
        ["--tasks", "t", "--helper-extra", '{"a": null, "b": [1, "x y"]}'],
    ],
)
def test_a_stored_config_gives_the_same_config_again(flags: list[str]) -> None:
    """The flags made of a config's JSON give that config; flags behind them win."""
    config = parse_config(Whole, flags)
    again = argv_of(Whole, to_json(flat(config)) | {"unknown": 1})
    assert parse_config(Whole, again) == config
    assert parse_config(Whole, [*again, "--helper-rate", "7"]).helper.rate == 7


@pytest.mark.parametrize("text", ["[1]", "x", "1", ""])
def test_a_flag_of_fields_is_a_json_object(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Anything else is one line that says what was expected."""
    with pytest.raises(SystemExit):
        parse_config(Whole, ["--tasks", "t", "--helper-extra", text])
    assert "--helper-extra: found" in capsys.readouterr().err


def test_a_bound_of_a_part_is_named_by_its_flag() -> None:
    """The name is the one on the command line, prefix included."""
    with pytest.raises(ValueError, match=r"--helper-rate -1\.0: expected at least 0"):
        parse_config(Whole, ["--tasks", "t", "--helper-rate", "-1"])
