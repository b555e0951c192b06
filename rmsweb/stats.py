"""Statistics of an evaluation: pass@1, pass@k, 95% intervals, paired differences, prices.

Purpose: the figures of Tables 1-3 and Fig. 1 (App. A) and how sure one may be of them. Outcomes are given as
one list of runs a task: `{"task": [True, False, True]}`. Nothing here imports the package.

ours: intervals resample tasks, not runs, because the runs of a task are not independent; the same tasks are
resampled on both sides of a comparison. Wilson's interval is for plain shares.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

Outcomes = Mapping[str, Sequence[bool]]
RESAMPLES = 10_000
Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95% interval and the number of units it rests on."""

    value: float
    low: float
    high: float
    n: int


def pass_at_1(outcomes: Outcomes) -> float:
    """Mean over the runs of the share of tasks solved, in [0, 1] (App. A: micro-average over tasks, every
    task run equally often); nan without tasks.

    >>> pass_at_1({"a": [True, False], "b": [True, True]})
    0.75
    """
    runs = [outcome for task in outcomes.values() for outcome in task]
    return sum(runs) / len(runs) if runs else math.nan


def pass_at_k(outcomes: Outcomes, k: int) -> float:
    """Share of tasks solved at least once in k runs, in [0, 1]; with n > k runs of a task the unbiased
    estimate 1 - C(n-c, k) / C(n, k).

    Tasks with fewer than k runs raise ValueError: the figure would not be the one that its name says.

    >>> pass_at_k({"a": [True, False, False], "b": [False, False, False]}, 3)
    0.5
    """
    if not outcomes:
        return math.nan
    short = [task for task, runs in outcomes.items() if len(runs) < k]
    if short or k < 1:
        raise ValueError(f"pass@{k}: {len(short)} tasks have fewer than {k} runs, such as {short[:1]}")
    return sum(1 - math.comb(len(r) - sum(r), k) / math.comb(len(r), k) for r in outcomes.values()) / len(
        outcomes
    )


def wilson(successes: int, n: int) -> Estimate:
    """A share with Wilson's 95% interval; (nan, 0, 1) for n = 0.

    >>> wilson(0, 10).low, round(wilson(0, 10).high, 4)
    (0.0, 0.2775)
    """
    if not 0 <= successes <= n:
        raise ValueError(f"wilson: {successes} successes of {n}")
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    share, z2 = successes / n, Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Estimate(
        share, 0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half, n
    )


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Mean of one value a task with the 95% percentile interval over resampled tasks; nan without values."""
    data = np.asarray(values, dtype=float)
    if data.size == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    rng = np.random.default_rng(seed)
    step = max(1, 1_000_000 // data.size)  # resamples drawn at a time
    means = [
        data[rng.integers(0, data.size, (min(step, resamples - done), data.size))].mean(axis=1)
        for done in range(0, resamples, step)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Estimate(float(data.mean()), float(low), float(high), int(data.size))


def pass_at_1_estimate(outcomes: Outcomes, *, seed: int = 0) -> Estimate:
    """pass@1 with its 95% interval by bootstrap over tasks; n = number of tasks."""
    return bootstrap_mean([sum(runs) / len(runs) for runs in outcomes.values() if runs], seed=seed)


def paired_difference(ours: Outcomes, other: Outcomes, *, seed: int = 0) -> Estimate:
    """pass@1 of `ours` minus that of `other` over the tasks that both ran, with the 95% interval by paired
    bootstrap over tasks.

    >>> paired_difference({"a": [True], "b": [True]}, {"a": [False], "b": [False]})
    Estimate(value=1.0, low=1.0, high=1.0, n=2)
    """
    shared = sorted(task for task in ours.keys() & other.keys() if ours[task] and other[task])
    return bootstrap_mean(
        [sum(ours[t]) / len(ours[t]) - sum(other[t]) / len(other[t]) for t in shared], seed=seed
    )


def evidence(difference: Estimate) -> Literal["shows", "contradicts", "undecided"]:
    """What a paired difference says about a claimed improvement: the interval excludes 0 in the claim's
    direction, in the other one, or not.
    """
    return "shows" if difference.low > 0 else "contradicts" if difference.high < 0 else "undecided"


# ----------------------------------------------------------------------------------------------------- prices


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for a million tokens."""

    prompt: float
    completion: float


def load_prices(path: Path) -> dict[str, Price]:
    """A table of prices: `{"model": {"prompt": 1.25, "completion": 10.0}}`, US dollars for a million tokens."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {model: Price(float(row["prompt"]), float(row["completion"])) for model, row in data.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path}: {error}; expected {{"model": {{"prompt": X, "completion": Y}}}} in US dollars for a million tokens'
        ) from None


def cost(prompt_tokens: int, completion_tokens: int, price: Price) -> float:
    """US dollars for that many tokens.

    >>> cost(1_000_000, 100_000, Price(1.0, 10.0))
    2.0
    """
    return (prompt_tokens * price.prompt + completion_tokens * price.completion) / 1e6


def cost_of_k(cost_of_one: float, k: int) -> float:
    """C_k = k C_1: what k attempts at every task cost (Fig. 1)."""
    return k * cost_of_one
