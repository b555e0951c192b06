"""Laws of the evaluation script: flags and checkpoint hash. Its runs in a browser are in test_resume."""

import subprocess
import sys
from pathlib import Path

import pytest
from fake_world import CONFIG, TASK

from evaluate import Config
from rmsweb.config import parse_config
from rmsweb.jsonl import write_records
from rmsweb.records import Task

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--policy p --policy-url u",
        "--policy-url u",
        "--policy p --runs 0",
        "--policy p --top-p 0.0",
        "--policy p --environment live",
    ],
)
def test_wrong_flags_are_named(flags: str) -> None:
    """Each wrong combination names the flag."""
    with pytest.raises(ValueError, match="--"):
        parse_config(Config, ["--tasks", "t", "--out", "o", *flags.split()])


def script(name: str, *flags: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a script."""
    done = subprocess.run(
        [sys.executable, str(ROOT / name), *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["collect.py", "evaluate.py"])
def test_bad_input_is_one_line(name: str, tmp_path: Path) -> None:
    """Unknown flags end with 2, missing files with 3, each in one line, and no folder is made; --help
    explains the paper's values.
    """
    policy = ("--policy-url", "http://127.0.0.1:9/v1", "--policy-model", "m", "--out", tmp_path / "out")
    for flags, expected in (
        (("--unknown",), 2),
        ((*policy, "--tasks", tmp_path / "nowhere.jsonl"), 3),
        ((*policy, "--tasks", ROOT / "README"), 3),
        ((*policy, "--tasks", tmp_path, "--max-steps", "0"), 2),
    ):
        code, _, err = script(name, *flags)
        assert (code, err.count("\n")) == (expected, 1), err
    assert not (tmp_path / "out").exists()
    code, out, _ = script(name, "--help")
    assert code == 0
    assert "paper" in out


def test_another_prompt_config_than_the_checkpoints_is_named(tmp_path: Path) -> None:
    """A --prompt-config that differs from the checkpoint's ends with 2 and the name of the field."""
    from tiny_model import tiny_checkpoint

    tiny_checkpoint(tmp_path / "checkpoint", prompt_config=CONFIG)
    (tmp_path / "other.json").write_text('{"history_steps": 7}')
    write_records(tmp_path / "tasks.jsonl", Task, [TASK])
    code, _, err = script(
        "evaluate.py",
        *(
            "--policy",
            tmp_path / "checkpoint",
            "--tasks",
            tmp_path / "tasks.jsonl",
            "--split",
            "train",
            "--out",
            tmp_path / "out",
        ),
        *("--prompt-config", tmp_path / "other.json"),
    )
    assert code == 2
    assert "history_steps" in err
