"""Segment attention: one attention function for everything that is trained, and for the sampler's prefill.

Purpose: a pack is a row of T tokens, made of bundles that lie one after another. A bundle is a prompt of P
tokens with n answers of R tokens each. The prompt sees itself, an answer sees the prompt and itself, both
causally. No T x T mask is ever built: with flash-attn on a GPU the segments are lists of lengths for its
varlen kernel, whose causal mask is aligned at the end of the keys; elsewhere they are a loop of SDPA calls
over slices of the row. Log-probabilities and gradients equal those of n separate sequences (tested).

Shapes: B batch, T tokens, H query heads, h key/value heads, d head dimension, P prompt, R response, n answers.

ours: short answers of one bundle share one SDPA call with a small block mask, because a call costs more than
the masked pairs.
"""  # noqa: E501

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
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
        if not bundles or any(prompt < 1 or min(answers, default=1) < 1 for prompt, answers in bundles):
            raise ValueError(
                f"a pack needs a prompt, and prompts and answers of at least one token; found {list(bundles)}"
            )
        self.bundles = bundles
        self.num_tokens = sum(prompt + sum(answers) for prompt, answers in bundles)
        self.device, self.keep = torch.device(device), keep

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend within the segments: query [1, H, T, d], key and value [1, h, T, d] -> [1, T, H, d]."""
        if self.keep is not None:
            self.keep(layer, key[0], value[0])
        half = query.dtype in (torch.bfloat16, torch.float16)
        if query.is_cuda and flash_attn_varlen_func is not None and half:
            return self._flash(query, key, value, scale)
        sizes = [call.queries for call in self._calls]
        queries, keys, values = (x.split(sizes, dim=2) for x in (query, key, value))
        parts = []
        for q, call in zip(queries, self._calls, strict=True):
            # a piece that sees itself alone is not copied
            k, v = (
                torch.cat([x[i] for i in call.pieces], 2) if len(call.pieces) > 1 else x[call.pieces[0]]
                for x in (keys, values)
            )
            grouped = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(
                q, k, v, call.mask, is_causal=call.mask is None, scale=scale, enable_gqa=grouped
            )
            parts.append(out.transpose(1, 2))
        return torch.cat(parts, 1)

    @cached_property
    def _calls(self) -> list[_Call]:
        """One call a piece of the row: a prompt, some answers, or a prompt with its only answer."""
        calls: list[_Call] = []
        for prompt, answers in self.bundles:
            context, waiting = len(calls), list(answers)
            if len(waiting) == 1:  # an only answer continues its prompt: one causal sequence
                prompt += waiting.pop()
            calls.append(_Call(prompt, (context,), None))
            while waiting:
                merged = [waiting.pop(0)]
                while waiting and sum(merged) + waiting[0] <= MERGE_TOKENS:
                    merged.append(waiting.pop(0))
                own = torch.block_diag(*(torch.ones(r, r, dtype=torch.bool).tril() for r in merged))
                mask = torch.cat([own.new_ones(len(own), prompt), own], 1).to(self.device)
                calls.append(_Call(len(own), (context, len(calls)), mask))
        return calls

    @cached_property
    def _segments(self) -> _Segments:
        """The segments of the row: a prompt's keys are itself, an answer's are its prompt and itself."""
        keys, query_lengths, key_lengths, start = [], [], [], 0
        for prompt, answers in self.bundles:
            context = torch.arange(start, start + prompt)
            for number, length in enumerate((prompt, *answers)):
                own = torch.arange(start, start + length)
                seen = torch.cat([context, own]) if number else own
                keys.append(seen)
                query_lengths.append(length)
                key_lengths.append(len(seen))
                start += length
        query_ends, key_ends = (
            torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)
            for lengths in (query_lengths, key_lengths)
        )
        index = torch.cat(keys).to(self.device)
        return _Segments(index, query_ends, key_ends, max(query_lengths), max(key_lengths))

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
