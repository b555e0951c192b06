"""The work of an RL step in advance: groups, packs, forward passes and tokens, for `train_rl.py --plan`.

Purpose: it says what packing saves before a machine is rented. The packs are those that `engine.packing`
would make of prompts and answers of given lengths.

Letters: B accepted groups of a step, M groups of a mini-batch, n rollouts a group, S retained rejected
groups.

ours: a step has as many generation batches as the paper's rejection shares imply, and as many rejected
groups as it retains at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rmsweb.engine.packing import Lengths, cost, deal_packs, lengths_in, plan_packs
from rmsweb.engine.plan import MachineConfig
from rmsweb.salvage.gating import deal_mini_batches, select_groups
from rmsweb.salvage.step import StepConfig

# App. J: about 0.36 of the groups pass both gates, so 64 accepted ones take three batches of 64
GENERATION_BATCHES = 3


@dataclass(frozen=True, slots=True)
class _Packs:
    """Packs of some groups, passes of each rank for them, and their tokens."""

    packs: int
    passes: int
    tokens: int


def _packs(answers: Sequence[int], config: StepConfig, machine: MachineConfig) -> _Packs:
    """Pack groups that have so many answers each."""
    lengths: list[Lengths] = [
        (machine.prompt_tokens, (machine.response_tokens,) * number) for number in answers
    ]
    parts = [lengths_in(content, lengths) for content in plan_packs(lengths, config.token_budget)]
    passes = len(deal_packs([cost(part) for part in parts], machine.world_size)[0])
    return _Packs(len(parts), passes, sum(prompt + sum(held) for part in parts for prompt, held in part))


def plan_work(config: StepConfig, machine: MachineConfig) -> dict[str, float]:
    """Return what a step does that finds its B accepted groups and retains all it may."""
    n, wanted, mini_batch = config.num_rollouts, config.train_batch, config.mini_batch
    accepted = [draw < wanted for draw in range(GENERATION_BATCHES * wanted)]
    chosen = select_groups(accepted, train_batch=wanted, mini_batch=mini_batch)
    batches = deal_mini_batches(chosen, mini_batch=mini_batch)
    count = len(chosen.accepted) + len(chosen.retained)
    # the old pass scores the target twice: as it is, and behind the policy's own reasoning
    old, reference = (_packs([number] * count, config, machine) for number in (n + 2, n))
    updates = [
        _packs([n if accepted[place] else n + 1 for place in batch], config, machine) for batch in batches
    ]
    passes, packed = sum(found.passes for found in updates), sum(found.tokens for found in updates)
    separate = (n * count + len(chosen.retained)) * (machine.prompt_tokens + machine.response_tokens)
    return {
        "generated groups": len(accepted),
        "accepted groups": len(chosen.accepted),
        "retained groups": len(chosen.retained),
        "optimizer steps": len(updates),
        "packs scored": old.packs + reference.packs,
        "packs updated": sum(found.packs for found in updates),
        "forward passes of a GPU": old.passes + reference.passes + passes,
        "backward passes of a GPU": passes,
        "prefilled tokens": len(accepted) * machine.prompt_tokens,
        "update tokens, packed": packed,
        "update tokens, unpacked": separate,
        "packing saves (times)": separate / packed,
    }
