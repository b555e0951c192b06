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
from typing import Any, Literal

import torch
from torch import Tensor

from rmsweb.config import Config, opt, part
from rmsweb.engine import training
from rmsweb.engine.distributed import Ranks, unsharded
from rmsweb.engine.lora import disabled
from rmsweb.engine.packing import Group
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.sampler import Decoding, sample
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
from rmsweb.salvage.states import Prompts, SampledGroup, State

DAPO_CLIP_HIGH = 0.28  # Clip-Higher of DAPO
Report = Callable[[str], None]


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
    """What a group brings to the loss: its answers, and their tokens in the same order."""

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

    A step with nothing accepted or retained changes no weight.

    Args: step: number of this step, from 0, skipped ones counted. position: prompts drawn in all steps
    before.
    Returns: the statistics of App. J and the new position.
    """
    clock, prompts = Clock(), Prompts(policy)
    # 1. Sample n rollouts a prompt, score and gate them, refill until B groups are accepted (Eq. 1, App. G).
    with clock("sample_s"):
        groups = generate(policy, ranks, states, prompts, config, step=step, position=position, report=report)
    # 2. Keep B accepted and S rejected groups, and deal them into mini-batches of M.
    accepted = [group.gate.accepted for group in groups]
    sizes = {"train_batch": config.train_batch, "mini_batch": config.mini_batch}
    chosen = select_groups(accepted, **sizes, salvage=config.algorithm == "salvage-ds")
    batches = deal_mini_batches(chosen, mini_batch=config.mini_batch)
    trained = {place: groups[place] for batch in batches for place in batch}
    probes = [probes_of(group, policy) for group in trained.values()]
    # 3. Old log-probs are the policy's before the first update, reference log-probs those without adapters.
    report(f"scoring {len(trained)} groups")
    with clock("score_s"):
        rollouts = [(group.state, [rollout.ids for rollout in group.rollouts]) for group in trained.values()]
        probed = [
            (state, ids + [found.ids for found in extra])
            for (state, ids), extra in zip(rollouts, probes, strict=True)
        ]
        old = log_probs(policy, ranks, probed, prompts, config)
        with disabled(policy.model):
            reference = log_probs(policy, ranks, rollouts, prompts, config)
    ready = {
        place: training_group(group, before, frozen)
        for (place, group), before, frozen in zip(trained.items(), old, reference, strict=True)
    }
    # 4. One optimizer step a mini-batch (Eq. 2-3).
    sums: Counter[str] = Counter()
    norms = []
    with clock("update_s"):
        for number, batch in enumerate(batches, 1):
            report(f"update {number} of {len(batches)}")
            part_sums, norm = update(
                policy, ranks, [ready[place] for place in batch], prompts, optimizer, config
            )
            sums.update(part_sums)
            norms.append(norm)
    values = {
        **counts(chosen, len(groups), len(batches), config),
        **generation_statistics(groups),
        **loss_statistics(sums),
        "loss": sums["loss"] / max(len(batches), 1),
        **branch_statistics(list(trained.values()), probes, old, policy),
        "grad_norm": sum(norms) / max(len(norms), 1),
        "lr": optimizer.rate(max(optimizer.num_steps - 1, 0)),
        **clock.seconds,
    }
    return values, position + len(groups)


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
    """Draw prompts, sample n rollouts of each, score and gate them; refill until B groups are accepted or the
    cap is reached.

    Every rank samples every world_size-th prompt of a batch; the result, in order of draw, is the same on all
    ranks.
    """
    groups: list[SampledGroup] = []
    num_accepted, num_batches = 0, 0
    limits = {"train_batch": config.train_batch, "max_batches": config.max_generation_batches}
    while needs_refill(num_accepted, num_batches, **limits):
        report(f"sampling, {num_accepted} of {config.train_batch} accepted")
        first, size = position + len(groups), config.train_batch
        drawn = [states[place] for place in drawn_states(len(states), config.seed, first, size)]
        coming = [states[place] for place in drawn_states(len(states), config.seed, first + size, size)]
        own = range(ranks.rank, size, ranks.world_size)
        encoded = [prompts(drawn[number]) for number in own]
        prompts.announce(coming[number] for number in own)
        # The seed of a rollout: (seed, step, draw, rollout). A draw counts the prompts drawn in this step.
        seeds = [
            derive_seed(config.seed, step, len(groups) + number, rollout)
            for number in own
            for rollout in range(config.num_rollouts)
        ]
        with unsharded(policy):
            sampled = sample(
                policy, encoded, n=config.num_rollouts, max_new_tokens=config.response_budget, seeds=seeds
            )
        rollouts = {
            number: answers
            for found in ranks.gather(dict(zip(own, sampled, strict=True)))
            for number, answers in found.items()
        }
        for number, state in enumerate(drawn):
            rewards = tuple(score(answer.text, state.target, state.indices) for answer in rollouts[number])
            verdict = gate(
                [reward.value for reward in rewards],
                min_std=config.min_std,
                min_competent=config.min_competent,
            )
            groups.append(SampledGroup(state, tuple(rollouts[number]), rewards, verdict))
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


def log_probs(
    policy: PolicyModel,
    ranks: Ranks,
    answers: Sequence[tuple[State, Sequence[Tensor]]],
    prompts: Prompts,
    config: StepConfig,
) -> list[list[Tensor]]:
    """Return the log-probs [R] of the answers (token ids [R]) to each state, without gradient.

    These are the old log-probs of Eq. 2, and the reference's where the adapters are off. All ranks share the
    work and get the same result.
    """
    lengths = [(state.prompt_length, tuple(map(len, ids))) for state, ids in answers]

    def encode(number: int) -> Group:
        state, ids = answers[number]
        return Group(prompts(state), tuple(ids))

    found = training.score(policy, ranks, lengths, encode, config.token_budget)
    return [[found[number, answer] for answer in range(len(ids))] for number, (_, ids) in enumerate(answers)]


def training_group(group: SampledGroup, old: Sequence[Tensor], reference: Sequence[Tensor]) -> TrainingGroup:
    """Return what a group brings to the loss: its rollouts, whole, and the target of a rejected group.

    The salvage target is one more answer of its group; its mask is the action span A (Eq. 3). `old` may be
    longer than the rollouts: probes follow them.
    """
    ids = [rollout.ids for rollout in group.rollouts]
    answers = [
        Answer(
            mask=torch.ones(len(own), dtype=torch.bool),
            accepted=group.gate.accepted,
            advantage=advantage,
            old=before,
            ref=frozen,
        )
        for own, advantage, before, frozen in zip(
            ids, group.gate.advantages, old[: len(ids)], reference, strict=True
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

    Returns: the sums of `joint_loss` over all ranks, and the gradient norm.
    """
    lengths = [(group.state.prompt_length, tuple(map(len, group.ids))) for group in batch]
    num_tokens = None
    if config.objective.aggregation == "token-mean":  # all rollout tokens of the mini-batch, over all ranks
        num_tokens = sum(
            len(answer.mask) for group in batch for answer in group.answers if not answer.is_target
        )

    def encode(number: int) -> Group:
        return Group(prompts(batch[number].state), batch[number].ids)

    sums: Counter[str] = Counter()  # of this rank
    for item in training.rank_packs(policy, ranks, lengths, encode, config.token_budget):
        answers = [batch[number].answers[answer] for number, answer in item.answers]
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
        loss, part_sums = joint_loss(new, tokens, config.loss)
        loss.backward()
        sums.update(part_sums)
    norm, _ = optimizer.step()
    total: Counter[str] = Counter()
    for other in ranks.gather(dict(sums)):
        total.update(other)
    return total, norm


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
    """Return the rewards of the greedy answers to some states, in their order, the same on all ranks.

    They choose a checkpoint on `dev`.
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
    everything = {number: value for gathered in ranks.gather(found) for number, value in gathered.items()}
    return [everything[number] for number in range(len(states))]
