"""Laws of the SFT script."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sft_world import sft_items, step_sample, write_run
from tiny_model import SMALL_PROMPT, tiny_checkpoint

import train_sft
from rmsweb.config import flat
from rmsweb.engine.distributed import Ranks
from rmsweb.engine.policy import PolicyModel
from rmsweb.jsonl import write_json

ROOT = Path(train_sft.__file__).parent


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny checkpoint, a run folder with train samples (one too long), one with dev samples."""
    root = tmp_path_factory.mktemp("sft")
    tiny_checkpoint(root / "model", std=0.05)
    write_run(root / "train", 21, samples=[step_sample(99, padding=700)])
    write_run(root / "dev", 6, split="dev")
    return root


def flags(world, out, *more):
    return [
        "--model",
        world / "model",
        "--samples",
        world / "train/samples.jsonl",
        "--out",
        out,
        "--device",
        "cpu",
        "--cutoff",
        "400",
        *more,
    ]


def run(world, out, *more):
    return train_sft.main([str(flag) for flag in flags(world, out, *more)])


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out):
    return [row["loss"] for row in metrics(out) if "loss" in row]


def weights(out):
    return load_file(out / "checkpoint-last" / "model.safetensors")


def test_trains_and_writes_a_run_folder(world, tmp_path):
    """The loss falls, dev loss is logged every epoch, the long sample is dropped and counted, both
    checkpoints load.
    """
    dev = ("--dev-samples", world / "dev/samples.jsonl")
    run(world, tmp_path / "a", *dev, "--epochs", 4, "--lr", 1e-2, "--lora-rank", 8, "--lora-alpha", 16)
    rows, found = metrics(tmp_path / "a"), losses(tmp_path / "a")
    assert len(found) == 4 * 6  # 21 samples, 4 a step
    assert sum(found[-3:]) < 0.6 * sum(found[:3])
    assert rows[0]["dropped"] == 1
    dev_losses = [row["dev_loss"] for row in rows if "dev_loss" in row]
    assert len(dev_losses) == 4
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["best_dev_loss"] == min(dev_losses)
    for name in ("checkpoint-best", "checkpoint-last"):
        assert PolicyModel.load(tmp_path / "a" / name).prompt_config == SMALL_PROMPT
    assert (tmp_path / "a/adapter/adapter_config.json").exists()


def test_defaults_are_the_papers():
    """App. F for 8B, as flags."""
    parsed = train_sft.parse_config(train_sft.Config, ["--model", "m", "--samples", "s", "--out", "o"])
    config = SimpleNamespace(**flat(parsed))
    assert (config.epochs, config.lr, config.warmup_ratio, config.weight_decay, config.clip) == (
        3,
        1e-4,
        0.03,
        0.01,
        1.0,
    )
    assert (config.per_device_batch, config.accumulation) == (1, 4)
    assert (config.lora_rank, config.lora_alpha, config.lora_dropout, config.lora_scope) == (
        64,
        128.0,
        0.05,
        "language",
    )
    assert (config.cutoff, config.seed) == (12_000, 42)


def test_rates_follow_the_cosine_and_every_epoch_has_its_own_order(world, tmp_path):
    """Rates warm up and follow the cosine; every epoch trains every sample once, in an order of its own that
    the seed decides.
    """
    run(world, tmp_path / "a", "--epochs", 2, "--lr", 0.2, "--warmup-ratio", 0.2, "--lora-rank", 4)
    rates = [row["lr"] for row in metrics(tmp_path / "a") if "lr" in row]
    assert rates == pytest.approx([train_sft.cosine_with_warmup(step, 12, 0.2, 0.2) for step in range(12)])
    config = train_sft.parse_config(train_sft.Config, [str(flag) for flag in flags(world, tmp_path)])
    orders = [train_sft.epoch_order(config.seed, epoch, 21) for epoch in range(3)]
    assert all(sorted(order) == list(range(21)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders != [train_sft.epoch_order(1, epoch, 21) for epoch in range(3)]


def test_the_best_checkpoint_is_that_of_the_lowest_dev_loss(world, tmp_path, monkeypatch):
    """With the lowest loss after the second of three epochs, checkpoint-best and the adapter are those of its
    end, checkpoint-last is another.
    """
    losses = iter((2.0, 1.0, 3.0))
    monkeypatch.setattr(train_sft, "dev_loss", lambda *_: next(losses))
    out = tmp_path / "a"
    run(
        world,
        out,
        "--dev-samples",
        world / "dev/samples.jsonl",
        "--epochs",
        3,
        "--lr",
        1e-2,
        "--lora-rank",
        4,
    )
    assert json.loads((out / "summary.json").read_text())["best_dev_loss"] == 1.0
    state = torch.load(out / "state/state-00000012.rank0-of-1.pt", weights_only=True)["weights"]
    adapter = load_file(out / "adapter/adapter_model.safetensors")
    assert len(adapter) == len(state)
    for name, value in state.items():
        assert torch.equal(adapter[f"base_model.model.{name}.weight"], value)
    best = load_file(out / "checkpoint-best/model.safetensors")
    assert any(not torch.equal(value, best[name]) for name, value in weights(out).items())


def test_packing_changes_no_loss(world, tmp_path):
    """Rows of any length give the same losses and weights."""
    common = ("--epochs", 1, "--lr", 1e-3, "--lora-dropout", 0, "--lora-rank", 4)
    for name, budget in (("wide", 12_000), ("narrow", 1)):
        run(world, tmp_path / name, *common, "--token-budget", budget)
    assert losses(tmp_path / "wide") == pytest.approx(losses(tmp_path / "narrow"), rel=1e-4)


def test_accumulation_is_one_large_batch(world, tmp_path):
    """Four micro-batches of one and one micro-batch of four are the same step."""
    common = ("--max-steps", 3, "--lr", 1e-3, "--lora-rank", 4)
    run(world, tmp_path / "a", *common)
    run(world, tmp_path / "b", *common, "--per-device-batch", 4, "--accumulation", 1)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_first_loss_is_the_base_models(world, tmp_path):
    """The first step's loss is the token mean over the whole effective batch under the untouched model."""
    run(world, tmp_path / "a", "--max-steps", 1, "--lora-rank", 4)
    policy = PolicyModel.load(world / "model")
    config = train_sft.parse_config(train_sft.Config, [str(flag) for flag in flags(world, tmp_path)])
    items = sft_items(config, policy)
    alone = Ranks(0, 1, torch.device("cpu"))
    batch = [items[i] for i in train_sft.epoch_order(config.seed, 0, len(items))[:4]]
    values = [train_sft.answer_logprobs(policy, alone, [item], 1)[0, 0] for item in batch]
    assert losses(tmp_path / "a") == pytest.approx([-float(torch.cat(values).mean())], rel=1e-4)


def test_resume_equals_an_uninterrupted_run(world, tmp_path):
    """A run whose last part is lost goes on from its state to the same weights."""
    common = ("--epochs", 1, "--lr", 1e-2, "--lora-rank", 4, "--save-every", 2)
    run(world, tmp_path / "whole", *common)
    run(world, tmp_path / "cut", *common)
    for path in (tmp_path / "cut/state").glob("state-00000006*"):
        path.unlink()
    run(world, tmp_path / "cut", *common, "--resume")
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert losses(tmp_path / "cut")[-2:] == losses(tmp_path / "whole")[-2:]


def test_all_weights_can_be_trained(world, tmp_path):
    """--lora-rank 0 trains every weight and writes no adapter."""
    run(world, tmp_path / "a", "--max-steps", 1, "--lora-rank", 0, "--lr", 1e-3)
    before = load_file(world / "model/model.safetensors")
    assert all(
        not torch.equal(value, before[name])
        for name, value in weights(tmp_path / "a").items()
        if "layers" in name and value.ndim == 2
    )
    assert not (tmp_path / "a/adapter").exists()


@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(("--shard",), marks=pytest.mark.slow),
        pytest.param(("--shard", "--lora-rank", "0"), marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one(world, tmp_path, more):
    """Two gloo processes, replicated or sharded, take the steps of one process with the same effective batch;
    dropout included.
    """
    common = ("--max-steps", 3, "--lr", 1e-3, "--lora-rank", 4, "--token-budget", 150)
    run(world, tmp_path / "one", *common, *[flag for flag in more if flag != "--shard"], "--accumulation", 4)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(ROOT / "train_sft.py"),
    ]
    arguments = [str(flag) for flag in flags(world, tmp_path / "two", *common, *more, "--accumulation", 2)]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    norms = [
        [row["grad_norm"] for row in metrics(tmp_path / name) if "loss" in row] for name in ("one", "two")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-2, atol=1e-3)


def test_impossible_runs_are_refused_by_name(world, tmp_path):
    """Another prompt config, a wrong split, a cutoff that drops all, a used folder, and impossible flags."""
    write_run(tmp_path / "other", 2)
    other = dataclasses.replace(SMALL_PROMPT, history_steps=9)
    write_json(tmp_path / "other/prompt_config.json", other)
    with pytest.raises(ValueError, match="history_steps"):
        run(world, tmp_path / "x", "--dev-samples", tmp_path / "other/samples.jsonl")
    write_run(
        tmp_path / "stale",
        0,
        samples=[step_sample(1, config=dataclasses.replace(SMALL_PROMPT, history_steps=9))],
    )
    with pytest.raises(ValueError, match="was made with prompt config"):
        run(world, tmp_path / "x", "--samples", tmp_path / "stale/samples.jsonl")
    with pytest.raises(ValueError, match="is of split dev"):
        run(world, tmp_path / "x", "--samples", world / "dev/samples.jsonl")
    with pytest.raises(ValueError, match="no sample of at most --cutoff 5"):
        run(world, tmp_path / "x", "--cutoff", 5)
    with pytest.raises(ValueError, match="--epochs 0"):
        run(world, tmp_path / "x", "--epochs", 0)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        run(world, tmp_path / "x", "--model", tmp_path)
    run(world, tmp_path / "y", "--max-steps", 1, "--lora-rank", 4)
    with pytest.raises(ValueError, match="already holds a run"):
        run(world, tmp_path / "y", "--max-steps", 1, "--lora-rank", 4)
