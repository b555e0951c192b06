"""Statistics of an evaluation: pass@1, pass@k, 95% intervals, paired differences, prices.

Purpose: the figures of Tables 1-3 and Fig. 1 (App. A) and how sure one may be of them. Outcomes are one list
of runs a task: `{"task": [True, False, True]}`. Nothing here imports the package.

ours: intervals resample tasks, not runs, because the runs of a task are not independent; the same tasks are
resampled on both sides of a comparison.
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
DRAWS_AT_A_TIME = 1_000_000  # bounds the memory of the bootstrap


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95% interval and the number of units it rests on."""

    value: float
    low: float
    high: float
    n: int


def pass_at_k(outcomes: Outcomes, k: int) -> float:
    """Return the share of tasks solved at least once in k runs, in [0, 1]; nan without tasks.

    With n > k runs of a task of which c succeed it is the unbiased estimate 1 - C(n-c, k) / C(n, k). Raises
    ValueError if a task has fewer than k runs: the figure would not be the one that its name says.

    >>> pass_at_k({"a": [True, False, False], "b": [False, False, False]}, 3)
    0.5
    """
    if not outcomes:
        return math.nan
    short = [task for task, runs in outcomes.items() if len(runs) < k]
    if short or k < 1:
        raise ValueError(f"pass@{k}: {len(short)} tasks have fewer than {k} runs, such as {short[:1]}")
    solved = (1 - math.comb(len(runs) - sum(runs), k) / math.comb(len(runs), k) for runs in outcomes.values())
    return sum(solved) / len(outcomes)


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Return the mean of one value a task with the 95% percentile interval over resampled tasks.

    All figures are nan without values.
    """
    data = np.asarray(values, dtype=float)
    if data.size == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    rng = np.random.default_rng(seed)
    step = max(1, DRAWS_AT_A_TIME // data.size)
    means = [
        data[rng.integers(0, data.size, (min(step, resamples - done), data.size))].mean(axis=1)
        for done in range(0, resamples, step)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Estimate(float(data.mean()), float(low), float(high), int(data.size))


def pass_at_1_estimate(outcomes: Outcomes, *, seed: int = 0) -> Estimate:
    """Return pass@1 (App. A: the mean over tasks of the share of runs that succeed) with its 95% interval.

    The interval is a bootstrap over tasks; n counts the tasks.

    >>> pass_at_1_estimate({"a": [True, False], "b": [True, True]}).value
    0.75
    """
    return bootstrap_mean([sum(runs) / len(runs) for runs in outcomes.values() if runs], seed=seed)


def paired_difference(ours: Outcomes, other: Outcomes, *, seed: int = 0) -> Estimate:
    """Return pass@1 of `ours` minus that of `other` over the tasks that both ran, with its 95% interval.

    The interval is a paired bootstrap over tasks.

    >>> paired_difference({"a": [True], "b": [True]}, {"a": [False], "b": [False]})
    Estimate(value=1.0, low=1.0, high=1.0, n=2)
    """
    shared = sorted(task for task in ours.keys() & other.keys() if ours[task] and other[task])
    return bootstrap_mean(
        [sum(ours[task]) / len(ours[task]) - sum(other[task]) / len(other[task]) for task in shared],
        seed=seed,
    )


def evidence(difference: Estimate) -> Literal["shows", "contradicts", "undecided"]:
    """Return what a paired difference says about a claimed improvement.

    It is decided if the interval excludes 0, in the claim's direction or in the other one.
    """
    if difference.low > 0:
        return "shows"
    return "contradicts" if difference.high < 0 else "undecided"


# ----------------------------------------------------------------------------------------------------- prices


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for a million tokens."""

    prompt: float
    completion: float


def load_prices(path: Path) -> dict[str, Price]:
    """Read a table of prices: `{"model": {"prompt": 1.25, "completion": 10.0}}`, US dollars for 1e6 tokens.

    Raises ValueError, naming the file, for anything else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {model: Price(float(row["prompt"]), float(row["completion"])) for model, row in data.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path}: {error}; expected {{"model": {{"prompt": X, "completion": Y}}}} in US dollars for a '
            "million tokens"
        ) from None


def cost(prompt_tokens: int, completion_tokens: int, price: Price) -> float:
    """Return what that many tokens cost, in US dollars.

    >>> cost(1_000_000, 100_000, Price(1.0, 10.0))
    2.0
    """
    return (prompt_tokens * price.prompt + completion_tokens * price.completion) / 1e6
