"""Laws of the divergence search: what a run takes back is no decision, what the other run does too is no
divergence, and planted errors are found where they were planted."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mining_world import page, render, run
from planted_pairs import ERRORS, Planted, planted_pairs
from teacher_pool import collect_pool, runs_of, sample_of, wrong_moves

from rmsweb.mining.alignment import AlignedRun, Contrast
from rmsweb.mining.divergence import candidates, in_order, takes
from rmsweb.mining.search import Judge, MinerConfig, evidence_of, mine, pairs
from rmsweb.mining.taxonomy import Features, Label, rule_label
from rmsweb.playground.tasks import TEMPLATES, make_worlds

ORDERS = st.permutations(["select@/item", "type@/item"])


def decisions(success: AlignedRun, failure: AlignedRun) -> set[int]:
    """Return the positions of the success that are candidates."""
    return {item.success_step for item in candidates(Contrast(success, failure))}


# ------------------------------------------------------------------------------------- what a run settles on


def test_a_detour_is_no_decision() -> None:
    """Pages that were left by the way back, with nothing entered there, are not on the path."""
    straight = run("open@/ select@/item add@/item done@/cart", True)
    detour = run(
        "open@/ open@/help back@/other select@/item open@/help back@/other add@/item done@/cart", True
    )
    assert straight.path == (0, 1, 2, 3)
    assert detour.path == (0, 1, 2, 3, 4, 5, 6, 7)  # the item page was left with its option chosen
    looked = run("open@/ open@/help back@/other open@/ select@/item done@/cart", True)
    assert looked.path == (3, 4, 5)
    assert 0 not in looked.settled


def test_what_was_read_on_the_way_is_no_detour() -> None:
    """A page whose words are in the answer was needed, although the run went back from it."""
    found = run("open@/ scroll@/details back@/details open@/ done@/cart", True)
    assert found.path == (3, 4)
    steps = list(found.trajectory.steps)
    steps[1] = replace(steps[1], observation=page("/details", text="weight 731"))
    told = replace(found.trajectory, steps=tuple(steps), final_text="it weighs 731")
    assert AlignedRun(told, True).path == (0, 1, 2, 3, 4)


def test_an_overwritten_value_is_no_decision() -> None:
    """Of two values for one field on one page the last one counts."""
    assert list(run("blue@/item select@/item add@/item done@/cart", True).settled) == [1, 2, 3]


def test_a_repeated_move_counts_where_it_was_made_last() -> None:
    """A move that is made again on the same page has not settled anything before."""
    assert list(run("add@/item scroll@/item add@/item done@/cart", True).settled) == [1, 2, 3]


# -------------------------------------------------------------------------------------- what is a divergence


@given(ORDERS, ORDERS)
def test_the_same_moves_in_another_order_are_no_divergence(won: list[str], lost: list[str]) -> None:
    """A failing run that makes the success's moves sooner or later does not part from it there."""
    success = run(" ".join(["open@/", *won, "add@/item", "done@/cart"]), True)
    failure = run(" ".join(["open@/", *lost, "checkout@/item", "done@/cart"]), False, name="b", shift=3)
    assert decisions(success, failure) == {3}


def test_a_move_one_step_later_is_no_divergence() -> None:
    """The lag of a run that scrolls first does not make its next move a missing one."""
    success = run("open@/ select@/item add@/item done@/cart", True)
    late = run("scroll@/ open@/ scroll@/item select@/item checkout@/item done@/cart", False, name="b")
    assert decisions(success, late) == {2}


def test_identical_runs_do_not_part() -> None:
    """Two runs with the same moves have no candidate, whatever the verdicts."""
    names = "open@/ select@/item add@/item done@/cart"
    assert not decisions(run(names, True), run(names, False, name="b", shift=5))


def test_the_right_move_taken_back_is_still_missing() -> None:
    """A failing run that chose right and then overwrote it has not taken the decision."""
    success = run("open@/ select@/item add@/item done@/cart", True)
    changed = run("open@/ select@/item blue@/item add@/item done@/cart", False, name="b")
    assert decisions(success, changed) == {1}


def test_the_first_missing_decision_behind_the_last_shared_state_comes_first() -> None:
    """Where the runs never meet again, what follows the parting is its consequence."""
    success = run("open@/ select@/item checkout@/item add@/basket done@/cart", True)
    failure = run("open@/ done@/item", False, name="b")
    pair = Contrast(success, failure)
    found = candidates(pair)
    assert pair.last_shared == 2  # the page of the item looks the same before and behind the choice
    assert in_order(pair, {item: item.state for item in found})[0].success_step == 2


def test_what_another_success_does_without_comes_last() -> None:
    """A decision that every success takes is more critical than one that some do without."""
    success = run("open@/ select@/item type@/item add@/item done@/cart", True)
    other = run("open@/ select@/item add@/item done@/cart", True, name="c")
    failure = run("open@/ add@/item done@/cart", False, name="b")
    alone, beside = Contrast(success, failure), Contrast(success, failure, witnesses=(other,))
    for pair, first in ((alone, 2), (beside, 1)):
        scores = {item: item.state for item in candidates(pair)}
        assert in_order(pair, scores)[0].success_step == first
    assert takes(other, success, 1)
    assert not takes(other, success, 2)


# -------------------------------------------------------------------------------------------- planted errors


def found_right(found: Planted, judge: Judge | None) -> bool | None:
    """Return whether the planted step was mined, None where nothing was."""
    result = asyncio.run(
        mine([found.success, found.failure], render=render, judge=judge, config=MinerConfig())
    )
    return result.found[0].state.step == found.critical if result.found else None


def recall_and_precision(count: int, *, true_labels: bool) -> tuple[float, float]:
    """Mine the pairs of the first seeds and return how many planted steps were found, and were right."""
    outcomes: Counter[bool | None] = Counter()
    for planted in planted_pairs(count):

        async def judge(
            pair: Contrast, seen: Features, opinions: Sequence[Label], name: str = planted.label
        ) -> Label | None:
            return Label(name, 0.9)

        outcomes[found_right(planted, judge if true_labels else None)] += 1
    return outcomes[True] / count, outcomes[True] / (outcomes[True] + outcomes[False])


@pytest.mark.parametrize(("true_labels", "least"), [(True, 0.95), (False, 0.90)])
def test_planted_errors_are_found_where_they_are(true_labels: bool, least: float) -> None:
    """Of ten kinds of error under detours, other orders, repeated and similar pages most are found."""
    recall, precision = recall_and_precision(20 * len(ERRORS), true_labels=true_labels)
    assert recall >= least
    assert precision >= least


@pytest.mark.slow
@pytest.mark.parametrize(("true_labels", "least"), [(True, 0.95), (False, 0.90)])
def test_five_hundred_planted_errors_are_found(true_labels: bool, least: float) -> None:
    """The same on 500 pairs."""
    assert min(recall_and_precision(500, true_labels=true_labels)) >= least


# ------------------------------------------------------------------------------- against what the sites know


def test_mined_states_are_what_the_sites_call_critical() -> None:
    """Of the states mined from the teacher's runs nine in ten hold the decision that broke the failing run.

    The labels of the rules are right for eight in ten of the failing runs, and eight modes are among them.
    """
    runs = runs_of(collect_pool(make_worlds("train", 24 * len(TEMPLATES))))
    by_id = {item.trajectory.trajectory_id: item for item in runs}
    result = asyncio.run(mine(runs, render=sample_of, judge=None, config=MinerConfig(secondary=False)))
    critical = 0
    for item in result.found:
        won = by_id[item.audit.success_trajectory].trajectory.steps[item.audit.success_step - 1]
        assert won.output is not None
        critical += won.output.next_goal in wrong_moves(by_id[item.audit.failure_trajectory].trajectory)
    assert len(result.found) >= 150
    assert len({item.state.category for item in result.found}) >= 8
    assert critical >= 0.9 * len(result.found)

    right = known = 0
    modes: set[str] = set()
    tasks: dict[str, list[AlignedRun]] = {}
    for item in runs:
        tasks.setdefault(item.trajectory.task.task_id, []).append(item)
    for group in tasks.values():
        for pair in pairs(group, secondary=False):
            causes = set(wrong_moves(pair.failure.trajectory).values())
            label = rule_label(evidence_of(pair)).category
            known += bool(causes)
            right += any(label in cause for cause in causes)
            modes |= {label} if causes else set()
    assert right >= 0.8 * known
    assert len(modes) >= 8
