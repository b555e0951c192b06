"""One step of Salvage-DS: sample, score, gate, refill, deal, update.

Purpose: `rl_step` is the algorithm of the paper as one function that calls the rooms: `sampler` draws
rollouts, `reward` scores them, `gating` decides which groups train, `training` computes log-probs on packed
groups, `objective` is the loss.

Place in the paper: section "The Salvage-DS RL Algorithm", App. G (sizes), App. J (statistics).
Letters: B groups a train batch, M groups a mini-batch, n rollouts a group, S retained rejected groups, R
tokens of an answer.

Deviations:
1. `ours:` a generation batch is B prompts from an endless stream that is shuffled anew every epoch; a group
   is known by its draw, so a prompt may come twice in a step. Rollouts depend on (seed, step, draw, rollout)
   alone: neither ranks nor batch shapes change a sample or a selection.
2. `ours:` old log-probs are recomputed by the trainer once a step, before its first update; reference
   log-probs come from the same model without adapters.
3. `ours:` the gap of App. J is measured before the first update, on all trained groups; the target of an
   accepted group is scored there and nowhere else.
"""

import bisect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rmsweb.browser.actions import action_span, parse_agent_output
from rmsweb.engine import training
from rmsweb.engine.distributed import Ranks, unsharded
from rmsweb.engine.lora import disabled
from rmsweb.engine.packing import EncodedPrompt, Group
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.sampler import Decoding, Rollout, sample
from rmsweb.records import AgentOutput, MinedState, ParseFailure, StepSample, derive_seed
from rmsweb.salvage.gating import (
    MIN_COMPETENT,
    MIN_STD,
    Gate,
    cell_counts,
    deal,
    gate,
    needs_refill,
    rejection_shares,
    reward_statistics,
    select,
)
from rmsweb.salvage.objective import (
    Answer,
    ObjectiveConfig,
    joint_loss,
    lay_out,
    log_perplexity,
    masked_mean,
    preference_gap,
    statistics,
)
from rmsweb.salvage.reward import Reward, score

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """Sizes and switches of a step; the defaults are the paper's (App. G)."""

    train_batch: int = 64
    mini_batch: int = 16
    num_rollouts: int = 8
    max_generation_batches: int = 16
    response_budget: int = 2048  # tokens of a rollout, end-of-turn included
    token_budget: int = 20_480  # tokens of a pack
    algorithm: Literal["salvage-ds", "dapo"] = "salvage-ds"
    min_std: float = MIN_STD
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    seed: int = 42


@dataclass(frozen=True, slots=True)
class State:
    """An RL prompt with its verified answer, in tokens where they are short."""

    sample: StepSample
    root: Path  # folder that the sample's image paths are relative to
    target: AgentOutput
    target_ids: Tensor  # [R] the whole verified answer, end-of-turn included
    target_mask: Tensor  # [R] bool: the action span A
    prompt_length: int  # tokens
    indices: frozenset[int]

    @property
    def category(self) -> str:
        return self.sample.category if isinstance(self.sample, MinedState) else "ordinary"


def make_state(
    sample_: StepSample, root: Path, policy: PolicyModel, *, prompt_budget: int, response_budget: int
) -> State | str:
    """A record -> State, or the reason why it cannot be trained on.

    Reasons: an extraction, a target that is no answer, an index that the prompt does not show, too long a
    prompt or answer.
    """
    if sample_.kind != "action" or sample_.action_span is None:
        return "not an action state"
    target = parse_agent_output(sample_.target_text)
    if isinstance(target, ParseFailure):
        return "target is no valid answer"
    indices = frozenset(sample_.prompt_indices)
    if score(target, target, indices).value < 1.0:
        return "target's index is not in the prompt"
    prompt_length, ids = policy.prompt_length(sample_.messages), policy.encode_response(sample_.target_text)
    if prompt_length > prompt_budget:
        return "prompt too long"
    if len(ids) > response_budget:
        return "target too long"
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[slice(*policy.token_span(sample_.target_text, sample_.action_span))] = True
    return State(sample_, root, target, ids, mask, prompt_length, indices)


class Prompts:
    """Encoded prompts of a step, made in a worker thread: when they are announced, or else when they are
    first needed.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self.policy, self._kept, self._worker = (
            policy,
            dict[str, Future[EncodedPrompt]](),
            ThreadPoolExecutor(1, "prompts"),
        )

    def announce(self, states: Iterable[State]) -> None:
        """Encodes what will be needed soon, while the caller goes on (ours: pictures of the next refill are
        read while the model samples).
        """
        for state in states:
            if state.sample.sample_id not in self._kept:
                self._kept[state.sample.sample_id] = self._worker.submit(
                    self.policy.encode_prompt, state.sample.messages, state.root
                )

    def __call__(self, state: State) -> EncodedPrompt:
        self.announce([state])
        return self._kept[state.sample.sample_id].result()


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """A state's rollouts, their rewards and the gates' verdict."""

    state: State
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Reward, ...]
    gate: Gate


def drawn_states(num_states: int, seed: int, first: int, count: int) -> list[int]:
    """Places `first` to `first + count` of the endless stream: every epoch is one permutation of all states,
    shuffled anew.

    >>> stream = drawn_states(3, 0, 0, 6)
    >>> sorted(stream[:3]), sorted(stream[3:]), drawn_states(3, 0, 2, 2) == stream[2:4]
    ([0, 1, 2], [0, 1, 2], True)
    """
    orders: dict[int, list[int]] = {}
    places = []
    for position in range(first, first + count):
        epoch, place = divmod(position, num_states)
        if epoch not in orders:
            orders[epoch] = torch.randperm(
                num_states, generator=torch.Generator().manual_seed(derive_seed(seed, "prompts", epoch))
            ).tolist()
        places.append(orders[epoch][place])
    return places


def generate(
    policy: PolicyModel,
    ranks: Ranks,
    states: Sequence[State],
    prompts: Prompts,
    config: StepConfig,
    *,
    step: int,
    position: int,
    report: Report,
) -> list[SampledGroup]:
    """Draws prompts, samples n rollouts of each, scores and gates them, and refills until B groups are
    accepted or the cap is reached.

    Every rank samples every world_size-th prompt of a batch; the result, in order of draw, is the same on all
    ranks.
    """
    groups: list[SampledGroup] = []
    num_accepted, num_batches = 0, 0
    while needs_refill(
        num_accepted, num_batches, train_batch=config.train_batch, max_batches=config.max_generation_batches
    ):
        report(f"sampling, {num_accepted} of {config.train_batch} accepted")
        first, count = position + len(groups), config.train_batch
        drawn, coming = (
            [states[place] for place in drawn_states(len(states), config.seed, start, count)]
            for start in (first, first + count)
        )
        own = range(ranks.rank, len(drawn), ranks.world_size)
        encoded = [prompts(drawn[number]) for number in own]
        prompts.announce(coming[number] for number in own)
        seeds = [
            derive_seed(config.seed, step, len(groups) + number, rollout)
            for number in own
            for rollout in range(config.num_rollouts)
        ]
        with unsharded(policy):
            sampled = sample(
                policy, encoded, n=config.num_rollouts, max_new_tokens=config.response_budget, seeds=seeds
            )
        found = dict(zip(own, sampled, strict=True))
        everything = {number: rollouts for part in ranks.gather(found) for number, rollouts in part.items()}
        for number, state in enumerate(drawn):
            rewards = tuple(
                score(rollout.text, state.target, state.indices) for rollout in everything[number]
            )
            verdict = gate(
                [reward.value for reward in rewards],
                min_std=config.min_std,
                min_competent=None if config.algorithm == "dapo" else MIN_COMPETENT,
            )
            groups.append(SampledGroup(state, tuple(everything[number]), rewards, verdict))
        num_accepted, num_batches = sum(group.gate.accepted for group in groups), num_batches + 1
    return groups


def log_probs(
    policy: PolicyModel,
    ranks: Ranks,
    groups: Sequence[tuple[State, Sequence[Tensor]]],
    prompts: Prompts,
    config: StepConfig,
) -> list[list[Tensor]]:
    """Log-probs [R] of every answer (token ids [R]) of every group, without gradient, the same on all ranks."""
    lengths = [(state.prompt_length, tuple(map(len, answers))) for state, answers in groups]
    found = training.score(
        policy,
        ranks,
        lengths,
        lambda number: Group(prompts(groups[number][0]), tuple(groups[number][1])),
        config.token_budget,
    )
    return [
        [found[number, answer] for answer in range(len(answers))]
        for number, (_, answers) in enumerate(groups)
    ]


def update(
    policy: PolicyModel,
    ranks: Ranks,
    batch: Sequence[tuple[SampledGroup, Sequence[Answer], Sequence[Tensor]]],
    prompts: Prompts,
    optimizer: training.Optimizer,
    config: StepConfig,
) -> tuple[Counter[str], float]:
    """One optimizer step on a mini-batch of (group, answers, their token ids) (Eq. 2-3); returns the loss's
    sums over all ranks and the gradient norm.
    """
    lengths = [(group.state.prompt_length, tuple(map(len, ids))) for group, _, ids in batch]
    num_tokens = None
    if config.objective.aggregation == "token-mean":
        num_tokens = sum(
            len(answer.mask) for _, answers, _ in batch for answer in answers if not answer.is_target
        )
    packs = training.rank_packs(
        policy,
        ranks,
        lengths,
        lambda number: Group(prompts(batch[number][0].state), tuple(batch[number][2])),
        config.token_budget,
    )
    sums: Counter[str] = Counter()  # of this rank
    for item in packs:
        answers = [batch[number][1][answer] for number, answer in item.answers]
        new = policy.response_logprobs(item.pack)
        if not answers:  # a dummy: it only keeps the ranks' collectives in step
            (new.sum() * 0.0).backward()
            continue
        tokens = lay_out(
            answers,
            num_groups=config.mini_batch,
            num_rollouts=config.num_rollouts,
            num_tokens=num_tokens,
            device=new.device,
        )
        loss, part = joint_loss(new, tokens, config.objective)
        loss.backward()
        sums.update(part)
    norm, _ = optimizer.step()
    total: Counter[str] = Counter()
    for other in ranks.gather(dict(sums)):
        total.update(other)
    return total, norm


def rl_step(
    policy: PolicyModel,
    ranks: Ranks,
    states: Sequence[State],
    optimizer: training.Optimizer,
    config: StepConfig,
    *,
    step: int,
    position: int,
    report: Report = lambda text: None,
) -> tuple[dict[str, Any], int]:
    """One training step of Salvage-DS (section "The Salvage-DS RL Algorithm"), the same on every rank.

    Args: step: number of this step, from 0, skipped ones counted. position: prompts drawn in all steps
    before.
    Returns: the statistics of App. J and the new position. A step with nothing accepted or retained changes
    no weight.
    """
    clock, prompts = Clock(), Prompts(policy)
    with clock("sample_s"):
        groups = generate(policy, ranks, states, prompts, config, step=step, position=position, report=report)
    chosen = select(
        [group.gate.accepted for group in groups],
        train_batch=config.train_batch,
        mini_batch=config.mini_batch,
        salvage=config.algorithm == "salvage-ds",
    )
    batches = deal(chosen, mini_batch=config.mini_batch)
    places = [place for batch in batches for place in batch]
    trained = {place: groups[place] for place in places}
    report(f"scoring {len(places)} groups")
    with clock("score_s"):
        rollouts = [(group.state, [rollout.ids for rollout in group.rollouts]) for group in trained.values()]
        probes = [probe(group, policy) for group in trained.values()]
        extended = [
            (state, ids + [found.ids for found in extra])
            for (state, ids), extra in zip(rollouts, probes, strict=True)
        ]
        old = dict(zip(places, log_probs(policy, ranks, extended, prompts, config), strict=True))
        with disabled(policy.model):
            ref = dict(zip(places, log_probs(policy, ranks, rollouts, prompts, config), strict=True))
    sums: Counter[str] = Counter()
    norms = []
    with clock("update_s"):
        for number, batch in enumerate(batches, 1):
            report(f"update {number} of {len(batches)}")
            part, norm = update(
                policy,
                ranks,
                [training_answers(groups[p], old[p], ref[p]) for p in batch],
                prompts,
                optimizer,
                config,
            )
            sums.update(part)
            norms.append(norm)
    values: dict[str, Any] = {
        "generated": len(groups),
        "generation_batches": len(groups) // config.train_batch,
        "updates": len(batches),
    }
    values |= {"accepted": len(chosen.accepted), "rejected": len(chosen.retained) + len(chosen.unused)}
    values |= {"retained": len(chosen.retained), "dropped": len(chosen.dropped)}
    values |= generation_statistics(groups) | statistics(sums) | {"loss": sums["loss"] / max(len(batches), 1)}
    values |= branch_statistics(list(trained.values()), probes, [old[place] for place in places], policy)
    values |= {
        "grad_norm": sum(norms) / max(len(norms), 1),
        "lr": optimizer.rate(max(optimizer.num_steps - 1, 0)),
    }
    return values | clock.seconds, position + len(groups)


def training_answers(
    group: SampledGroup, old: Sequence[Tensor], ref: Sequence[Tensor]
) -> tuple[SampledGroup, list[Answer], list[Tensor]]:
    """What a group brings to the loss: its rollouts, whole, and, where it was rejected, the target with its
    action span.
    """
    accepted = group.gate.accepted
    ids = [rollout.ids for rollout in group.rollouts]
    answers = [
        Answer(
            mask=torch.ones(len(own), dtype=torch.bool),
            accepted=accepted,
            advantage=advantage,
            old=before,
            ref=reference,
        )
        for own, advantage, before, reference in zip(
            ids, group.gate.advantages, old[: len(ids)], ref, strict=True
        )
    ]
    if not accepted:
        answers.append(Answer(mask=group.state.target_mask, accepted=False))
        ids.append(group.state.target_ids)
    return group, answers, ids


# ------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True, slots=True)
class Probe:
    """An answer that is only scored: the target as it stands, or the target's action behind the policy's own
    reasoning.
    """

    ids: Tensor  # [R]
    mask: Tensor  # [R] bool: the target's action span


def probe(group: SampledGroup, policy: PolicyModel) -> list[Probe]:
    """The target, and, where a rollout parses, the first such rollout with its action list replaced by the
    target's.
    """
    state = group.state
    found = [Probe(state.target_ids, state.target_mask)]
    assert state.sample.action_span is not None
    start, end = state.sample.action_span
    action = state.sample.target_text[start:end]
    for rollout in group.rollouts:
        if span := action_span(rollout.text):
            text = rollout.text[: span[0]] + action + rollout.text[span[1] :]
            ids = policy.encode_response(text)
            mask = torch.zeros(len(ids), dtype=torch.bool)
            mask[slice(*policy.token_span(text, (span[0], span[0] + len(action))))] = True
            return [*found, Probe(ids, mask)]
    return found


def sampled_span(policy: PolicyModel, ids: Tensor, span: tuple[int, int]) -> tuple[int, int]:
    """Character span of a sampled answer's text -> span of its own tokens, which need not be those that
    encoding the text would give.
    """

    def num_chars(count: int) -> int:
        return len(policy.decode(ids[:count]))

    start = bisect.bisect_right(range(len(ids) + 1), span[0], key=num_chars) - 1
    return start, max(bisect.bisect_left(range(len(ids) + 1), span[1], key=num_chars), start + 1)


def branch_statistics(
    groups: Sequence[SampledGroup],
    probes: Sequence[Sequence[Probe]],
    old: Sequence[Sequence[Tensor]],
    policy: PolicyModel,
) -> dict[str, Any]:
    """Gap of App.

    J with both parts, the target's action log-prob behind the policy's own reasoning, and log-perplexity,
    over the trained groups.
    """
    pairs, own_reasoning, differences, num_unparsed = [], [], [], 0
    for group, extra, logprobs in zip(groups, probes, old, strict=True):
        count = len(group.rollouts)
        wrong = []
        for rollout, reward, values in zip(group.rollouts, group.rewards, logprobs[:count], strict=True):
            differences.append(float((values - rollout.logprobs).abs().mean()))
            if reward.failure is not None:
                num_unparsed += 1
            elif reward.value < MIN_COMPETENT and (span := action_span(rollout.text)):
                wrong.append(float(values[slice(*sampled_span(policy, rollout.ids, span))].mean()))
        scored = [
            masked_mean(values, found.mask) for values, found in zip(logprobs[count:], extra, strict=True)
        ]
        pairs.append((scored[0] or 0.0, wrong))
        own_reasoning += [value for value in scored[1:] if value is not None]
    return {
        **preference_gap(pairs),
        "own_reasoning_logprob": math.fsum(own_reasoning) / max(len(own_reasoning), 1),
        "unparsed_rollouts": num_unparsed,
        "rollout_log_ppl": log_perplexity(
            values
            for group, logprobs in zip(groups, old, strict=True)
            for values in logprobs[: len(group.rollouts)]
        ),
        "sampler_trainer_diff": math.fsum(differences) / max(len(differences), 1),
    }


def generation_statistics(groups: Sequence[SampledGroup]) -> dict[str, Any]:
    """Rewards, gate cells by category, and what the rollouts look like, over all generated groups."""
    counts = cell_counts((group.state.category, group.gate) for group in groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(len(rollout.ids) for rollout in rollouts)

    def multi_action_frac(accepted: bool) -> float:
        kind = [len(group.state.target.actions) > 1 for group in groups if group.gate.accepted == accepted]
        return sum(kind) / max(len(kind), 1)

    return {
        **reward_statistics([group.gate for group in groups]),
        **rejection_shares(counts),
        "cells": counts,
        "multi_action_accepted_frac": multi_action_frac(True),
        "multi_action_rejected_frac": multi_action_frac(False),
        "format_error_frac": sum(reward.failure is not None for group in groups for reward in group.rewards)
        / max(len(rollouts), 1),
        "truncated_frac": sum(rollout.finish_reason == "length" for rollout in rollouts)
        / max(len(rollouts), 1),
        "response_tokens": tokens / max(len(rollouts), 1),
        "sampled_tokens": tokens,
    }


class Clock:
    """Seconds by phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def greedy_rewards(
    policy: PolicyModel, ranks: Ranks, states: Sequence[State], *, response_budget: int
) -> list[float]:
    """Rewards of the greedy answers to some states, in their order, the same on all ranks; how a checkpoint
    is chosen on `dev`.
    """
    own = range(ranks.rank, len(states), ranks.world_size)
    prompts = [policy.encode_prompt(states[number].sample.messages, states[number].root) for number in own]
    with unsharded(policy):
        rollouts = sample(
            policy,
            prompts,
            n=1,
            max_new_tokens=response_budget,
            seeds=[0] * len(prompts),
            decoding=Decoding(temperature=0.0),
        )
    found = {
        number: score(answer[0].text, states[number].target, states[number].indices).value
        for number, answer in zip(own, rollouts, strict=True)
    }
    everything = {number: value for part in ranks.gather(found) for number, value in part.items()}
    return [everything[number] for number in range(len(states))]
