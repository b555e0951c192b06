"""A trainer that is killed at any write and resumed ends as one that was never killed: state, checkpoints and metrics, bit for bit."""

import random

import pytest
import torch
from killing import forked, rows, summary
from rl_world import INDICES, mined, ordinary, wavering_policy, write_states
from safetensors.torch import load_file
from sft_world import write_run
from tiny_model import tiny_checkpoint

import train_rl
import train_sft

SFT = ["--epochs", "2", "--lr", "1e-2", "--lora-rank", "4", "--cutoff", "400", "--save-every", "2", "--threads", "1", "--device", "cpu"]
RL = ["--train-batch", "4", "--mini-batch", "2", "--num-rollouts", "4", "--max-generation-batches", "2", "--response-budget", "40", "--lora-rank", "8"]
RL += ["--lora-alpha", "16", "--lr", "1e-3", "--max-steps", "4", "--save-every", "1", "--seed", "0", "--threads", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """For each trainer: its main, its flags but --out, and the folder of a run that was never killed."""
    root = tmp_path_factory.mktemp("kill")
    tiny_checkpoint(root / "tiny", std=0.05)
    sft = ["--model", str(root / "tiny"), "--samples", str(write_run(root / "train", 9)), "--dev-samples", str(write_run(root / "dev", 3, split="dev")), *SFT]
    wavering_policy().save(root / "wavering")
    write_states(root / "dev-states", [ordinary(index, split="dev") for index in INDICES[:2]])
    dev = write_states(root / "dev-states", [mined(index, split="dev") for index in INDICES[:2]])
    rl = ["--model", str(root / "wavering"), "--states", str(write_states(root / "states", [mined(index) for index in INDICES]))]
    rl += ["--dev-states", str(dev), str(dev.with_name("samples.jsonl")), *RL]
    made = {"sft": (train_sft.main, sft), "rl": (train_rl.main, rl)}
    for name, (main, flags) in made.items():
        main([*flags, "--out", str(root / name)])
    return {name: (*value, root / name) for name, value in made.items()}


def assert_equal_runs(killed, whole):
    """Metrics, summary, checkpoints, adapter and training states."""
    assert rows(killed) == rows(whole)
    assert summary(killed) == summary(whole)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.suffix in (".safetensors", ".pt"))
    assert sorted(path.relative_to(killed) for path in killed.rglob("*") if path.suffix in (".safetensors", ".pt")) == files
    for file in files:
        if file.suffix == ".safetensors":
            ours, theirs = load_file(killed / file), load_file(whole / file)
        else:
            ours, theirs = (flat(torch.load(folder / file, weights_only=True)) for folder in (killed, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name] for name, value in ours.items()), file


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
    with pytest.raises(ValueError, match="started with other data"):
        main([*flags, "--resume"])
