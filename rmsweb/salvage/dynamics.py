"""Statistics of training: what App. J plots, and what else tells a healthy run from a sick one.

Purpose: every number that an RL step logs has its one definition here. docs/metrics.md says what a healthy
run shows.

Place in the paper: App. J. The gap is measured before the first update of a step, on all trained groups.
Letters: n rollouts a group, R tokens of an answer, A the target's action span.

Deviation:
1. `ours:` the target of an accepted group is scored here and nowhere else: it takes no part in the loss.
"""

import bisect
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rmsweb.browser.actions import action_span
from rmsweb.engine.policy import PolicyModel
from rmsweb.salvage.gating import CELLS, MIN_COMPETENT, Cell, Gate
from rmsweb.salvage.states import GroupLogProbs, Probe, SampledGroup, span_mask

# ------------------------------------------------------------------------------------------- generated groups


def generation_statistics(groups: Sequence[SampledGroup]) -> dict[str, Any]:
    """Return rewards, gate cells by category, and what rollouts look like, over all generated groups.

    Shares are in [0, 1]; `response_tokens` is the mean length of a rollout.
    """
    cells = cell_counts((group.state.category, group.gate) for group in groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failures = sum(reward.failure is not None for group in groups for reward in group.rewards)
    truncated = sum(rollout.finish_reason == "length" for rollout in rollouts)
    tokens, count = sum(len(rollout.ids) for rollout in rollouts), max(len(rollouts), 1)
    return {
        **reward_statistics([group.gate for group in groups]),
        **rejection_shares(cells),
        "cells": cells,
        "multi_action_accepted_frac": _multi_action_share(groups, accepted=True),
        "multi_action_rejected_frac": _multi_action_share(groups, accepted=False),
        "format_error_frac": failures / count,
        "truncated_frac": truncated / count,
        "response_tokens": tokens / count,
        "sampled_tokens": tokens,
    }


def reward_statistics(gates: Sequence[Gate]) -> dict[str, float]:
    """Return the means of best-of-n reward, mean reward and within-group std (App. J); 0 without groups.

    >>> from rmsweb.salvage.gating import gate
    >>> reward_statistics([gate([1.0, 1.0]), gate([0.0, 0.0])])
    {'best_of_n': 0.5, 'reward_mean': 0.5, 'reward_std': 0.0}
    """
    count = max(len(gates), 1)
    return {
        "best_of_n": math.fsum(found.best for found in gates) / count,
        "reward_mean": math.fsum(found.mean for found in gates) / count,
        "reward_std": math.fsum(found.std for found in gates) / count,
    }


def cell_counts(groups: Iterable[tuple[str, Gate]]) -> dict[str, dict[Cell, int]]:
    """Count groups by category and gate cell.

    >>> from rmsweb.salvage.gating import gate
    >>> cell_counts([("navigation", gate([1.0, 0.3])), ("navigation", gate([1.0, 1.0]))])
    {'navigation': {'accepted': 1, 'no contrast': 1, 'not competent': 0, 'neither': 0}}
    """
    counts: dict[str, dict[Cell, int]] = {}
    for category, found in groups:
        counts.setdefault(category, dict.fromkeys(CELLS, 0))[found.cell] += 1
    return counts


def rejection_shares(counts: Mapping[str, Mapping[Cell, int]]) -> dict[str, float]:
    """Return the share of all groups that each gate rejects, in [0, 1]; 0 without groups (App. J).

    The paper does not say whether it plots each gate by itself or the competence gate among what the std gate
    lets through, so both are given.

    >>> rejection_shares({"a": {"accepted": 1, "no contrast": 1, "not competent": 1, "neither": 1}})
    {'std_rejected_frac': 0.5, 'competence_rejected_frac': 0.5, 'competence_rejected_after_std_frac': 0.25}
    """
    total = {cell: sum(row[cell] for row in counts.values()) for cell in CELLS}
    num_groups = max(sum(total.values()), 1)
    return {
        "std_rejected_frac": (total["no contrast"] + total["neither"]) / num_groups,
        "competence_rejected_frac": (total["not competent"] + total["neither"]) / num_groups,
        "competence_rejected_after_std_frac": total["not competent"] / num_groups,
    }


def _multi_action_share(groups: Sequence[SampledGroup], *, accepted: bool) -> float:
    """Return the share of accepted (or rejected) groups whose target has several actions.

    Soft-F1 narrows their contrast (`reward`, known consequences).
    """
    kind = [len(group.state.target.actions) > 1 for group in groups if group.gate.accepted == accepted]
    return sum(kind) / max(len(kind), 1)


# -------------------------------------------------------------------------------------------------- the loss


def loss_statistics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the statistics of a step from the sums of `joint_loss` over packs, mini-batches and ranks.

    `pg`, `kl`, `nll`: means under the loss's own weights, of accepted, of accepted and retained, and of
    retained groups. `clip_frac`: share of the tokens of accepted rollouts whose clipped term is strictly the
    larger loss; `dual_clip_frac` likewise. `ppo_kl`: token mean of old - new (k1). `kl_muted_frac`: share of
    rollout tokens whose KL gradient a clamp mutes, which are the suppressed negatives of App. G. Each is 0
    where nothing was counted.
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


# -------------------------------------------------------------------------------------------- trained groups


def probes_of(group: SampledGroup, policy: PolicyModel) -> tuple[Probe, ...]:
    """Return the target as it is, and the target's action after the policy's own reasoning.

    The second one is the first rollout that parses, with its action list replaced by the target's. It is
    missing if no rollout parses.
    """
    state = group.state
    target = Probe(state.target_ids, state.target_mask)
    assert state.sample.action_span is not None
    action = state.sample.target_text[slice(*state.sample.action_span)]
    for rollout in group.rollouts:
        if span := action_span(rollout.text):
            start, end = span
            text = rollout.text[:start] + action + rollout.text[end:]
            ids = policy.encode_response(text)
            mask = span_mask(policy, text, (start, start + len(action)), len(ids))
            return target, Probe(ids, mask)
    return (target,)


def branch_statistics(trained: Sequence[GroupLogProbs], policy: PolicyModel) -> dict[str, Any]:
    """Return the gap of App. J with both parts, and other means of log-probs over the trained groups.

    `own_reasoning_logprob`: mean token log-prob of the target's action after the policy's own reasoning.
    `unparsed_rollouts`: how many rollouts have no action span, so that the gap leaves them out.
    `sampler_trainer_diff`: mean absolute difference of a token's log-prob between sampler and trainer, at
    least 0, which is rounding alone.
    """
    pairs: list[tuple[float, list[float]]] = []
    own_reasoning, differences, num_unparsed = [], [], 0
    for found in trained:
        wrong = []
        rollouts = zip(found.group.rollouts, found.group.rewards, found.old, strict=True)
        for rollout, reward, values in rollouts:
            differences.append(float((values - rollout.logprobs).abs().mean()))
            if reward.failure is not None:
                num_unparsed += 1
            elif reward.value < MIN_COMPETENT and (span := action_span(rollout.text)):
                wrong.append(float(values[slice(*sampled_span(policy, rollout.ids, span))].mean()))
        target, *reasoned = [
            masked_mean(values, probe.mask) for probe, values in zip(found.probes, found.probed, strict=True)
        ]
        pairs.append((target, wrong))
        own_reasoning += reasoned
    return {
        **preference_gap(pairs),
        "own_reasoning_logprob": math.fsum(own_reasoning) / max(len(own_reasoning), 1),
        "unparsed_rollouts": num_unparsed,
        "rollout_log_ppl": log_perplexity(values for found in trained for values in found.old),
        "sampler_trainer_diff": math.fsum(differences) / max(len(differences), 1),
    }


def preference_gap(groups: Iterable[tuple[float, Sequence[float]]]) -> dict[str, float]:
    """Return the correct-minus-wrong log-probability gap: the mean over states of (correct - mean of wrong).

    Args: groups: for every state the mean token log-prob of the target's action span, and the same mean of
    each wrong rollout's own action span under its own context. A rollout is wrong below the competent reward;
    one that does not parse has no action span and is left out by the caller.
    Returns: `gap` = `correct_logprob` - `wrong_logprob`, all over the `gap_groups` states with a wrong
    rollout; 0 without such states.

    >>> preference_gap([(-0.5, [-0.25, -0.75]), (-1.0, [-0.5]), (-9.0, [])])
    {'gap': -0.25, 'correct_logprob': -0.75, 'wrong_logprob': -0.5, 'gap_groups': 2}
    """
    pairs = [(correct, math.fsum(wrong) / len(wrong)) for correct, wrong in groups if wrong]
    count = max(len(pairs), 1)
    correct, wrong = (math.fsum(side) / count for side in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return {
        "gap": correct - wrong,
        "correct_logprob": correct,
        "wrong_logprob": wrong,
        "gap_groups": len(pairs),
    }


def log_perplexity(logprobs: Iterable[Tensor]) -> float:
    """Return rollout_log_ppl of App. J in nats: the mean over rollouts of -(mean over tokens of log pi_old).

    >>> import torch
    >>> log_perplexity([torch.tensor([-1.0, -3.0]), torch.tensor([-4.0])])
    3.0
    """
    means = [-float(values.mean()) for values in logprobs if len(values)]
    return math.fsum(means) / len(means) if means else 0.0


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Return the mean of the values under the mask, whatever the others are; an action span is never empty.

    >>> import torch
    >>> masked_mean(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([True, False, True]))
    2.0
    """
    return float(values[mask.bool()].mean())


def sampled_span(policy: PolicyModel, ids: Tensor, span: tuple[int, int]) -> tuple[int, int]:
    """Return the token span of a character span of a sampled answer's text.

    The sampled tokens need not be those that encoding the text would give, so the text is decoded token by
    token.
    """

    def num_chars(count: int) -> int:
        return len(policy.decode(ids[:count]))

    start = bisect.bisect_right(range(len(ids) + 1), span[0], key=num_chars) - 1
    return start, max(bisect.bisect_left(range(len(ids) + 1), span[1], key=num_chars), start + 1)


class Clock:
    """Adds up seconds by phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
