"""Laws of the failure modes: Table 5, moves without indices, rule features, local evidence."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from mining_world import TASK, on_page, page, step, trajectory

from rmsweb.mining.taxonomy import (
    BY_NAME,
    CATEGORIES,
    MODES,
    features,
    features_text,
    is_blocked,
    moves_of,
    rule_label,
    signs_of,
    traits_of,
)


def test_the_modes_are_those_of_table_5() -> None:
    """Eleven categories, whose shares add up to 100 %, in falling order."""
    shares = [mode.share for mode in MODES]
    assert len(set(CATEGORIES)) == 11
    assert sum(shares) == pytest.approx(100, abs=0.02)
    assert shares == sorted(shares, reverse=True)


def test_a_move_does_not_depend_on_the_index() -> None:
    """The same element under another index gives the same move; another element or value another one."""
    assert moves_of(step(1, "add")) == moves_of(step(1, "add", shift=7))
    assert moves_of(step(1, "add")) != moves_of(step(1, "checkout"))
    assert moves_of(step(1, "select")) != moves_of(step(1, "blue"))


def test_a_failed_action_is_no_move() -> None:
    """Evidence counts what was done, not what was tried, unless asked for."""
    failed = step(1, "add", error="gone")
    assert moves_of(failed) == ()
    assert len(moves_of(failed, failed=True)) == 1


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_mode_has_closing_behaviour_and_a_violation(category: str) -> None:
    """Closing behaviour and violation of each mode name known traits and signs, and take empty windows."""
    window = trajectory("open select add done").steps
    mode = BY_NAME[category]
    wanted = mode.closing(window, TASK)
    assert wanted <= {move for found in window for move in moves_of(found)}
    assert mode.closing([], TASK) == frozenset()
    mode.violated([], wanted, "done")
    assert mode.trait in traits_of(moves_of(window[0])[0], window[0], frozenset())
    assert set(mode.signs) <= signs_of([], wanted, "").keys()


def test_a_skipped_option_violates_the_constraint() -> None:
    """A run that goes on without the option that the task names shows the violation, another one does not."""
    good, bad = trajectory("open select add done").steps, trajectory("open add done").steps
    mode = BY_NAME["constraint"]
    wanted = mode.closing(good[:3], TASK)
    assert {move.value for move in wanted if move.verb == "select_dropdown_option"} == {"red"}
    assert mode.violated(bad[:2], wanted, "")
    assert not mode.violated(good[:3], wanted, "")


@pytest.mark.parametrize(
    ("names", "category"),
    [
        ("open junk junk junk", "interaction"),
        ("search research search scroll", "interaction"),
        ("open add done", "constraint"),
    ],
)
def test_rules_point_at_plain_failures(names: str, category: str) -> None:
    """The rule category follows from how the run failed; its confidence is a share of votes."""
    found = features(
        "Buy a lamp with color red under 100 at shop", trajectory("open select add done"), trajectory(names)
    )
    label = rule_label(found)
    assert label.category in (category, "controls")
    assert 0 < label.confidence <= 1
    assert "failed run" in features_text(found)


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_mode_can_be_the_rules_label(category: str) -> None:
    """For every mode some features make it the label."""
    plain = features("Buy it", trajectory("open add done"), trajectory("open add done"))
    changes: dict[str, list[Any]] = {
        "numbers": [0, 1],
        "time_cue": [False, True],
        "login_cue": [False, True],
        "extract_cue": [False, True],
        "ended": ["done", "max_steps", "environment"],
        "blocked": [False, True],
        "repeated_searches": [0, 2],
        "missing": [(), ("click_element_by_index",), ("input_text",), ("select_dropdown_option",)],
    }
    found = (
        replace(plain, **dict(zip(changes, values, strict=True))) for values in product(*changes.values())
    )
    assert any(rule_label(item).category == category for item in found)


def test_blocked_pages_are_recognised() -> None:
    """Signatures of CAPTCHA and 403 pages count, a shop page does not."""
    assert not is_blocked(step(1, "add"))
    for words in ("Please solve this CAPTCHA", "403 Forbidden", "Verify you are human"):
        blocked = on_page(trajectory("add"), 0, page("/", text=words))
        assert is_blocked(blocked.steps[0])
