"""Segment attention: one attention function for everything that is trained, and for the sampler's prefill.

Purpose: a pack is a row of T tokens made of groups that lie one after another; a group is a prompt of P
tokens and n answers of R tokens each. The prompt sees itself, an answer sees the prompt and itself, both
causally. No T x T mask is ever built: with flash-attn on a GPU the segments are lists of lengths for its
varlen kernel (whose causal mask is aligned at the end of the keys), elsewhere a loop of SDPA over slices of
the row. Log-probabilities and gradients equal those of n separate sequences (tested).

Shapes: B batch, T tokens, W places that are read, H query heads, h key/value heads, d head dimension, P
prompt, R response, n answers.

1. ours: short answers of one group share one SDPA call with a small block mask, because a call costs more
   than the masked pairs.
2. ours: the last layer is computed at the W places that are read (a prompt's last token, and answers); of the
   other tokens it needs keys and values only.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer, rotate_half

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

NAME = "segments"  # under which transformers knows this attention
MERGE_TOKENS = 512  # answers of a group share one SDPA call up to this many query tokens


class Layout(Protocol):
    """What the text model gets as its `layout` keyword: it computes the attention of one layer."""

    @property
    def read(self) -> Tensor | None:
        """Places [W] of the row whose final hidden states are read; None where that is all of them."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [B, H, T, d] (or [B, H, W, d] at the places read), key and value [B, h, T, d] of this call's
        tokens -> [B, T or W, H, d].
        """
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
    """The function that transformers calls: hands a layer's tensors to the layout of this forward call."""
    return layout.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, segment_attention)


def use_segment_attention(text_config: Any) -> None:
    """Switches a Qwen3-VL's text model (not its vision tower) to segment attention; its forward then needs
    `layout=`.
    """
    text_config._attn_implementation = NAME


class ReadLayer(Qwen3VLTextDecoderLayer):
    """The last decoder layer, computed only where it is read.

    The same sums as its parent's, in values and gradients (tested).
    """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        layout: Layout | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D], zero where the layout does not read it; a layout that reads everything, or
        none, gets the plain layer.
        """
        read = layout.read if layout is not None else None
        if layout is None or read is None:
            return super().forward(hidden_states, position_embeddings, *args, layout=layout, **kwargs)
        attention, normed = self.self_attn, self.input_layernorm(hidden_states)
        (cos, sin), heads = (
            (part.unsqueeze(1) for part in position_embeddings),
            (-1, attention.head_dim),
        )  # cos, sin [1, 1, T, d]
        query = attention.q_norm(attention.q_proj(normed[:, read]).unflatten(-1, heads)).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(normed).unflatten(-1, heads)).transpose(1, 2)
        value = attention.v_proj(normed).unflatten(-1, heads).transpose(1, 2)
        query = query * cos[:, :, read] + rotate_half(query) * sin[:, :, read]
        key = key * cos + rotate_half(key) * sin
        attended = layout.attend(attention.layer_idx, query, key, value, attention.scaling)
        out = hidden_states[:, read] + attention.o_proj(attended.flatten(-2))
        out = out + self.mlp(self.post_attention_layernorm(out))
        return torch.zeros_like(hidden_states).index_copy(1, read, out)


def use_read_layer(text_model: Any) -> None:
    """Makes the last layer of a Qwen3-VL's text model a ReadLayer: nearly a layer's work on a long prompt is
    saved.
    """
    text_model.layers[-1].__class__ = ReadLayer


_Segments = tuple[Tensor, Tensor, Tensor, int, int]


class _Call(NamedTuple):
    """One call of SDPA."""

    queries: int
    pieces: tuple[int, ...]  # of the row's pieces, whose keys it sees
    mask: Tensor | None  # [queries, keys]; None where it is plainly causal


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


class PackLayout:
    """Layout of a row of groups.

    Args:
        groups: (P, (R, ...)) of each group in the order of the row; a group without answers is a prompt
        alone.
        device: where the row lies.
        keep: a list that receives (key, value), each [h, T, d], of every layer in order (the sampler's
        prefill); None keeps nothing.

    >>> PackLayout([(3, (2, 1)), (4, ())]).num_tokens
    10
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, Sequence[int]]],
        device: torch.device | str = "cpu",
        keep: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        if not groups or any(prompt < 1 or min(answers, default=1) < 1 for prompt, answers in groups):
            raise ValueError(
                f"a pack needs a group, and prompts and answers of at least one token; found {list(groups)}"
            )
        self.groups = [(prompt, tuple(answers)) for prompt, answers in groups]
        self.num_tokens = sum(prompt + sum(answers) for prompt, answers in self.groups)
        self.device, self.keep = torch.device(device), keep

    @cached_property
    def read(self) -> Tensor:
        """Places [W] that are read: the last token of every prompt, and all answer tokens."""
        places, start = [], 0
        for prompt, answers in self.groups:
            places.append(torch.arange(start + prompt - 1, start + prompt + sum(answers)))
            start += prompt + sum(answers)
        return torch.cat(places).to(self.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [1, H, T, d] or [1, H, W, d] at the places read, key and value [1, h, T, d] -> [1, T or W, H,
        d].
        """
        if self.keep is not None:
            self.keep.append((key[0], value[0]))
        narrow = query.shape[2] != self.num_tokens
        if (
            query.is_cuda
            and flash_attn_varlen_func is not None
            and query.dtype in (torch.bfloat16, torch.float16)
        ):
            return self._flash(query, key, value, scale, self._segments[narrow])
        calls = self._calls[narrow]
        keys, values = (x.split([call.queries for call in self._calls[0]], dim=2) for x in (key, value))
        parts = []
        for q, (_, pieces, mask) in zip(
            query.split([call.queries for call in calls], dim=2), calls, strict=True
        ):
            k, v = (
                torch.cat([x[i] for i in pieces], 2) if len(pieces) > 1 else x[pieces[0]]
                for x in (keys, values)
            )
            parts.append(_sdpa(q, k, v, mask, scale).transpose(1, 2))
        return torch.cat(parts, 1)

    @cached_property
    def _calls(self) -> tuple[list[_Call], list[_Call]]:
        """SDPA calls, one a piece of the row (a prompt, some answers, or a prompt with its only answer), and
        those for the places read.
        """
        whole: list[_Call] = []
        read: list[_Call] = []
        for prompt, answers in self.groups:
            context, waiting = len(whole), list(answers) if len(answers) > 1 else []
            first = (
                prompt if waiting else prompt + sum(answers)
            )  # one answer continues the prompt: a single causal sequence
            whole.append(_Call(first, (context,), None))
            tail = torch.ones(first - prompt + 1, first, dtype=torch.bool).tril(
                prompt - 1
            )  # from the prompt's last token on
            read.append(_Call(len(tail), (context,), tail.to(self.device)))
            while waiting:
                merged = [waiting.pop(0)]
                while waiting and sum(merged) + waiting[0] <= MERGE_TOKENS:
                    merged.append(waiting.pop(0))
                own = torch.block_diag(*(torch.ones(r, r, dtype=torch.bool).tril() for r in merged))
                mask = torch.cat([torch.ones(sum(merged), prompt, dtype=torch.bool), own], 1).to(self.device)
                answered = _Call(sum(merged), (context, len(whole)), mask)
                whole.append(answered)
                read.append(answered)
        return whole, read

    @cached_property
    def _segments(self) -> tuple[_Segments, _Segments]:
        """For the varlen kernel, of the row and of the places read: key index [K], cumulative query and key
        lengths [segments + 1], longest of each.
        """
        keys, key_lengths, whole, read, start = [], [], [], [], 0
        for prompt, answers in self.groups:
            context = torch.arange(start, start + prompt)
            for number, length in enumerate((prompt, *answers)):
                own = torch.arange(start, start + length)
                keys += [context, own] if number else [own]
                key_lengths.append(length + (prompt if number else 0))
                whole.append(length)
                read.append(length if number else 1)
                start += length
        index = torch.cat(keys).to(self.device)
        ends, whole_ends, read_ends = (
            torch.tensor([0, *x]).cumsum(0).to(self.device, torch.int32) for x in (key_lengths, whole, read)
        )
        return (index, whole_ends, ends, max(whole), max(key_lengths)), (
            index,
            read_ends,
            ends,
            max(read),
            max(key_lengths),
        )

    @staticmethod
    def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, segments: _Segments) -> Tensor:
        index, query_ends, key_ends, longest_query, longest_key = segments
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
        return flash_attn_varlen_func(
            q,
            k[index],
            v[index],
            query_ends,
            key_ends,
            longest_query,
            longest_key,
            softmax_scale=scale,
            causal=True,
        )[None]
