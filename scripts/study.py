"""One seed of the study: base, SFT, SFT + RL and three controls on the held-out tasks, in a real browser.

    python scripts/study.py --seed 0     run what is missing of runs/study/seed0, then write its report.html
                                         and docs/study/seed0.json
    python scripts/study.py --table      print the tables of docs/study.md under "Results"
    python scripts/study.py --details    print those under "What happened"

RL trains on the mined states and on the two steps of the success behind each of them (`mine.py --followers`).
The controls start from the same SFT checkpoint: plain supervised training on the same targets for as many
updates as RL makes at most (on accepted and retained groups), RL without the salvage anchor, and RL on the
mined states alone, which are the paper's corpus. The last checkpoint of each is evaluated: on dev the SFT
policy is right in nearly every mined state, which leaves nothing to choose by. All seeds share the tasks and
the scripted teacher's runs; they differ in training, in the policy's runs that are mined, and in evaluation.

A stage is done once: it is known by the hash of its command, of the code, and of the stages before it. An
interrupted stage goes on with --resume. Several seeds may run at a time. Nothing here reads a held-out task
before the evaluations.
"""

import argparse
import datetime
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

from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rmsweb.evaluation.figures import Results, figures_of  # noqa: E402  the project is not installed
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
    """A command that writes a folder.

    `needs` are the stages whose folders it reads. `URL` in a command is the teacher's address.
    """

    folder: Path
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    resumes: bool = True

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name


def flags(**values: object) -> tuple[str, ...]:
    """Return values as flags: max_steps=12 is --max-steps 12, a tuple gives several values, True none."""
    words: list[str] = []
    for name, value in values.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += map(str, value if isinstance(value, tuple) else (value,))
    return tuple(words)


CLONE = flags(
    epochs=6, lr="1e-3", per_device_batch=16, warmup_ratio=0.05, lora_rank=64, lora_alpha=128
)  # supervised training on the successes
CONTROL = flags(
    epochs=1000,
    max_steps=RL_STEPS * 2 * TRAIN_BATCH // MINI_BATCH,
    per_device_batch=MINI_BATCH,
    lr="3e-5",
    warmup_ratio=0,
    lora_rank=32,
    lora_alpha=64,
)  # supervised training on the mined states, for as many updates as RL makes at most


@dataclass(frozen=True)
class Plan:
    """The stages of a seed; those of SHARED are the same for all seeds and lie beside the seed's folder."""

    seed: int
    out: Path

    def at(self, name: str) -> Path:
        """Return the folder of a stage."""
        return (self.out.parent / "shared" if name in SHARED else self.out) / name

    def stage(
        self, script: str, name: str, words: Sequence[str], needs: tuple[str, ...], *, resumes: bool = True
    ) -> Stage:
        """Return a stage that runs one of the five scripts."""
        return Stage(self.at(name), (f"{script}.py", "--out", str(self.at(name)), *words), needs, resumes)

    def collect(self, name: str, split: str) -> Stage:
        """Return a collection by the scripted teacher."""
        words = flags(
            tasks=f"{self.at('tasks')}/{split}.jsonl",
            split=split,
            policy_url="URL",
            policy_model="scripted-teacher",
            reflection_model="scripted-reflection",
            extraction_model="scripted-extractor",
            prompt_config=PROMPT,
            tokenizer=BASE,
            max_steps=MAX_STEPS,
            concurrency=CONCURRENCY,
            rounds=5,
            successes=2,
            seed=0,
        )
        return self.stage("collect", name, words, ("tasks",))

    def mine(self, name: str, split: str, *pool: str) -> Stage:
        """Return a mining of the runs of other stages."""
        words = flags(
            pool=tuple(map(self.at, pool)),
            split=split,
            judge_url="URL",
            judge_model="scripted-failure-judge",
            tokenizer=BASE,
            followers=FOLLOWERS,
        )
        return self.stage("mine", name, words, pool, resumes=False)

    def evaluate(
        self,
        name: str,
        policy: str,
        needs: tuple[str, ...],
        *words: str,
        split: str = "held-out",
        runs: int = RUNS,
    ) -> Stage:
        """Return an evaluation of a checkpoint."""
        limits = flags(
            policy=policy,
            tasks=f"{self.at('tasks')}/{split}.jsonl",
            split=split,
            runs=runs,
            max_steps=MAX_STEPS,
            stop_on_stall=True,
            concurrency=CONCURRENCY,
            seed=self.seed,
        )
        return self.stage("evaluate", name, (*limits, *words), needs)

    def train_rl(self, name: str, *words: str, states: tuple[str, ...] = ("mined", "followers")) -> Stage:
        """Return a training by RL from the SFT checkpoint."""
        dev = self.at("mined-dev")
        sizes = flags(
            model=f"{self.at('train-sft')}/checkpoint-best",
            states=tuple(f"{self.at('mined')}/{kind}.jsonl" for kind in states),
            dev_states=(f"{dev}/mined.jsonl", f"{dev}/ordinary.jsonl"),
            max_steps=RL_STEPS,
            train_batch=TRAIN_BATCH,
            mini_batch=MINI_BATCH,
            num_rollouts=8,
            max_generation_batches=4,
            lr="3e-5",
            lora_rank=32,
            lora_alpha=64,
            response_budget=40,
            threads=1,
            seed=self.seed,
        )
        return self.stage("train_rl", name, (*sizes, *words), ("train-sft", "mined", "mined-dev"))

    def train_sft(
        self,
        name: str,
        model: str,
        files: Sequence[str],
        *words: str,
        sources: tuple[str, str],
        needs: tuple[str, ...],
    ) -> Stage:
        """Return a supervised training on `files` of the train and the dev folder in `sources`."""
        train, dev = (tuple(f"{self.at(source)}/{file}.jsonl" for file in files) for source in sources)
        data = flags(model=model, samples=train, dev_samples=dev, accumulation=1, threads=1, seed=self.seed)
        return self.stage("train_sft", name, (*data, *words), needs)

    def stages(self) -> list[Stage]:
        """Return all stages in their order."""
        tasks, sft = self.at("tasks"), f"{self.at('train-sft')}/checkpoint-best"
        sizes = flags(out=tasks, train=TRAIN, dev=DEV, held_out=HELD_OUT)
        plain = flags(temperature=1, top_p=1, top_k=0)
        return [
            Stage(tasks, ("-m", "rmsweb.playground", "tasks", *sizes), resumes=False),
            self.collect("collect", "train"),
            self.collect("collect-dev", "dev"),
            self.train_sft(
                "train-sft",
                BASE,
                ["samples"],
                *CLONE,
                sources=("collect", "collect-dev"),
                needs=("collect", "collect-dev"),
            ),
            self.evaluate("pool", sft, ("tasks", "train-sft"), *plain, split="train", runs=1),
            self.mine("mined", "train", "collect", "pool"),
            self.mine("mined-dev", "dev", "collect-dev"),
            self.train_rl("train-rl"),
            self.train_rl("train-rl-no-anchor", *flags(salvage_weight=0)),
            self.train_rl("train-rl-mined", states=("mined",)),
            self.train_sft(
                "train-sft-mined",
                sft,
                ["mined", "followers"],
                *CONTROL,
                sources=("mined", "mined-dev"),
                needs=("train-sft", "mined", "mined-dev"),
            ),
            self.evaluate("base", BASE, ("tasks",)),
            self.evaluate("sft", sft, ("tasks", "train-sft")),
            *(
                self.evaluate(name, f"{self.at(f'train-{name}')}/checkpoint-last", ("tasks", f"train-{name}"))
                for name in ("rl", "sft-mined", "rl-no-anchor", "rl-mined")
            ),
        ]


# ---------------------------------------------------------------------------------------------------- running


def code_hash() -> str:
    """Return a hash of the package, the scripts, the committed base and the prompt configuration."""
    package = (path for path in (ROOT / "rmsweb").rglob("*") if "__pycache__" not in path.parts)
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("*.py"), ROOT / PROMPT, *filter(Path.is_file, package)]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run_stages(wanted: Sequence[Stage], url: str) -> dict[str, float]:
    """Run every stage that is not done and return the seconds of each.

    Exits with the code of a stage that fails.
    """
    keys: dict[str, str] = {}
    seconds: dict[str, float] = {}
    code = code_hash()
    for stage in wanted:
        recipe = json.dumps([code, stage.command, [keys[name] for name in stage.needs]])
        keys[stage.name] = hashlib.sha256(recipe.encode()).hexdigest()
        stage.folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(stage.folder.with_suffix(".lock")):  # another seed may be at a shared stage
            seconds[stage.name] = round(run_stage(stage, keys[stage.name], url), 1)
    return seconds


def run_stage(stage: Stage, key: str, url: str) -> float:
    """Run a stage unless it is done under this key; return its seconds, with those of interrupted tries."""
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
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        returned = subprocess.run(command, cwd=ROOT, env=os.environ | threads).returncode
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


def git(*words: str) -> str:
    """Return what a git command prints about the checkout."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def result(seed: int, out: Path, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return what is committed of a seed.

    Figures, outcomes of every run, failures by mode, the course of RL, times, and the commit.
    """
    folders = {name: Results(out / name) for name in POLICIES}
    return {
        "seed": seed,
        "commit": git("rev-parse", "HEAD"),
        "changed_files": git("status", "--porcelain", "--untracked-files=no").splitlines(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": dict(seconds),
        "policies": {name: figures_of(folder, list(folders.values())) for name, folder in folders.items()},
        "outcomes": {
            name: {task: [int(success) for success in runs] for task, runs in folder.outcomes.items()}
            for name, folder in folders.items()
        },
        "rl": [
            {key: row[key] for key in ("step", *COURSE) if key in row}
            for row in Results(out / "train-rl").metrics
            if "step" in row
        ],
        "mined": Results(out / "mined").json("summary.json"),
    }


def pooled(results: Sequence[Mapping[str, Any]], policy: str) -> dict[str, list[bool]]:
    """Return outcomes by task: the runs of all seeds of a task together."""
    found: dict[str, list[bool]] = {}
    for item in results:
        for task, runs in item["outcomes"][policy].items():
            found.setdefault(task, []).extend(map(bool, runs))
    return found


def markdown(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the first tables of docs/study.md: pass@1 by policy and seed, then the paired differences."""
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
    """Yield the tables of docs/study.md, all seeds together.

    How each policy's runs end, its failures by mode, the course of RL, seconds by stage.
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
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def head(*cells: str) -> Iterator[str]:
    """Yield the first row of a table and the line under it."""
    yield row(*cells)
    yield f"|{'---|' * len(cells)}"


def _points(found: Estimate) -> str:
    return f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def load_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the committed results, by seed."""
    return sorted(
        (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("seed*.json")),
        key=lambda item: item["seed"],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; a stage that fails gives the script its exit code."""
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
    wanted = Plan(options.seed, out).stages()
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
