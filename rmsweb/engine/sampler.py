"""The sampler: n rollouts of each prompt over one stored prompt cache.

Purpose: App. G samples n=8 answers of a prompt of up to 12,000 tokens. The prompt is prefilled once and its
keys and values are stored once; each rollout owns only the keys and values of its answer, preallocated.
Attention over both is one softmax over concatenated scores, so the rollouts are exactly those of the plain
path (tested), for an eighth of the cache.

Shapes: B prompts, n rollouts a prompt, P longest prompt, N longest answer, L layers, h key/value heads, g
query heads of one of them, d head dimension, V vocabulary.

1. ours: a rollout draws by inverse CDF from the uniform numbers of its own seed, so that neither the batch it
   lies in, nor the rank, nor the other rollouts change it.
2. ours: finished rollouts are dropped once at least 25 % of the batch can go. A batch has equally many
   rollouts of every prompt: a prompt leaves with its last rollout, and the others keep n', the largest number
   of unfinished rollouts of any prompt.
3. ours: recorded log-probabilities are those of the model at the sampling temperature before top-k and top-p;
   at the temperature of RL, 1, these are what the trainer recomputes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rmsweb.engine.attention import cut
from rmsweb.engine.packing import Bundle, EncodedPrompt, make_pack
from rmsweb.engine.policy import PolicyModel

PREFILL_TOKENS = 32_768  # prompt tokens of one prefill pass
KEPT_FRAC = 0.75  # a batch is cut down to its unfinished rollouts when they are at most this share of it
# keys and values of one decoding batch; 18 GiB are 131,072 tokens of the 8B in bfloat16
CACHE_BYTES = {"cuda": 18 << 30, "cpu": 2 << 30}


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

    def __init__(self, policy: PolicyModel, lengths: Sequence[int], n: int, max_new: int) -> None:
        config, batch, longest = policy.text.config, len(lengths), max(lengths)
        layers, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        empty = partial(torch.zeros, dtype=policy.text.dtype, device=policy.device)
        self.lengths, self.n, self.step = list(lengths), n, 0
        self.prompt = empty(layers, 2, batch, heads, longest, size)  # [L, 2, B, h, P, d]
        self.own = empty(layers, 2, batch * n, heads, max_new, size)  # [L, 2, B n, h, N, d]
        missing = torch.arange(longest) >= torch.tensor(self.lengths)[:, None]
        self.missing = missing[:, None, None].to(policy.device)  # [B, 1, 1, P]: behind a shorter prompt

    def store(self, prompts: Sequence[int], layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer of a prefill: keys and values [h, T, d] of some prompts in a row."""
        start = 0
        for number in prompts:
            stop = start + self.lengths[number]
            for target, row in zip(self.prompt[layer], (keys, values), strict=True):
                target[number, :, : stop - start] = row[:, start:stop]
            start = stop

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend from the newest token: query [B n, H, 1, d], key and value [B n, h, 1, d] -> [B n, 1, H, d].

        softmax([q K_prompt^T ; q K_own^T] scale) [V_prompt ; V_own], with one softmax over both parts.
        """

        def together(x: Tensor) -> Tensor:
            """[B n, h, g, *] -> [B, h, n g, *]: the rollouts of a prompt side by side."""
            return x.unflatten(0, (-1, self.n)).transpose(1, 2).flatten(2, 3)

        def apart(x: Tensor) -> Tensor:
            """[B, h, n g, *] -> [B n, h, g, *]."""
            return x.unflatten(2, (self.n, -1)).transpose(1, 2).flatten(0, 1)

        prompt_keys, prompt_values = self.prompt[layer]
        self.own[layer, 0, :, :, self.step], self.own[layer, 1, :, :, self.step] = (
            key[:, :, 0],
            value[:, :, 0],
        )
        own_keys, own_values = self.own[layer, ..., : self.step + 1, :]
        q = (query * scale).view(len(query), key.shape[1], -1, query.shape[-1])  # [B n, h, g, d]
        prompt_scores = together(q) @ prompt_keys.transpose(-1, -2)  # [B, h, n g, P]
        prompt_scores.masked_fill_(self.missing, -torch.inf)
        own_scores = together(q @ own_keys.transpose(-1, -2))  # [B, h, n g, t]
        scores = torch.cat([prompt_scores, own_scores], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        on_prompt, on_own = weights.split([prompt_scores.shape[-1], own_scores.shape[-1]], -1)
        out = apart(on_prompt @ prompt_values) + apart(on_own) @ own_values  # [B n, h, g, d]
        return out.reshape(len(query), 1, -1, query.shape[-1])

    def keep(self, prompts: Tensor, rows: Tensor) -> None:
        """Keep some prompts [B'] and, of each of them in turn, equally many of its rollouts' rows [B' n']."""
        self.n = len(rows) // len(prompts)
        self.prompt, self.own = self.prompt[:, :, prompts], self.own[:, :, rows]
        self.missing = self.missing[prompts]


def choose(logits: Tensor, uniform: Tensor, decoding: Decoding) -> tuple[Tensor, Tensor]:
    """Pick one token a row.

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
        size = logits.shape[1]
        kept, order = logits, torch.arange(size, device=logits.device).expand_as(logits)
        if decoding.top_k or decoding.top_p < 1:
            kept, order = logits.topk(min(decoding.top_k or size, size), dim=-1)  # falling
        weights = kept.softmax(-1, dtype=torch.float64)
        if decoding.top_p < 1:
            weights = weights.masked_fill(weights.cumsum(-1) - weights >= decoding.top_p, 0.0)
        cumulative = weights.cumsum(-1)
        picked = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
        picked = picked.clamp(max=kept.shape[1] - 1)  # rounding may carry a number beyond the last token
        tokens = order.gather(1, picked)[:, 0]
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Return uniform numbers in [0, 1), [seeds, count] float64.

    Row i depends on seeds[i] alone, and a longer row begins as a shorter one.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(count, dtype=torch.float64, generator=own) for own in generators])


def cache_bytes(config: Any, dtype: torch.dtype, n: int, prompt_tokens: int, max_new_tokens: int) -> int:
    """Return the bytes of the keys and values of one prompt and its n rollouts.

    `config` is that of the text model. The 8B in bfloat16 takes 144 KiB a token.
    """
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return per_token * (prompt_tokens + n * max_new_tokens)


def sample(
    policy: PolicyModel,
    prompts: Sequence[EncodedPrompt],
    *,
    n: int,
    max_new_tokens: int | Sequence[int],
    seeds: Sequence[int],
    decoding: Decoding = Decoding(),
) -> list[list[Rollout]]:
    """Sample n answers of every prompt, batch after batch within CACHE_BYTES.

    Args:
        max_new_tokens: longest answer in tokens, <|im_end|> included: one number, or one a prompt.
        seeds: one a rollout, prompt by prompt: len(prompts) x n.
    Returns:
        for every prompt its n rollouts, in the order of the seeds.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if n < 1 or len(seeds) != len(prompts) * n or len(limits) != len(prompts) or min(limits, default=1) < 1:
        raise ValueError(
            f"sample: {len(prompts)} prompts x n={n} with {len(seeds)} seeds and limits {limits}: "
            "expected one seed a rollout, limits >= 1"
        )

    def size(batch: list[int]) -> int:
        """Return the bytes of a batch, padded to its first prompt, the longest one, and longest limit."""
        prompt, limit = len(prompts[batch[0]]), max(limits[i] for i in batch)
        return len(batch) * cache_bytes(policy.text.config, policy.text.dtype, n, prompt, limit)

    results: dict[int, list[Rollout]] = {}
    # prompts of a batch are about equally long
    longest_first = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    with policy.evaluating():
        for batch in cut(longest_first, size, CACHE_BYTES[policy.device.type]):
            own_prompts, own_limits = [prompts[i] for i in batch], [limits[i] for i in batch]
            own_seeds = [seed for i in batch for seed in seeds[i * n : i * n + n]]
            rollouts = _sample_batch(policy, own_prompts, n, own_limits, own_seeds, decoding)
            results |= zip(batch, rollouts, strict=True)
    return [results[number] for number in range(len(prompts))]


def _prefill(policy: PolicyModel, prompts: Sequence[EncodedPrompt], cache: RolloutCache) -> Tensor:
    """Fill the cache and return the final hidden state of every prompt's last token, [B, D]."""
    last = []
    for part in cut(range(len(prompts)), lambda part: sum(cache.lengths[i] for i in part), PREFILL_TOKENS):
        bundles = [Bundle(prompts[number]) for number in part]
        pack = make_pack(bundles, policy.device, partial(cache.store, part))
        ends = torch.tensor([cache.lengths[number] for number in part]).cumsum(0) - 1
        last.append(policy.scorer.hidden(pack)[ends.to(policy.device)])
    return torch.cat(last)


def _sample_batch(
    policy: PolicyModel,
    prompts: Sequence[EncodedPrompt],
    n: int,
    limits: Sequence[int],
    seeds: Sequence[int],
    decoding: Decoding,
) -> list[list[Rollout]]:
    """Sample one batch: prefill, then a token of every unfinished rollout at a time."""
    device, rollouts, longest = policy.device, len(prompts) * n, max(limits)
    backbone, head = policy.text, policy.model.lm_head
    cache = RolloutCache(policy, [len(prompt) for prompt in prompts], n, longest)
    logits = head(_prefill(policy, prompts, cache)).repeat_interleave(n, 0)  # [B n, V]
    uniform = uniforms(seeds, longest).to(device)
    limit, position = (
        torch.tensor(values, device=device).repeat_interleave(n)
        for values in (limits, [prompt.next_position for prompt in prompts])
    )
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
            cache.keep(kept, kept_rows)
            rows, tokens = rows[kept_rows], tokens[kept_rows]
        where = (position[rows] + step).expand(3, -1)[..., None]  # [3, rows, 1]
        embedded = backbone.embed_tokens(tokens)[:, None]
        out = backbone(inputs_embeds=embedded, position_ids=where, layout=cache, use_cache=False)
        logits = head(out.last_hidden_state[:, 0])
    ids, logprobs = ids.cpu(), logprobs.cpu()
    answers = []
    for row, end in enumerate(lengths.tolist()):
        own = ids[row, :end]
        text, stopped = policy.decode(own), own[-1] == policy.end_id
        answers.append(Rollout(own, logprobs[row, :end], text, "stop" if stopped else "length"))
    return [answers[start : start + n] for start in range(0, rollouts, n)]
