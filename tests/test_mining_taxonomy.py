"""Laws of the failure modes: Table 5, moves without indices, rule features, local evidence."""

from dataclasses import replace
from typing import Any

import pytest
from mining_world import TASK, on_page, page, step, trajectory

from rmsweb.mining.taxonomy import (
    BY_NAME,
    CATEGORIES,
    CLICK,
    EXTRACTION,
    MODES,
    SEARCH,
    SELECT,
    Move,
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


# What rules see -> the label. A row changes NEUTRAL, a finished run that did one thing less; the first row of
# a mode is its plainest case, and the rows behind it differ from it in one point and are something else.
NEUTRAL = features("Buy a lamp", trajectory("open add done"), trajectory("open done"), None)
ROW, BUTTON = Move(CLICK, "a", "oak lamp"), Move(CLICK, "button", "send")
OTHER_ROW, OPTION = Move(CLICK, "a", "steel lamp"), Move(SELECT, "select", "color", "red")
DONE, READ = Move("done", value="42"), Move(EXTRACTION, value="price")
SEEN = frozenset({"any"})
EXAMPLES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "evidence": [
        ({"asks": True, "decision": (ROW,), "instead": (DONE,)}, "evidence"),
        ({"asks": False, "decision": (ROW,), "instead": (DONE,)}, "interaction"),
    ],
    "endpoint": [
        ({"decision": (BUTTON,), "instead": (DONE,), "traits": SEEN | {"brings to the end"}}, "endpoint"),
        ({"decision": (BUTTON,), "instead": (DONE,), "traits": SEEN}, "interaction"),
    ],
    "obstruction": [
        ({"blocked": True, "decision": (ROW,), "instead": (OTHER_ROW,)}, "obstruction"),
        ({"blocked": False, "decision": (ROW,), "instead": (OTHER_ROW,)}, "constraint"),
    ],
    "interaction": [
        ({"ended": "stalled", "errors": 2, "decision": (BUTTON,), "instead": (ROW,)}, "interaction"),
        ({"ended": "environment", "decision": (BUTTON,), "instead": (ROW,)}, "runtime"),
    ],
    "runtime": [
        ({"ended": "environment", "decision": (ROW,)}, "runtime"),
        ({"unreadable": 3, "decision": (ROW,)}, "runtime"),
        ({"unreadable": 1, "decision": (ROW,)}, "interaction"),
    ],
    "constraint": [
        ({"decision": (ROW,), "instead": (OTHER_ROW,)}, "constraint"),
        ({"decision": (OPTION,), "instead": (replace(OPTION, value="blue"),)}, "constraint"),
        ({"decision": (ROW,), "instead": (Move("scroll"),)}, "interaction"),
    ],
    "controls": [
        ({"decision": (OPTION,), "instead": (ROW,), "leads_to_link": True}, "controls"),
        ({"decision": (OPTION,), "instead": (ROW,), "leads_to_link": False}, "interaction"),
    ],
    "date": [
        ({"decision": (ROW,), "instead": (BUTTON,), "traits": SEEN | {"concerns time"}}, "date"),
        ({"decision": (ROW,), "instead": (BUTTON,), "traits": SEEN}, "interaction"),
    ],
    "discovery": [
        ({"decision": (ROW,), "instead": (BUTTON,), "traits": SEEN | {"looks for something"}}, "discovery"),
        ({"repeated_searches": 2, "decision": (ROW,), "instead": (Move(SEARCH, value="x"),)}, "discovery"),
        ({"repeated_searches": 1, "decision": (ROW,), "instead": (Move(SEARCH, value="x"),)}, "interaction"),
    ],
    "omission": [
        (
            {"asks": True, "several": True, "read_before": True, "decision": (READ,), "instead": (DONE,)},
            "omission",
        ),
        (
            {"asks": True, "several": False, "read_before": True, "decision": (READ,), "instead": (DONE,)},
            "evidence",
        ),
    ],
    "boundary": [
        ({"decision": (BUTTON,), "instead": (ROW,), "traits": SEEN | {"concerns an account"}}, "boundary"),
        ({"decision": (BUTTON,), "instead": (ROW,), "traits": SEEN}, "interaction"),
    ],
}


@pytest.mark.parametrize("mode", CATEGORIES)
def test_rules_tell_a_mode_from_its_neighbour(mode: str) -> None:
    """Each mode has a plain case, and cases that differ in one point and are another mode."""
    rows = EXAMPLES[mode]
    assert rows[0][1] == mode
    assert any(expected != mode for _, expected in rows)
    for changes, expected in rows:
        label = rule_label(replace(NEUTRAL, **changes))
        assert label.category == expected, changes
        assert 0 < label.confidence <= 1
        assert label.source == "rule"


def test_features_tell_the_judge_where_the_runs_part() -> None:
    """The judge reads what both runs did there, by element."""
    success, failure = trajectory("open@/ select@/item done@/cart"), trajectory("open@/ add@/item done@/cart")
    seen = features(TASK, success, failure, (1, 1))
    text = features_text(seen)
    assert "'color' red" in text
    assert "'add to cart'" in text
    assert seen.decision == moves_of(success.steps[1])
    assert "nothing" in features_text(features(TASK, success, failure, None))


def test_blocked_pages_are_recognised() -> None:
    """Signatures of CAPTCHA and 403 pages count, a shop page does not."""
    assert not is_blocked(step(1, "add"))
    blocks = ("Please solve this CAPTCHA", "403 Forbidden", "Verify you are human", "Checking your browser")
    for words in blocks:
        blocked = on_page(trajectory("add"), 0, page("/", text=words))
        assert is_blocked(blocked.steps[0])
    for words in ("Meet in room 403", "The Forbidden City", "403 rooms"):
        assert not is_blocked(on_page(trajectory("add"), 0, page("/", text=words)).steps[0])
