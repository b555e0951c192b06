"""Laws of the optimizer step, the packs of a step, and the training state."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import tiny_policy

from rmsweb.engine.distributed import Ranks
from rmsweb.engine.lora import add_lora
from rmsweb.engine.packing import Group
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.training import (
    Optimizer,
    constant,
    cosine_with_warmup,
    load_training_state,
    rank_packs,
    save_checkpoint,
    save_training_state,
    score,
)
from rmsweb.records import Message, Text

ALONE = Ranks(0, 1, torch.device("cpu"))


def groups_of(policy, answers=("yes", "no, not at all", "")):
    prompts = [policy.encode_prompt([Message(role="user", parts=(Text(tag="task", text="press " * n),))], None) for n in (1, 4, 2)]
    return [Group(prompt, tuple(policy.encode_response(a) for a in answers[: n + 1])) for n, prompt in enumerate(prompts)]


@given(st.integers(1, 60), st.floats(0, 0.9))
def test_cosine_rises_then_falls_within_its_bounds(total, ratio):
    """Rates are positive, at most the peak, rising in the warm-up and falling after it."""
    rates = [cosine_with_warmup(step, total, 2.0, ratio) for step in range(total)]
    warmup = math.ceil(total * ratio)
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[min(warmup, total - 1)] == 2.0
    assert constant(3, 10, 2.0) == 2.0


def gradients(policy, ranks, groups, budget):
    for item in rank_packs(policy, ranks, [g.lengths for g in groups], groups.__getitem__, budget):
        logprobs = policy.response_logprobs(item.pack)
        weights = torch.cat(
            [torch.full((length,), 1.0 + g + a) for (g, a), length in zip(item.answers, item.pack.response_lengths, strict=False)] or [logprobs * 0]
        )
        (logprobs * weights.detach()).sum().backward()
    found = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in policy.model.parameters()]
    policy.model.zero_grad()
    return found


def test_budget_and_ranks_change_no_gradient():
    """Summed over ranks, gradients are the same for every token budget and number of ranks; dummies add nothing."""
    policy = tiny_policy(std=0.05)
    groups = groups_of(policy)
    reference = gradients(policy, ALONE, groups, 10_000)
    for budget, world in ((60, 1), (1, 1), (60, 2), (1, 4), (10_000, 2)):
        parts = [gradients(policy, Ranks(rank, world, torch.device("cpu")), groups, budget) for rank in range(world)]
        for expected, *found in zip(reference, *parts, strict=True):
            torch.testing.assert_close(sum(found), expected, rtol=1e-3, atol=1e-5)


def test_scores_are_named_by_group_and_answer():
    """`score` gives every answer's log-probabilities under its own name, whatever the budget."""
    policy = tiny_policy()
    groups = groups_of(policy)
    lengths = [group.lengths for group in groups]
    wide, narrow = (score(policy, ALONE, lengths, groups.__getitem__, budget) for budget in (10_000, 1))
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
    optimizer = Optimizer(list(model.parameters()), ALONE, lambda step: 0.1 / (step + 1), weight_decay=0.5, clip=0.3)
    matrices, vectors = [p for p in other.parameters() if p.ndim > 1], [p for p in other.parameters() if p.ndim == 1]
    plain = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
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
        for item in rank_packs(policy, ALONE, [g.lengths for g in groups], groups.__getitem__, 1000):
            (-policy.response_logprobs(item.pack).sum()).backward()
        optimizer.step()


def test_a_run_goes_on_from_its_state_bit_by_bit(tmp_path):
    """Two steps, a state, two steps equal two steps, a fresh process that loads the state, two steps; the two newest states stay."""
    policy, optimizer = start()
    assert load_training_state(tmp_path, policy, optimizer, ALONE) is None
    for _ in range(2):
        take_steps(policy, optimizer, 1)
        save_training_state(tmp_path, policy, optimizer, ALONE, {"best": 1.5})
    take_steps(policy, optimizer, 2)
    again, fresh = start(seed=1)
    (tmp_path / "state-00000009.rank0.tmp").write_bytes(b"torn")  # a killed writer's rest
    assert load_training_state(tmp_path, again, fresh, ALONE) == {"best": 1.5}
    assert fresh.num_steps == 2
    take_steps(again, fresh, 2)
    for ours, theirs in zip(optimizer.parameters, fresh.parameters, strict=True):
        assert torch.equal(ours, theirs)
    save_training_state(tmp_path, again, fresh, ALONE, {})
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["state-00000002.rank0.pt", "state-00000004.rank0.pt"]


def test_a_state_of_another_run_is_an_error(tmp_path):
    """Other parameters or another number of ranks are named."""
    policy, optimizer = start()
    save_training_state(tmp_path, policy, optimizer, ALONE, {})
    other = tiny_policy()
    with pytest.raises(ValueError, match="other parameters"):
        load_training_state(tmp_path, other, Optimizer(list(other.model.parameters()), ALONE, lambda step: 0.1), ALONE)
    (tmp_path / "state-00000000.rank1.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="more than 1 ranks"):
        load_training_state(tmp_path, policy, optimizer, ALONE)


def test_checkpoint_is_merged_and_replaces_the_old_one(tmp_path):
    """The checkpoint loads as a plain model with the adapted log-probabilities; a file of the older one does not stay."""
    policy, optimizer = start()
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "old").write_text("x")
    take_steps(policy, optimizer, 2)
    save_checkpoint(policy, ALONE, tmp_path / "best", adapter=tmp_path / "adapter", base_name="tiny")
    loaded, groups = PolicyModel.load(tmp_path / "best"), groups_of(policy)
    lengths = [group.lengths for group in groups]
    ours, theirs = (score(p, ALONE, lengths, groups.__getitem__, 1000) for p in (policy, loaded))
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "best"]
    assert not (tmp_path / "best" / "old").exists()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
