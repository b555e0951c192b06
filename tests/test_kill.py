"""A script that is killed at any write and resumed ends as one that was never killed: the same records, none
twice; of a trainer the same bits.

Collection and evaluation run on the replay of the playground; test_resume kills them in a real browser.
"""

import itertools
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from killing import forked, rows, summary
from rl_world import INDICES, mined, ordinary, wavering_policy, write_states
from safetensors.torch import load_file
from sft_world import write_run
from tiny_model import tiny_checkpoint
from without_browser import without_browser

import collect
import evaluate
import mine
import train_rl
import train_sft
from rmsweb.playground.__main__ import main as playground
from rmsweb.playground.base_model import BASE_FOLDER

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import kill_resume

COLLECT = [
    "--policy-model",
    "scripted-teacher",
    "--reflection-model",
    "scripted-reflection",
    "--extraction-model",
    "scripted-extractor",
]
COLLECT += [
    "--prompt-config",
    "scripts/demo_prompt.json",
    "--tokenizer",
    str(BASE_FOLDER),
    "--max-steps",
    "8",
    "--concurrency",
    "2",
    "--rounds",
    "3",
]
EVALUATE = [
    "--policy",
    str(BASE_FOLDER),
    "--split",
    "train",
    "--runs",
    "2",
    "--max-steps",
    "4",
    "--stop-on-stall",
    "--concurrency",
    "2",
]
SFT = [
    "--epochs",
    "2",
    "--lr",
    "1e-2",
    "--lora-rank",
    "4",
    "--cutoff",
    "400",
    "--save-every",
    "2",
    "--threads",
    "1",
    "--device",
    "cpu",
]
RL = [
    "--train-batch",
    "4",
    "--mini-batch",
    "2",
    "--num-rollouts",
    "4",
    "--max-generation-batches",
    "2",
    "--response-budget",
    "40",
    "--lora-rank",
    "8",
]
RL += [
    "--lora-alpha",
    "16",
    "--lr",
    "1e-3",
    "--max-steps",
    "4",
    "--save-every",
    "1",
    "--seed",
    "0",
    "--threads",
    "1",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """For each trainer: its main, its flags but --out, and the folder of a run that was never killed."""
    root = tmp_path_factory.mktemp("kill")
    tiny_checkpoint(root / "tiny", std=0.05)
    sft = [
        "--model",
        str(root / "tiny"),
        "--samples",
        str(write_run(root / "train", 9)),
        "--dev-samples",
        str(write_run(root / "dev", 3, split="dev")),
        *SFT,
    ]
    wavering_policy().save(root / "wavering")
    write_states(root / "dev-states", [ordinary(index, split="dev") for index in INDICES[:2]])
    dev = write_states(root / "dev-states", [mined(index, split="dev") for index in INDICES[:2]])
    rl = [
        "--model",
        str(root / "wavering"),
        "--states",
        str(write_states(root / "states", [mined(index) for index in INDICES])),
    ]
    rl += ["--dev-states", str(dev), str(dev.with_name("samples.jsonl")), *RL]
    made = {"sft": (train_sft.main, sft), "rl": (train_rl.main, rl)}
    for name, (main, flags) in made.items():
        main([*flags, "--out", str(root / name)])
    return {name: (*value, root / name) for name, value in made.items()}


def assert_equal_runs(killed, whole):
    """Metrics, summary, checkpoints, adapter and training states."""
    assert rows(killed) == rows(whole)
    assert summary(killed) == summary(whole)
    files = sorted(
        path.relative_to(whole) for path in whole.rglob("*") if path.suffix in (".safetensors", ".pt")
    )
    assert (
        sorted(
            path.relative_to(killed) for path in killed.rglob("*") if path.suffix in (".safetensors", ".pt")
        )
        == files
    )
    for file in files:
        if file.suffix == ".safetensors":
            ours, theirs = load_file(killed / file), load_file(whole / file)
        else:
            ours, theirs = (flat(torch.load(folder / file, weights_only=True)) for folder in (killed, whole))
        assert ours.keys() == theirs.keys()
        assert all(
            torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
            for name, value in ours.items()
        ), file


def flat(value, name=""):
    """A nest of dicts and lists as one dict of its leaves."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for inner, item in items for key, leaf in flat(item, f"{name}/{inner}").items()}
    return {name: value}


def kill_and_finish(world, out, moments):
    """Dies at each of the moments in turn, then runs to its end."""
    main, flags, whole = world
    for moment in moments:
        resume = ["--resume"] if out.exists() else []
        assert forked(main, [*flags, "--out", str(out), *resume], die_at=moment) == -9
    main([*flags, "--out", str(out), "--resume"])
    assert_equal_runs(out, whole)


@pytest.mark.parametrize("trainer", ["sft", "rl"])
def test_killed_twice_equals_never_killed(worlds, tmp_path, trainer):
    """At two moments drawn by seed."""
    draw = random.Random(trainer)
    kill_and_finish(worlds[trainer], tmp_path / "out", [draw.randint(4, 24), draw.randint(1, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["sft", "rl"])
def test_killed_at_every_third_write_equals_never_killed(worlds, tmp_path, trainer):
    """From the first write of a run to its last ones."""
    for moment in range(1, 30, 3):
        kill_and_finish(worlds[trainer], tmp_path / str(moment), [moment])


def test_another_run_cannot_be_resumed(worlds, tmp_path):
    """Other samples under the same path are refused by name."""
    main, flags, _ = worlds["sft"]
    samples = write_run(tmp_path / "data", 5)
    flags = [*flags, "--samples", str(samples), "--epochs", "1", "--out", str(tmp_path / "out")]
    main(flags)
    samples.write_text("\n".join(samples.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(ValueError, match="changed: --samples"):
        main([*flags, "--resume"])


@pytest.fixture(scope="module")
def data_worlds(tmp_path_factory, teacher_url):
    """For each of the other scripts the same: its main, its flags but --out, and the folder of a run that was
    never killed.
    """
    root = tmp_path_factory.mktemp("kill-data")
    assert (
        playground(["tasks", "--out", str(root / "tasks"), "--train", "4", "--dev", "0", "--held-out", "0"])
        == 0
    )
    tasks = ["--tasks", str(root / "tasks/train.jsonl")]
    judge = [
        "--judge-url",
        teacher_url,
        "--judge-model",
        "scripted-failure-judge",
        "--tokenizer",
        str(BASE_FOLDER),
    ]
    made = {
        "collect": (collect.main, [*tasks, "--policy-url", teacher_url, *COLLECT]),
        "mine": (mine.main, ["--pool", str(root / "collect"), *judge]),
        "evaluate": (evaluate.main, [*tasks, *EVALUATE]),
    }
    with pytest.MonkeyPatch.context() as patch:
        without_browser(patch)
        for name, (main, flags) in made.items():
            assert main([*flags, "--out", str(root / name)]) == 0
        yield {name: (*value, root / name) for name, value in made.items()}


def finish_and_compare(world, out):
    """Runs to the end: every record of the unkilled run is there, once, and the same report."""
    main, flags, whole = world
    assert main([*flags, "--out", str(out), "--resume"]) == 0
    kill_resume.compare(out, whole)


@pytest.mark.parametrize(("script", "writes"), [("collect", 30), ("mine", 6), ("evaluate", 24)])
def test_killed_twice_has_every_record_once(data_worlds, tmp_path, script, writes):
    """At two moments drawn by seed."""
    draw, (main, flags, _) = random.Random(script), data_worlds[script]
    for resume, latest in (([], writes), (["--resume"], writes // 2)):
        assert (
            forked(main, [*flags, "--out", str(tmp_path / "out"), *resume], die_at=draw.randint(1, latest))
            == -9
        )
    finish_and_compare(data_worlds[script], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("script", "stride"), [("collect", 3), ("mine", 1), ("evaluate", 5)])
def test_killed_at_many_writes_has_every_record_once(data_worlds, tmp_path, script, stride):
    """From the first write of a run until one ends before it is killed."""
    main, flags, _ = data_worlds[script]
    for moment in itertools.count(1, stride):
        code = forked(main, [*flags, "--out", str(tmp_path / str(moment))], die_at=moment)
        if code == 0:
            break
        assert code == -9
        finish_and_compare(data_worlds[script], tmp_path / str(moment))
    assert moment > 8 * stride


def test_the_comparison_sees_a_record_too_few_and_one_too_many(data_worlds, tmp_path):
    """Without a line, or with a line twice, a folder is not that of the unkilled run."""
    whole = data_worlds["collect"][2]
    for name in ("trajectories.rank0.jsonl", "judgements.rank0.jsonl", "samples.jsonl", "metrics.jsonl"):
        lines = (whole / name).read_text().splitlines(keepends=True)
        for words, changed in (("differs from", lines[:-1]), ("stands there twice", [*lines, lines[-1]])):
            folder = tmp_path / f"{name}{len(changed)}"
            shutil.copytree(whole, folder)
            (folder / name).write_text("".join(changed))
            with pytest.raises(SystemExit, match=words):
                kill_resume.compare(folder, whole)
