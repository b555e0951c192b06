"""Laws of the statistics: naive oracles for pass@k, coverage of the intervals, and pairing."""

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsweb.stats import (
    bootstrap_mean,
    cost,
    evidence,
    load_prices,
    paired_difference,
    pass_at_1_estimate,
    pass_at_k,
)

runs = st.lists(st.booleans(), min_size=3, max_size=5)


@given(st.dictionaries(st.text(max_size=3), runs, min_size=1, max_size=5), st.integers(1, 3))
def test_pass_at_k_is_the_mean_over_all_choices_of_k_runs(outcomes: dict[str, list[bool]], k: int) -> None:
    """pass@k equals the share of k-subsets of a task's runs with a success, averaged over tasks."""
    naive = [
        sum(any(c) for c in itertools.combinations(r, k)) / math.comb(len(r), k) for r in outcomes.values()
    ]
    assert pass_at_k(outcomes, k) == pytest.approx(sum(naive) / len(naive))


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6))
def test_pass_at_1_is_the_mean_over_runs(table: list[list[bool]]) -> None:
    """With equally many runs a task, pass@1 is the mean of the success shares of the runs, at most pass@3."""
    outcomes = {str(i): row for i, row in enumerate(table)}
    by_run = [sum(row[r] for row in table) / len(table) for r in range(3)]
    pass_at_1 = pass_at_1_estimate(outcomes).value
    assert pass_at_1 == pytest.approx(sum(by_run) / 3)
    assert pass_at_1 == pytest.approx(pass_at_k(outcomes, 1))
    assert pass_at_1 <= pass_at_k(outcomes, 3) + 1e-12


def test_too_few_runs_for_pass_at_k_are_refused() -> None:
    """pass@3 of a task with two runs is refused; without tasks there is no figure."""
    with pytest.raises(ValueError, match="fewer than 3 runs"):
        pass_at_k({"a": [True, False]}, 3)
    assert math.isnan(pass_at_1_estimate({}).value)
    assert math.isnan(pass_at_k({}, 3))


def test_the_bootstrap_resamples_tasks() -> None:
    """The interval is about 1.96 standard errors wide on each side, is repeatable, and resamples tasks."""
    values = [0.0, 1.0] * 50
    result = bootstrap_mean(values, seed=1)
    assert result == bootstrap_mean(values, seed=1)
    assert (result.value, result.n) == (0.5, 100)
    assert result.low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.02)
    assert result.high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.02)
    # three runs a task must not look like 300 tasks
    same_in_all_runs = {str(i): [i % 2 == 0] * 3 for i in range(100)}
    assert pass_at_1_estimate(same_in_all_runs).high > 0.58
    assert bootstrap_mean([]).n == 0


@settings(max_examples=10, deadline=None)
@given(st.lists(runs, min_size=2, max_size=6))
def test_paired_difference_of_a_policy_with_itself_is_zero(table: list[list[bool]]) -> None:
    """Pairing removes what both sides share: against itself a policy has an interval of width 0."""
    outcomes = {str(i): row for i, row in enumerate(table)}
    result = paired_difference(outcomes, outcomes | {"only there": [True]})
    assert (result.value, result.low, result.high, result.n) == (0, 0, 0, len(table))
    assert evidence(result) == "undecided"


def test_evidence_needs_an_interval_on_one_side_of_zero() -> None:
    """A difference is decided if its interval is on one side of 0."""
    good, bad = {str(i): [True] for i in range(5)}, {str(i): [False] for i in range(5)}
    assert evidence(paired_difference(good, bad)) == "shows"
    assert evidence(paired_difference(bad, good)) == "contradicts"


def test_costs_follow_the_table_of_prices(tmp_path: Path) -> None:
    """Costs are those of the user's table; a broken table names the file."""
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"m": {"prompt": 2, "completion": 8}}))
    assert cost(500_000, 250_000, load_prices(path)["m"]) == 3.0
    for text in ("[", '{"m": {"prompt": 1}}', '{"m": 3}', "[1]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"prices\.json"):
            load_prices(path)
