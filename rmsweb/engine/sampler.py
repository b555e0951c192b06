"""The sampler: n rollouts of each prompt over one stored prompt cache.

Purpose: App. G samples n=8 answers of a prompt of up to 12,000 tokens. The prompt is prefilled once and its
keys and values are stored once; each rollout owns only the keys and values of its answer, preallocated.
Attention over both is one softmax over concatenated scores, so the rollouts are exactly those of the plain
path (tested), for an eighth of the cache.

Shapes: B prompts, n rollouts a prompt, P longest prompt, N longest answer, L layers, h key/value heads, g
query heads of one of them, d head dimension, V vocabulary.

1. ours: a rollout draws by inverse CDF from the uniform numbers of its own seed, so that neither the batch it
   lies in, nor the rank, nor the other rollouts change it.
2. ours: finished rollouts leave the batch once a quarter of it could leave. A batch has equally many rollouts
   of every prompt that is left, so a prompt leaves with its last rollout, and the others keep as many as the
   busiest prompt has unfinished.
3. ours: recorded log-probabilities are those of the model at the sampling temperature before top-k and top-p,
   which is what the trainer recomputes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rmsweb.engine.packing import EncodedPrompt, Group, make_pack
from rmsweb.engine.policy import PolicyModel

PREFILL_TOKENS = 32_768  # prompt tokens of one prefill pass
KEPT_FRAC = 0.75  # a batch is cut down to its unfinished rollouts when they are at most this share of it
CACHE_BYTES = {
    "cuda": 18 << 30,
    "cpu": 2 << 30,
}  # keys and values of one decoding batch; 18 GiB are 131,072 tokens of the 8B in bfloat16


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer."""

    ids: Tensor  # [R] int64 on the CPU, with the final <|im_end|> where it stopped by itself
    logprobs: Tensor  # [R] float32 on the CPU
    text: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """How a token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"decoding: {self}: expected temperature >= 0, 0 < top_p <= 1, top_k >= 0")


class RolloutCache:
    """The layout of decoding: keys and values of B prompts, and of their B x n answers so far.

    The rollouts of a prompt act as n queries of one matrix product with the prompt's keys.
    """

    read = None  # every token's hidden state is read

    def __init__(self, lengths: Sequence[int], n: int, max_new: int) -> None:
        self.lengths, self.n, self.max_new, self.step = list(lengths), n, max_new, 0
        self.prompt: list[tuple[Tensor, Tensor]] = []  # a layer: keys, values [B, h, P, d]
        self.own: list[tuple[Tensor, Tensor]] = []  # a layer: keys, values [B n, h, N, d]
        self.bias: Tensor | None = None  # [B, 1, 1, P]: -inf where a shorter prompt has no token

    def fill(self, first: int, kept: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Stores a prefill: (keys, values) [h, T, d] of every layer for the prompts from number `first` on,
        packed in a row.
        """
        batch, longest = len(self.lengths), max(self.lengths)
        if not self.prompt:
            for pair in kept:
                heads, _, size = pair[0].shape
                self.prompt.append(
                    (
                        pair[0].new_zeros(batch, heads, longest, size),
                        pair[0].new_zeros(batch, heads, longest, size),
                    )
                )
                shape = (batch * self.n, heads, self.max_new, size)
                self.own.append((pair[0].new_empty(shape), pair[0].new_empty(shape)))
            if min(self.lengths) < longest:
                missing = torch.arange(longest) >= torch.tensor(self.lengths)[:, None]
                self.bias = (
                    torch.zeros(batch, 1, 1, longest)
                    .masked_fill(missing[:, None, None], -torch.inf)
                    .to(kept[0][0])
                )
        for stored, new in zip(self.prompt, kept, strict=True):
            for target, row in zip(stored, new, strict=True):
                start, number = 0, first
                while start < row.shape[1]:
                    target[number, :, : self.lengths[number]] = row[:, start : start + self.lengths[number]]
                    start, number = start + self.lengths[number], number + 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [B n, H, 1, d], key and value [B n, h, 1, d] of the newest token -> [B n, 1, H, d]."""
        (prompt_keys, prompt_values), (own_keys, own_values) = self.prompt[layer], self.own[layer]
        own_keys[:, :, self.step], own_values[:, :, self.step] = key[:, :, 0], value[:, :, 0]
        own_keys, own_values = own_keys[:, :, : self.step + 1], own_values[:, :, : self.step + 1]
        rows, num_heads, _, size = query.shape
        batch, heads, longest, _ = prompt_keys.shape
        n, g = self.n, num_heads // heads
        q = (query * scale).view(batch, n, heads, g, size)
        shared = q.transpose(1, 2).reshape(batch, heads, n * g, size)  # the rollouts' queries side by side
        prompt_scores = shared @ prompt_keys.transpose(-1, -2)  # [B, h, n g, P]
        if self.bias is not None:
            prompt_scores = prompt_scores + self.bias
        own_scores = q.reshape(rows, heads, g, size) @ own_keys.transpose(-1, -2)  # [B n, h, g, t]
        own_scores = own_scores.view(batch, n, heads, g, -1).transpose(1, 2).reshape(batch, heads, n * g, -1)
        weights = torch.cat([prompt_scores, own_scores], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
        from_prompt = (weights[..., :longest] @ prompt_values).view(batch, heads, n, g, size).transpose(1, 2)
        own_weights = (
            weights[..., longest:].reshape(batch, heads, n, g, -1).transpose(1, 2).reshape(rows, heads, g, -1)
        )
        from_own = (own_weights @ own_values).view(batch, n, heads, g, size)
        return (from_prompt + from_own).reshape(rows, 1, num_heads, size)

    def select(self, prompts: Tensor, rows: Tensor) -> None:
        """Keeps some prompts [B'] and, of each of them in turn, equally many of its rollouts' rows [B' n']."""
        self.n = len(rows) // len(prompts)
        self.prompt = [(keys[prompts], values[prompts]) for keys, values in self.prompt]
        self.own = [(keys[rows], values[rows]) for keys, values in self.own]
        self.bias = None if self.bias is None else self.bias[prompts]


def choose(logits: Tensor, uniform: Tensor, decoding: Decoding) -> tuple[Tensor, Tensor]:
    """Picks one token a row.

    Args:
        logits: [rows, V].
        uniform: [rows] float64 in [0, 1), one number a row; unused when greedy.
    Returns:
        tokens [rows] int64, and their log-probabilities [rows] float32 at the temperature, before top-k and
        top-p.
    """
    logits = logits.float()
    if decoding.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        logits = logits / decoding.temperature
        order = None
        kept = logits
        if decoding.top_k or decoding.top_p < 1:
            kept, order = logits.topk(
                min(decoding.top_k or logits.shape[1], logits.shape[1]), dim=-1
            )  # falling
        weights = kept.softmax(-1, dtype=torch.float64)
        if decoding.top_p < 1:
            weights = weights.masked_fill(weights.cumsum(-1) - weights >= decoding.top_p, 0.0)
        cumulative = weights.cumsum(-1)
        picked = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True).clamp(
            max=kept.shape[1] - 1
        )
        tokens = (picked if order is None else order.gather(1, picked))[:, 0]
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """[seeds, count] float64 in [0, 1): row i depends on seeds[i] alone, and a longer row begins as a shorter
    one.
    """
    rows = torch.empty(len(seeds), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in zip(rows, seeds, strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return rows


def cache_bytes(config: Any, dtype: torch.dtype, n: int, prompt_tokens: int, max_new_tokens: int) -> int:
    """Bytes of the keys and values of one prompt and its n rollouts, for a text model's config (8B in
    bfloat16: 144 KiB a token).
    """
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return per_token * (prompt_tokens + n * max_new_tokens)


def plan_batches(
    lengths: Sequence[int], limits: Sequence[int], size: Callable[[int, int], int], budget: int
) -> list[list[int]]:
    """Cuts prompts into decoding batches, longest prompts first, so that those of a batch are about equally
    long.

    `size` gives the bytes of one prompt from the batch's longest prompt and limit; a single prompt may exceed
    the budget.

    >>> plan_batches([5, 90, 6, 80], [1, 1, 1, 1], lambda prompt, limit: prompt + limit, 190)
    [[1, 3], [2, 0]]
    """
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        joined = [*batches[-1], number] if batches else []
        if (
            joined
            and len(joined) * size(max(lengths[i] for i in joined), max(limits[i] for i in joined)) <= budget
        ):
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


@torch.no_grad()
def sample(
    policy: PolicyModel,
    prompts: Sequence[EncodedPrompt],
    *,
    n: int,
    max_new_tokens: int | Sequence[int],
    seeds: Sequence[int],
    decoding: Decoding = Decoding(),
    budget: int | None = None,
) -> list[list[Rollout]]:
    """Samples n answers of every prompt.

    Args:
        max_new_tokens: longest answer in tokens, <|im_end|> included: one number, or one a prompt.
        seeds: one a rollout, prompt by prompt: len(prompts) x n.
        budget: bounds the bytes of stored keys and values of one batch; more prompts are decoded batch after
        batch. None takes CACHE_BYTES.
    Returns:
        for every prompt its n rollouts, in the order of the seeds.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if n < 1 or len(seeds) != len(prompts) * n or len(limits) != len(prompts) or min(limits, default=1) < 1:
        raise ValueError(
            f"sample: {len(prompts)} prompts x n={n} with {len(seeds)} seeds and limits {limits}: expected one seed a rollout, limits >= 1"
        )
    training = policy.model.training
    policy.model.eval()
    text = policy.model.model.language_model
    size = partial(cache_bytes, text.config, text.dtype, n)
    results: dict[int, list[Rollout]] = {}
    for batch in plan_batches(
        [len(prompt) for prompt in prompts],
        limits,
        size,
        CACHE_BYTES[policy.device.type] if budget is None else budget,
    ):
        own_seeds = [seed for i in batch for seed in seeds[i * n : i * n + n]]
        results |= zip(
            batch,
            _sample_batch(
                policy, [prompts[i] for i in batch], n, [limits[i] for i in batch], own_seeds, decoding
            ),
            strict=True,
        )
    policy.model.train(training)
    return [results[number] for number in range(len(prompts))]


def _prefill(policy: PolicyModel, prompts: Sequence[EncodedPrompt], cache: RolloutCache) -> Tensor:
    """Fills the cache and returns the final hidden state of every prompt's last token, [B, D]."""
    last, first = [], 0
    while first < len(prompts):
        stop, tokens = first + 1, len(prompts[first])
        while stop < len(prompts) and tokens + len(prompts[stop]) <= PREFILL_TOKENS:
            tokens += len(prompts[stop])
            stop += 1
        kept: list[tuple[Tensor, Tensor]] = []
        hidden = policy.scorer.hidden(
            make_pack([Group(prompt) for prompt in prompts[first:stop]], policy.device, kept)
        )
        ends = torch.tensor([len(prompt) for prompt in prompts[first:stop]]).cumsum(0) - 1
        last.append(hidden[ends.to(hidden.device)])
        cache.fill(first, kept)
        first = stop
    return torch.cat(last)


def _sample_batch(
    policy: PolicyModel,
    prompts: Sequence[EncodedPrompt],
    n: int,
    limits: Sequence[int],
    seeds: Sequence[int],
    decoding: Decoding,
) -> list[list[Rollout]]:
    device, rollouts, longest = policy.device, len(prompts) * n, max(limits)
    backbone, head = policy.model.model.language_model, policy.model.lm_head
    cache = RolloutCache([len(prompt) for prompt in prompts], n, longest)
    logits = head(_prefill(policy, prompts, cache)).repeat_interleave(n, 0)  # [B n, V]
    uniform = uniforms(seeds, longest).to(device)
    limit = torch.tensor(limits, device=device).repeat_interleave(n)
    position = torch.tensor([prompt.next_position for prompt in prompts], device=device).repeat_interleave(n)
    ids = torch.zeros(rollouts, longest, dtype=torch.long, device=device)
    logprobs = torch.zeros(rollouts, longest, device=device)
    lengths = torch.zeros(rollouts, dtype=torch.long, device=device)  # 0: not finished
    rows = torch.arange(rollouts, device=device)  # the rollouts that are still decoded
    for step in range(longest):
        tokens, chosen = choose(logits, uniform[rows, step], decoding)
        ids[rows, step], logprobs[rows, step] = tokens, chosen
        ends = (lengths[rows] == 0) & ((tokens == policy.end_id) | (limit[rows] == step + 1))
        lengths[rows] += ends * (step + 1)
        ended = (lengths[rows] > 0).view(-1, cache.n)  # [B', n']
        widest = int((~ended).sum(1).max())
        if widest == 0:
            break
        cache.step = step
        kept = (~ended.all(1)).nonzero()[:, 0]
        if len(kept) * widest <= KEPT_FRAC * ended.numel():
            unfinished_first = ended[kept].int().argsort(dim=1, stable=True)[:, :widest]
            kept_rows = (kept[:, None] * cache.n + unfinished_first).reshape(-1)
            cache.select(kept, kept_rows)
            rows, tokens = rows[kept_rows], tokens[kept_rows]
        where = (position[rows] + step).expand(3, -1)[..., None]  # [3, rows, 1]
        embedded = backbone.embed_tokens(tokens)[:, None]
        logits = head(
            backbone(
                inputs_embeds=embedded, position_ids=where, layout=cache, use_cache=False
            ).last_hidden_state[:, 0]
        )
    ids, logprobs, ends_at = ids.cpu(), logprobs.cpu(), lengths.tolist()
    answers = [
        Rollout(
            ids[row, :end],
            logprobs[row, :end],
            policy.decode(ids[row, :end]),
            "stop" if ids[row, end - 1] == policy.end_id else "length",
        )
        for row, end in enumerate(ends_at)
    ]
    return [answers[start : start + n] for start in range(0, rollouts, n)]
