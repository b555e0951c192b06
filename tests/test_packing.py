"""Laws of packing and dealing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmsweb.engine.packing import (
    Bundle,
    EncodedPrompt,
    Packable,
    bundles_in,
    cost,
    deal_packs,
    dummy_pack,
    make_pack,
    plan_packs,
)

LENGTHS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), max_size=6).map(tuple)), max_size=8
)


def text_bundle(prompt: int, answers: tuple[int, ...], first: int = 0) -> Bundle:
    ids = torch.arange(first, first + prompt)
    encoded = EncodedPrompt(ids, torch.arange(prompt).expand(3, -1), prompt, ids[:0])
    return Bundle(encoded, tuple(torch.full((length,), 1000 + length) for length in answers))


@given(LENGTHS, st.integers(1, 60))
def test_every_answer_lies_in_exactly_one_bin_within_the_budget(lengths, budget):
    """Nothing is lost or doubled, and a bin is over the budget only where one answer with its prompt is."""
    bins = plan_packs(lengths, budget)
    seen = sorted((group, answer) for content in bins for group, answers in content for answer in answers)
    assert seen == [
        (group, answer) for group, (_, answers) in enumerate(lengths) for answer in range(len(answers))
    ]
    assert {group for content in bins for group, _ in content} == set(range(len(lengths)))
    for content in bins:
        tokens = sum(
            lengths[group][0] + sum(lengths[group][1][a] for a in answers) for group, answers in content
        )
        assert tokens <= budget or (len(content) == 1 and len(content[0][1]) <= 1)


@given(st.lists(st.floats(0.1, 100), max_size=20), st.integers(1, 5))
def test_dealing_gives_every_rank_equally_many(costs, ranks):
    """Each pack goes to one rank; dummies fill up; no rank carries more than an even share plus one pack."""
    hands = deal_packs(costs, ranks)
    assert len({len(hand) for hand in hands}) <= 1
    assert sorted(pack for hand in hands for pack in hand if pack is not None) == list(range(len(costs)))
    load = [sum(costs[pack] for pack in hand if pack is not None) for hand in hands]
    assert max(load) <= sum(costs) / ranks + max(costs, default=0) + 1e-6


def test_a_pack_lays_groups_in_a_row():
    """Positions restart at the prompt's end, and the first token of an answer is predicted by the prompt's
    last one.
    """
    pack = make_pack([text_bundle(3, (2, 1)), text_bundle(2, (1,), 10)])
    assert pack.ids[0].tolist() == [0, 1, 2, 1002, 1002, 1001, 10, 11, 1001]
    assert pack.positions[1, 0].tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2]
    assert pack.source.tolist() == [2, 3, 2, 7]
    assert pack.targets.tolist() == [1002, 1002, 1001, 1001]
    assert pack.response_lengths == (2, 1, 1)


def test_a_bundle_split_over_bins_repeats_its_prompt():
    """Every bin holds the prompt with its own part of the answers."""
    groups = [text_bundle(10, (5, 5, 5))]
    items = [Packable(group.lengths, lambda group=group: group) for group in groups]
    parts = [bundles_in(content, items)[0] for content in plan_packs([group.lengths for group in groups], 20)]
    assert [part.lengths for part in parts] == [(10, (5, 5)), (10, (5,))]


def test_cost_grows_with_tokens_and_pairs():
    """A long prompt costs more than the same tokens in two short ones."""
    assert cost([(200, (10,))]) > cost([(100, (5,)), (100, (5,))]) > cost([(100, (5,))])


def test_a_dummy_is_a_pack_and_an_empty_budget_an_error():
    """A dummy has one answer token; a budget below one token is refused."""
    assert dummy_pack().response_lengths == (1,)
    with pytest.raises(ValueError, match="token budget"):
        plan_packs([(1, (1,))], 0)
