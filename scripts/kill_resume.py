"""Kills one of the five scripts at random moments, resumes it every time, and checks that it ends as one that
was never killed.

    python scripts/kill_resume.py {collect,train_sft,mine,train_rl,evaluate} [--kills 20] [--seed 0] [--work
    DIR]

Runs on the tiny base and the playground. Every record and every line of metrics of the unkilled run must be
there, once, and equal but for times; the weights of a trainer must be equal to the bit. A run that ends
before it is killed is checked, and another one begins. Exit code 1 names what differs.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BASE = "rmsweb/playground/base"
KEYS = ("state_id", "sample_id", "trajectory_id", "trajectory")  # the first one that a record has names it
# Ends of names whose values two equal runs may differ in.
VARIES = ("_s", "_gb", "seconds", "started", "browser_restarts")
COLLECT = (
    "--policy-model scripted-teacher --reflection-model scripted-reflection "
    "--extraction-model scripted-extractor --prompt-config scripts/demo_prompt.json "
    f"--tokenizer {BASE} --max-steps 8 --concurrency 2 --rounds 3 --successes 1 --seed 0"
)
RL = (
    "--max-steps 4 --train-batch 2 --mini-batch 1 --num-rollouts 4 --max-generation-batches 2 "
    "--lora-rank 4 --response-budget 40 --save-every 1 --threads 1"
)
SFT = "--epochs 2 --per-device-batch 4 --accumulation 1 --lora-rank 4 --save-every 2 --threads 1"
EVALUATE = "--split train --runs 2 --max-steps 6 --stop-on-stall --concurrency 2 --seed 0"


def start(*command: str) -> "subprocess.Popen[bytes]":
    """A script in a process group of its own, so that killing it takes its browsers along."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[bytes]") -> None:
    """Waits for a good end."""
    _, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"kill_resume: exit code {process.returncode} \n{errors.decode()[-2000:]}")


@contextmanager
def teacher() -> Iterator[str]:
    """URL of the scripted roles."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "rmsweb.playground", "teacher", "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.match(r"(http\S+) serves", process.stdout.readline())
        if found is None:
            raise SystemExit("kill_resume: the scripted teacher did not start")
        yield found[1]
    finally:
        process.kill()
        process.wait()


def commands(work: Path, url: str) -> dict[str, list[str]]:
    """Each script with its flags but --out."""
    tasks, collected = ["--tasks", str(work / "tasks/train.jsonl")], work / "collect"
    return {
        "collect": ["collect.py", *tasks, "--policy-url", url, *COLLECT.split()],
        "train_sft": [
            "train_sft.py",
            "--model",
            BASE,
            "--samples",
            str(collected / "samples.jsonl"),
            *SFT.split(),
        ],
        "mine": [
            "mine.py",
            "--pool",
            str(collected),
            "--judge-url",
            url,
            "--judge-model",
            "scripted-failure-judge",
            "--tokenizer",
            BASE,
        ],
        "train_rl": ["train_rl.py", "--model", BASE, "--states", str(work / "mine/mined.jsonl"), *RL.split()],
        "evaluate": ["evaluate.py", "--policy", BASE, *tasks, *EVALUATE.split()],
    }


def plain(value: Any) -> Any:
    """A JSON value without what varies."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if not name.endswith(VARIES)}
    return [plain(item) for item in value] if isinstance(value, list) else value


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """File -> key -> record, for every JSON Lines file; a trainer's line of metrics is known by its place.

    SystemExit where a key stands twice.
    """
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        own = found.setdefault(file.name, {})
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
            record = json.loads(line)
            key = next((str(record[name]) for name in KEYS if name in record), f"line {number + 1}")
            if key in own:
                raise SystemExit(f"kill_resume: {file}: {key} stands there twice")
            own[key] = plain(record)
    return found


def difference(a: Any, b: Any, where: str = "") -> str:
    """Where two JSON values begin to differ, and what stands there."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        name = next(name for name in a if a[name] != b[name])
        return difference(a[name], b[name], f"{where}.{name}")
    if isinstance(a, list) and isinstance(b, list):
        number = next(
            (number for number, (one, two) in enumerate(zip(a, b, strict=False)) if one != two), None
        )
        if number is not None:
            return difference(a[number], b[number], f"{where}[{number}]")
    return f"{where or 'record'}: found {a!r}, expected {b!r}"[:2000]


def compare(killed: Path, whole: Path) -> None:
    """SystemExit naming the first record, report or weight file that is missing, too many, or different."""
    ours, theirs = records(killed), records(whole)
    for name in ("report.json", "summary.json"):
        for found, folder in ((ours, killed), (theirs, whole)):
            if (folder / name).exists():
                found[name] = plain(json.loads((folder / name).read_text(encoding="utf-8")))
    for name in sorted(ours.keys() | theirs.keys()):
        for key in sorted(ours.get(name, {}).keys() | theirs.get(name, {}).keys()):
            a, b = ours.get(name, {}).get(key), theirs.get(name, {}).get(key)
            if a != b:
                raise SystemExit(
                    f"kill_resume: {killed / name}: {key} differs from the run that was never killed\n"
                    f"{difference(a, b)}"
                )
    for file in sorted(whole.rglob("*.safetensors")):
        if file.read_bytes() != (killed / file.relative_to(whole)).read_bytes():
            raise SystemExit(
                f"kill_resume: {killed / file.relative_to(whole)} differs from the run that was never killed"
            )


def prepare(script: str, work: Path, wanted: dict[str, list[str]]) -> float:
    """Runs what the script needs and the script itself, never killed; returns its seconds."""
    finish(
        start(
            "-m",
            "rmsweb.playground",
            "tasks",
            "--out",
            str(work / "tasks"),
            "--train",
            "5",
            "--dev",
            "1",
            "--held-out",
            "1",
        )
    )
    before = {"train_sft": ["collect"], "mine": ["collect"], "train_rl": ["collect", "mine"]}.get(script, [])
    for name in (*before, script):
        begun = time.monotonic()
        finish(start(*wanted[name], "--out", str(work / name)))
    return time.monotonic() - begun


def main() -> None:
    """Kills, resumes, compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", choices=("collect", "train_sft", "mine", "train_rl", "evaluate"))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder to work in; default: a temporary one")
    given = parser.parse_args()
    draw, killed, runs = random.Random(given.seed), 0, 0
    with tempfile.TemporaryDirectory() as temporary, teacher() as url:
        work = given.work or Path(temporary)
        wanted = commands(work, url)
        seconds = prepare(given.script, work, wanted)
        print(f"{given.script}: {seconds:.1f} s when it is not killed")
        while killed < given.kills:
            out, done = work / f"killed{runs}", False
            while not done:
                process = start(
                    *wanted[given.script],
                    "--out",
                    str(out),
                    *(["--resume"] if (out / "config.json").exists() else []),
                )
                try:
                    process.wait(draw.uniform(0, seconds) if killed < given.kills else None)
                    done = True
                    finish(process)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
                    killed += 1
            compare(out, work / given.script)
            runs += 1
    print(
        f"{given.script}: {killed} kills in {runs} runs; every record is there once and equals that of the "
        "run that was never killed"
    )


if __name__ == "__main__":
    main()
