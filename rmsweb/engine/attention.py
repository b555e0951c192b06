"""Segment attention: one attention function for everything that is trained, and for the sampler's prefill.

Purpose: a pack is a row of T tokens, made of bundles that lie one after another. A bundle is a prompt of P
tokens with n answers of R tokens each. The prompt sees itself, an answer sees the prompt and itself, both
causally. No T x T mask is ever built: with flash-attn on a GPU the segments are lists of lengths for its
varlen kernel, whose causal mask is aligned at the end of the keys; elsewhere they are a loop of SDPA calls
over slices of the row. Log-probabilities and gradients equal those of n separate sequences (tested).

Shapes: B batch, T tokens, H query heads, h key/value heads, d head dimension, P prompt, R response, n
answers.

ours: short answers of one bundle share one SDPA call with a small block mask, because a call costs more than
the masked pairs.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

Keep = Callable[[int, Tensor, Tensor], None]
NAME = "segments"  # under which transformers knows this attention
MERGE_TOKENS = 512  # answers of a bundle share one SDPA call up to this many query tokens


class Layout(Protocol):
    """The `layout` keyword of the text model's forward: it computes the attention of one layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend from this call's tokens: query [B, H, T, d], key and value [B, h, T, d] -> [B, T, H, d]."""
        ...


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layout,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hand a layer's tensors to the layout of this forward call; transformers calls this function."""
    return layout.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, segment_attention)


def use_segment_attention(text_config: Any) -> None:
    """Switch the text model of a Qwen3-VL to segment attention; its forward then needs `layout=`.

    The vision tower keeps SDPA.
    """
    text_config._attn_implementation = NAME


def cut(numbers: Iterable[int], size: Callable[[list[int]], int], budget: int) -> list[list[int]]:
    """Cut a sequence into runs of at most `budget` each; a single number may exceed it.

    >>> cut([3, 1, 1, 2, 9, 1], sum, 4)
    [[3, 1], [1, 2], [9], [1]]
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and size([*runs[-1], number]) <= budget:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


class _Call(NamedTuple):
    """One call of SDPA. The row is cut into pieces, and each piece is the queries of one call."""

    queries: int
    pieces: tuple[int, ...]  # whose keys the queries see
    mask: Tensor | None  # [queries, keys]; None: plainly causal


class _Segments(NamedTuple):
    """The lists that the varlen kernel takes; a segment is a prompt or an answer."""

    keys: Tensor  # [K] places of the row: the keys of every segment, one segment after another
    query_ends: Tensor  # [segments + 1] int32, cumulative
    key_ends: Tensor  # [segments + 1] int32, cumulative
    longest_query: int
    longest_key: int


class PackLayout:
    """The layout of a row of bundles.

    Args:
        bundles: (P, (R, ...)) of each bundle, in the order of the row. A bundle without answers is a prompt.
        device: where the row lies.
        keep: called with (layer, key, value) of every layer, key and value [h, T, d] (the sampler's prefill).

    >>> PackLayout([(3, (2, 1)), (4, ())]).num_tokens
    10
    """

    def __init__(
        self,
        bundles: Sequence[tuple[int, Sequence[int]]],
        device: torch.device | str = "cpu",
        keep: Keep | None = None,
    ) -> None:
        sizes = [size for prompt, answers in bundles for size in (prompt, *answers)]
        if min(sizes, default=0) < 1:
            raise ValueError(f"a pack needs a prompt, and at least one token of each part; found {bundles}")
        self.bundles, self.num_tokens = bundles, sum(sizes)
        self.device, self.keep = torch.device(device), keep

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend within the segments: query [1, H, T, d], key and value [1, h, T, d] -> [1, T, H, d]."""
        if self.keep is not None:
            self.keep(layer, key[0], value[0])
        if query.is_cuda and flash_attn_varlen_func is not None and query.dtype != torch.float32:
            return self._flash(query, key, value, scale)
        sizes = [call.queries for call in self._calls]
        queries, keys, values = (x.split(sizes, dim=2) for x in (query, key, value))
        out = []
        for q, call in zip(queries, self._calls, strict=True):
            seen = ([x[i] for i in call.pieces] for x in (keys, values))
            k, v = (torch.cat(x, 2) if len(x) > 1 else x[0] for x in seen)  # a single piece is not copied
            plain, grouped = call.mask is None, q.shape[1] != k.shape[1]
            part = sdpa(q, k, v, call.mask, is_causal=plain, scale=scale, enable_gqa=grouped)
            out.append(part.transpose(1, 2))
        return torch.cat(out, 1)

    @cached_property
    def _calls(self) -> list[_Call]:
        """One call a piece of the row: a prompt, some answers, or a prompt with its only answer."""
        calls: list[_Call] = []
        for prompt, answers in self.bundles:
            context, waiting = len(calls), list(answers)
            if len(waiting) == 1:  # an only answer continues its prompt: one causal sequence
                prompt += waiting.pop()
            calls.append(_Call(prompt, (context,), None))
            for merged in cut(waiting, sum, MERGE_TOKENS):
                own = torch.block_diag(*(torch.ones(r, r, dtype=torch.bool).tril() for r in merged))
                mask = torch.cat([own.new_ones(len(own), prompt), own], 1).to(self.device)
                calls.append(_Call(len(own), (context, len(calls)), mask))
        return calls

    @cached_property
    def _segments(self) -> _Segments:
        """The segments of the row: a prompt's keys are itself, an answer's are its prompt and itself."""
        keys, lengths, start = [], [], 0
        for prompt, answers in self.bundles:
            context = torch.arange(start, start + prompt)
            for number, length in enumerate((prompt, *answers)):
                own = torch.arange(start, start + length)
                keys.append(torch.cat([context, own]) if number else own)
                lengths.append(length)
                start += length
        key_lengths = [len(index) for index in keys]
        query_ends, key_ends = (
            torch.tensor([0, *x]).cumsum(0).to(self.device, torch.int32) for x in (lengths, key_lengths)
        )
        return _Segments(
            torch.cat(keys).to(self.device), query_ends, key_ends, max(lengths), max(key_lengths)
        )

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend by flash-attn's varlen kernel; the same shapes as `attend`."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
        found = self._segments
        return flash_attn_varlen_func(
            q,
            k[found.keys],
            v[found.keys],
            found.query_ends,
            found.key_ends,
            found.longest_query,
            found.longest_key,
            softmax_scale=scale,
            causal=True,
        )[None]
