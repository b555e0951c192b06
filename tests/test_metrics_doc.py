"""docs/metrics.md against what runs really write, in both directions."""

import json
import re
from pathlib import Path

import pytest
from fake_world import trajectory
from rl_world import INDICES, mined, ordinary, write_states
from sft_world import write_run
from tiny_model import tiny_checkpoint

import train_rl
import train_sft
from rmsweb.runs import RunWriter

PAGE = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
WRITERS = ("train_rl.py", "train_sft.py", "collect.py")  # evaluate.py writes the lines of collect.py
COURSE = "The course of a run"
EVALUATE = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True)
(out / "summary.json").write_text(json.dumps({"pass1": 0.5}))
"""


def section(title: str) -> str:
    """The text below the heading that names `title`."""
    return next(part for part in PAGE.split("\n## ")[1:] if title in part.splitlines()[0])


def described(title: str) -> set[str]:
    """The keys in the first column of a section's tables."""
    rows = [line.split(" | ")[0] for line in section(title).splitlines() if line.startswith("| `")]
    return {name for cell in rows for name in re.findall(r"`(\w+)`", cell)}


def keys(folder: Path) -> set[str]:
    """All keys of a run's metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {key for line in lines for key in json.loads(line)}


def run_rl(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps of RL with dev states of both kinds, and dev episodes whose evaluation is a stand-in."""
    write_states(root / "train", [mined(index) for index in INDICES])
    write_states(root / "dev", [mined(index, split="dev") for index in INDICES])
    write_states(root / "dev", [ordinary(index, split="dev") for index in INDICES])
    (root / "evaluate.py").write_text(EVALUATE, encoding="utf-8")
    monkeypatch.setattr(train_rl, "EVALUATE", root / "evaluate.py")
    command = f"""--model {tiny_checkpoint(root / "model", std=0.05)} --states {root}/train/mined.jsonl
        --dev-states {root}/dev/mined.jsonl {root}/dev/samples.jsonl --dev-episodes {root}/tasks.jsonl
        --train-batch 2 --mini-batch 1 --num-rollouts 2 --max-generation-batches 1 --response-budget 40
        --lora-rank 4 --max-steps 2 --device cpu --out {root}/run"""
    train_rl.main(command.split())
    return root / "run"


def run_sft(root: Path) -> Path:
    """One epoch of SFT with a dev loss."""
    samples, dev = write_run(root / "train", 4), write_run(root / "dev", 2, split="dev")
    command = f"""--model {tiny_checkpoint(root / "model")} --samples {samples} --dev-samples {dev}
        --epochs 1 --lora-rank 4 --device cpu --out {root}/run"""
    train_sft.main(command.split())
    return root / "run"


def run_episode(root: Path) -> Path:
    """One committed episode, as collection and evaluation write it."""
    with RunWriter(root / "run") as folder:
        folder.commit(trajectory(), None, 1.0)
    return root / "run"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The keys that each writer writes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        rl = run_rl(tmp_path_factory.mktemp("rl"), monkeypatch)
    sft, episode = run_sft(tmp_path_factory.mktemp("sft")), run_episode(tmp_path_factory.mktemp("episode"))
    return dict(zip(WRITERS, map(keys, (rl, sft, episode)), strict=True))


@pytest.mark.parametrize("writer", WRITERS)
def test_every_written_key_is_described(written: dict[str, set[str]], writer: str) -> None:
    """No key of metrics.jsonl is left out of the page."""
    assert written[writer] - described(writer) == set()


@pytest.mark.parametrize("writer", WRITERS)
def test_every_described_key_is_written(written: dict[str, set[str]], writer: str) -> None:
    """The page tells of no key that a run does not write."""
    assert described(writer) - written[writer] == set()


def test_the_course_names_described_keys() -> None:
    """Figures of the paper stand beside keys that exist."""
    assert described(COURSE) <= described("train_rl.py")
    assert {"gap", "best_of_n", "std_rejected_frac"} <= described(COURSE)


def test_every_described_key_has_a_meaning() -> None:
    """Each row of a writer's tables has four cells, and the second one says what the key is."""
    rows = [line for writer in WRITERS for line in section(writer).splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if row.count(" |") != 4 or len(row.split(" | ")[1]) < 5] == []
