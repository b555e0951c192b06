"""Laws of the RL step: what it draws, trains and reports, against plain per-sequence computations."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_world import CATEGORIES, INDICES, click, mined, ordinary, wavering_policy

from rmsweb.engine.distributed import Ranks
from rmsweb.engine.lora import add_lora
from rmsweb.engine.packing import Bundle, make_pack
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.sampler import sample
from rmsweb.engine.training import Optimizer, OptimizerConfig
from rmsweb.records import Image, Message, derive_seed
from rmsweb.salvage.dynamics import probes_of, sampled_span
from rmsweb.salvage.objective import ObjectiveConfig
from rmsweb.salvage.states import Prompts, make_state
from rmsweb.salvage.step import (
    StepConfig,
    drawn_states,
    generate,
    greedy_rewards,
    log_probs,
    old_and_reference,
    rl_step,
    training_group,
    update,
)

ALONE = Ranks(0, 1, torch.device("cpu"))
SMALL = StepConfig(
    train_batch=4, mini_batch=2, num_rollouts=4, max_generation_batches=3, response_budget=40, seed=0
)


@pytest.fixture(scope="module")
def wavering():
    torch.set_num_threads(1)
    return wavering_policy()


@pytest.fixture
def policy(wavering):
    """The wavering policy with fresh adapters."""
    fresh = copy.deepcopy(wavering)
    torch.manual_seed(0)
    fresh.adapters = add_lora(fresh.model, rank=8, alpha=16, scope="attn")
    return fresh


def optimizer_of(policy, lr=3e-3):
    return Optimizer(policy.adapters, ALONE, lambda step: lr)


def states_of(policy, records):
    return [make_state(record, Path(), policy, prompt_budget=400, response_budget=40) for record in records]


def right_states(policy):
    return states_of(policy, [mined(index) for index in INDICES])


def wrong_states(policy):
    """Targets that this policy never gives: a scroll."""
    scroll = '{"action":[{"scroll":{"down":true,"num_pages":1.0}}]}'
    return states_of(policy, [mined(index, target=scroll) for index in INDICES])


def weights(policy):
    return [parameter.detach().clone() for parameter in policy.adapters]


# --------------------------------------------------------------------------------------------- states, stream


@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 30), st.integers(0, 30))
def test_the_stream_is_endless_and_epoch_wise(num_states, seed, first, count):
    """Every epoch holds every state once, and a part of the stream does not depend on where it was cut."""
    stream = drawn_states(num_states, seed, 0, 60 + num_states)
    assert drawn_states(num_states, seed, first, count) == stream[first : first + count]
    for epoch in range(60 // num_states):
        assert sorted(stream[epoch * num_states : (epoch + 1) * num_states]) == list(range(num_states))


def test_epochs_are_shuffled_anew():
    """Two epochs and two seeds differ in order."""
    stream = drawn_states(20, 0, 0, 40)
    assert stream[:20] != stream[20:]
    assert stream[:20] != drawn_states(20, 1, 0, 20)


def test_states_that_cannot_be_trained_on_say_why(wavering):
    """Extractions, broken targets, hidden indices and what exceeds a budget are left out with a reason."""
    base = mined(3)
    cases = {
        "not an action state": dataclasses.replace(base, kind="extraction"),
        "target is no valid answer": dataclasses.replace(base, target_text="press it"),
        "target's index is not in the prompt": dataclasses.replace(base, prompt_indices=(9,)),
    }
    for reason, record in cases.items():
        assert make_state(record, Path(), wavering, prompt_budget=400, response_budget=40) == reason
    assert make_state(base, Path(), wavering, prompt_budget=5, response_budget=40) == "prompt too long"
    assert make_state(base, Path(), wavering, prompt_budget=400, response_budget=5) == "target too long"


def test_a_state_holds_the_target_and_its_action_span(wavering):
    """Target tokens end with end-of-turn, and the mask covers the action list without it."""
    state = states_of(wavering, [mined(3)])[0]
    assert int(state.target_ids[-1]) == wavering.end_id
    assert not state.target_mask[-1]
    covered = wavering.decode(state.target_ids[state.target_mask])
    start, end = state.sample.action_span
    assert state.sample.target_text[start:end] in covered
    assert state.category == CATEGORIES[1]
    assert states_of(wavering, [ordinary(3)])[0].category == "ordinary"


# ----------------------------------------------------------------------------------------------------- a step


def test_groups_are_drawn_scored_and_gated(policy):
    """Generation stops at B accepted, and rollouts depend on (seed, step, draw, rollout) alone."""
    states = right_states(policy)
    groups = generate(
        policy, ALONE, states, Prompts(policy), SMALL, step=3, position=5, report=lambda text: None
    )
    assert len(groups) % SMALL.train_batch == 0
    assert sum(group.gate.accepted for group in groups) >= SMALL.train_batch
    assert sum(group.gate.accepted for group in groups[: -SMALL.train_batch]) < SMALL.train_batch
    order = drawn_states(len(states), SMALL.seed, 5, len(groups))
    for draw, (group, place) in enumerate(zip(groups, order, strict=True)):
        assert group.state is states[place]
        prompt = policy.encode_prompt(group.state.sample.messages, Path())
        seeds = [derive_seed(SMALL.seed, 3, draw, rollout) for rollout in range(4)]
        alone = sample(policy, [prompt], n=4, max_new_tokens=40, seeds=seeds)[0]
        assert [rollout.text for rollout in alone] == [rollout.text for rollout in group.rollouts]
        assert all(
            reward.value == 1.0
            for reward, rollout in zip(group.rewards, group.rollouts, strict=True)
            if rollout.text == group.state.sample.target_text
        )


def test_the_number_of_ranks_changes_no_sample(policy):
    """What the ranks of three draw for themselves is, put together, what one rank draws."""
    states, config = right_states(policy), dataclasses.replace(SMALL, max_generation_batches=1)

    class Share(Ranks):
        """One rank of three; the others' shares are missing, so those of the single rank stand in."""

        def gather(self, value):
            own.append(value)
            return [whole[0], value]

    whole, own = [], []
    groups = generate(
        policy, ALONE, states, Prompts(policy), config, step=1, position=2, report=lambda text: None
    )
    whole.append({number: list(group.rollouts) for number, group in enumerate(groups)})
    for rank in range(3):
        generate(
            policy,
            Share(rank, 3, torch.device("cpu")),
            states,
            Prompts(policy),
            config,
            step=1,
            position=2,
            report=lambda text: None,
        )
    together = {number: rollouts for part in own for number, rollouts in part.items()}
    assert sorted(together) == list(range(len(groups)))
    for number, rollouts in together.items():
        assert [rollout.text for rollout in rollouts] == [rollout.text for rollout in groups[number].rollouts]


def test_the_next_refill_is_encoded_meanwhile(policy, monkeypatch):
    """Each prompt of the coming refill is encoded once, and a broken one is an error when it is needed."""
    states = right_states(policy)
    prompts, encoded = Prompts(policy), []
    monkeypatch.setattr(
        policy,
        "encode_prompt",
        lambda messages, root: encoded.append(messages) or PolicyModel.encode_prompt(policy, messages, root),
    )
    generate(
        policy,
        ALONE,
        states,
        prompts,
        dataclasses.replace(SMALL, max_generation_batches=1),
        step=0,
        position=0,
        report=lambda text: None,
    )
    for place in drawn_states(len(states), SMALL.seed, 0, 2 * SMALL.train_batch):
        expected = PolicyModel.encode_prompt(policy, states[place].sample.messages, Path())
        assert torch.equal(prompts(states[place]).ids, expected.ids)
    drawn = set(drawn_states(len(states), SMALL.seed, 0, 2 * SMALL.train_batch))
    assert len(encoded) == len(drawn)
    picture = Message(role="user", parts=(Image(path="gone.png", sha256="", width=8, height=8),))
    broken = dataclasses.replace(
        states[0], sample=dataclasses.replace(states[0].sample, sample_id="broken", messages=(picture,))
    )
    prompts.announce([broken])
    with pytest.raises(FileNotFoundError):
        prompts(broken)


def separate_logprobs(policy, state, ids):
    """Log-probs of one answer, alone behind its prompt."""
    return policy.response_logprobs(
        make_pack([Bundle(policy.encode_prompt(state.sample.messages, Path()), (ids,))])
    )


def disturb(policy):
    """Give the adapters weights that do something."""
    with torch.no_grad():
        for parameter in policy.adapters:
            parameter += 0.05 * torch.randn_like(parameter)


def test_the_reference_is_the_policy_without_its_adapters(policy):
    """Reference log-probs stay those of the model before training; old ones move with the adapters."""
    groups = generate(
        policy,
        ALONE,
        right_states(policy),
        Prompts(policy),
        SMALL,
        step=0,
        position=0,
        report=lambda text: None,
    )[:3]
    untrained = old_and_reference(policy, ALONE, groups, Prompts(policy), SMALL)
    disturb(policy)
    trained = old_and_reference(policy, ALONE, groups, Prompts(policy), SMALL)
    for group, before, after in zip(groups, untrained, trained, strict=True):
        assert before.group is after.group is group
        assert [len(values) for values in after.old] == [len(rollout.ids) for rollout in group.rollouts]
        assert [len(values) for values in after.probed] == [len(probe.ids) for probe in after.probes]
        torch.testing.assert_close(before.old, before.reference, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(after.reference, before.reference)
        assert not torch.allclose(torch.cat(after.old), torch.cat(before.old), atol=1e-2)


def loss_of_separate_sequences(policy, trained, *, kl_weight):
    """Eq. 3 of some groups, sequence by sequence; n = 4, M = 2, and every ratio is 1, so nothing clips."""
    loss = torch.zeros(())
    for found in trained:
        group, state = found.group, found.group.state
        answers = zip(group.rollouts, group.gate.advantages, found.old, found.reference, strict=True)
        for rollout, advantage, old, reference in answers:
            new = separate_logprobs(policy, state, rollout.ids)
            torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
            d = reference - new
            terms = -torch.exp(new - old) * advantage + kl_weight * (torch.exp(d) - d - 1)
            loss = loss + terms.mean() / (4 * 2)
        if not group.gate.accepted:
            target = separate_logprobs(policy, state, state.target_ids)
            loss = loss - 0.1 * target[state.target_mask].mean() / 2
    return loss


@pytest.mark.parametrize("kind", ["accepted", "rejected"])
def test_update_equals_the_sum_over_separate_sequences(policy, kind):
    """The gradient of one mini-batch on packed groups is that of Eq. 3 computed sequence by sequence."""
    states = right_states(policy) if kind == "accepted" else wrong_states(policy)
    config = dataclasses.replace(SMALL, objective=ObjectiveConfig(kl_weight=0.5), train_batch=6)
    groups = generate(
        policy, ALONE, states, Prompts(policy), config, step=0, position=0, report=lambda text: None
    )
    groups = [group for group in groups if group.gate.accepted == (kind == "accepted")][:3]
    assert len(groups) == 3
    optimizer = optimizer_of(policy)
    disturb(policy)
    trained = old_and_reference(policy, ALONE, groups, Prompts(policy), config)
    loss = loss_of_separate_sequences(policy, trained, kl_weight=0.5)
    expected = torch.autograd.grad(loss, policy.adapters)
    gradients = []
    optimizer.adam.register_step_pre_hook(
        lambda *_: gradients.extend(parameter.grad.clone() for parameter in policy.adapters)
    )
    optimizer.clip = math.inf
    batch = [training_group(found) for found in trained]
    sums, norm = update(policy, ALONE, batch, Prompts(policy), optimizer, config)
    assert norm == pytest.approx(
        math.sqrt(sum(float(gradient.square().sum()) for gradient in expected)), rel=1e-4
    )
    assert sums["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_packing_changes_no_weight(wavering):
    """Packs of one answer and packs of everything give the same weights after a step."""
    results = []
    for budget in (1, 20_480):
        policy = copy.deepcopy(wavering)
        torch.manual_seed(0)
        policy.adapters = add_lora(policy.model, rank=8, alpha=16, scope="attn")
        optimizer = optimizer_of(policy, lr=1e-4)
        values, _ = rl_step(
            policy,
            ALONE,
            right_states(policy),
            optimizer,
            dataclasses.replace(SMALL, token_budget=budget),
            step=0,
            position=0,
        )
        results.append((values, weights(policy)))
    (one, a), (many, b) = results
    for name in ("loss", "kl", "gap", "rollout_log_ppl", "grad_norm"):
        assert one[name] == pytest.approx(many[name], rel=1e-3, abs=1e-5)
    assert max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) < 2e-5


def test_counts_add_up_and_the_sampler_agrees_with_the_trainer(policy):
    """Groups are counted once each, and before any update the policy is its own reference."""
    config = dataclasses.replace(SMALL, train_batch=6, mini_batch=6)
    values, position = rl_step(
        policy, ALONE, right_states(policy), optimizer_of(policy), config, step=0, position=0
    )
    assert values["accepted"] + values["dropped"] + values["rejected"] == values["generated"] == position
    assert sum(sum(row.values()) for row in values["cells"].values()) == values["generated"]
    assert set(values["cells"]) <= set(CATEGORIES)
    assert values["retained"] % config.mini_batch == 0
    assert values["updates"] == math.ceil((values["accepted"] + values["retained"]) / config.mini_batch)
    assert values["sampler_trainer_diff"] < 1e-4
    if values["updates"] == 1:
        assert values["kl"] == pytest.approx(0, abs=1e-6)
        assert values["ppo_kl"] == pytest.approx(0, abs=1e-5)
        assert values["clip_frac"] == 0.0
    assert values["gap"] == pytest.approx(values["correct_logprob"] - values["wrong_logprob"])
    assert 0 < values["rollout_log_ppl"] < 2
    assert values["own_reasoning_logprob"] < 0
    json.dumps(values)


def target_probabilities(policy, states):
    """The probability of each state's target, whole, under the policy."""
    answers = [(state, [state.target_ids]) for state in states]
    found = log_probs(policy, ALONE, answers, Prompts(policy), SMALL)
    return [float(target.sum().exp()) for (target,) in found]


def test_accepted_groups_raise_the_right_action(policy):
    """Training on states with mixed rollouts makes right answers likelier, sampled and greedy.

    Rewards of sampled answers waver with the processor's rounding; exact probabilities hardly do.
    """
    states, optimizer, position = right_states(policy), optimizer_of(policy, 1e-3), 0
    before = target_probabilities(policy, states)
    greedy_before = greedy_rewards(policy, ALONE, states, response_budget=40)
    for step in range(16):
        _, position = rl_step(policy, ALONE, states, optimizer, SMALL, step=step, position=position)
    assert sum(target_probabilities(policy, states)) / 6 > sum(before) / 6 + 0.2
    assert sum(greedy_rewards(policy, ALONE, states, response_budget=40)) > sum(greedy_before) + 1.5


def test_salvage_alone_teaches_a_state_without_competent_rollouts(policy):
    """With nothing accepted, the anchor makes the target's action likelier, after own reasoning too."""
    states, optimizer, position = wrong_states(policy), optimizer_of(policy, 1e-2), 0
    own = []
    for step in range(6):
        values, position = rl_step(policy, ALONE, states, optimizer, SMALL, step=step, position=position)
        assert (values["accepted"], values["retained"], values["generation_batches"]) == (0, 4, 3)
        assert values["pg"] == 0.0
        own.append(values["own_reasoning_logprob"])
    assert own[-1] > own[0] + 0.1
    assert values["cells"][CATEGORIES[0]]["accepted"] == 0


def test_without_anchor_only_the_brake_is_left(policy):
    """Salvage weight 0 keeps groups and KL, whose gradient is 0 before the first update."""
    before = weights(policy)
    config = dataclasses.replace(SMALL, mini_batch=4, objective=ObjectiveConfig(salvage_weight=0.0))
    optimizer = Optimizer(policy.adapters, ALONE, lambda step: 1e-2, OptimizerConfig(weight_decay=0.0))
    values, _ = rl_step(policy, ALONE, wrong_states(policy), optimizer, config, step=0, position=0)
    assert values["retained"] == 4
    assert values["nll"] > 0
    assert values["grad_norm"] == pytest.approx(0, abs=1e-5)
    assert len(before) == len(weights(policy))


def test_a_step_with_nothing_to_train_on_is_skipped(policy):
    """With no group accepted and fewer than M rejected, no weight changes; the prompts count as drawn."""
    before = weights(policy)
    config = dataclasses.replace(SMALL, train_batch=2, mini_batch=16, max_generation_batches=2)
    values, position = rl_step(
        policy, ALONE, wrong_states(policy), optimizer_of(policy), config, step=0, position=0
    )
    assert (values["updates"], values["accepted"], values["retained"], position) == (0, 0, 0, 4)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(policy), strict=True))


def test_dapo_needs_no_competence_and_retains_nothing(policy):
    """DAPO trains on contrast alone and keeps no rejected group."""
    half = json.dumps(
        {"action": [{"click_element_by_index": {"index": 8}}]}
    )  # never given: 0.3 for any click, 0 for a broken answer
    states = states_of(
        policy,
        [
            dataclasses.replace(mined(index, target=half), prompt_indices=(1, 2, 3, 4, 5, 6, 8))
            for index in INDICES
        ],
    )
    config = dataclasses.replace(SMALL, algorithm="dapo", max_generation_batches=2)
    values, _ = rl_step(policy, ALONE, states, optimizer_of(policy), config, step=0, position=0)
    assert values["retained"] == 0
    assert values["accepted"] > 0
    assert all(row["accepted"] == 0 for row in values["cells"].values())  # contrast, but not competent


def test_a_step_is_repeatable(wavering):
    """The same seed, step and position give the same statistics and weights."""
    found = []
    for _ in range(2):
        policy = copy.deepcopy(wavering)
        torch.manual_seed(0)
        policy.adapters = add_lora(policy.model, rank=8, alpha=16, scope="attn")
        values, _ = rl_step(
            policy, ALONE, right_states(policy), optimizer_of(policy), SMALL, step=2, position=7
        )
        found.append(
            ({name: value for name, value in values.items() if not name.endswith("_s")}, weights(policy))
        )
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


# ------------------------------------------------------------------------------------------------ token spans


def test_action_spans_are_found_in_the_sampled_tokens(wavering):
    """The span is that of the sampled tokens, also where encoding the text would give others."""
    text = click(3)
    span = (10, len(text) - 1)
    ids = wavering.encode_response(text)
    assert sampled_span(wavering, ids, span) == wavering.token_span(text, span)
    letters = torch.cat(
        [wavering.encode_response(letter)[:-1] for letter in text] + [ids[-1:]]
    )  # one token a character
    assert len(letters) > len(ids)
    assert sampled_span(wavering, letters, span) == span


def test_the_own_reasoning_probe_keeps_the_reasoning(policy):
    """The second probe is the first parsed rollout with the target's action list in place of its own."""
    states = right_states(policy)
    group = generate(
        policy, ALONE, states, Prompts(policy), SMALL, step=0, position=0, report=lambda text: None
    )[0]
    rollout = dataclasses.replace(group.rollouts[0], text='{"memory":"look","action":[{"go_back":{}}]}')
    broken = dataclasses.replace(rollout, text="nothing")
    target, own = probes_of(dataclasses.replace(group, rollouts=(broken, rollout)), policy)
    assert torch.equal(target.ids, group.state.target_ids)
    start, end = group.state.sample.action_span
    action = group.state.sample.target_text[start:end]
    assert policy.decode(own.ids) == '{"memory":"look","action":' + action + "}"
    assert action in policy.decode(own.ids[own.mask])
    assert "look" not in policy.decode(own.ids[own.mask])
    assert len(probes_of(dataclasses.replace(group, rollouts=(broken,)), policy)) == 1
