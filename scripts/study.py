"""One seed of the study: base, SFT, SFT + RL and three controls on the held-out tasks, every stage in a real
browser where it needs one.

    python scripts/study.py --seed 0     runs what is missing of runs/study/seed0, then writes its
                                         report.html and docs/study/seed0.json
    python scripts/study.py --table      prints the tables of docs/study.md under "Results"
    python scripts/study.py --details    prints those under "What happened"

RL trains on the mined states and on the two steps of the success behind each of them (`mine.py --followers`).
The controls start from the same SFT checkpoint: plain supervised training on the same targets for as many
updates as RL makes at most (on accepted and retained groups), RL without the salvage anchor, and RL on the
mined states alone, which are the paper's corpus. Of all four the last checkpoint is
evaluated: on dev the SFT policy is right in nearly every mined state, which leaves nothing to choose by. All
seeds share the tasks and the scripted teacher's runs; they differ in training, in the policy's runs that are
mined, and in evaluation. A stage is done once: it is known by the hash of its command, of the code, and of
the stages before it; one that was interrupted goes on with --resume; several seeds may run at a time. Nothing
here reads a held-out task before the evaluations.
"""

import argparse
import datetime
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rmsweb.evaluation.figures import Results, figures  # noqa: E402  the project is not installed
from rmsweb.stats import Estimate, evidence, paired_difference, pass_at_1_estimate  # noqa: E402

RESULTS = ROOT / "docs" / "study"
TRAIN, DEV, HELD_OUT, MAX_STEPS, RUNS = 400, 60, 108, 12, 3
RL_STEPS, TRAIN_BATCH, MINI_BATCH = 100, 8, 4
CONCURRENCY = "4"
POLICIES = {
    "base": "base",
    "sft": "SFT",
    "rl": "SFT + RL",
    "sft-mined": "SFT + supervised on the same states",
    "rl-no-anchor": "SFT + RL without anchor",
    "rl-mined": "SFT + RL on the mined states alone",
}
PAIRS = (
    ("sft", "base"),
    ("rl", "sft"),
    ("rl", "sft-mined"),
    ("rl", "rl-no-anchor"),
    ("rl", "rl-mined"),
    ("rl-mined", "sft"),
    ("sft-mined", "sft"),
)
FOLLOWERS = 2
COURSE = (
    "std_rejected_frac",
    "competence_rejected_frac",
    "reward_mean",
    "best_of_n",
    "kl",
    "gap",
    "format_error_frac",
    "dev_reward",
)
SHARED = ("tasks", "collect", "collect-dev")
REPORTED = (*SHARED[1:], "train-sft", "pool", "mined", "mined-dev", "train-rl", "base", "sft", "rl")
BASE, PROMPT = "rmsweb/playground/base", "scripts/demo_prompt.json"


@dataclass(frozen=True)
class Stage:
    """A command that writes its folder; `needs` are the stages whose folders it reads, `URL` in a command is
    the teacher's address.
    """

    folder: Path
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    resumes: bool = True

    @property
    def name(self) -> str:
        return self.folder.name


def stages(seed: int, out: Path) -> list[Stage]:
    """The stages of a seed in order; those of SHARED are the same for all seeds and lie beside them."""

    def at(name: str) -> Path:
        return (out.parent / "shared" if name in SHARED else out) / name

    def command(script: str, name: str, *flags: object) -> tuple[str, ...]:
        return (f"{script}.py", "--out", str(at(name)), *map(str, flags))

    def collect(name: str, split: str) -> Stage:
        roles = (
            "--policy-url",
            "URL",
            "--policy-model",
            "scripted-teacher",
            "--reflection-model",
            "scripted-reflection",
        )
        limits = (
            "--max-steps",
            MAX_STEPS,
            "--concurrency",
            CONCURRENCY,
            "--rounds",
            5,
            "--successes",
            2,
            "--seed",
            0,
        )
        small = ("--extraction-model", "scripted-extractor", "--prompt-config", PROMPT, "--tokenizer", BASE)
        return Stage(
            at(name),
            command(
                "collect",
                name,
                "--tasks",
                f"{at('tasks')}/{split}.jsonl",
                "--split",
                split,
                *roles,
                *small,
                *limits,
            ),
            ("tasks",),
        )

    def mine(name: str, split: str, *pool: str) -> Stage:
        judge = (
            "--judge-url",
            "URL",
            "--judge-model",
            "scripted-failure-judge",
            "--tokenizer",
            BASE,
            "--followers",
            FOLLOWERS,
        )
        return Stage(
            at(name),
            command("mine", name, "--pool", *map(at, pool), "--split", split, *judge),
            pool,
            resumes=False,
        )

    def evaluate(
        name: str,
        policy: str,
        *flags: object,
        split: str = "held-out",
        runs: int = RUNS,
        needs: tuple[str, ...] = (),
    ) -> Stage:
        limits = (
            "--runs",
            runs,
            "--max-steps",
            MAX_STEPS,
            "--stop-on-stall",
            "--concurrency",
            CONCURRENCY,
            "--seed",
            seed,
        )
        return Stage(
            at(name),
            command(
                "evaluate",
                name,
                "--policy",
                policy,
                "--tasks",
                f"{at('tasks')}/{split}.jsonl",
                "--split",
                split,
                *limits,
                *flags,
            ),
            needs,
        )

    def rl(name: str, *flags: object, states: Sequence[str] = ("mined", "followers")) -> Stage:
        files = (
            "--states",
            *(f"{at('mined')}/{kind}.jsonl" for kind in states),
            "--dev-states",
            f"{at('mined-dev')}/mined.jsonl",
            f"{at('mined-dev')}/ordinary.jsonl",
        )
        sizes = (
            "--max-steps",
            RL_STEPS,
            "--train-batch",
            TRAIN_BATCH,
            "--mini-batch",
            MINI_BATCH,
            "--num-rollouts",
            8,
            "--max-generation-batches",
            4,
        )
        rest = (
            "--lr",
            "3e-5",
            "--lora-rank",
            32,
            "--lora-alpha",
            64,
            "--response-budget",
            40,
            "--threads",
            1,
            "--seed",
            seed,
        )
        return Stage(
            at(name),
            command("train_rl", name, "--model", sft, *files, *sizes, *rest, *flags),
            ("train-sft", "mined", "mined-dev"),
        )

    def train_sft(
        name: str, model: str, samples: Sequence[str], needs: tuple[str, ...], *flags: object
    ) -> Stage:
        return Stage(
            at(name),
            command(
                "train_sft",
                name,
                "--model",
                model,
                *samples,
                "--accumulation",
                1,
                "--threads",
                1,
                "--seed",
                seed,
                *flags,
            ),
            needs,
        )

    sft = f"{at('train-sft')}/checkpoint-best"
    successes = (
        "--samples",
        f"{at('collect')}/samples.jsonl",
        "--dev-samples",
        f"{at('collect-dev')}/samples.jsonl",
    )
    targets = tuple(
        part
        for flag, name in (("--samples", "mined"), ("--dev-samples", "mined-dev"))
        for part in (flag, f"{at(name)}/mined.jsonl", f"{at(name)}/followers.jsonl")
    )
    clone = (
        "--epochs",
        6,
        "--lr",
        "1e-3",
        "--per-device-batch",
        16,
        "--warmup-ratio",
        0.05,
        "--lora-rank",
        64,
        "--lora-alpha",
        128,
    )
    updates = (
        "--epochs",
        1000,
        "--max-steps",
        RL_STEPS * 2 * TRAIN_BATCH // MINI_BATCH,
        "--per-device-batch",
        MINI_BATCH,
    )
    control = (*updates, "--lr", "3e-5", "--warmup-ratio", 0, "--lora-rank", 32, "--lora-alpha", 64)
    sizes = ("--train", TRAIN, "--dev", DEV, "--held-out", HELD_OUT)
    return [
        Stage(
            at("tasks"),
            ("-m", "rmsweb.playground", "tasks", "--out", *map(str, (at("tasks"), *sizes))),
            resumes=False,
        ),
        collect("collect", "train"),
        collect("collect-dev", "dev"),
        train_sft("train-sft", BASE, successes, ("collect", "collect-dev"), *clone),
        evaluate(
            "pool",
            sft,
            "--temperature",
            1,
            "--top-p",
            1,
            "--top-k",
            0,
            split="train",
            runs=1,
            needs=("tasks", "train-sft"),
        ),
        mine("mined", "train", "collect", "pool"),
        mine("mined-dev", "dev", "collect-dev"),
        rl("train-rl"),
        rl("train-rl-no-anchor", "--salvage-weight", 0),
        rl("train-rl-mined", states=("mined",)),
        train_sft("train-sft-mined", sft, targets, ("train-sft", "mined", "mined-dev"), *control),
        evaluate("base", BASE, needs=("tasks",)),
        evaluate("sft", sft, needs=("tasks", "train-sft")),
        *(
            evaluate(name, f"{at(f'train-{name}')}/checkpoint-last", needs=("tasks", f"train-{name}"))
            for name in ("rl", "sft-mined", "rl-no-anchor", "rl-mined")
        ),
    ]


# ---------------------------------------------------------------------------------------------------- running


def code_hash() -> str:
    """Hash of the package, the scripts, the committed base and the prompt configuration."""
    files = [
        *ROOT.glob("*.py"),
        ROOT / PROMPT,
        *(
            path
            for path in (ROOT / "rmsweb").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ),
    ]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run_stages(wanted: Sequence[Stage], url: str) -> dict[str, float]:
    """Runs every stage that is not done; returns the seconds of each.

    Exits with the code of a stage that failed.
    """
    keys: dict[str, str] = {}
    seconds: dict[str, float] = {}
    code = code_hash()
    for stage in wanted:
        keys[stage.name] = hashlib.sha256(
            json.dumps([code, stage.command, [keys[name] for name in stage.needs]]).encode()
        ).hexdigest()
        stage.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(stage.folder.with_suffix(".lock"), "w") as lock:  # another seed may be at a shared stage
            fcntl.flock(lock, fcntl.LOCK_EX)
            seconds[stage.name] = round(run_stage(stage, keys[stage.name], url), 1)
    return seconds


def run_stage(stage: Stage, key: str, url: str) -> float:
    """Runs a stage that is not done under this key; returns its seconds, those of interrupted tries included."""
    note = stage.folder.with_suffix(".stage.json")
    known = json.loads(note.read_text()) if note.exists() else {}
    if known.get("key") != key:
        shutil.rmtree(stage.folder, ignore_errors=True)
        known = {"key": key, "seconds": 0.0, "done": False}
        note.write_text(json.dumps(known))
    if not known["done"]:
        resume = ["--resume"] if stage.resumes and (stage.folder / "config.json").exists() else []
        command = [sys.executable, *(url if part == "URL" else part for part in stage.command), *resume]
        print(f"\n== {stage.name}\n$ {' '.join(command)}", flush=True)
        started = time.monotonic()
        returned = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        ).returncode
        known |= {"seconds": known["seconds"] + time.monotonic() - started, "done": returned == 0}
        note.write_text(json.dumps(known))
        if returned:
            sys.exit(returned)
    return float(known["seconds"])


class Teacher:
    """The scripted roles behind their HTTP endpoint while the stages run."""

    def __enter__(self) -> str:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rmsweb.playground", "teacher", "--port", "0"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        for line in self.process.stdout:
            if found := re.match(r"(http\S+) serves", line):
                return found[1]
        sys.exit("study: the scripted teacher did not start")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


# ---------------------------------------------------------------------------------------------------- results


def result(seed: int, out: Path, seconds: Mapping[str, float]) -> dict[str, Any]:
    """What is committed of a seed: figures, outcomes of every run, failures by mode, the course of RL, times,
    and the commit.
    """
    folders = {name: Results(out / name) for name in POLICIES}
    git = {name: subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
           for name, command in {"commit": ("rev-parse", "HEAD"), "changed": ("status", "--porcelain", "--untracked-files=no")}.items()}  # fmt: skip
    return {
        "seed": seed,
        "commit": git["commit"],
        "changed_files": git["changed"].splitlines(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": dict(seconds),
        "policies": {name: figures(folder, list(folders.values())) for name, folder in folders.items()},
        "outcomes": {
            name: {task: [int(success) for success in runs] for task, runs in folder.outcomes.items()}
            for name, folder in folders.items()
        },
        "rl": [
            {key: row[key] for key in ("step", *COURSE) if key in row}
            for row in Results(out / "train-rl").metrics
            if "step" in row
        ],
        "mined": Results(out / "mined").json("report.json"),
    }


def pooled(results: Sequence[Mapping[str, Any]], policy: str) -> dict[str, list[bool]]:
    """Outcomes by task over all seeds: the runs of all seeds of a task together."""
    found: dict[str, list[bool]] = {}
    for item in results:
        for task, runs in item["outcomes"][policy].items():
            found.setdefault(task, []).extend(map(bool, runs))
    return found


def markdown(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The first tables of docs/study.md: pass@1 of every policy and seed, then the paired differences."""
    seeds = [f"seed {item['seed']}" for item in results]
    sides = [[item] for item in results] + [list(results)]
    yield from head(
        f"pass@1 in %, {len(results[0]['outcomes']['base'])} held-out tasks × {RUNS} runs", *seeds, "all"
    )
    for policy, title in POLICIES.items():
        yield row(title, *(f"{100 * pass_at_1_estimate(pooled(side, policy)).value:.1f}" for side in sides))
    yield ""
    yield from head(
        "paired difference in points (95 % interval over tasks)", *seeds, "all", "all seeds together"
    )
    for ours, other in PAIRS:
        found = [paired_difference(pooled(side, ours), pooled(side, other)) for side in sides]
        yield row(f"{POLICIES[ours]} against {POLICIES[other]}", *map(_points, found), evidence(found[-1]))


def details(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The tables of docs/study.md, all seeds together: how each policy's runs end, its failures by mode, the
    course of RL, seconds by stage.
    """

    def mean(values: Sequence[float | None], scale: float = 1.0, digits: int = 1) -> str:
        known = [value for value in values if value is not None]
        return f"{scale * sum(known) / len(known):.{digits}f}" if known else ""

    def failures(policy: str, mode: str) -> int:
        return sum(item["policies"][policy]["failures"].get(mode, 0) for item in results)

    yield from head("", *POLICIES.values())
    for title, name, scale in (
        ("pass@3 in %", "pass3", 100),
        ("turns of a successful run", "steps", 1),
        ("unusable answers, % of turns", "format_errors", 100),
    ):
        yield row(
            title, *(mean([item["policies"][policy][name] for item in results], scale) for policy in POLICIES)
        )
    modes = {mode for item in results for policy in POLICIES for mode in item["policies"][policy]["failures"]}
    for mode in sorted(modes, key=lambda mode: (-failures("sft", mode), mode)):
        yield row(f"failed runs: {mode}", *(str(failures(policy, mode)) for policy in POLICIES))
    yield ""
    spans = [(start + 1, start + RL_STEPS // 5) for start in range(0, RL_STEPS, RL_STEPS // 5)]
    yield from head("RL steps", *(f"{first} to {last}" for first, last in spans))
    steps = [step for item in results for step in item["rl"]]
    for name in COURSE:
        yield row(
            name,
            *(
                mean(
                    [step[name] for step in steps if name in step and first <= step["step"] <= last], digits=3
                )
                for first, last in spans
            ),
        )
    yield ""
    yield from head("seconds", *(f"seed {item['seed']}" for item in results))
    for name in results[0]["seconds"]:
        yield row(name, *(f"{item['seconds'][name]:.0f}" for item in results))
    yield row("total", *(f"{sum(item['seconds'].values()):.0f}" for item in results))


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def head(*cells: str) -> Iterator[str]:
    """The first row of a table and the line under it."""
    yield row(*cells)
    yield f"|{'---|' * len(cells)}"


def _points(found: Estimate) -> str:
    return f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def load_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The committed results, by seed."""
    return sorted(
        (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("seed*.json")),
        key=lambda item: item["seed"],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; a stage that fails gives the script its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--seed",
        type=int,
        help="seed of collection, training and evaluation; the tasks are the same for all seeds",
    )
    what.add_argument(
        "--table",
        action="store_true",
        help="print the tables of the committed seeds that docs/study.md shows first",
    )
    what.add_argument(
        "--details",
        action="store_true",
        help="print the tables of the committed seeds that docs/study.md shows",
    )
    parser.add_argument("--until", metavar="STAGE", help="stop after this stage and write no result")
    options = parser.parse_args(argv)
    if options.table or options.details:
        tables = markdown if options.table else details
        print("\n".join(tables(load_results())) if load_results() else "no results in docs/study")
        return 0
    out = Path("runs") / "study" / f"seed{options.seed}"
    wanted = stages(options.seed, out)
    names = [stage.name for stage in wanted]
    if options.until:
        if options.until not in names:
            parser.error(f"--until {options.until}: expected one of {', '.join(names)}")
        wanted = wanted[: names.index(options.until) + 1]
    os.chdir(ROOT)
    with Teacher() as url:
        seconds = run_stages(wanted, url)
    if not options.until:
        RESULTS.mkdir(parents=True, exist_ok=True)
        report = [str(stage.folder) for stage in wanted if stage.name in REPORTED]
        subprocess.run(
            [sys.executable, "-m", "rmsweb.report", *report, "--out", str(out)], cwd=ROOT, check=True
        )
        (RESULTS / f"seed{options.seed}.json").write_text(
            json.dumps(result(options.seed, out, seconds), ensure_ascii=False) + "\n", encoding="utf-8"
        )
        print("\n".join(markdown(load_results())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
