"""Laws of the figures of an evaluation: rates, denominators, failure modes, the table for a terminal."""

from collections import Counter
from pathlib import Path

import pytest
from fake_world import trajectory
from hypothesis import given
from hypothesis import strategies as st
from mining_world import held_out

from rmsweb.evaluation.figures import (
    UNSOLVED,
    Results,
    RunRow,
    failure_modes,
    figures_of,
    summarize,
    turned,
)
from rmsweb.mining.taxonomy import CATEGORIES
from rmsweb.records import Judgement, Source, Verdict
from rmsweb.report.page import terminal_table


def verdict(word: Verdict) -> Judgement:
    return Judgement(trajectory_id="x", judge="check", model="", verdict=word)


def row(task: str, run: int, success: bool, **fields: object) -> RunRow:
    values = {
        "trajectory_id": f"{task}.{run}",
        "site": "shop",
        "category": "c",
        "declared": success,
        "judgement": verdict("success" if success else "not_success"),
        "ended": "done",
        "unusable": 0,
    }
    values |= {"turns": 5 + run, "actions": 9, "prompt_tokens": 100, "completion_tokens": 10}
    return RunRow(task_id=task, run=run, success=success, **(values | fields))  # type: ignore[arg-type]


def test_a_run_without_verdict_is_counted_and_in_no_figure() -> None:
    """It is neither missing nor a failure."""
    rows = [row("a", 0, True), row("a", 1, False, judgement=None)]
    result = summarize(rows, tasks=1, runs=3)
    assert [result[name] for name in ("pass1", "runs", "unjudged", "missing")] == [1.0, 1, 1, 1]
    table = terminal_table({"p": result})
    assert "1 unjudged" in table
    assert "pass@1" in table


def test_unknown_tokens_are_no_zero() -> None:
    """Where an endpoint does not report the tokens of a call, there is no mean of them."""
    rows = [row("a", 0, True), row("a", 1, True, usage_unknown=2)]
    result = summarize(rows, tasks=1, runs=2)
    assert result["usage_unknown"] == 2
    assert result["prompt_tokens_per_run"] is None
    assert result["completion_tokens_per_run"] is None


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5))
def test_figures_of_complete_runs_are_plain_means(table: list[list[bool]]) -> None:
    """pass@1 is the mean over runs, pass@3 the share of tasks solved once, steps are over successes."""
    rows = [
        row(str(task), run, success) for task, runs in enumerate(table) for run, success in enumerate(runs)
    ]
    result = summarize(rows, tasks=len(table), runs=3)
    assert result["pass1"] == pytest.approx(sum(map(sum, table)) / (3 * len(table)))
    assert result["pass3"] == pytest.approx(sum(map(any, table)) / len(table))
    assert (result["n"], result["runs"], result["missing"]) == (len(table), 3 * len(table), 0)
    turns = [5 + run for runs in table for run, success in enumerate(runs) if success]
    assert result["steps"] == (pytest.approx(sum(turns) / len(turns)) if turns else None)
    low, high = result["pass1_interval"]
    assert low - 1e-9 <= result["pass1"] <= high + 1e-9


def test_missing_runs_are_counted_and_never_guessed() -> None:
    """Unparsed verdicts stay in; pass@3 is over the tasks with three runs; n counts the tasks with a run."""
    rows = [
        row("a", 0, True),
        row("a", 1, False, judgement=verdict("unparsed")),
        row("a", 2, False, ended="max_steps", declared=False),
        row("b", 0, False, site="jobs"),
    ]
    result = summarize(rows, tasks=3, runs=3)
    assert [result[name] for name in ("runs", "missing", "n", "unparsed", "declared")] == [4, 5, 2, 1, 3]
    assert result["pass3"] == 1.0
    assert {name: group["n"] for name, group in result["by_site"].items()} == {"jobs": 1, "shop": 1}
    assert summarize([row("a", 0, True)], tasks=1, runs=1)["pass3"] is None
    assert summarize([], tasks=2, runs=3)["pass1"] is None


def test_a_run_succeeds_only_if_done_was_executed_and_the_judge_agrees() -> None:
    """Verdict and ending both count; the flag of the done does not."""
    won = verdict("success")
    source = Source(script="evaluate", policy="p", run=2)
    assert RunRow.of(trajectory(declared_success=False, source=source), won).success
    assert RunRow.of(trajectory(source=source), won).run == 2
    assert not RunRow.of(trajectory(ended="max_steps"), won).success
    assert not RunRow.of(trajectory(), None).success


def test_the_table_for_a_terminal_has_a_dash_for_a_missing_figure() -> None:
    """It holds the figures by policy and site, how many runs are missing, and the scripted roles."""
    for rows in ([row("a", run, run == 0) for run in range(3)], []):
        out = terminal_table({"p": summarize(rows, tasks=1, runs=3)}, ["scripted-judge"])
        assert ("33.3" in out) == ("100.0" in out) == ("shop" in out) == bool(rows)
        assert ("3 missing" in out) == (not rows)
        assert "–" in out or rows
        assert "scripted-judge" in out
    assert "R&D" in terminal_table({"R&D": summarize([], tasks=1, runs=1)})


def test_figures_of_a_folder_are_those_of_its_runs(tmp_path: Path) -> None:
    """pass@1 is the mean over runs, pass@3 counts tasks solved once, steps are over the successes."""
    results = Results(held_out(tmp_path / "sft", "+--" + "---" + "+++"))
    found = figures_of(results, [results])
    assert found["pass1"] == pytest.approx(4 / 9)
    assert found["pass3"] == pytest.approx(2 / 3)
    assert (found["steps"], found["n"], found["runs"]) == (4.0, 3, 9)
    assert found["pass1_interval"][0] <= found["pass1"] <= found["pass1_interval"][1]


def test_failures_have_a_mode_where_their_task_was_ever_solved(tmp_path: Path) -> None:
    """A failed run is compared with a success of its task, whoever had it; every failure is counted once."""
    sft, rl = (
        Results(held_out(tmp_path / name, wins))
        for name, wins in (("sft", "---" + "-?-"), ("rl", "+--" + "---"))
    )
    assert [*failure_modes(sft, [sft]).values()] == [UNSOLVED] * 6
    found = Counter(failure_modes(sft, [sft, rl]).values())
    assert found[UNSOLVED] == 3
    assert found.total() == 6
    assert set(found) <= {*CATEGORIES, UNSOLVED}
    assert figures_of(sft, [sft])["format_errors"] == pytest.approx(2 / (5 * 3 + 2))
    assert figures_of(rl, [sft])["format_errors"] == 0


def test_turned_runs_are_those_whose_outcome_changed(tmp_path: Path) -> None:
    """Runs are matched by task and number, and each change is found once."""
    before, after = (
        Results(held_out(tmp_path / name, wins))
        for name, wins in (("sft", "--+" + "+-"), ("rl", "+--" + "+-" + "+"))
    )
    found = turned(before, after)
    assert [(a.trajectory_id, b.trajectory_id) for a, b in found if b.success] == [("t0.n0", "t0.n0")]
    assert [(a.trajectory_id, b.trajectory_id) for a, b in found if a.success] == [("t0.n2", "t0.n2")]
    assert turned(after, before) == [(b, a) for a, b in found]
