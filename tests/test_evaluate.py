"""Laws of the evaluation script: its figures, its denominators, its flags. (Its runs in a browser are in
test_resume.)
"""

import subprocess
import sys
from pathlib import Path

import pytest
from fake_world import CONFIG, TASK, trajectory
from hypothesis import given
from hypothesis import strategies as st

from evaluate import Config, Row, checkpoint_sha256, print_table, summarize
from rmsweb.jsonl import write_records
from rmsweb.records import Judgement, Source, Task

ROOT = Path(__file__).parent.parent


def row(task: str, run: int, success: bool, **fields: object) -> Row:
    values = {
        "site": "shop",
        "category": "c",
        "declared": success,
        "verdict": "success" if success else "not_success",
        "ended": "done",
    }
    values |= {"turns": 5 + run, "actions": 9, "prompt_tokens": 100, "completion_tokens": 10}
    return Row(task_id=task, run=run, success=success, **(values | fields))  # type: ignore[arg-type]


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5))
def test_figures_of_complete_runs(table: list[list[bool]]) -> None:
    """pass@1 is the mean over runs, pass@3 the share of tasks solved at least once, steps the mean turns of
    the successes alone.
    """
    rows = [
        row(str(task), run, success) for task, runs in enumerate(table) for run, success in enumerate(runs)
    ]
    result = summarize(rows, tasks=len(table), runs=3)
    assert result["pass1"] == pytest.approx(sum(map(sum, table)) / (3 * len(table)))
    assert result["pass3"] == pytest.approx(sum(map(any, table)) / len(table))
    assert (result["n"], result["runs"], result["missing"]) == (len(table), 3 * len(table), 0)
    turns = [5 + run for runs in table for run, success in enumerate(runs) if success]
    assert result["steps"] == (pytest.approx(sum(turns) / len(turns)) if turns else None)
    low, high = result["pass1_interval"]
    assert low - 1e-9 <= result["pass1"] <= high + 1e-9


def test_denominators() -> None:
    """Missing runs are counted, not guessed; unparsed verdicts stay in; pass@3 is over the tasks with three
    runs.
    """
    rows = [
        row("a", 0, True),
        row("a", 1, False, verdict="unparsed"),
        row("a", 2, False, ended="max_steps", declared=False),
        row("b", 0, False, site="jobs"),
    ]
    result = summarize(rows, tasks=3, runs=3)
    assert (result["runs"], result["missing"], result["n"], result["unparsed"], result["declared"]) == (
        4,
        5,
        2,
        1,
        3,
    )
    assert result["pass3"] == 1.0
    assert {name: group["n"] for name, group in result["by_site"].items()} == {"jobs": 1, "shop": 1}
    assert summarize([row("a", 0, True)], tasks=1, runs=1)["pass3"] is None
    assert summarize([], tasks=2, runs=3)["pass1"] is None


def test_a_run_succeeds_only_if_done_was_executed_and_the_judge_agrees() -> None:
    """Verdict and ending both count; the flag of the done does not."""
    won = Judgement(trajectory_id="x", judge="check", model="", verdict="success")
    source = Source(script="evaluate", policy="p", run=2)
    assert Row.of(trajectory(declared_success=False, source=source), won).success
    assert Row.of(trajectory(source=source), won).run == 2
    assert not Row.of(trajectory(ended="max_steps"), won).success
    assert not Row.of(trajectory(), None).success


def test_the_table_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed table holds the figures, with a dash where there is none."""
    for rows in ([row("a", run, run == 0) for run in range(3)], []):
        print_table(summarize(rows, tasks=1, runs=3) | {"policy": "p", "split": "dev", "scripted": []}, 3)
    out = capsys.readouterr().out
    assert "33.3" in out
    assert "100.0" in out
    assert "3 missing" in out
    print_table(summarize([], tasks=1, runs=1) | {"policy": "p", "split": "dev", "scripted": []}, 1)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"policy": Path("p"), "policy_url": "u"},
        {"policy_url": "u"},
        {"policy": Path("p"), "runs": 0},
        {"policy": Path("p"), "top_p": 0.0},
    ],
)
def test_wrong_flags_are_named(flags: dict[str, object]) -> None:
    """Each wrong combination names the flag."""
    with pytest.raises(ValueError, match="--"):
        Config(tasks=Path("t"), out=Path("o"), **flags)  # type: ignore[arg-type]


def test_checkpoint_hash_depends_on_the_weights(tmp_path: Path) -> None:
    """The hash is that of the weight files."""
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = checkpoint_sha256(tmp_path)
    (tmp_path / "config.json").write_bytes(b"{}")
    assert checkpoint_sha256(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert checkpoint_sha256(tmp_path) != first


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
