"""The trainers under `torchrun` on gloo: 2 and 4 processes take the steps of one, and a run that loses a rank
stops and can go on.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from killing import rows
from rl_world import INDICES, mined, rl_states, wavering_policy, write_states
from safetensors.torch import load_file
from sft_world import sft_items, step_sample, write_run
from tiny_model import tiny_checkpoint

import train_rl
import train_sft
from rmsweb.engine.distributed import Ranks
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.training import rank_packs
from rmsweb.records import Image, sha256_bytes
from rmsweb.salvage.states import Prompts
from rmsweb.salvage.step import generate

ROOT = Path(train_sft.__file__).parent
pytestmark = pytest.mark.slow
SIZES = [
    "--max-steps",
    "3",
    "--lr",
    "1e-3",
    "--lora-rank",
    "4",
    "--token-budget",
    "150",
    "--threads",
    "1",
    "--device",
    "cpu",
]
SFT = [*SIZES, "--lora-scope", "all", "--lora-dropout", "0", "--cutoff", "400", "--save-every", "1"]
RL = [
    *SIZES,
    "--train-batch",
    "3",
    "--mini-batch",
    "1",
    "--num-rollouts",
    "4",
    "--max-generation-batches",
    "1",
    "--response-budget",
    "40",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """SFT samples of which few have a picture, and mined states, with pictures and without, half of which are
    never answered rightly.
    """
    root = tmp_path_factory.mktemp("ranks")
    tiny_checkpoint(root / "tiny", std=0.05)
    write_run(root / "train", 0)  # makes the picture
    data = (root / "train/screenshots/a.png").read_bytes()
    picture = Image(path="screenshots/a.png", sha256=sha256_bytes(data), width=160, height=96)
    shutil.rmtree(root / "train")
    write_run(
        root / "train",
        0,
        samples=[step_sample(number, picture=picture if number % 6 == 0 else None) for number in range(21)],
    )
    wavering_policy().save(root / "wavering")
    scroll = '{"action":[{"scroll":{"down":true,"num_pages":1.0}}]}'
    states = [mined(index, target=scroll if index > 3 else None) for index in INDICES]
    for number in (1, 3, 5):
        message = states[number].messages[0]
        states[number] = dataclasses.replace(
            states[number], messages=(dataclasses.replace(message, parts=(picture, *message.parts)),)
        )
    shutil.copytree(root / "train/screenshots", root / "states/screenshots")
    write_states(root / "states", states)
    (root / "seed").write_text("0")
    (root / "seed").write_text(str(next(seed for seed in range(20) if one_rank_accepts_nothing(root, seed))))
    return root


def one_rank_accepts_nothing(root, seed):
    """Whether in the first step one of two ranks samples no accepted group while the other does."""
    config = train_rl.parse_config(train_rl.Config, rl_flags(root, root / "unused", "--seed", str(seed)))
    policy = PolicyModel.load(root / "wavering")
    states = rl_states(config, policy)
    alone = Ranks(0, 1, torch.device("cpu"))
    found = generate(
        policy,
        alone,
        states,
        Prompts(policy),
        config.step,
        step=0,
        position=0,
        report=lambda text: None,
    )
    accepted = [group.gate.accepted for group in found]
    return any(accepted[0::2]) != any(accepted[1::2])


def sft_flags(world, out, *more):
    return [
        "--model",
        str(world / "tiny"),
        "--samples",
        str(world / "train/samples.jsonl"),
        "--out",
        str(out),
        *SFT,
        *more,
    ]


def rl_flags(world, out, *more):
    return [
        "--model",
        str(world / "wavering"),
        "--states",
        str(world / "states/mined.jsonl"),
        "--out",
        str(out),
        *RL,
        "--seed",
        (world / "seed").read_text(),
        *more,
    ]


def torchrun(count, script, flags):
    """Starts the processes."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(count),
        str(ROOT / script),
        *flags,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Waits for the end, which must be a good one."""
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]


def assert_equal_steps(one, many, names):
    """Losses to 1e-5, merged weights after three steps to 1e-4."""
    losses = [[(row["step"], row["loss"]) for row in rows(out) if "loss" in row] for out in (one, many)]
    assert len(losses[0]) == 3
    for (step, expected), (same, found) in zip(*losses, strict=True):
        assert step == same
        assert found == pytest.approx(expected, rel=0, abs=1e-5)
    for name in names:
        assert [row.get(name) for row in rows(one)] == [row.get(name) for row in rows(many)], name
    a, b = (load_file(out / "checkpoint-last/model.safetensors") for out in (one, many))
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=0, atol=1e-4)


def test_the_sft_data_is_hard(world, tmp_path):
    """Lengths are ragged; in some step one of two ranks has pictures and the other none; in some step of four
    ranks one is filled up with dummies.
    """
    config = train_sft.parse_config(train_sft.Config, sft_flags(world, tmp_path))
    policy = PolicyModel.load(world / "tiny")
    items = sft_items(config, policy)
    assert len({item.lengths for item in items}) > 5
    seen, dummies = set(), 0
    for step in range(3):
        order = train_sft.epoch_order(config.seed, 0, len(items))[step * 4 : step * 4 + 4]
        batch = [items[i] for i in order]
        for count in (2, 4):
            ranks = [Ranks(rank, count, torch.device("cpu")) for rank in range(count)]
            packs = [list(rank_packs(policy, rank, batch, 150)) for rank in ranks]
            seen.add((count, *(any(item.pack.pixel_values is not None for item in own) for own in packs)))
            dummies += sum(not item.answers for own in packs for item in own)
    assert {(2, True, False), (2, False, True)} & seen
    assert dummies


@pytest.mark.parametrize(("count", "more"), [(2, ()), (2, ("--shard",)), (4, ("--shard",))])
def test_sft_steps_equal_those_of_one_process(world, tmp_path, count, more):
    """Ragged samples, pictures on one rank alone, adapters in the vision tower too: losses and weights of one
    process.
    """
    train_sft.main(sft_flags(world, tmp_path / "one", "--accumulation", "4"))
    finish(
        torchrun(
            count,
            "train_sft.py",
            sft_flags(world, tmp_path / "many", "--accumulation", str(4 // count), *more),
        )
    )
    assert_equal_steps(tmp_path / "one", tmp_path / "many", ("tokens",))


@pytest.mark.parametrize(("count", "more"), [(2, ()), (2, ("--shard",)), (4, ("--shard",))])
def test_rl_steps_equal_those_of_one_process(world, tmp_path, count, more):
    """Unequal shares of prompts, a rank with nothing accepted, a rank without a prompt (of four), pictures in
    some prompts.
    """
    train_rl.main(rl_flags(world, tmp_path / "one"))
    finish(torchrun(count, "train_rl.py", rl_flags(world, tmp_path / "many", *more)))
    assert_equal_steps(
        tmp_path / "one",
        tmp_path / "many",
        ("generated", "accepted", "retained", "cells", "sampled_tokens", "updates"),
    )
    assert {row["accepted"] for row in rows(tmp_path / "one") if "accepted" in row} - {3}


def workers(process):
    """Process ids of the ranks by rank."""
    found = {}
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        settings = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {
            int(item.removeprefix(b"RANK=")): int(child) for item in settings if item.startswith(b"RANK=")
        }
    return found


@pytest.mark.parametrize(("script", "victim"), [("train_sft.py", 0), ("train_rl.py", 1)])
def test_a_killed_rank_ends_the_run_and_resume_continues_bit_for_bit(world, tmp_path, script, victim):
    """SIGKILL of one rank: the run ends within a minute and says why; resumed, it writes the metrics and
    weights of a run that was never killed.
    """
    flags = {"train_sft.py": sft_flags, "train_rl.py": rl_flags}[script]
    more = ("--max-steps", "8", "--save-every", "1")
    finish(torchrun(2, script, flags(world, tmp_path / "whole", *more)))
    out, process = tmp_path / "killed", torchrun(2, script, flags(world, tmp_path / "killed", *more))
    try:
        for _ in range(3000):
            if len(list((out / "state").glob("state-*.pt"))) >= 3 or process.poll() is not None:
                break
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be killed"
        os.kill(workers(process)[victim], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode not in (0, None)
    assert re.search(rf"Signal 9 \(SIGKILL\)|rank {1 - victim} of 2: another rank has ended", errors), errors[
        -2000:
    ]
    assert len(rows_without_torn_line(out)) < len(rows(tmp_path / "whole"))
    finish(torchrun(2, script, flags(world, out, *more, "--resume")))
    assert rows(out) == rows(tmp_path / "whole")
    ours, theirs = (
        load_file(folder / "checkpoint-last/model.safetensors") for folder in (out, tmp_path / "whole")
    )
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def rows_without_torn_line(out):
    """Whole lines of the metrics of a killed run."""
    return [
        json.loads(line)
        for line in (out / "metrics.jsonl").read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def test_ranks_with_other_flags_stop(world, tmp_path):
    """A rank that was started with another learning rate: exit with code 2 inside torchrun, and one line that
    names flag and values.
    """
    wrapper = tmp_path / "start.py"
    script = f"runpy.run_path({str(ROOT / 'train_sft.py')!r}, run_name='__main__')"
    wrapper.write_text(
        f"import os, sys, runpy\nsys.argv += ['--lr', '0.0' + os.environ['RANK'] + '1']\n{script}\n"
    )
    process = torchrun(2, wrapper, sft_flags(world, tmp_path / "out"))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.search(r"ranks disagree on lr: 0\.001 on rank 0, 0\.011 on rank 1", errors), errors[-2000:]
