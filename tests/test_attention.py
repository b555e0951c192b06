"""Laws of the segment attention."""

import itertools
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsweb.engine import attention
from rmsweb.engine.attention import PackLayout

GROUPS = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(1, 5), max_size=4)), min_size=1, max_size=4
)


def dense(groups, query, key, value, scale):
    """Oracle: one T x T mask over the whole row."""
    owner, prompt_of = [], []
    for group, (prompt, answers) in enumerate(groups):
        owner += [(group, 0)] * prompt
        for number, length in enumerate(answers, 1):
            owner += [(group, number)] * length
    prompt_of = [(group, 0) for group, _ in owner]
    total = len(owner)
    mask = torch.tensor(
        [[k <= q and owner[k] in (owner[q], prompt_of[q]) for k in range(total)] for q in range(total)]
    )
    repeat = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query * scale @ keys.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2)


def tensors(total):
    generator = torch.Generator().manual_seed(total)
    return [
        torch.randn(1, heads, total, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]


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
    for ours, oracle in zip(*results, strict=True):
        torch.testing.assert_close(ours, oracle)
    attention.MERGE_TOKENS = old


@given(GROUPS)
def test_varlen_lengths_describe_the_same_segments(groups):
    """The lists for the GPU kernel: queries cover the row once, each segment's keys are its prompt and
    itself, in order.
    """
    index, query_ends, key_ends, longest_query, longest_key = PackLayout(groups)._segments
    segments = [
        (prompt, number, length)
        for prompt, answers in groups
        for number, length in enumerate((prompt, *answers))
    ]
    assert query_ends.tolist()[-1] == sum(length for *_, length in segments)
    start = group_start = 0
    for segment, (prompt, number, length) in enumerate(segments):
        if number == 0:
            group_start = start
        keys = index[key_ends[segment] : key_ends[segment + 1]].tolist()
        assert keys == (list(range(group_start, group_start + prompt)) if number else []) + list(
            range(start, start + length)
        )
        assert longest_query >= length
        assert longest_key >= len(keys)
        start += length


def documented_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
):
    """Stand-in for flash-attn's varlen call, as its documentation describes it: q [total_q, H, d], k and v
    [total_k, h, d], H a multiple of h, half precision, contiguous in d; cumulative lengths [segments + 1]
    int32 from 0; causal masks aligned at the bottom right; a naive loop over query tokens.
    """
    (total, heads, size), (total_k, heads_k, _) = q.shape, k.shape
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert k.shape == v.shape == (total_k, heads_k, size)
    assert heads % heads_k == 0
    assert size <= 256
    for tensor in (q, k, v):
        assert tensor.stride(-1) == 1
    for ends, count, longest in ((cu_seqlens_q, total, max_seqlen_q), (cu_seqlens_k, total_k, max_seqlen_k)):
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert (int(ends[0]), int(ends[-1]), int(ends.diff().max())) == (0, count, longest)
        assert int(ends.diff().min()) >= 0
    assert len(cu_seqlens_q) == len(cu_seqlens_k)
    assert dropout_p == 0.0
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    rows = []
    for (start, stop), (start_k, stop_k) in zip(
        itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True
    ):
        for place in range(start, stop):
            seen = stop_k - (stop - 1 - place) if causal else stop_k  # the last query sees every key
            keys, values = (x[start_k:seen].float().repeat_interleave(heads // heads_k, 1) for x in (k, v))
            weights = (torch.einsum("hd,thd->ht", q[place].float(), keys) * scale).softmax(-1)
            rows.append(torch.einsum("ht,thd->hd", weights, values))
    return torch.stack(rows).to(q.dtype)


@settings(deadline=None, max_examples=30)
@given(GROUPS)
def test_the_varlen_call_keeps_to_its_contract(groups):
    """What the GPU path hands to flash-attn is what its documentation asks for, and gives what one dense mask
    gives, in value and gradient.
    """
    layout = PackLayout(groups)
    parts = [part.detach().to(torch.bfloat16).requires_grad_() for part in tensors(layout.num_tokens)]
    weight = torch.randn(1, layout.num_tokens, 4, 8)
    with patch.object(attention, "flash_attn_varlen_func", documented_varlen):
        out = layout._flash(*parts, 0.3)
    oracle = dense(groups, *(part.float() for part in parts), 0.3)
    assert out.shape == oracle.shape
    torch.testing.assert_close(out.float(), oracle, rtol=0.02, atol=0.02)
    sides = [torch.autograd.grad((side * weight).sum(), parts) for side in (out, oracle)]
    for ours, theirs in zip(*sides, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1)


def test_the_stand_in_tells_the_alignments_apart():
    """Two queries behind three keys: with the mask at the bottom right the first sees two of them, as the
    documentation's example says.
    """
    q = torch.zeros(2, 1, 8, dtype=torch.bfloat16)
    k, v = (
        torch.zeros(3, 1, 8, dtype=torch.bfloat16),
        torch.tensor([3.0, 6.0, 9.0]).bfloat16()[:, None, None].repeat(1, 1, 8),
    )
    ends = [torch.tensor([0, count], dtype=torch.int32) for count in (2, 3)]
    assert documented_varlen(q, k, v, *ends, 2, 3, causal=True)[:, 0, 0].tolist() == [4.5, 6.0]


@pytest.mark.parametrize("groups", [[], [(0, [])], [(3, [0])]])
def test_an_empty_part_of_a_row_is_refused(groups):
    """A row needs a group, and no prompt or answer may be empty."""
    with pytest.raises(ValueError, match="at least one token"):
        PackLayout(groups)
