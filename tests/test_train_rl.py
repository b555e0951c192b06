"""Laws of the RL script."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rl_world import INDICES, mined, ordinary, wavering_policy, write_states
from safetensors.torch import load_file
from tiny_model import SMALL_PROMPT

import train_rl
import train_sft
from rmsweb.config import flat
from rmsweb.engine.policy import PolicyModel
from rmsweb.jsonl import RecordError, write_json
from rmsweb.prompt import load_prompt_config
from rmsweb.salvage.gating import CELLS

ROOT = Path(train_rl.__file__).parent


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A wavering SFT checkpoint, mined train states (one hidden index), mined and ordinary dev states."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("rl")
    wavering_policy().save(root / "model")
    hidden = dataclasses.replace(mined(6), sample_id="hidden", prompt_indices=(9,))
    write_states(root / "train", [*[mined(index) for index in INDICES], hidden])
    write_states(root / "dev", [mined(index, split="dev") for index in INDICES[:4]])
    write_states(root / "dev", [ordinary(index, split="dev") for index in INDICES])
    return root


def flags(world, out, *more):
    """Flags of a small run; later ones win."""
    sizes = [
        "--train-batch",
        4,
        "--mini-batch",
        2,
        "--num-rollouts",
        4,
        "--max-generation-batches",
        2,
        "--response-budget",
        40,
    ]
    lora = [
        "--lora-rank",
        8,
        "--lora-alpha",
        16,
        "--lr",
        1e-3,
        "--max-steps",
        4,
        "--save-every",
        2,
        "--seed",
        0,
        "--threads",
        1,
        "--device",
        "cpu",
    ]
    return [
        str(flag)
        for flag in [
            "--model",
            world / "model",
            "--states",
            world / "train/mined.jsonl",
            "--out",
            out,
            *sizes,
            *lora,
            *more,
        ]
    ]


def run(world, out, *more):
    return train_rl.main(flags(world, out, *more))


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def steps(out):
    return [
        {name: value for name, value in row.items() if not name.endswith(("_s", "_gb"))}
        for row in metrics(out)
        if "generated" in row
    ]


def weights(out):
    return load_file(out / "checkpoint-last" / "model.safetensors")


def test_trains_and_writes_a_run_folder(world, tmp_path):
    """Every step is logged with the statistics of App. J, and dev states choose the best checkpoint.

    Both checkpoints load, and the adapter is there.
    """
    out = tmp_path / "a"
    run(world, out, "--dev-states", world / "dev/mined.jsonl", world / "dev/samples.jsonl", "--dev-count", 6)
    rows = steps(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    wanted = {
        "reward_mean",
        "best_of_n",
        "reward_std",
        "std_rejected_frac",
        "competence_rejected_frac",
        "cells",
        "gap",
        "correct_logprob",
        "wrong_logprob",
    }
    wanted |= {
        "own_reasoning_logprob",
        "rollout_log_ppl",
        "kl",
        "ppo_kl",
        "clip_frac",
        "grad_norm",
        "accepted",
        "retained",
        "dropped",
        "generated",
    }
    assert all(wanted <= row.keys() for row in rows)
    first = metrics(out)[0]
    assert (first["states"], first["left_out"]) == (6, {"target's index is not in the prompt": 1})
    dev = [row for row in metrics(out) if "dev_reward" in row]
    assert [row["step"] for row in dev] == [0, 2, 4]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["dev_mined"], summary["dev_ordinary"]) == (3, 3)
    assert summary["best_dev"] == max(row["dev_reward"] for row in dev)
    assert summary["prompts"] == sum(row["generated"] for row in rows)
    assert summary["best_step"] == max(row["step"] for row in dev if row["dev_reward"] == summary["best_dev"])
    for name in ("checkpoint-best", "checkpoint-last"):
        assert PolicyModel.load(out / name).prompt_config == SMALL_PROMPT
    assert (out / "adapter/adapter_config.json").exists()
    sampled = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert [group["step"] for group in sampled] == [1] * rows[0]["generated"]
    assert Counter(group["gate"] for group in sampled) == Counter(
        {cell: sum(cells[cell] for cells in rows[0]["cells"].values()) for cell in CELLS}
    )


@pytest.mark.parametrize(
    ("successes", "best"), [((0.2, 0.6, 0.4), 2), ((0.5, 0.5, 0.5), 4), ((0.9, 0.1, 0.2), 0)]
)
def test_success_on_dev_episodes_chooses_the_best_checkpoint(world, tmp_path, monkeypatch, successes, best):
    """evaluate.py is run on the weights of every --save-every steps, on split dev; the latest of the best
    wins, whatever the reward says.
    """
    script = tmp_path / "evaluate.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "out = pathlib.Path(flags['--out'])\n"
        "assert flags['--split'] == 'dev' and flags['--runs'] == '2'\n"
        "assert (pathlib.Path(flags['--policy']) / 'model.safetensors').exists()\n"
        "out.mkdir(parents=True)\n"
        f"value = dict(zip(('step0', 'step2', 'step4'), {successes}))[out.name]\n"
        "(out / 'summary.json').write_text(json.dumps({'pass1': value}))\n"
    )
    monkeypatch.setattr(train_rl, "EVALUATE", script)
    (tmp_path / "dev.jsonl").write_text("tasks")
    out = tmp_path / "a"
    run(
        world,
        out,
        "--dev-states",
        world / "dev/mined.jsonl",
        "--dev-episodes",
        tmp_path / "dev.jsonl",
        "--dev-flags",
        "--runs 2",
    )
    assert [row["dev_success"] for row in metrics(out) if "dev_success" in row] == list(successes)
    assert json.loads((out / "summary.json").read_text())["best_step"] == best
    script.write_text("import sys; sys.exit(3)")
    with pytest.raises(ValueError, match="exit code 3"):
        run(world, tmp_path / "b", "--dev-episodes", tmp_path / "dev.jsonl")


def test_mined_states_are_samples_too(world, tmp_path):
    """Plain supervised training on the mined targets, the control of RL: the same files, the same checks."""
    flags = (
        "--model",
        world / "model",
        "--samples",
        world / "train/mined.jsonl",
        "--out",
        tmp_path / "a",
        "--device",
        "cpu",
        "--lr",
        1e-2,
        "--max-steps",
        8,
    )
    assert train_sft.main([str(flag) for flag in (*flags, "--epochs", 10, "--lora-rank", 8)]) == 0
    found = [row["loss"] for row in metrics(tmp_path / "a") if "loss" in row]
    assert len(found) == 8
    assert metrics(tmp_path / "a")[0]["samples"] == 7
    with pytest.raises(ValueError, match="is of split train, expected dev"):
        train_sft.main(
            [
                str(flag)
                for flag in (
                    *flags[:-2],
                    "--dev-samples",
                    world / "train/mined.jsonl",
                    "--out",
                    tmp_path / "b",
                )
            ]
        )


def test_resume_equals_an_uninterrupted_run(world, tmp_path):
    """A run whose last steps are lost goes on from its state to the same weights and statistics."""
    every = ("--rollouts-every", 2)
    run(world, tmp_path / "whole", *every)
    run(world, tmp_path / "cut", *every, "--max-steps", 2)
    with open(tmp_path / "cut" / "rollouts.jsonl", "a") as file:
        file.write('{"step": 3, "state": "x"}\n{"step": 3, "sta')  # a killed writer's rest
    run(world, tmp_path / "cut", *every, "--resume")
    rollouts = [(tmp_path / name / "rollouts.jsonl").read_bytes() for name in ("whole", "cut")]
    assert rollouts[0] == rollouts[1]
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert steps(tmp_path / "cut") == steps(tmp_path / "whole")


def test_only_the_attention_of_the_language_model_changes(world, tmp_path):
    """Merged q, k, v and o projections differ from the SFT checkpoint, nothing else does; without dev states
    the last checkpoint is the best.
    """
    run(world, tmp_path / "a", "--max-steps", 2)
    before, after = load_file(world / "model/model.safetensors"), weights(tmp_path / "a")
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {
        name
        for name in after
        if "language_model" in name
        and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
    }
    best = load_file(tmp_path / "a/checkpoint-best/model.safetensors")
    assert all(torch.equal(best[name], after[name]) for name in after)


def test_full_corpus_and_dapo_are_flags(world, tmp_path):
    """Supervised samples serve as states (full-corpus ablation); DAPO clips at 0.28 and retains nothing;
    token-mean runs.
    """
    file = write_states(
        tmp_path / "full",
        [*[ordinary(index) for index in INDICES], dataclasses.replace(ordinary(1), kind="extraction")],
    )
    run(
        world,
        tmp_path / "a",
        "--states",
        file,
        "--algorithm",
        "dapo",
        "--min-std",
        0,
        "--aggregation",
        "token-mean",
        "--max-steps",
        1,
    )
    assert metrics(tmp_path / "a")[0]["left_out"] == {"not an action state": 1}
    assert steps(tmp_path / "a")[0]["retained"] == 0
    assert set(steps(tmp_path / "a")[0]["cells"]) == {"ordinary"}
    parse = train_rl.parse_config
    assert parse(train_rl.Config, flags(world, tmp_path, "--algorithm", "dapo")).step.loss.upper_clip == 0.28
    assert parse(train_rl.Config, flags(world, tmp_path)).step.loss.upper_clip == 0.32
    assert (
        parse(
            train_rl.Config, flags(world, tmp_path, "--clip-high", "0.4", "--algorithm", "dapo")
        ).step.loss.upper_clip
        == 0.4
    )


def test_defaults_are_the_papers():
    """App. G, as flags."""
    parsed = train_rl.parse_config(train_rl.Config, ["--model", "m", "--states", "s", "--out", "o"])
    config = SimpleNamespace(**flat(parsed))
    assert (config.train_batch, config.mini_batch, config.num_rollouts, config.max_generation_batches) == (
        64,
        16,
        8,
        16,
    )
    assert (config.lr, config.lora_rank, config.lora_alpha, config.lora_scope) == (8e-6, 64, 128.0, "attn")
    assert (config.response_budget, config.token_budget, config.min_std) == (2048, 20_480, 0.10)
    objective = parsed.step.loss
    assert (objective.clip_low, objective.upper_clip, objective.salvage_weight, objective.kl_weight) == (
        0.2,
        0.32,
        0.10,
        1e-3,
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--shard",)])
def test_two_processes_equal_one(world, tmp_path, more):
    """Two gloo processes draw the same rollouts and take the same steps as one process."""
    common = ("--max-steps", 3, "--token-budget", 150, "--dev-states", world / "dev/mined.jsonl")
    run(world, tmp_path / "one", *common)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(ROOT / "train_rl.py"),
    ]
    arguments = flags(world, tmp_path / "two", *common, *more)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    for name in ("generated", "accepted", "retained", "cells", "sampled_tokens"):
        assert [row[name] for row in one] == [row[name] for row in two]
    for name in ("loss", "kl", "gap", "rollout_log_ppl"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=1e-3, abs=1e-5)
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.browser
def test_dev_episodes_choose_the_checkpoint(tmp_path):
    """Real episodes in the playground, before the first and after the last step; their success is logged and
    decides; a broken task file is named.
    """
    base = ROOT / "rmsweb/playground/base"
    tasks = [
        sys.executable,
        "-m",
        "rmsweb.playground",
        "tasks",
        "--out",
        str(tmp_path / "tasks"),
        "--train",
        "1",
        "--dev",
        "2",
        "--held-out",
        "1",
    ]
    subprocess.run(tasks, cwd=ROOT, check=True, capture_output=True)
    config = load_prompt_config(base / "prompt_config.json")
    file = write_states(
        tmp_path / "states",
        [dataclasses.replace(mined(index), prompt_config=config.hash) for index in INDICES],
    )
    write_json(file.parent / "prompt_config.json", config)
    more = (
        "--model",
        base,
        "--states",
        file,
        "--max-steps",
        1,
        "--max-generation-batches",
        1,
        "--dev-flags",
        "--runs 1 --max-steps 3",
    )
    run(tmp_path, tmp_path / "a", *more, "--dev-episodes", tmp_path / "tasks/dev.jsonl")
    found = [row["dev_success"] for row in metrics(tmp_path / "a") if "dev_success" in row]
    assert len(found) == 2
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    assert summary["best_dev"] == max(found)
    assert summary["best_step"] == max(step for step, success in enumerate(found) if success == max(found))
    for step in (0, 1):
        episodes = json.loads((tmp_path / f"a/dev-episodes/step{step}/summary.json").read_text())
        assert (episodes["runs"], episodes["split"]) == (2, "dev")
    assert not (tmp_path / "a/candidate").exists()
    PolicyModel.load(tmp_path / "a/checkpoint-best")
    with pytest.raises(ValueError, match=r"--dev-episodes .*exit code"):
        run(tmp_path, tmp_path / "b", *more, "--dev-episodes", tmp_path / "tasks/train.jsonl")


def test_impossible_runs_are_refused_by_name(world, tmp_path):
    """A wrong split, hash, kind of file, prompt config, or size is refused in words."""
    with pytest.raises(ValueError, match="is of split dev, expected train"):
        run(world, tmp_path / "x", "--states", world / "dev/mined.jsonl")
    with pytest.raises(ValueError, match="was made with prompt config"):
        run(
            world,
            tmp_path / "x",
            "--states",
            write_states(tmp_path / "stale", [dataclasses.replace(mined(1), prompt_config="0")]),
        )
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/mined.jsonl").write_text('{"schema_version": 1, "kind": "Task"}\n')
    write_json(tmp_path / "odd/prompt_config.json", SMALL_PROMPT)
    with pytest.raises(RecordError, match="expected one of a MinedState or StepSample file"):
        run(world, tmp_path / "x", "--states", tmp_path / "odd/mined.jsonl")
    other = dataclasses.replace(SMALL_PROMPT, history_steps=9)
    write_json(tmp_path / "odd/prompt_config.json", other)
    with pytest.raises(ValueError, match="history_steps"):
        run(world, tmp_path / "x", "--dev-states", tmp_path / "odd/mined.jsonl")
    with pytest.raises(ValueError, match="no usable state"):
        run(world, tmp_path / "x", "--response-budget", 3)
    for flag, value in (
        ("--num-rollouts", 1),
        ("--mini-batch", 0),
        ("--lr", 0),
        ("--clip-low", 1),
        ("--min-std", 1),
    ):
        with pytest.raises(ValueError, match=r"expected|must be"):
            run(world, tmp_path / "x", flag, value)
    assert not (tmp_path / "x" / "checkpoint-last").exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            [{"accepted": 3, "retained": 1}, {"accepted": 1, "retained": 0}],
            "5 groups trained in 2 updates; best",
        ),
        ([{"accepted": 0, "retained": 2}], "2 groups trained in 2 updates; no group was ever accepted; best"),
        (
            [{"states": 4}, {"accepted": 0, "retained": 0}],
            "0 groups trained in 2 updates; nothing was ever accepted",
        ),
    ],
)
def test_the_last_line_says_what_a_run_came_to(lines, words):
    """Groups, updates, the best step and the folder; a run that learned nothing says so."""
    facts = {"steps": 7, "updates": 2, "best_step": 3}
    text = train_rl.closing_line(Path("runs/rl"), facts, lines)
    assert text.startswith("runs/rl: 7 steps, ")
    assert words in text
    assert text.endswith("best step 3, in checkpoint-best")
    del facts["best_step"]
    assert train_rl.closing_line(Path("o"), facts, lines).endswith("the last weights are in checkpoint-best")


def test_dev_flags_without_dev_episodes_are_refused():
    """A flag that would be ignored is named."""
    with pytest.raises(ValueError, match="--dev-flags '--runs 1' needs --dev-episodes"):
        train_rl.parse_config(
            train_rl.Config, ["--model", "m", "--states", "s", "--out", "o", "--dev-flags", "--runs 1"]
        )
