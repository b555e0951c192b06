"""Laws of the segment attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsweb.engine import attention
from rmsweb.engine.attention import PackLayout

GROUPS = st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(1, 5), max_size=4)), min_size=1, max_size=4)


def dense(groups, query, key, value, scale):
    """Oracle: one T x T mask over the whole row."""
    owner, prompt_of = [], []
    for group, (prompt, answers) in enumerate(groups):
        owner += [(group, 0)] * prompt
        for number, length in enumerate(answers, 1):
            owner += [(group, number)] * length
    prompt_of = [(group, 0) for group, _ in owner]
    total = len(owner)
    mask = torch.tensor([[k <= q and owner[k] in (owner[q], prompt_of[q]) for k in range(total)] for q in range(total)])
    repeat = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query * scale @ keys.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2)


def tensors(total):
    generator = torch.Generator().manual_seed(total)
    return [torch.randn(1, heads, total, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


@settings(deadline=None, max_examples=30)
@given(GROUPS, st.sampled_from([1, 6, 512]))
def test_equals_a_dense_mask_in_value_and_gradient(groups, merge_tokens):
    """Every way of cutting the row into SDPA calls gives what one dense mask gives, forward and backward."""
    old, attention.MERGE_TOKENS = attention.MERGE_TOKENS, merge_tokens
    layout = PackLayout(groups)
    parts = tensors(layout.num_tokens)
    weight = torch.randn(1, layout.num_tokens, 4, 8, dtype=torch.float64)
    results = []
    for out in (layout.attend(0, *parts, 0.3), dense(groups, *parts, 0.3)):
        results.append([out, *torch.autograd.grad((out * weight).sum(), parts)])
    attention.MERGE_TOKENS = old
    for ours, oracle in zip(*results, strict=True):
        torch.testing.assert_close(ours, oracle)


@given(GROUPS)
def test_varlen_lengths_describe_the_same_segments(groups):
    """The lists for the GPU kernel: queries cover the row once, each segment's keys are its prompt and itself, in order."""
    index, query_ends, key_ends, longest_query, longest_key = PackLayout(groups)._segments
    segments = [(prompt, number, length) for prompt, answers in groups for number, length in enumerate((prompt, *answers))]
    assert query_ends.tolist()[-1] == sum(length for *_, length in segments)
    start = group_start = 0
    for segment, (prompt, number, length) in enumerate(segments):
        if number == 0:
            group_start = start
        keys = index[key_ends[segment] : key_ends[segment + 1]].tolist()
        assert keys == (list(range(group_start, group_start + prompt)) if number else []) + list(range(start, start + length))
        assert longest_query >= length
        assert longest_key >= len(keys)
        start += length


@pytest.mark.parametrize("groups", [[], [(0, [])], [(3, [0])]])
def test_refuses_empty_parts(groups):
    """A row needs a group, and no prompt or answer may be empty."""
    with pytest.raises(ValueError, match="at least one token"):
        PackLayout(groups)
