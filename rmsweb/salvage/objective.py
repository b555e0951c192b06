"""The joint objective of Salvage-DS: clipped surrogate, KL brake and salvage anchor.

Purpose: every term of Eq. 2-3 is a sum over tokens of (constant weight) x (function of one log-prob). The
weights hold all denominators and masks and are fixed before the forward pass. So partial sums of packs,
micro-batches and ranks simply add up, and padding has weight 0.

Place in the paper: Eq. 2 and 3, section "The salvage anchor on rejected groups", App. G "Stability".
Letters: M groups of a full mini-batch, n rollouts a group, R tokens of an answer, T tokens of all answers of
a pack, A the target's action span.

Mini-batch loss, with k_g of Eq. 1, beta = kl_weight, lambda = salvage_weight:
    L = (1/M) sum_g [ k_g mean_i mean_t PG + (1 - k_g) lambda mean_{t in A} NLL + beta mean_i mean_t KL ]

Deviations:
1. `ours:` Eq. 3 is averaged over groups. M is constant, also when a mini-batch is short, so lambda and beta
   weigh every group alike and one salvage target equals its n copies. Salvage and KL act on the groups that
   were accepted or retained.
2. `ours:` the log-ratio is clamped to +-20 and k3 to at most 10 (it is never negative); the share of tokens
   that the clamp mutes is counted.
3. `ours:` dual clip (c = 3) and DAPO's token-mean are switches, off by default. No entropy term, no KL in the
   reward (App. G).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from rmsweb.config import Config, opt

CLIP_LOW, CLIP_HIGH = 0.2, 0.32  # App. G
SALVAGE_WEIGHT = 0.10  # lambda_salvage, App. G
KL_WEIGHT = 1e-3  # beta, App. G
LOG_RATIO_CLAMP = 20.0
KL_CLAMP = 10.0
DUAL_CLIP = 3.0

Aggregation = Literal["seq-mean-token-mean", "token-mean"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Config):
    """Weights and switches of the loss."""

    clip_low: float = opt(
        CLIP_LOW, "lower clip epsilon_lo of the importance ratio", paper=0.2, at_least=0, below=1
    )
    clip_high: float | None = opt(
        None,
        f"upper clip epsilon_hi of the importance ratio; without it {CLIP_HIGH}, or the algorithm's own",
        paper=CLIP_HIGH,
        at_least=0,
    )
    dual_clip: float | None = opt(
        None, f"bound c of the loss of negative advantages ({DUAL_CLIP:g} is usual)", paper="none", above=1
    )
    salvage_weight: float = opt(
        SALVAGE_WEIGHT,
        "weight lambda of the salvage anchor; 0: anchor-free ablation",
        paper="0.10",
        at_least=0,
    )
    kl_weight: float = opt(KL_WEIGHT, "weight beta of the KL brake", paper="1e-3", at_least=0)
    aggregation: Aggregation = opt(
        "seq-mean-token-mean", "how token losses are averaged", paper="seq-mean-token-mean"
    )

    @property
    def upper_clip(self) -> float:
        """epsilon_hi: the given one, else the paper's."""
        return CLIP_HIGH if self.clip_high is None else self.clip_high


# ---------------------------------------------------------------------------------- answers and their weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer as the loss sees it: a rollout, or the target as one more answer of its group."""

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
    """The constants of the loss, each [T]: answers laid end to end. Tokens with zero weight are ignored."""

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
    """Give every token of a pack's answers its weights, which are the denominators of Eq. 2 and 3.

    Args: answers: in the order in which their log-probs will come. num_groups: M of a full mini-batch.
    num_rollouts: n. num_tokens: tokens of all rollouts of the whole mini-batch, over all ranks, for
    token-mean; None for seq-mean-token-mean.
    """
    laid = []
    for answer in answers:
        # Masked tokens count nowhere: not in a mean, not in its denominator.
        length = max(int(answer.mask.sum()), 1)
        if answer.is_target:
            share = 1 / (num_groups * length)  # Eq. 3: mean over groups, mean over the action span A
        elif num_tokens is None:
            share = 1 / (num_groups * num_rollouts * length)  # Eq. 2: means over groups, rollouts, tokens
        else:
            share = 1 / num_tokens  # DAPO: one mean over all tokens of all rollouts
        laid.append(_lay_out_answer(answer, share, dtype))
    none = torch.zeros(0, dtype=dtype)
    return Tokens(
        **{
            column.name: torch.cat([none, *(getattr(part, column.name) for part in laid)]).to(device)
            for column in fields(Tokens)
        }
    )


def _lay_out_answer(answer: Answer, share: float, dtype: torch.dtype) -> Tokens:
    """Return the columns [R] of one answer, whose unmasked tokens weigh `share`."""
    mask = answer.mask.bool()
    zero = torch.zeros(mask.shape, dtype=dtype)
    weight = zero.masked_fill(mask, share)
    if answer.old is None or answer.ref is None:  # the target: the anchor, and only in a rejected group
        nll_weight = zero if answer.accepted else weight
        return Tokens(
            old=zero, ref=zero, advantage=zero, pg_weight=zero, kl_weight=zero, nll_weight=nll_weight
        )
    return Tokens(
        old=torch.where(mask, answer.old.detach().to(dtype), zero),
        ref=torch.where(mask, answer.ref.detach().to(dtype), zero),
        advantage=zero + answer.advantage,
        pg_weight=weight if answer.accepted else zero,  # k_g
        kl_weight=weight,
        nll_weight=zero,
    )


# -------------------------------------------------------------------------------------------- the three terms


def policy_gradient_terms(
    new: Tensor, old: Tensor, advantage: Tensor, config: ObjectiveConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clipped surrogate of each token (Eq. 2).

        PG = -min(rho A, clip(rho, 1 - eps_lo, 1 + eps_hi) A),    rho = exp(clamp(new - old, +-20))

    Args: log-probs and advantages, [T].
    Returns: PG [T] with gradient; where the clip binds, [T] bool; where the dual clip binds, [T] bool.

    >>> new = torch.tensor([-0.5, -0.5], dtype=torch.float64)
    >>> advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)
    >>> terms, clipped, _ = policy_gradient_terms(new, new - 1.0, advantage, ObjectiveConfig())
    >>> [round(term, 6) for term in terms.tolist()], clipped.tolist()
    ([-1.32, 2.718282], [True, False])
    """
    ratio = torch.exp(torch.clamp(new - old, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
    free = -ratio * advantage
    bounded = -torch.clamp(ratio, 1 - config.clip_low, 1 + config.upper_clip) * advantage
    terms, clipped = torch.maximum(free, bounded), bounded > free
    if config.dual_clip is None:
        return terms, clipped, torch.zeros_like(clipped)
    limit = config.dual_clip * advantage.abs()  # with a positive advantage PG is never above 0
    return torch.minimum(terms, limit), clipped, terms > limit


def kl_terms(new: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low-variance KL estimate of each token (App. G, low_var_kl).

        k3 = exp(d) - d - 1,    d = clamp(ref - new, +-20),    k3 at most 10

    Args: log-probs, [T].
    Returns: k3 >= 0, [T], with gradient; where a clamp mutes the gradient, [T] bool.

    >>> new, ref = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], dtype=torch.float64)
    >>> terms, _ = kl_terms(new, ref)
    >>> [round(term, 6) for term in terms.tolist()]
    [0.0, 0.718282]
    """
    difference = ref - new
    d = torch.clamp(difference, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    k3 = torch.expm1(d) - d  # expm1: exp(d) - 1 without its rounding error near 0
    return torch.clamp(k3, max=KL_CLAMP), (difference.abs() > LOG_RATIO_CLAMP) | (k3 > KL_CLAMP)


def joint_loss(new: Tensor, tokens: Tokens, config: ObjectiveConfig) -> tuple[Tensor, dict[str, float]]:
    """Return the partial loss of a pack (Eq. 2-3), which adds up over packs and ranks.

        sum_t  pg_weight PG + lambda nll_weight NLL + beta kl_weight KL,    NLL = -new

    Args: new: log-probs [T] of the policy that is being updated, with gradient, in the order of `tokens`;
    masked places may hold anything.
    Returns: the loss, a scalar with gradient; and named sums over tokens as numbers, which add up the same
    way. `dynamics.loss_statistics` makes means and shares of them.
    """
    used = (tokens.pg_weight + tokens.kl_weight + tokens.nll_weight) > 0
    new = torch.where(used, new, torch.zeros_like(new))  # not a product: NaN times 0 is NaN
    pg, clipped, dual_clipped = policy_gradient_terms(new, tokens.old, tokens.advantage, config)
    k3, muted = kl_terms(new, tokens.ref)
    in_pg, in_kl = tokens.pg_weight > 0, tokens.kl_weight > 0
    sums = {
        "pg": (tokens.pg_weight * pg).sum(),  # Eq. 2, the clipped surrogate
        "kl": (tokens.kl_weight * k3).sum(),  # Eq. 2, the KL brake
        "nll": (tokens.nll_weight * -new).sum(),  # Eq. 2, the salvage anchor L^salv
        "pg_weight": tokens.pg_weight.sum(),
        "kl_weight": tokens.kl_weight.sum(),
        "nll_weight": tokens.nll_weight.sum(),
        "pg_tokens": in_pg.sum(),
        "kl_tokens": in_kl.sum(),
        "clipped": (clipped & in_pg).sum(),
        "dual_clipped": (dual_clipped & in_pg).sum(),
        "kl_muted": (muted & in_kl).sum(),
        "old_minus_new": torch.where(in_kl, tokens.old - new, 0.0).sum(),
    }
    loss = sums["pg"] + config.salvage_weight * sums["nll"] + config.kl_weight * sums["kl"]
    sums["loss"] = loss
    numbers = torch.stack([value.detach().double() for value in sums.values()]).tolist()
    return loss, dict(zip(sums, numbers, strict=True))
