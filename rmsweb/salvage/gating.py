"""The gates: which groups train, and how they are dealt into mini-batches.

Purpose: everything between rewards and the loss, as pure functions of numbers.

Place in the paper: Eq. 1 (`gate`), App. G "Batching and lengths" (`needs_refill`, `num_retained`).
Letters: n rollouts a group, B groups a train batch, M groups a mini-batch, D rejected groups of a step, S
retained ones.

Deviations:
1. `ours:` a group with max == min has sigma exactly 0 whatever rounding says. A group of one is rejected,
   because its sigma does not exist.
2. `ours:` S = M * floor(min(D, B) / M), the first S to arrive; the paper states it for B = 64 and M = 16.
3. `ours:` accepted groups beyond B are dropped in order of arrival. They are neither accepted nor rejected,
   and they are counted.
4. `ours:` with fewer than B accepted groups at the cap, the step trains on what it has: ceil((accepted + S) /
   M) mini-batches, possibly none.
5. `ours:` DAPO here keeps the std gate; `min_std=0` gives its own criterion, sigma > 0. It retains no
   rejected group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MIN_STD = 0.10  # epsilon_sigma, App. G
MIN_COMPETENT = 0.55  # r_comp, App. G
ADVANTAGE_EPS = 1e-6  # epsilon of Eq. 1

Cell = Literal["accepted", "no contrast", "not competent", "neither"]
CELLS: tuple[Cell, ...] = ("accepted", "no contrast", "not competent", "neither")


@dataclass(frozen=True, slots=True)
class Gate:
    """The verdict of Eq. 1 on one group. The advantages of a rejected group are exactly 0."""

    mean: float
    std: float  # Bessel-corrected
    best: float
    has_contrast: bool
    is_competent: bool
    accepted: bool  # k_g
    advantages: tuple[float, ...]

    @property
    def cell(self) -> Cell:
        """The cell of (std gate, competence gate); under DAPO an accepted group may be "not competent"."""
        if self.is_competent:
            return "accepted" if self.has_contrast else "no contrast"
        return "not competent" if self.has_contrast else "neither"


def sample_std(values: Sequence[float]) -> float:
    """Return the Bessel-corrected standard deviation sigma_g; 0 for equal values and a single one.

    The paper's example (App. H) is eight rollouts, seven on one level and one on the next.

    >>> round(sample_std([0.7] * 7 + [1.0]), 9), round(0.3 / 8**0.5, 9), sample_std([0.7] * 8)
    (0.106066017, 0.106066017, 0.0)
    """
    if len(values) < 2 or max(values) == min(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def gate(
    rewards: Sequence[float], *, min_std: float = MIN_STD, min_competent: float | None = MIN_COMPETENT
) -> Gate:
    """Return both gates and the advantages of one group (Eq. 1).

        k = 1[sigma >= min_std] * 1[max r >= min_competent],    A = k (r - mean) / (sigma + 1e-6)

    Args: rewards: n raw rewards in [0, 1], without any KL term. min_std: epsilon_sigma; 0 asks for sigma > 0,
    as DAPO does. min_competent: r_comp; None switches the competence gate off (DAPO).
    Raises: ValueError for no or non-finite rewards.

    >>> gate([0.7] * 7 + [1.0]).accepted, gate([0.7] * 8).accepted, gate([0.3] * 7 + [0.0]).accepted
    (True, False, False)
    >>> [round(a, 6) for a in gate([1.0, 0.3]).advantages]
    [0.707105, -0.707105]
    """
    values = [float(reward) for reward in rewards]
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"found rewards {values}, expected at least one finite number")
    mean, std, best = math.fsum(values) / len(values), sample_std(values), max(values)
    has_contrast = std >= min_std and std > 0
    is_competent = best >= (MIN_COMPETENT if min_competent is None else min_competent)
    accepted = has_contrast and (is_competent or min_competent is None)
    advantages = tuple((value - mean) / (std + ADVANTAGE_EPS) if accepted else 0.0 for value in values)
    return Gate(mean, std, best, has_contrast, is_competent, accepted, advantages)


# --------------------------------------------------------------------------------------- refill and selection


def needs_refill(num_accepted: int, num_batches: int, *, train_batch: int, max_batches: int) -> bool:
    """Say whether a step generates another batch: until B groups are accepted, or the cap (App. G).

    >>> needs_refill(63, 15, train_batch=64, max_batches=16)
    True
    >>> needs_refill(64, 1, train_batch=64, max_batches=16)
    False
    """
    return num_accepted < train_batch and num_batches < max_batches


def num_retained(num_rejected: int, *, train_batch: int, mini_batch: int) -> int:
    """Return S = M * floor(min(D, B) / M), the number of rejected groups that the anchor keeps (App. G).

    >>> [num_retained(d, train_batch=64, mini_batch=16) for d in (15, 16, 63, 64, 200)]
    [0, 16, 48, 64, 64]
    """
    return mini_batch * (min(num_rejected, train_batch) // mini_batch)


@dataclass(frozen=True, slots=True)
class Selection:
    """What became of the generated groups: their places in the order of arrival, each place once."""

    accepted: tuple[int, ...]  # at most B
    retained: tuple[int, ...]  # S rejected groups that get the salvage anchor
    unused: tuple[int, ...]  # other rejected groups
    dropped: tuple[int, ...]  # accepted beyond B


def select_groups(
    accepted: Sequence[bool], *, train_batch: int, mini_batch: int, salvage: bool = True
) -> Selection:
    """Split the generated groups of a step.

    Args: accepted: k_g of every generated group in order of arrival (= order of draw). salvage: False keeps
    no rejected group (DAPO).

    >>> select_groups([True, False, True, False, False, True], train_batch=2, mini_batch=2)
    Selection(accepted=(0, 2), retained=(1, 3), unused=(4,), dropped=(5,))
    """
    passed = [place for place, k in enumerate(accepted) if k]
    rejected = [place for place, k in enumerate(accepted) if not k]
    kept = num_retained(len(rejected), train_batch=train_batch, mini_batch=mini_batch) if salvage else 0
    return Selection(
        tuple(passed[:train_batch]),
        tuple(rejected[:kept]),
        tuple(rejected[kept:]),
        tuple(passed[train_batch:]),
    )


def deal_mini_batches(selection: Selection, *, mini_batch: int) -> list[tuple[int, ...]]:
    """Return mini-batches of at most M groups: accepted groups, then retained ones, dealt round-robin.

    Sizes and the number of each kind differ by at most 1. At the paper's sizes there are 4 + S / 16 of them;
    none where nothing was accepted or retained, and the step is skipped.

    >>> deal_mini_batches(Selection((0, 2, 5), (1,), (), ()), mini_batch=2)
    [(0, 5), (2, 1)]
    """
    order = selection.accepted + selection.retained
    count = math.ceil(len(order) / mini_batch)
    return [order[first::count] for first in range(count)]
