"""Killed with SIGKILL in the middle and run again with --resume, collection and evaluation finish without
doubled records.

The whole thing is real: the scripts, Chromium, the playground's sites, and the scripted roles behind their
HTTP interface.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rmsweb.jsonl import read_records
from rmsweb.records import Judgement, StepSample, Trajectory

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.browser


def start(*command: object, **settings: object) -> "subprocess.Popen[bytes]":
    """A process of this Python, in a group of its own, so that killing it takes its browsers along."""
    quiet = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "cwd": ROOT,
        "start_new_session": True,
    }
    return subprocess.Popen([sys.executable, *map(str, command)], **(quiet | settings))  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four training tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    command = [
        sys.executable,
        "-m",
        "rmsweb.playground",
        "tasks",
        "--out",
        str(folder),
        "--train",
        "4",
        "--dev",
        "1",
        "--held-out",
        "1",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder / "train.jsonl"


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def killed_in_the_middle(out: Path, *command: object) -> int:
    """Starts the script, kills it as soon as two attempts are on disk, and says how many there were."""
    process, written = start(*command), out / "trajectories.rank0.jsonl"
    try:
        for _ in range(900):
            if lines(written) >= 3 or process.poll() is not None:
                break
            time.sleep(0.1)
        assert process.poll() is None, "it ended before it could be killed"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return lines(written) - 1


def finish(*command: object) -> None:
    """Runs the script to its end."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def attempts(out: Path) -> list[Trajectory]:
    """The trajectories on disk, each judged exactly once and recorded exactly once."""
    found = list(read_records(out / "trajectories.rank0.jsonl", Trajectory))
    ids = [item.trajectory_id for item in found]
    assert len(set(ids)) == len(ids)
    assert sorted(
        item.trajectory_id for item in read_records(out / "judgements.rank0.jsonl", Judgement)
    ) == sorted(ids)
    return found


def test_collection_survives_a_kill(tmp_path: Path, teacher_url: str, tasks: Path) -> None:
    """After the kill nothing finished is lost, nothing is written twice, every task reaches a stop rule, and
    samples follow from what is there.
    """
    out = tmp_path / "run"
    flags = [
        "--tasks",
        tasks,
        "--out",
        out,
        "--policy-url",
        teacher_url,
        "--policy-model",
        "scripted-teacher",
        "--reflection-model",
        "scripted-reflection",
    ]
    flags += [
        "--extraction-model",
        "scripted-extractor",
        "--prompt-config",
        "scripts/demo_prompt.json",
        "--max-steps",
        "12",
        "--concurrency",
        "2",
    ]
    before = killed_in_the_middle(out, "collect.py", *flags)
    finish("collect.py", *flags, "--resume")
    found = attempts(out)
    assert len(found) > before >= 2
    verdicts = {
        item.trajectory_id: item.verdict for item in read_records(out / "judgements.rank0.jsonl", Judgement)
    }
    for task in {item.task.task_id for item in found}:
        rounds = sorted(
            (item.source.round, verdicts[item.trajectory_id] == "success")
            for item in found
            if item.task.task_id == task
        )
        assert [number for number, _ in rounds] == list(range(1, len(rounds) + 1))
        assert len(rounds) == 5 or sum(won for _, won in rounds) == 2
    samples = list(read_records(out / "samples.jsonl", StepSample))
    assert len({sample.sample_id for sample in samples}) == len(samples) > 0
    assert json.loads((out / "summary.json").read_text())["attempts"] == len(found)


def test_evaluation_survives_a_kill(tmp_path: Path, teacher_url: str, tasks: Path) -> None:
    """After the kill every task has each of its runs exactly once, and the summary counts all of them."""
    out = tmp_path / "run"
    flags = [
        "--tasks",
        tasks,
        "--split",
        "train",
        "--out",
        out,
        "--policy-url",
        teacher_url,
        "--policy-model",
        "scripted-teacher",
        "--runs",
        "2",
    ]
    flags += ["--prompt-config", "scripts/demo_prompt.json", "--max-steps", "12", "--concurrency", "2"]
    before = killed_in_the_middle(out, "evaluate.py", *flags)
    finish("evaluate.py", *flags, "--resume")
    found = attempts(out)
    assert len(found) == 8 > before >= 2
    assert len({(item.task.task_id, item.source.run) for item in found}) == 8
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["n"], summary["runs"], summary["missing"]) == (4, 8, 0)
