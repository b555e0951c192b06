"""docs/metrics.md against the metrics that small real runs write."""

import json
import re
from pathlib import Path

import pytest
from fake_world import trajectory
from rl_world import INDICES, mined, ordinary, wavering_policy, write_states
from sft_world import write_run
from tiny_model import tiny_checkpoint

import train_rl
import train_sft
from rmsweb.engine.policy import PolicyModel
from rmsweb.playground import base_model
from rmsweb.playground.drills import Words
from rmsweb.playground.words import vocabulary
from rmsweb.prompt import load_prompt_config
from rmsweb.records import Judgement
from rmsweb.runs import RunWriter

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"


def documented(section: str) -> dict[str, list[str]]:
    """Key -> the other cells of its row, for the tables below the heading that names a script."""
    parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = [part for part in parts if section in part.partition("\n")[0]]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    keys = [row[0].strip().strip("`") for row in rows]
    assert len(keys) == len(set(keys)), f"{section} documents a key twice"
    return {key: [cell.strip() for cell in row[1:]] for key, row in zip(keys, rows, strict=True)}


def written(folder: Path) -> set[str]:
    """The keys of all lines of a run's metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {key for line in lines for key in json.loads(line)}


def small(flags: dict[str, object]) -> list[str]:
    """Flags of a script, from their names without dashes."""
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def test_the_page_documents_what_rl_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key of an RL run with dev states and dev episodes has a row, and every row is written."""
    wavering_policy(30).save(tmp_path / "model")
    states = write_states(tmp_path / "train", [mined(index) for index in INDICES])
    dev = [mined(index, split="dev") for index in INDICES]
    write_states(tmp_path / "dev", dev)
    write_states(tmp_path / "dev", [ordinary(index, split="dev") for index in INDICES])
    script = tmp_path / "evaluate.py"  # stands in for episodes in a browser
    script.write_text(
        "import json, pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "out.mkdir(parents=True)\n"
        "(out / 'summary.json').write_text(json.dumps({'pass1': 0.5}))\n"
    )
    monkeypatch.setattr(train_rl, "EVALUATE", script)
    sizes = {"train-batch": 2, "mini-batch": 2, "num-rollouts": 4, "max-generation-batches": 2}
    run = {"response-budget": 40, "max-steps": 1, "lora-rank": 4, "device": "cpu", "threads": 1}
    files = {"model": tmp_path / "model", "states": states, "out": tmp_path / "run"}
    chosen = ["--dev-states", str(tmp_path / "dev/mined.jsonl"), str(tmp_path / "dev/samples.jsonl")]
    (tmp_path / "dev.jsonl").write_text("tasks")
    train_rl.main([*small({**files, **sizes, **run, "dev-episodes": tmp_path / "dev.jsonl"}), *chosen])
    assert written(tmp_path / "run") == documented("train_rl.py").keys()


def test_the_page_documents_what_sft_writes(tmp_path: Path) -> None:
    """Every key of an SFT run with dev samples has a row, and every row is written."""
    tiny_checkpoint(tmp_path / "model", std=0.05)
    files = {
        "model": tmp_path / "model",
        "samples": write_run(tmp_path / "train", 4),
        "dev-samples": write_run(tmp_path / "dev", 2, split="dev"),
        "out": tmp_path / "run",
    }
    train_sft.main(small({**files, "epochs": 1, "lora-rank": 4, "device": "cpu", "threads": 1}))
    assert written(tmp_path / "run") == documented("train_sft.py").keys()


def test_the_page_documents_what_the_tiny_bases_training_writes(tmp_path: Path) -> None:
    """Every key of a second of drills has a row, and every row is written."""
    words, config = vocabulary(), load_prompt_config(base_model.BASE_FOLDER / "prompt_config.json")
    tokenizer = base_model.build_tokenizer(words)
    policy = PolicyModel(base_model.build_model(tokenizer, 0), tokenizer, prompt_config=config)
    drills = Words(words, config, base_model.draw_pictures(tmp_path, config, 2, 0))
    base_model.train(policy, base_model.DrillEncoder(policy, tmp_path), drills, seed=0, seconds=1.0)
    assert written(tmp_path / "run") == documented("playground.base_model").keys()


def test_the_page_documents_what_an_episode_writes(tmp_path: Path) -> None:
    """Collection and evaluation write a line of metrics an episode, by the run folder's `commit`."""
    run = trajectory(number=1)
    judged = Judgement(trajectory_id=run.trajectory_id, judge="check", model="", verdict="success")
    with RunWriter(tmp_path / "run") as folder:
        folder.commit(run, judged)
    assert written(tmp_path / "run") == documented("collect.py").keys()


@pytest.mark.parametrize("section", ["train_rl.py", "train_sft.py", "playground.base_model", "collect.py"])
def test_every_key_has_a_meaning_and_a_range(section: str) -> None:
    """A row says what its key means, and in which unit or range."""
    assert not [key for key, (meaning, unit, *_) in documented(section).items() if not (meaning and unit)]
