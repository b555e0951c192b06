"""Laws of the optimizer step, the packs of a step, and the training state."""

import copy
import json
import math
import operator

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_world import ordinary, wavering_policy
from safetensors.torch import load_file
from tiny_model import tiny_policy
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

import train_sft
from rmsweb.engine.checkpoints import load_training_state, save_checkpoint, save_training_state
from rmsweb.engine.distributed import Ranks
from rmsweb.engine.lora import add_lora
from rmsweb.engine.packing import Bundle, Packable
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.sampler import Decoding, sample
from rmsweb.engine.training import (
    Optimizer,
    OptimizerConfig,
    Trainer,
    TrainerConfig,
    answer_logprobs,
    rank_packs,
)
from rmsweb.records import Image, Message, Text

ALONE = Ranks(0, 1, torch.device("cpu"))


def groups_of(policy, answers=("yes", "no, not at all", "")):
    prompts = [
        policy.encode_prompt([Message(role="user", parts=(Text(tag="task", text="press " * n),))], None)
        for n in (1, 4, 2)
    ]
    return [
        Bundle(prompt, tuple(policy.encode_response(a) for a in answers[: n + 1]))
        for n, prompt in enumerate(prompts)
    ]


def packables(groups):
    return [Packable(group.lengths, lambda group=group: group) for group in groups]


@given(st.integers(1, 60), st.floats(0, 0.9))
def test_cosine_rises_then_falls_within_its_bounds(total, ratio):
    """Rates are positive, at most the peak, rising in the warm-up and falling after it."""
    rates = [train_sft.cosine_with_warmup(step, total, 2.0, ratio) for step in range(total)]
    warmup = math.ceil(total * ratio)
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[min(warmup, total - 1)] == 2.0


def gradients(policy, ranks, groups, budget):
    for item in rank_packs(policy, ranks, packables(groups), budget):
        logprobs = policy.response_logprobs(item.pack)
        weights = torch.cat(
            [
                torch.full((length,), 1.0 + g + a)
                for (g, a), length in zip(item.answers, item.pack.response_lengths, strict=False)
            ]
            or [logprobs * 0]
        )
        (logprobs * weights.detach()).sum().backward()
    found = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in policy.model.parameters()]
    policy.model.zero_grad()
    return found


def test_budget_and_ranks_change_no_gradient():
    """Summed over ranks, gradients are the same for every token budget and number of ranks; dummies add
    nothing.
    """
    policy = tiny_policy(std=0.05)
    groups = groups_of(policy)
    reference = gradients(policy, ALONE, groups, 10_000)
    for budget, world in ((60, 1), (1, 1), (60, 2), (1, 4), (10_000, 2)):
        parts = [
            gradients(policy, Ranks(rank, world, torch.device("cpu")), groups, budget)
            for rank in range(world)
        ]
        for expected, *found in zip(reference, *parts, strict=True):
            torch.testing.assert_close(sum(found), expected, rtol=1e-3, atol=1e-5)


def test_scores_are_named_by_group_and_answer():
    """Every answer's log-probabilities come under its own name, whatever the budget."""
    policy = tiny_policy()
    groups = groups_of(policy)
    wide, narrow = (answer_logprobs(policy, ALONE, packables(groups), budget) for budget in (10_000, 1))
    assert wide.keys() == narrow.keys() == {(g, a) for g in range(3) for a in range(g + 1)}
    for key, value in wide.items():
        assert len(value) == len(groups[key[0]].responses[key[1]])
        torch.testing.assert_close(value, narrow[key], rtol=1e-4, atol=1e-5)
    assert not any(value.requires_grad for value in wide.values())


def test_step_equals_plain_adamw_with_clipping():
    """The step is torch's AdamW on clipped gradients, without decay on vectors, at the rate of its number."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))
    other = copy.deepcopy(model)
    config = OptimizerConfig(weight_decay=0.5, clip=0.3)
    optimizer = Optimizer(model.parameters(), ALONE, lambda step: 0.1 / (step + 1), config)
    matrices, vectors = (
        [p for p in other.parameters() if p.ndim > 1],
        [p for p in other.parameters() if p.ndim == 1],
    )
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}], lr=0.1
    )
    for step in range(3):
        x = torch.randn(7, 5)
        model(x).square().sum().backward()
        other(x).square().sum().backward()
        expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.3)
        for group in plain.param_groups:
            group["lr"] = 0.1 / (step + 1)
        plain.step()
        plain.zero_grad()
        norm, rate = optimizer.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
        assert rate == 0.1 / (step + 1)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_an_infinite_gradient_is_an_error():
    """A step that would destroy the weights is refused."""
    layer = torch.nn.Linear(1, 1)
    optimizer = Optimizer(list(layer.parameters()), ALONE, lambda step: 1.0)
    (layer(torch.ones(1)) * math.inf).sum().backward()
    with pytest.raises(ValueError, match="gradient norm"):
        optimizer.step()


def start(seed=0):
    policy = tiny_policy(std=0.05)
    torch.manual_seed(seed)
    parameters = add_lora(policy.model, rank=2, alpha=4)
    return policy, Optimizer(parameters, ALONE, lambda step: 0.01)


def take_steps(policy, optimizer, count):
    groups = groups_of(policy)
    for _ in range(count):
        for item in rank_packs(policy, ALONE, packables(groups), 1000):
            (-policy.response_logprobs(item.pack).sum()).backward()
        optimizer.step()


def test_a_run_goes_on_from_its_state_bit_by_bit(tmp_path):
    """Two steps, a state, two steps equal two steps, a fresh process that loads the state, two steps; the two
    newest states stay.
    """
    policy, optimizer = start()
    assert load_training_state(tmp_path, policy, optimizer.adam, ALONE) is None
    for step in (1, 2):
        take_steps(policy, optimizer, 1)
        save_training_state(tmp_path, policy, optimizer.adam, ALONE, step=step, extra={"best": 1.5})
    take_steps(policy, optimizer, 2)
    again, fresh = start(seed=1)
    (tmp_path / "state-00000009.rank0-of-1.tmp").write_bytes(b"torn")  # a killed writer's rest
    assert load_training_state(tmp_path, again, fresh.adam, ALONE) == {"best": 1.5}
    take_steps(again, fresh, 2)
    for ours, theirs in zip(optimizer.parameters, fresh.parameters, strict=True):
        assert torch.equal(ours, theirs)
        assert all(
            torch.equal(value, fresh.adam.state[theirs][name])
            for name, value in optimizer.adam.state[ours].items()
        )
    save_training_state(tmp_path, again, fresh.adam, ALONE, step=4, extra={})
    assert [path.name for path in sorted(tmp_path.glob("*.pt"))] == [
        "state-00000002.rank0-of-1.pt",
        "state-00000004.rank0-of-1.pt",
    ]


def test_skipped_steps_have_states_of_their_own(tmp_path):
    """A step that made no update is another state than the step before: its position must not be lost."""
    policy, optimizer = start()
    for step in (1, 2, 3):
        save_training_state(tmp_path, policy, optimizer.adam, ALONE, step=step, extra={"position": 10 * step})
    assert load_training_state(tmp_path, policy, optimizer.adam, ALONE) == {"position": 30}


class Parted(Ranks):
    """Rank 0 of two, whose other rank has got as far as `others` says."""

    others: tuple[int, ...] = ()

    def gather(self, value):
        return [value, dict.fromkeys(self.others, "elsewhere")]


def test_ranks_resume_from_the_newest_common_state(tmp_path):
    """A state that the other rank has not written is not used, and deleted, so that it can never be mixed
    with later ones.
    """
    policy, optimizer = start()
    pair = Parted(0, 2, torch.device("cpu"))
    for step in (3, 6):
        save_training_state(tmp_path, policy, optimizer.adam, pair, step=step, extra={"at": step})
    Parted.others = (1, 3)
    assert load_training_state(tmp_path, policy, optimizer.adam, pair) == {"at": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["state-00000003.rank0-of-2.pt"]
    Parted.others = ()
    assert load_training_state(tmp_path, policy, optimizer.adam, pair) is None


def test_a_state_of_another_run_is_an_error(tmp_path):
    """Other parameters and another number of ranks, more or fewer, are named."""
    policy, optimizer = start()
    save_training_state(tmp_path, policy, optimizer.adam, ALONE, step=0, extra={})
    other = tiny_policy()
    others = Optimizer(other.model.parameters(), ALONE, lambda step: 0.1)
    with pytest.raises(ValueError, match="other parameters"):
        load_training_state(tmp_path, other, others.adam, ALONE)
    with pytest.raises(ValueError, match="another number of ranks than 2"):
        load_training_state(tmp_path, policy, optimizer.adam, Parted(0, 2, torch.device("cpu")))
    (tmp_path / "state-00000000.rank1-of-2.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="another number of ranks than 1"):
        load_training_state(tmp_path, policy, optimizer.adam, ALONE)


def test_checkpoint_is_merged_and_replaces_the_old_one(tmp_path):
    """The checkpoint loads as a plain model with the adapted log-probabilities; a file of the older one does
    not stay.
    """
    policy, optimizer = start()
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "old").write_text("x")
    take_steps(policy, optimizer, 2)
    save_checkpoint(policy, ALONE, tmp_path / "best", adapter=tmp_path / "adapter")
    loaded, groups = PolicyModel.load(tmp_path / "best"), groups_of(policy)
    ours, theirs = (answer_logprobs(p, ALONE, packables(groups), 1000) for p in (policy, loaded))
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "best"]
    assert not (tmp_path / "best" / "old").exists()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_a_checkpoint_generates_the_same_text_elsewhere(tmp_path):
    """`from_pretrained` and `generate`, which know nothing of this package, give the sampler's greedy
    answers, with a picture and without, to the end token.
    """
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (96, 160, 3), dtype=np.uint8)).save(
        tmp_path / "a.png"
    )
    picture = Image(path="a.png", sha256="", width=160, height=96)
    policy = wavering_policy()
    policy.model.generation_config.eos_token_id = policy.end_id
    torch.manual_seed(1)
    for parameter in add_lora(policy.model, rank=2, alpha=4):
        torch.nn.init.normal_(parameter, std=0.02)
    save_checkpoint(policy, ALONE, tmp_path / "best")
    other = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "best", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "best")
    parts = ordinary(3).messages[0].parts
    for shown in (parts, (picture, *parts)):
        prompt = policy.encode_prompt([Message(role="user", parts=shown)], tmp_path)
        ((ours,),) = sample(
            policy, [prompt], n=1, max_new_tokens=40, seeds=[0], decoding=Decoding(temperature=0)
        )
        pictures = {}
        if prompt.pixel_values is not None:
            pictures = {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid}
            pictures["mm_token_type_ids"] = (prompt.ids == other.config.image_token_id).int()[None]
        ids = prompt.ids[None]
        theirs = other.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, **pictures
        )[0, len(prompt) :]
        assert theirs.tolist() == ours.ids.tolist()
        assert tokenizer.decode(theirs, skip_special_tokens=False).removesuffix("<|im_end|>") == ours.text
        assert pictures or (ours.finish_reason == "stop" and ours.text.startswith('{"action":[{"click'))


def test_the_generation_settings_survive_sharded_loading(tmp_path):
    """A model made on the meta device knows the end token of its checkpoint, so that servers of what it
    becomes stop there.
    """
    policy = tiny_policy()
    policy.model.generation_config.eos_token_id = policy.end_id
    policy.save(tmp_path)
    assert PolicyModel.load(tmp_path, device="meta").model.generation_config.eos_token_id == policy.end_id


def test_adapters_are_saved_in_the_common_layout(tmp_path):
    """File names, configuration and tensor names that PEFT reads, one A [r, in] and B [out, r] a layer."""
    policy, _ = start()
    policy.name = "Qwen/Qwen3-VL-8B-Instruct"
    save_checkpoint(policy, ALONE, tmp_path / "best", adapter=tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 2, 4, "none")
    assert config["base_model_name_or_path"] == "Qwen/Qwen3-VL-8B-Instruct"
    leaves = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    layers = [f"model.language_model.layers.{number}.{leaf}" for number in range(2) for leaf in leaves]
    assert config["target_modules"] == sorted(layers)
    tensors, modules = (
        load_file(tmp_path / "adapter/adapter_model.safetensors"),
        dict(policy.model.named_modules()),
    )
    assert tensors.keys() == {
        f"base_model.model.{layer}.lora_{side}.weight" for layer in layers for side in "AB"
    }
    for layer in layers:
        rows, columns = modules[layer].weight.shape
        assert tensors[f"base_model.model.{layer}.lora_A.weight"].shape == (2, columns)
        assert tensors[f"base_model.model.{layer}.lora_B.weight"].shape == (rows, 2)


def tiny_trainer(out, **changed):
    """A trainer whose steps raise one adapter by one, and its evaluations."""
    policy, _ = start()
    config = TrainerConfig(model="", out=out, resume=out.exists())
    settings = {
        "num_steps": 4,
        "evaluate_every": 1,
        "save_every": 2,
        "best_by": "loss",
        "better": operator.lt,
    }
    return Trainer(config, policy, ALONE, rate=lambda step: 0.1, **(settings | changed))


def raise_weights(trainer):
    """One step without a loss, so that the weights tell how many steps there were."""
    with torch.no_grad():
        trainer.optimizer.parameters[1].add_(1.0)
    return {"reward": 1.0}


def test_the_metric_that_is_named_chooses_the_best_checkpoint(tmp_path):
    """Not the first one of an evaluation; among equals the rule decides, and the weights are those of that
    step.
    """
    losses = {1: 3.0, 2: 1.0, 3: 1.0, 4: 2.0}
    for better, best in ((operator.lt, 2), (operator.le, 3)):
        trainer = tiny_trainer(tmp_path / str(best), better=better)

        def evaluate(trainer=trainer):
            return {"epoch": float(trainer.progress.step), "loss": losses[trainer.progress.step]}

        with trainer.folder:
            assert len(list(trainer.run(lambda trainer=trainer: raise_weights(trainer), evaluate, {}))) == 4
            trainer.finish({"best": trainer.progress.best})
        assert (trainer.progress.best, trainer.progress.best_step) == (1.0, best)
        saved = load_file(tmp_path / str(best) / "adapter/adapter_model.safetensors")
        assert any(torch.equal(value, torch.full_like(value, best)) for value in saved.values())
        assert json.loads((tmp_path / str(best) / "summary.json").read_text())["best"] == 1.0


def test_a_step_that_returns_nothing_ends_the_run(tmp_path):
    """Training ends before its number of steps, and without evaluations the last weights are the best."""
    trainer = tiny_trainer(tmp_path / "a")

    def step():
        return raise_weights(trainer) if trainer.progress.step < 2 else None

    with trainer.folder:
        steps = list(trainer.run(step, dict, {"samples": 1}))
        trainer.finish({})
    assert len(steps) == trainer.progress.step == 2
    best, last = (
        load_file(tmp_path / "a" / f"checkpoint-{name}" / "model.safetensors") for name in ("best", "last")
    )
    assert all(torch.equal(value, last[name]) for name, value in best.items())
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["samples"] == 1


def test_a_trainer_goes_on_where_its_newest_state_was(tmp_path):
    """What was trained, consumed and chosen comes back; metrics after the state are written again."""
    first = tiny_trainer(tmp_path / "a", num_steps=4, save_every=3)

    def step(trainer):
        trainer.progress.consumed += 10
        return raise_weights(trainer)

    with first.folder:
        steps = first.run(lambda: step(first), lambda: {"loss": -first.progress.step}, {})
        for _ in range(3):
            next(steps)
        first.log({"reward": 9.0})
        first.progress.step += 1
        first.log({"lost": True})
    second = tiny_trainer(tmp_path / "a")
    assert (second.progress.step, second.progress.consumed, second.progress.best) == (3, 30, -3)
    with second.folder:
        assert len(list(second.run(lambda: step(second), dict, {}))) == 1
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(second.optimizer.parameters[:1], first.optimizer.parameters[:1], strict=True)
    )
    lines = (tmp_path / "a/metrics.jsonl").read_text()
    assert "lost" not in lines
