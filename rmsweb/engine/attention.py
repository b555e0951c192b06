"""Segment attention: one attention function for everything that is trained, and for the sampler's prefill.

Purpose: a pack is a row of T tokens made of groups that lie one after another; a group is a prompt of P tokens and n answers of R
tokens each. The prompt sees itself, an answer sees the prompt and itself, both causally. No T x T mask is ever built: with flash-attn
on a GPU the segments are lists of lengths for its varlen kernel (whose causal mask is aligned at the end of the keys), elsewhere a
loop of SDPA over slices of the row. Log-probabilities and gradients equal those of n separate sequences (tested).

Shapes: B batch, T tokens, H query heads, h key/value heads, d head dimension, P prompt, R response, n answers.

ours: short answers of one group share one SDPA call with a small block mask, because a call costs more than the masked pairs.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

NAME = "segments"  # under which transformers knows this attention
MERGE_TOKENS = 512  # answers of a group share one SDPA call up to this many query tokens


class Layout(Protocol):
    """What the text model gets as its `layout` keyword: it computes the attention of one layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [B, H, T, d], key and value [B, h, T, d] of this call's tokens -> [B, T, H, d]."""
        ...


def segment_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float, layout: Layout, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls: hands a layer's tensors to the layout of this forward call."""
    return layout.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, segment_attention)


def use_segment_attention(text_config: Any) -> None:
    """Switches a Qwen3-VL's text model (not its vision tower) to segment attention; its forward then needs `layout=`."""
    text_config._attn_implementation = NAME


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1])


class PackLayout:
    """Layout of a row of groups.

    Args:
        groups: (P, (R, ...)) of each group in the order of the row; a group without answers is a prompt alone.
        device: where the row lies.
        keep: a list that receives (key, value), each [h, T, d], of every layer in order (the sampler's prefill); None keeps nothing.

    >>> PackLayout([(3, (2, 1)), (4, ())]).num_tokens
    10
    """

    def __init__(
        self, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str = "cpu", keep: list[tuple[Tensor, Tensor]] | None = None
    ) -> None:
        if not groups or any(prompt < 1 or min(answers, default=1) < 1 for prompt, answers in groups):
            raise ValueError(f"a pack needs a group, and prompts and answers of at least one token; found {list(groups)}")
        self.groups = [(prompt, tuple(answers)) for prompt, answers in groups]
        self.num_tokens = sum(prompt + sum(answers) for prompt, answers in self.groups)
        self.device, self.keep = torch.device(device), keep

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [1, H, T, d], key and value [1, h, T, d] -> [1, T, H, d]."""
        if self.keep is not None:
            self.keep.append((key[0], value[0]))
        if query.is_cuda and flash_attn_varlen_func is not None and query.dtype in (torch.bfloat16, torch.float16):
            return self._flash(query, key, value, scale)
        pieces = list(zip(*(x.split([length for length, _, _ in self._calls], dim=2) for x in (query, key, value)), strict=True))
        parts = []
        for (q, k, v), (_, prompt, mask) in zip(pieces, self._calls, strict=True):
            if prompt is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(pieces[prompt][1:], (k, v), strict=True))
            parts.append(_sdpa(q, k, v, mask, scale).transpose(1, 2))
        return torch.cat(parts, 1)

    @cached_property
    def _calls(self) -> list[tuple[int, int | None, Tensor | None]]:
        """SDPA calls in order of the row: (queries, call of the prompt that they also see, mask or None where it is plainly causal)."""
        calls: list[tuple[int, int | None, Tensor | None]] = []
        for prompt, answers in self.groups:
            if len(answers) < 2:  # one answer continues the prompt: a single causal sequence
                calls.append((prompt + sum(answers), None, None))
                continue
            context, waiting = len(calls), list(answers)
            calls.append((prompt, None, None))
            while waiting:
                merged = [waiting.pop(0)]
                while waiting and sum(merged) + waiting[0] <= MERGE_TOKENS:
                    merged.append(waiting.pop(0))
                own = torch.block_diag(*(torch.ones(r, r, dtype=torch.bool).tril() for r in merged))
                mask = torch.cat([torch.ones(sum(merged), prompt, dtype=torch.bool), own], 1).to(self.device)
                calls.append((sum(merged), context, mask))
        return calls

    @cached_property
    def _segments(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """For the varlen kernel: key index [K], cumulative query and key lengths [segments + 1], longest of each."""
        keys, query_lengths, key_lengths, start = [], [], [], 0
        for prompt, answers in self.groups:
            context = torch.arange(start, start + prompt)
            for number, length in enumerate((prompt, *answers)):
                own = torch.arange(start, start + length)
                keys += [context, own] if number else [own]
                query_lengths.append(length)
                key_lengths.append(length + (prompt if number else 0))
                start += length
        cumulative = [torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32) for lengths in (query_lengths, key_lengths)]
        return torch.cat(keys).to(self.device), cumulative[0], cumulative[1], max(query_lengths), max(key_lengths)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        index, query_ends, key_ends, longest_query, longest_key = self._segments
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
        return flash_attn_varlen_func(q, k[index], v[index], query_ends, key_ends, longest_query, longest_key, softmax_scale=scale, causal=True)[None]
