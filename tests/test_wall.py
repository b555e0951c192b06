"""The wall between the splits: nothing of the held-out split is read or written before the evaluation.

The whole chain runs on a few tasks over the replay of the playground; the folder of the smoke demo is
searched too if it exists.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from without_browser import without_browser

import collect
import evaluate
import mine
import train_rl
import train_sft
from rmsweb.jsonl import dumps, read_records
from rmsweb.playground.__main__ import main as playground
from rmsweb.playground.base_model import BASE_FOLDER
from rmsweb.playground.tasks import make_worlds
from rmsweb.playground.words import entities
from rmsweb.records import Task, Trajectory

ROOT = Path(__file__).parent.parent
SMOKE = ROOT / "runs" / "smoke"
STAGES = (
    "collect",
    "collect-dev",
    "train-sft",
    "pool",
    "mined",
    "mined-dev",
    "train-rl",
)  # as in scripts/demo.sh
POOL_AND_LATER = ("pool", "mined", "train-rl")
BINARY = (".safetensors", ".pt", ".png", ".jpg", ".jpeg")
NAMES = sorted(set(entities("held-out")) - set(entities("train")) - set(entities("dev")))
SECRETS = [secret for world in make_worlds("held-out", 200) for secret in (world.task_id, world.text)]
HELD_OUT = re.compile(
    "|".join([*map(re.escape, SECRETS), "held-out", rf"(?:{'|'.join(NAMES)})(?![a-z])"])
)  # a name of train may begin with one of these


def held_out(text: str) -> set[str]:
    """Return the held-out split's tasks, texts and names in a text."""
    return set(HELD_OUT.findall(text))


def texts(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield every text file of a folder but the base's tokenizer, which knows all words of the playground.

    Of the rollouts, what the policy wrote is left out: its vocabulary has the words of all splits.
    """
    vocabulary = (BASE_FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in BINARY:
            text = path.read_text(encoding="utf-8")
            if path.name == "env.json":  # the defaults of all flags stand there
                text = json.dumps({**json.loads(text), "defaults": {}})
            if path.name == "rollouts.jsonl":
                rows = [json.loads(line) for line in text.splitlines()]
                text = json.dumps([{**row, "rollouts": []} for row in rows], ensure_ascii=False)
            if path.name != "tokenizer.json" or text != vocabulary:
                yield path, text


def shown_and_said(folder: Path) -> tuple[set[str], set[str]]:
    """Return what the runs in a folder showed of the held-out split, and what the policy wrote of it.

    What a page showed counts until the policy had written it. The tiny policy has the words of all splits in
    its vocabulary and now and then types one that it was never shown; then the page may show it.
    """
    shown, all_said = set[str](), set[str]()
    for trajectory in read_records(folder / "trajectories.rank0.jsonl", Trajectory):
        said = set[str]()
        shown |= held_out(dumps(trajectory.task) + (trajectory.guide_in or ""))
        for step in trajectory.steps:
            shown |= held_out(dumps(step.observation)) - said
            said |= held_out(step.response_text)
            shown |= held_out(dumps(step.results)) - said
        all_said |= said
    return shown, all_said


def assert_wall(root: Path) -> None:
    """Check every file of every stage; from the pool on, what the policy itself wrote is no leak."""
    for stage in ("collect", "collect-dev", "pool"):
        assert not shown_and_said(root / stage)[0]
    said = shown_and_said(root / "pool")[1]
    for stage in STAGES:
        files = dict(texts(root / stage))
        assert {"config.json", "metrics.jsonl"} <= {path.name for path in files} or stage.startswith("mined")
        leaks = {
            path: found
            for path, text in files.items()
            if (found := held_out(text) - (said if stage in POOL_AND_LATER else set()))
        }
        assert not leaks


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, teacher_url: str) -> Path:
    """Run the stages of the demo with the file of held-out tasks out of reach until the evaluation."""
    root = tmp_path_factory.mktemp("wall")
    base, runs = str(BASE_FOLDER), ["--max-steps", "8", "--concurrency", "2", "--seed", "0"]
    assert (
        playground(["tasks", "--out", str(root / "tasks"), "--train", "4", "--dev", "4", "--held-out", "18"])
        == 0
    )
    hidden = (root / "tasks/held-out.jsonl").rename(tmp_path_factory.mktemp("hidden") / "tasks.jsonl")
    roles = [
        "--policy-url",
        teacher_url,
        "--policy-model",
        "scripted-teacher",
        "--reflection-model",
        "scripted-reflection",
        "--rounds",
        "3",
    ]
    judge = ["--judge-url", teacher_url, "--judge-model", "scripted-failure-judge", "--tokenizer", base]

    def done(code: int) -> None:
        assert code == 0

    def run(main: object, out: str, *flags: object) -> None:
        done(main([*map(str, flags), "--out", str(root / out)]))  # type: ignore[operator]

    with pytest.MonkeyPatch.context() as patch:
        without_browser(patch)
        for split, out in (("train", "collect"), ("dev", "collect-dev")):
            tasks = ("--tasks", root / f"tasks/{split}.jsonl", "--split", split)
            run(
                collect.main,
                out,
                *tasks,
                *roles,
                *runs,
                "--tokenizer",
                base,
                "--prompt-config",
                ROOT / "scripts/demo_prompt.json",
            )
        samples = (
            "--samples",
            root / "collect/samples.jsonl",
            "--dev-samples",
            root / "collect-dev/samples.jsonl",
        )
        sizes = (
            "--epochs",
            1,
            "--per-device-batch",
            8,
            "--accumulation",
            1,
            "--lora-rank",
            4,
            "--threads",
            1,
            "--device",
            "cpu",
        )
        run(train_sft.main, "train-sft", "--model", base, *samples, *sizes)
        sft = root / "train-sft/checkpoint-best"
        run(
            evaluate.main,
            "pool",
            "--policy",
            sft,
            "--tasks",
            root / "tasks/train.jsonl",
            "--split",
            "train",
            "--runs",
            1,
            "--stop-on-stall",
            *runs,
        )
        run(mine.main, "mined", "--pool", root / "collect", root / "pool", "--split", "train", *judge)
        run(mine.main, "mined-dev", "--pool", root / "collect-dev", "--split", "dev", *judge)
        states = (
            "--states",
            root / "mined/mined.jsonl",
            "--dev-states",
            root / "mined-dev/mined.jsonl",
            root / "mined-dev/ordinary.jsonl",
        )
        sizes = (
            "--max-steps",
            1,
            "--train-batch",
            2,
            "--mini-batch",
            1,
            "--num-rollouts",
            4,
            "--max-generation-batches",
            2,
            "--lora-rank",
            4,
        )
        run(
            train_rl.main,
            "train-rl",
            "--model",
            sft,
            *states,
            *sizes,
            "--response-budget",
            40,
            "--threads",
            1,
            "--device",
            "cpu",
        )
        hidden.rename(root / "tasks/held-out.jsonl")
        run(
            evaluate.main,
            "rl",
            "--policy",
            root / "train-rl/checkpoint-best",
            "--tasks",
            root / "tasks/held-out.jsonl",
            "--runs",
            1,
            "--limit",
            2,
            *runs,
        )
    return root


def test_no_stage_before_the_evaluation_knows_the_held_out_split(chain: Path) -> None:
    """No file of collection, training, pool and mining holds one of its ids, texts or names."""
    assert_wall(chain)


def test_the_search_finds_what_is_there(chain: Path) -> None:
    """The search finds held-out tasks in their file, in an evaluation of them, and in a leak."""
    tasks = list(read_records(chain / "tasks/held-out.jsonl", Task))
    for task in tasks:
        assert held_out(task.task_id) == {task.task_id}
        assert held_out(task.text) == {task.text}
        assert held_out(task.text[1:]) & set(NAMES)
        assert held_out(task.text[1:].replace(" ", "%2F")) & set(NAMES)
    shown, _ = shown_and_said(chain / "rl")
    assert len(shown & set(NAMES)) > 5
    assert shown >= {secret for task in tasks[:2] for secret in (task.task_id, task.text)}
    assert "config.json" in {path.name for path, text in texts(chain / "rl") if held_out(text)}
    assert {path.name for path, text in texts(chain / "rl") if set(NAMES) & held_out(text)} >= {
        "trajectories.rank0.jsonl"
    }
    report = chain / "mined-dev/summary.json"
    whole = report.read_text(encoding="utf-8")
    report.write_text(whole + tasks[0].text, encoding="utf-8")
    with pytest.raises(AssertionError):
        assert_wall(chain)
    report.write_text(whole, encoding="utf-8")


def test_the_demo_names_the_held_out_split_in_its_evaluations_alone() -> None:
    """Before the evaluation only the line that writes the task files names the held-out split."""
    script, _, evaluation = (ROOT / "scripts/demo.sh").read_text(encoding="utf-8").partition(" 6 evaluation ")
    stages = script.partition("1 tasks and roles")[2].splitlines()
    assert [line.split()[:5] for line in stages if re.search("held.?out", line, re.IGNORECASE)] == [
        ["run", "collect", "-m", "rmsweb.playground", "tasks"]
    ]
    assert "$OUT/tasks/held-out.jsonl" in evaluation


def smoke_is_of_this_base() -> bool:
    """Return whether the smoke demo was run to its end here with the present base and its words."""
    trained = SMOKE / "train-sft/checkpoint-last/tokenizer.json"
    return (SMOKE / "summary.json").exists() and trained.read_bytes() == (
        BASE_FOLDER / "tokenizer.json"
    ).read_bytes()


@pytest.mark.skipif(
    not smoke_is_of_this_base(),
    reason="scripts/demo.sh --smoke was not run here with this base; scripts/test.sh runs it first",
)
def test_the_smoke_demo_kept_the_wall() -> None:
    """The same search over the smoke demo finds the held-out split in its evaluations alone."""
    assert_wall(SMOKE)
    assert all(shown_and_said(SMOKE / stage)[0] & set(NAMES) for stage in ("base", "sft", "rl"))
