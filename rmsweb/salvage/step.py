"""One step of Salvage-DS: sample, score, gate, refill, select, deal, update.

Purpose: `rl_step` is the algorithm of the paper as one function; its parts follow in the order of its calls.
`engine.sampler` draws rollouts, `reward` scores them, `gating` decides which groups train, `objective` is the
loss, `dynamics` measures.

Place in the paper: section "The Salvage-DS RL Algorithm", App. G (sizes).
Letters: B groups a train batch, M groups a mini-batch, n rollouts a group, S retained rejected groups, R
tokens of an answer.

Deviations:
1. `ours:` a generation batch is B prompts from an endless stream that is shuffled anew every epoch. A group
   is known by its draw, so a prompt may come twice in a step. Rollouts depend on (seed, step, draw, rollout)
   alone: neither ranks nor batch shapes change a sample or a selection.
2. `ours:` the trainer recomputes old log-probs once a step, before its first update. Reference log-probs come
   from the same model without adapters, which is the merged SFT policy.
3. `ours:` DAPO here drops the competence gate and the anchor and clips at 0.28; its other choices are flags.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from rmsweb.config import Config, opt, part
from rmsweb.engine import training
from rmsweb.engine.distributed import Ranks, unsharded
from rmsweb.engine.lora import disabled
from rmsweb.engine.packing import Bundle, Packable
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.sampler import Decoding, Rollout, sample
from rmsweb.records import derive_seed
from rmsweb.salvage.dynamics import (
    Clock,
    branch_statistics,
    generation_statistics,
    loss_statistics,
    probes_of,
)
from rmsweb.salvage.gating import (
    MIN_COMPETENT,
    MIN_STD,
    Selection,
    deal_mini_batches,
    gate,
    needs_refill,
    select_groups,
)
from rmsweb.salvage.objective import Answer, ObjectiveConfig, joint_loss, lay_out
from rmsweb.salvage.reward import score
from rmsweb.salvage.states import GroupLogProbs, Prompts, SampledGroup, State

DAPO_CLIP_HIGH = 0.28  # Clip-Higher of DAPO
Report = Callable[[str], None]  # hears in words what a step is doing
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StepConfig(Config):
    """Sizes and switches of an RL step."""

    train_batch: int = opt(64, "accepted groups a step (B)", paper=64, at_least=1)
    mini_batch: int = opt(16, "groups an optimizer step (M)", paper=16, at_least=1)
    num_rollouts: int = opt(8, "rollouts a prompt (n); a single one has no contrast", paper=8, at_least=2)
    max_generation_batches: int = opt(
        16, "generation batches of B prompts a step at most", paper=16, at_least=1
    )
    response_budget: int = opt(
        2048, "longest rollout in tokens, end-of-turn included", paper=2048, at_least=1
    )
    token_budget: int = opt(
        20_480,
        "tokens of a packed row on one rank; changes speed and memory, never the loss",
        paper=20480,
        at_least=1,
    )
    algorithm: Literal["salvage-ds", "dapo"] = opt(
        "salvage-ds", "dapo: no competence gate, no salvage anchor, clip [0.2, 0.28] (Table 2)"
    )
    min_std: float = opt(
        MIN_STD,
        "smallest within-group standard deviation of an accepted group; 0: any above 0",
        paper="0.10",
        at_least=0,
        below=1,
    )
    seed: int = opt(42, "seed of prompt order, rollouts and adapters")
    objective: ObjectiveConfig = part(ObjectiveConfig)

    @property
    def min_competent(self) -> float | None:
        """r_comp of the competence gate; None under DAPO, which has no such gate."""
        return None if self.algorithm == "dapo" else MIN_COMPETENT

    @property
    def loss(self) -> ObjectiveConfig:
        """The objective with the algorithm's own upper clip where none was given."""
        if self.algorithm == "dapo" and self.objective.clip_high is None:
            return replace(self.objective, clip_high=DAPO_CLIP_HIGH)
        return self.objective


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A group as the loss sees it: its answers, and their tokens in the same order."""

    state: State
    answers: tuple[Answer, ...]
    ids: tuple[Tensor, ...]  # [R] int64 each


# ---------------------------------------------------------------------------------------------- the algorithm


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
    """Run one training step of Salvage-DS, the same on every rank.

    Args: step: number of this step, from 0, skipped ones counted. position: prompts drawn in all steps
    before.
    Returns: the statistics of App. J (docs/metrics.md) and the new position.
    """
    clock, prompts = Clock(), Prompts(policy)
    # 1. Sample n rollouts a prompt, score and gate them, refill until B groups are accepted (Eq. 1, App. G).
    with clock("sample_s"):
        groups = generate(policy, ranks, states, prompts, config, step=step, position=position, report=report)
    # 2. Keep B accepted and S rejected groups, and deal them into mini-batches of M; with none the step is
    # skipped: no weight changes.
    chosen = select_groups(
        [group.gate.accepted for group in groups],
        train_batch=config.train_batch,
        mini_batch=config.mini_batch,
        salvage=config.algorithm == "salvage-ds",
    )
    batches = deal_mini_batches(chosen, mini_batch=config.mini_batch)
    # 3. Old and reference log-probs, once, before the first update.
    places = [place for batch in batches for place in batch]
    report(f"scoring {len(places)} groups")
    with clock("score_s"):
        trained = old_and_reference(policy, ranks, [groups[place] for place in places], prompts, config)
    ready = {place: training_group(found) for place, found in zip(places, trained, strict=True)}
    # 4. One optimizer step a mini-batch (Eq. 2-3).
    sums, norms = Counter[str](), []
    with clock("update_s"):
        for number, batch in enumerate(batches, 1):
            report(f"update {number} of {len(batches)}")
            found, norm = update(policy, ranks, [ready[place] for place in batch], prompts, optimizer, config)
            sums.update(found)
            norms.append(norm)
    values = {
        **counts(chosen, len(groups), len(batches), config),
        **generation_statistics(groups),
        **loss_statistics(sums),
        "loss": sums["loss"] / max(len(batches), 1),
        **branch_statistics(trained, policy),
        "grad_norm": sum(norms) / max(len(norms), 1),
        "lr": optimizer.rate(max(optimizer.num_steps - 1, 0)),
        **clock.seconds,
    }
    return values, position + len(groups)


# ------------------------------------------------------------------- 1. draw, sample, score, gate, and refill


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
    """Generate groups until B are accepted or the cap is reached (App. G).

    Returns: all groups in order of draw, B of every generation batch, the same on all ranks.
    """
    groups: list[SampledGroup] = []
    num_accepted, num_batches = 0, 0
    limits = {"train_batch": config.train_batch, "max_batches": config.max_generation_batches}
    while needs_refill(num_accepted, num_batches, **limits):
        report(f"sampling, {num_accepted} of {config.train_batch} accepted")
        first, size = position + len(groups), config.train_batch
        stream = drawn_states(len(states), config.seed, first, 2 * size)
        drawn, coming = [states[place] for place in stream[:size]], [states[place] for place in stream[size:]]
        rollouts = sample_rollouts(
            policy, ranks, drawn, coming, prompts, config, step=step, first_draw=len(groups)
        )
        groups += [score_and_gate(state, own, config) for state, own in zip(drawn, rollouts, strict=True)]
        num_accepted, num_batches = sum(group.gate.accepted for group in groups), num_batches + 1
    return groups


def drawn_states(num_states: int, seed: int, first: int, count: int) -> list[int]:
    """Return the places `first` to `first + count` of the endless stream of prompts.

    Every epoch is one permutation of all states, shuffled anew from (seed, epoch).

    >>> stream = drawn_states(3, 0, 0, 6)
    >>> sorted(stream[:3]), sorted(stream[3:]), drawn_states(3, 0, 2, 2) == stream[2:4]
    ([0, 1, 2], [0, 1, 2], True)
    """
    orders: dict[int, list[int]] = {}
    places = []
    for position in range(first, first + count):
        epoch, place = divmod(position, num_states)
        if epoch not in orders:
            generator = torch.Generator().manual_seed(derive_seed(seed, "prompts", epoch))
            orders[epoch] = torch.randperm(num_states, generator=generator).tolist()
        places.append(orders[epoch][place])
    return places


def sample_rollouts(
    policy: PolicyModel,
    ranks: Ranks,
    drawn: Sequence[State],
    coming: Sequence[State],
    prompts: Prompts,
    config: StepConfig,
    *,
    step: int,
    first_draw: int,
) -> list[list[Rollout]]:
    """Return n rollouts of each drawn prompt, in order of draw, the same on all ranks.

    Every rank samples every world_size-th prompt, and encodes meanwhile what it will sample next (`coming`).

    Args: first_draw: prompts drawn in this step before.
    """
    own = range(ranks.rank, len(drawn), ranks.world_size)
    encoded = [prompts(drawn[number]) for number in own]
    prompts.announce(coming[number] for number in own)
    # The seed of a rollout is (seed, step, draw, rollout): no rank and no batch shape changes a sample.
    seeds = [
        derive_seed(config.seed, step, first_draw + number, rollout)
        for number in own
        for rollout in range(config.num_rollouts)
    ]
    with unsharded(policy):  # whole weights once for all forward passes of the sampler
        sampled = sample(
            policy, encoded, n=config.num_rollouts, max_new_tokens=config.response_budget, seeds=seeds
        )
    return put_together(ranks, dict(zip(own, sampled, strict=True)))


def put_together(ranks: Ranks, own: dict[int, T]) -> list[T]:
    """Return the values of all ranks in order of their numbers; each number is one rank's."""
    found = {number: value for share in ranks.gather(own) for number, value in share.items()}
    return [found[number] for number in sorted(found)]


def score_and_gate(state: State, rollouts: Sequence[Rollout], config: StepConfig) -> SampledGroup:
    """Return a group with its rewards (Table 4) and the verdict of the gates (Eq. 1)."""
    rewards = tuple(score(rollout.text, state.target, state.indices) for rollout in rollouts)
    values = [reward.value for reward in rewards]
    verdict = gate(values, min_std=config.min_std, min_competent=config.min_competent)
    return SampledGroup(state, tuple(rollouts), rewards, verdict)


# -------------------------------------------------------------------------- 3. old and reference log-probs


def old_and_reference(
    policy: PolicyModel,
    ranks: Ranks,
    groups: Sequence[SampledGroup],
    prompts: Prompts,
    config: StepConfig,
) -> list[GroupLogProbs]:
    """Return the log-probs of the groups that will be trained, in their order, the same on all ranks.

    Old log-probs are the policy's before the first update of the step, reference log-probs the same model's
    without its adapters. The statistics' probes ride in the packs of the old ones.
    """
    rollouts = [(group.state, [rollout.ids for rollout in group.rollouts]) for group in groups]
    probes = [probes_of(group, policy) for group in groups]
    answers = [
        (state, [*ids, *(probe.ids for probe in extra)])
        for (state, ids), extra in zip(rollouts, probes, strict=True)
    ]
    old = log_probs(policy, ranks, answers, prompts, config)
    with disabled(policy.model):
        reference = log_probs(policy, ranks, rollouts, prompts, config)
    return [
        GroupLogProbs(
            group=group,
            old=tuple(before[: len(group.rollouts)]),
            reference=tuple(frozen),
            probes=extra,
            probed=tuple(before[len(group.rollouts) :]),
        )
        for group, before, frozen, extra in zip(groups, old, reference, probes, strict=True)
    ]


def log_probs(
    policy: PolicyModel,
    ranks: Ranks,
    answers: Sequence[tuple[State, Sequence[Tensor]]],
    prompts: Prompts,
    config: StepConfig,
) -> list[list[Tensor]]:
    """Return the log-probs [R] of the answers (token ids [R]) to each state, without gradient.

    All ranks share the work and get the same result. Packing changes nothing but speed.
    """
    items = [packable(state, ids, prompts) for state, ids in answers]
    found = training.answer_logprobs(policy, ranks, items, config.token_budget)
    return [[found[number, answer] for answer in range(len(ids))] for number, (_, ids) in enumerate(answers)]


def packable(state: State, ids: Sequence[Tensor], prompts: Prompts) -> Packable:
    """Return a state with some answers, whose prompt only the rank that packs it encodes."""
    return Packable((state.prompt_length, tuple(map(len, ids))), lambda: Bundle(prompts(state), tuple(ids)))


# ----------------------------------------------------------------------------------------------- 4. update


def training_group(found: GroupLogProbs) -> TrainingGroup:
    """Return a group as the loss sees it: all its rollouts, and the target too if it was rejected.

    The policy-gradient and KL masks cover a whole rollout, end-of-turn included. The salvage target is one
    more answer of its group, teacher-forced whole; its mask is the action span A (Eq. 3).
    """
    group = found.group
    ids = [rollout.ids for rollout in group.rollouts]
    answers = [
        Answer(
            mask=torch.ones(len(own), dtype=torch.bool),
            accepted=group.gate.accepted,
            advantage=advantage,
            old=old,
            ref=reference,
        )
        for own, advantage, old, reference in zip(
            ids, group.gate.advantages, found.old, found.reference, strict=True
        )
    ]
    if not group.gate.accepted:
        answers.append(Answer(mask=group.state.target_mask, accepted=False))
        ids.append(group.state.target_ids)
    return TrainingGroup(group.state, tuple(answers), tuple(ids))


def update(
    policy: PolicyModel,
    ranks: Ranks,
    batch: Sequence[TrainingGroup],
    prompts: Prompts,
    optimizer: training.Optimizer,
    config: StepConfig,
) -> tuple[Counter[str], float]:
    """Make one optimizer step on a mini-batch (Eq. 2-3).

    Every pack adds its partial loss to the gradient. All denominators are those of the whole mini-batch, so
    neither packing nor ranks change the step.

    Returns: the sums of `joint_loss` over all ranks, and the gradient norm before clipping.
    """
    items = [packable(group.state, group.ids, prompts) for group in batch]
    num_tokens = None
    if config.objective.aggregation == "token-mean":
        # All rollout tokens of the mini-batch, over all ranks; the target is no part of DAPO's mean.
        num_tokens = sum(
            len(answer.mask) for group in batch for answer in group.answers if not answer.is_target
        )

    sums: Counter[str] = Counter()  # of this rank
    for item in training.rank_packs(policy, ranks, items, config.token_budget):
        answers = [batch[number].answers[answer] for number, answer in item.answers]
        new = policy.response_logprobs(item.pack)  # [T], with gradient
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
        loss, part_sums = joint_loss(new, tokens, config.loss)
        loss.backward()
        sums.update(part_sums)
    norm, _ = optimizer.step()
    total: Counter[str] = Counter()
    for other in ranks.gather(dict(sums)):
        total.update(other)
    return total, norm


# ----------------------------------------------------------------------------------- counts, and checkpoints


def counts(chosen: Selection, num_groups: int, num_updates: int, config: StepConfig) -> dict[str, int]:
    """Return what became of the groups of a step (App. J)."""
    return {
        "generated": num_groups,
        "generation_batches": num_groups // config.train_batch,
        "updates": num_updates,
        "accepted": len(chosen.accepted),
        "rejected": len(chosen.retained) + len(chosen.unused),
        "retained": len(chosen.retained),
        "dropped": len(chosen.dropped),
    }


def greedy_rewards(
    policy: PolicyModel, ranks: Ranks, states: Sequence[State], *, response_budget: int
) -> list[float]:
    """Return the rewards of the greedy answers to states of `dev`, in their order, the same on all ranks.

    Their mean chooses the best checkpoint.
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
        number: score(answer.text, states[number].target, states[number].indices).value
        for number, (answer,) in zip(own, rollouts, strict=True)
    }
    return put_together(ranks, found)
