"""Laws of the sampler."""

import itertools
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import tiny_policy

from rmsweb.engine import sampler as sampler_room
from rmsweb.engine.lora import add_lora, merged_state_dict
from rmsweb.engine.packing import Bundle, make_pack
from rmsweb.engine.sampler import Decoding, RolloutCache, cache_bytes, choose, cut, sample, uniforms
from rmsweb.records import Image, Message, Text

GREEDY = Decoding(temperature=0.0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A policy that ends some answers, and four prompts of different lengths, two with a picture."""
    root = tmp_path_factory.mktemp("run")
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (96, 160, 3), dtype=np.uint8)).save(
        root / "a.png"
    )
    picture = Image(path="a.png", sha256="", width=160, height=96)
    policy = tiny_policy(std=0.12)
    policy.model.lm_head.weight.data[policy.end_id] *= 5  # so that some answers end
    texts = ["short", "a longer prompt " * 3, "with a picture", "press 3\n[3]<button />\n"]
    prompts = [
        policy.encode_prompt(
            [Message(role="user", parts=(*((picture,) if number % 2 else ()), Text(tag="task", text=text)))],
            root,
        )
        for number, text in enumerate(texts)
    ]
    return policy, prompts


def logprobs_of(policy, prompt, rollout, temperature):
    """The trainer's at temperature 1; at another one those of the same hidden states."""
    pack = make_pack([Bundle(prompt, (rollout.ids,))])
    with torch.no_grad():
        if temperature == 1.0:
            return policy.response_logprobs(pack)
        logits = policy.model.lm_head(policy.scorer.hidden(pack)[pack.source]) / temperature
        return logits.log_softmax(-1).gather(1, pack.targets[:, None])[:, 0]


def same(a, b):
    return all(
        torch.equal(x.ids, y.ids) and x.finish_reason == y.finish_reason for x, y in zip(a, b, strict=True)
    )


def test_greedy_equals_the_full_forward(world):
    """Every greedy token is the argmax of the plain forward over prompt and answer so far; pictures and
    ragged prompts included.
    """
    policy, prompts = world
    rollouts = sample(policy, prompts, n=2, max_new_tokens=12, seeds=range(8), decoding=GREEDY)
    for prompt, (first, second) in zip(prompts, rollouts, strict=True):
        assert torch.equal(first.ids, second.ids)
        hidden = policy.scorer.hidden(pack := make_pack([Bundle(prompt, (first.ids,))]))
        assert torch.equal(policy.model.lm_head(hidden[pack.source]).argmax(-1), first.ids)


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(temperature=0.7, top_p=0.8, top_k=20), GREEDY])
def test_logprobs_equal_the_trainers(world, decoding):
    """Recorded log-probabilities are those of the trainer, at their temperature, before any filter."""
    policy, prompts = world
    for prompt, rollouts in zip(
        prompts,
        sample(policy, prompts, n=3, max_new_tokens=10, seeds=range(12), decoding=decoding),
        strict=True,
    ):
        for rollout in rollouts:
            torch.testing.assert_close(
                rollout.logprobs,
                logprobs_of(policy, prompt, rollout, decoding.temperature or 1.0),
                rtol=1e-3,
                atol=1e-4,
            )


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(temperature=0.7, top_p=0.8, top_k=20)])
def test_a_rollout_depends_on_its_seed_alone(world, monkeypatch, decoding):
    """Batch shape, order, cache budget, prefill budget, leaving prompts and the number of rollouts change no
    sample.
    """
    policy, prompts = world
    seeds = [100 + i for i in range(12)]
    reference = sample(policy, prompts, n=3, max_new_tokens=14, seeds=seeds, decoding=decoding)
    assert {rollout.finish_reason for group in reference for rollout in group} == {"stop", "length"}
    assert not all(torch.equal(group[0].ids, group[1].ids) for group in reference)
    with monkeypatch.context() as patch:
        patch.setattr(sampler_room, "CACHE_BYTES", {"cpu": 1})
        small = sample(policy, prompts, n=3, max_new_tokens=14, seeds=seeds, decoding=decoding)
    monkeypatch.setattr(sampler_room, "PREFILL_TOKENS", 40)
    monkeypatch.setattr(sampler_room, "KEPT_FRAC", 1.0)  # cut down at every chance
    backward = sample(
        policy,
        prompts[::-1],
        n=3,
        max_new_tokens=14,
        seeds=[s for i in (3, 2, 1, 0) for s in seeds[3 * i : 3 * i + 3]],
        decoding=decoding,
    )
    for number, group in enumerate(reference):
        assert same(group, small[number])
        assert same(group, backward[3 - number])
        for rollout, seed in zip(group, seeds[3 * number :], strict=False):
            assert same(
                [rollout],
                sample(policy, [prompts[number]], n=1, max_new_tokens=14, seeds=[seed], decoding=decoding)[0],
            )


def test_a_limit_cuts_and_nothing_else(world):
    """A shorter limit gives the beginning of the longer answer; limits may differ from prompt to prompt."""
    policy, prompts = world
    longer = sample(policy, prompts, n=1, max_new_tokens=14, seeds=range(4))
    for (long,), (short,), limit in zip(
        longer,
        sample(policy, prompts, n=1, max_new_tokens=[2, 14, 1, 5], seeds=range(4)),
        [2, 14, 1, 5],
        strict=True,
    ):
        assert torch.equal(short.ids, long.ids[:limit])
        assert short.finish_reason == ("stop" if policy.end_id in short.ids else "length")
        assert short.text == policy.decode(short.ids)


def test_an_answer_ends_at_its_end_token(world):
    """<|im_end|> occurs only as the last token, and not in the text."""
    policy, prompts = world
    for group in sample(policy, prompts, n=8, max_new_tokens=20, seeds=range(32)):
        for rollout in group:
            assert policy.end_id not in rollout.ids[:-1]
            assert "<|im_end|>" not in rollout.text
            assert len(rollout.ids) == len(rollout.logprobs)


def test_merged_weights_sample_what_adapters_sample(world):
    """With adapters added into the weights the sampler draws what it draws with them beside the weights;
    training mode is given back.
    """
    policy = tiny_policy(std=0.12)
    for parameter in add_lora(policy.model, rank=4, alpha=8, dropout_p=0.5)[1::2]:
        parameter.data.normal_(std=0.05)
    policy.model.train()
    beside = sample(policy, world[1], n=2, max_new_tokens=8, seeds=range(8))
    assert policy.model.training
    plain = tiny_policy()
    plain.model.load_state_dict(merged_state_dict(policy.model))
    inside = sample(plain, world[1], n=2, max_new_tokens=8, seeds=range(8))
    assert all(same(a, b) for a, b in zip(beside, inside, strict=True))


def test_finished_rollouts_leave_the_batch(world, monkeypatch):
    """Rows that go through the model are never fewer than the unfinished rollouts, nor more than those of the
    busiest prompt times prompts left.
    """
    policy, prompts = world
    monkeypatch.setattr(sampler_room, "KEPT_FRAC", 1.0)
    rows = []
    head = policy.model.lm_head.register_forward_pre_hook(
        lambda module, arguments: rows.append(len(arguments[0]))
    )
    lengths = [
        [len(rollout.ids) for rollout in group]
        for group in sample(policy, prompts, n=3, max_new_tokens=40, seeds=range(12))
    ]
    head.remove()
    for step, count in enumerate(rows[1:]):  # the first call is the prefill's
        going_on = [sum(length > step + 1 for length in group) for group in lengths]
        assert count == sum(map(bool, going_on)) * max(going_on)
    assert len(rows) == max(max(group) for group in lengths)
    assert rows[-1] < 12, lengths


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), max_size=12),
    st.integers(1, 4),
    st.integers(1, 400),
)
def test_batches_stay_within_the_budget(prompts, n, budget):
    """Every prompt lies in one batch; a batch of several, padded to its longest prompt and limit, is within
    the budget and cannot take the next prompt.
    """
    lengths, limits = [length for length, _ in prompts], [limit for _, limit in prompts]

    def padded(batch):
        return len(batch) * (max(lengths[i] for i in batch) + n * max(limits[i] for i in batch))

    batches = cut(sorted(range(len(prompts)), key=lambda i: -lengths[i]), padded, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(prompts)))
    assert all(len(batch) == 1 or padded(batch) <= budget for batch in batches)
    assert all(padded([*batch, after[0]]) > budget for batch, after in itertools.pairwise(batches))


def test_cache_bytes_are_those_of_the_cache(world):
    """The estimate is what the cache really holds, and 144 KiB a token for the published 8B."""
    policy, prompts = world
    text = policy.model.model.language_model
    cache = RolloutCache(policy, [len(prompts[0])], 3, 14)
    with policy.evaluating():
        sampler_room._prefill(policy, prompts[:1], cache)
    held = cache.prompt.nbytes + cache.own.nbytes
    assert held == cache_bytes(text.config, text.dtype, 3, len(prompts[0]), 14)
    large = SimpleNamespace(num_hidden_layers=36, num_key_value_heads=8, head_dim=128)
    assert cache_bytes(large, torch.bfloat16, 1, 1, 0) == 144 * 1024


@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 5),
    st.floats(0.05, 1),
)
def test_choose_keeps_to_its_filters(logits, uniform, top_k, top_p):
    """A chosen token lies among the top-k, and in the smallest set of top tokens that holds top-p of their
    mass.
    """
    row = torch.tensor([logits])
    token, logprob = choose(
        row, torch.tensor([uniform], dtype=torch.float64), Decoding(top_k=top_k, top_p=top_p)
    )
    probabilities = row[0].double().softmax(0)
    kept = sorted(probabilities.tolist(), reverse=True)[: top_k or None]
    better = [p / sum(kept) for p in kept if p > probabilities[token] + 1e-9]
    assert len(better) < (top_k or len(logits))
    assert sum(better) < top_p + 1e-9
    torch.testing.assert_close(logprob[0].double(), probabilities[token[0]].log(), rtol=1e-4, atol=1e-5)


def test_choose_follows_the_distribution():
    """Over evenly spread uniform numbers the shares of tokens are their probabilities."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    grid = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    tokens, _ = choose(logits.expand(20000, -1), grid, Decoding())
    shares = torch.bincount(tokens, minlength=4) / 20000
    torch.testing.assert_close(shares, logits[0].softmax(0), atol=1e-4, rtol=0)


def test_uniform_rows_depend_on_their_seed_alone():
    """A row is the beginning of every longer row of the same seed."""
    long = uniforms([5, 6, 7], 100)
    for count in (1, 7, 15, 16, 33):
        assert torch.equal(uniforms([7, 5], count), long[[2, 0], :count])


def test_impossible_requests_are_refused(world):
    """Too few seeds, a limit of zero, and impossible decodings are errors; no prompts give no answers."""
    policy, prompts = world
    for arguments in (
        {"n": 1, "seeds": [1], "max_new_tokens": 3},
        {"n": 1, "seeds": range(4), "max_new_tokens": 0},
    ):
        with pytest.raises(ValueError, match="one seed a rollout"):
            sample(policy, prompts, **arguments)
    for decoding in ({"temperature": -1}, {"top_p": 0}, {"top_k": -1}):
        with pytest.raises(ValueError, match="decoding"):
            Decoding(**decoding)
    assert sample(policy, [], n=4, max_new_tokens=3, seeds=[]) == []
