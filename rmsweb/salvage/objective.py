"""The joint objective of Salvage-DS: clipped surrogate, KL brake and salvage anchor as one weighted sum over
tokens.

Purpose: every term of Eq. 2-3 is a sum over tokens of (constant weight) x (function of one log-prob). The
weights hold all denominators and masks and are fixed before the forward pass; so partial sums of packs,
micro-batches and ranks simply add up, and padding has weight 0.

Place in the paper: Eq. 2 and 3, section "The salvage anchor on rejected groups", App. G "Stability", App. J
(statistics).
Letters: M groups of a full mini-batch, n rollouts a group, R tokens of an answer, T tokens of all answers of
a pack, A the target's action span.

Mini-batch loss, with k_g of Eq. 1, beta = kl_weight, lambda = salvage_weight:
    L = (1/M) sum_g [ k_g mean_i mean_t PG + (1 - k_g) lambda mean_{t in A} NLL + beta mean_i mean_t KL ]

Deviations:
1. `ours:` Eq. 3 is averaged over groups: M is constant, also when a mini-batch is short, so lambda and beta
   weigh every group alike and one salvage target equals its n copies. Salvage and KL are on the groups that
   were accepted or retained.
2. `ours:` the log-ratio is clamped to +-20 and k3 to at most 10 (it is never negative); the share of tokens
   that the clamp mutes is counted.
3. `ours:` dual clip (c = 3) and DAPO's token-mean are switches, off by default. No entropy term, no KL in the
   reward (App. G).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CLIP_LOW, CLIP_HIGH = 0.2, 0.32  # App. G
SALVAGE_WEIGHT = 0.10  # lambda_salvage, App. G
KL_WEIGHT = 1e-3  # beta, App. G
LOG_RATIO_CLAMP = 20.0
KL_CLAMP = 10.0
DUAL_CLIP = 3.0

Aggregation = Literal["seq-mean-token-mean", "token-mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """Switches and weights of the loss; the defaults are the paper's."""

    clip_low: float = CLIP_LOW  # epsilon_lo
    clip_high: float = CLIP_HIGH  # epsilon_hi
    dual_clip: float | None = None  # c: bounds the loss of a token with negative advantage by -c A
    salvage_weight: float = SALVAGE_WEIGHT
    kl_weight: float = KL_WEIGHT
    aggregation: Aggregation = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise ValueError(
                f"clip range [{self.clip_low}, {self.clip_high}]: expected 0 <= low < 1 and high >= 0"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual clip {self.dual_clip}: expected more than 1")
        if self.salvage_weight < 0 or self.kl_weight < 0:
            raise ValueError(
                f"salvage weight {self.salvage_weight} and KL weight {self.kl_weight}: expected 0 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer as the loss sees it: a rollout, or the target that is teacher-forced as one more answer of
    its group.
    """

    mask: Tensor  # [R] bool: all tokens of a rollout, end-of-turn included; the action span A of a target
    accepted: bool  # k_g of its group
    advantage: float = 0.0
    old: Tensor | None = None  # [R] log-probs before the first update of the step; None for a target
    ref: Tensor | None = None  # [R] log-probs of the frozen SFT policy; None for a target

    @property
    def is_target(self) -> bool:
        return self.old is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The answers of a pack laid end to end: constants of the loss, each [T].

    A token without any weight does not exist for the loss.
    """

    old: Tensor
    ref: Tensor
    advantage: Tensor
    pg_weight: Tensor
    kl_weight: Tensor
    nll_weight: Tensor


def lay_out(
    answers: Sequence[Answer],
    *,
    num_groups: int,
    num_rollouts: int,
    num_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tokens:
    """Gives every token its weights.

    seq-mean-token-mean: a rollout's token weighs 1 / (M n R) in PG (if accepted) and in KL, a rejected
    group's target token 1 / (M |A|) in NLL. token-mean: a rollout's token weighs 1 / num_tokens instead. What
    is masked out, and the target of an accepted group, weighs 0.

    Args: answers: in the order in which their log-probs will come. num_groups: M, the constant of a full
    mini-batch. num_rollouts: n.
    num_tokens: tokens of all rollouts of the whole mini-batch, over all ranks, for token-mean; None for
    seq-mean-token-mean.
    """
    columns: list[list[Tensor]] = [[] for _ in range(6)]
    for answer in answers:
        mask = answer.mask.bool()
        zero = torch.zeros(mask.shape, dtype=dtype)
        length = max(int(mask.sum()), 1)
        share = (
            1 / (num_groups * length)
            if answer.is_target
            else 1 / (num_groups * num_rollouts * length)
            if num_tokens is None
            else 1 / num_tokens
        )
        weight = zero.masked_fill(mask, share)
        old, ref = (
            zero if given is None else torch.where(mask, given.detach().to(dtype), zero)
            for given in (answer.old, answer.ref)
        )
        rollout = not answer.is_target
        weights = (
            weight if used else zero
            for used in (rollout and answer.accepted, rollout, answer.is_target and not answer.accepted)
        )
        for column, part in zip(columns, (old, ref, zero + answer.advantage, *weights), strict=True):
            column.append(part)
    old, ref, advantage, pg, kl, nll = (
        torch.cat([torch.zeros(0, dtype=dtype), *column]).to(device) for column in columns
    )
    return Tokens(old=old, ref=ref, advantage=advantage, pg_weight=pg, kl_weight=kl, nll_weight=nll)


def policy_gradient_terms(
    new: Tensor, old: Tensor, advantage: Tensor, config: ObjectiveConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate a token: PG = -min(rho A, clip(rho, 1 - eps_lo, 1 + eps_hi) A), rho = exp(clamp(new -
    old, +-20)) (Eq. 2).

    Args: log-probs and advantages, [T]. Returns: PG [T] with gradient; where the clip binds [T] bool; where
    the dual clip binds [T] bool.

    >>> new = torch.tensor([-0.5, -0.5], dtype=torch.float64)
    >>> terms, clipped, _ = policy_gradient_terms(new, new - 1.0, torch.tensor([1.0, -1.0], dtype=torch.float64), ObjectiveConfig())
    >>> [round(term, 6) for term in terms.tolist()], clipped.tolist()
    ([-1.32, 2.718282], [True, False])
    """
    ratio = torch.exp(torch.clamp(new - old, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
    free = -ratio * advantage
    bounded = -torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage
    terms, clipped = torch.maximum(free, bounded), bounded > free
    if config.dual_clip is None:
        return terms, clipped, torch.zeros_like(clipped)
    limit = config.dual_clip * advantage.abs()  # with a positive advantage PG is never above 0
    return torch.minimum(terms, limit), clipped, terms > limit


def kl_terms(new: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """Low-variance KL estimate a token: k3 = exp(d) - d - 1, d = clamp(ref - new, +-20), k3 at most 10 (App.
    G, low_var_kl).

    Args: log-probs, [T]. Returns: k3 >= 0 [T] with gradient, and where a clamp mutes the gradient [T] bool.

    >>> terms, _ = kl_terms(torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-1.0, -1.0], dtype=torch.float64))
    >>> [round(term, 6) for term in terms.tolist()]
    [0.0, 0.718282]
    """
    difference = ref - new
    d = torch.clamp(difference, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    k3 = torch.expm1(d) - d  # expm1: exp(d) - 1 without its rounding error near 0
    return torch.clamp(k3, max=KL_CLAMP), (difference.abs() > LOG_RATIO_CLAMP) | (k3 > KL_CLAMP)


def joint_loss(new: Tensor, tokens: Tokens, config: ObjectiveConfig) -> tuple[Tensor, dict[str, float]]:
    """Partial loss of a pack (Eq. 2-3): sum_t of pg_weight PG + lambda nll_weight NLL + beta kl_weight KL,
    with NLL = -new.

    Args: new: log-probs of the policy that is being updated, [T], with gradient, in the order of `tokens`;
    masked places may hold anything.
    Returns: the loss (scalar, with gradient; add it up over packs and ranks), and sums as numbers that add up
    the same way: `loss`, `pg`, `kl`, `nll` with their `*_weight`; and counts or sums over tokens for
    `statistics`.
    """
    used = (tokens.pg_weight + tokens.kl_weight + tokens.nll_weight) > 0
    new = torch.where(used, new, torch.zeros_like(new))
    pg, clipped, dual_clipped = policy_gradient_terms(new, tokens.old, tokens.advantage, config)
    k3, muted = kl_terms(new, tokens.ref)
    parts = {"pg": tokens.pg_weight * pg, "kl": tokens.kl_weight * k3, "nll": tokens.nll_weight * -new}
    sums = {name: part.sum() for name, part in parts.items()}
    loss = sums["pg"] + config.salvage_weight * sums["nll"] + config.kl_weight * sums["kl"]
    in_pg, in_kl = tokens.pg_weight > 0, tokens.kl_weight > 0
    sums |= {
        "pg_weight": tokens.pg_weight.sum(),
        "kl_weight": tokens.kl_weight.sum(),
        "nll_weight": tokens.nll_weight.sum(),
    }
    sums |= {
        "pg_tokens": in_pg.sum(),
        "clipped": (clipped & in_pg).sum(),
        "dual_clipped": (dual_clipped & in_pg).sum(),
    }
    sums |= {
        "kl_tokens": in_kl.sum(),
        "kl_muted": (muted & in_kl).sum(),
        "old_minus_new": torch.where(in_kl, tokens.old - new, 0.0).sum(),
    }
    sums["loss"] = loss
    numbers = torch.stack([value.detach().double() for value in sums.values()]).tolist()
    return loss, dict(zip(sums, numbers, strict=True))


# --------------------------------------------------------------------------------------- statistics of App. J


def statistics(sums: Mapping[str, float]) -> dict[str, float]:
    """Statistics of a step from the sums of `joint_loss`, added up over packs, mini-batches and ranks; 0
    where nothing was counted.

    `pg`, `kl`, `nll`: means under the loss's own weights, of accepted, of accepted and retained, and of
    retained groups. `clip_frac`: share of accepted rollouts' tokens whose clipped term is strictly the larger
    loss; `dual_clip_frac` likewise. `ppo_kl`: token mean of old - new (k1).
    `kl_muted_frac`: share of rollout tokens whose KL gradient a clamp mutes: the suppressed negatives of App.
    G.
    """

    def ratio(part: str, whole: str) -> float:
        return float(sums.get(part, 0.0)) / float(sums[whole]) if sums.get(whole) else 0.0

    return {
        "pg": ratio("pg", "pg_weight"),
        "kl": ratio("kl", "kl_weight"),
        "nll": ratio("nll", "nll_weight"),
        "clip_frac": ratio("clipped", "pg_tokens"),
        "dual_clip_frac": ratio("dual_clipped", "pg_tokens"),
        "ppo_kl": ratio("old_minus_new", "kl_tokens"),
        "kl_muted_frac": ratio("kl_muted", "kl_tokens"),
    }


def masked_mean(values: Tensor, mask: Tensor) -> float | None:
    """Mean of the values under the mask, whatever stands elsewhere; None where the mask is empty.

    >>> masked_mean(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([True, False, True]))
    2.0
    """
    kept = values[mask.bool()]
    return float(kept.mean()) if len(kept) else None


def log_perplexity(logprobs: Iterable[Tensor]) -> float:
    """rollout_log_ppl of App. J: mean over rollouts of -(mean over tokens of log pi_old), in nats; 0 where
    there is no rollout.

    >>> log_perplexity([torch.tensor([-1.0, -3.0]), torch.tensor([-4.0])])
    3.0
    """
    means = [-float(values.mean()) for values in logprobs if len(values)]
    return math.fsum(means) / len(means) if means else 0.0


def preference_gap(groups: Iterable[tuple[float, Sequence[float]]]) -> dict[str, float]:
    """Correct-minus-wrong log-probability gap (App. J): mean over states of (correct - mean of wrong).

    Args: groups: for every state (mean token log-prob of the target's action span, the same mean of each
    wrong rollout's own action span under its own context). A rollout is wrong below the competent reward; one
    that does not parse has no action span and is left out by the caller.
    Returns: `gap` = `correct_logprob` - `wrong_logprob`, all over the `gap_groups` states that have a wrong
    rollout; 0 where there is none.

    >>> preference_gap([(-0.5, [-0.25, -0.75]), (-1.0, [-0.5]), (-9.0, [])])
    {'gap': -0.25, 'correct_logprob': -0.75, 'wrong_logprob': -0.5, 'gap_groups': 2}
    """
    pairs = [(correct, math.fsum(wrong) / len(wrong)) for correct, wrong in groups if wrong]
    count = max(len(pairs), 1)
    correct, wrong = (math.fsum(pair[side] for pair in pairs) / count for side in (0, 1))
    return {
        "gap": correct - wrong,
        "correct_logprob": correct,
        "wrong_logprob": wrong,
        "gap_groups": len(pairs),
    }
