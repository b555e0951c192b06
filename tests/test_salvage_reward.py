"""Laws of the reward: Table 4, the soft-F1, and their properties on any input."""

import itertools
import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import LEVELS, actions, json_values, outputs, plain_text, spellings, used_indices

from rmsweb.browser.actions import ACTIONS, canonical_text, parse_action
from rmsweb.records import Action, AgentOutput, ParseFailure
from rmsweb.salvage.gating import gate
from rmsweb.salvage.reward import RULES, Reward, action_level, align, score, soft_f1

# (action, target's parameters, predicted parameters, level)
TABLE_4 = [
    ("click_element_by_index", {"index": 18}, {"index": 18}, 1.0),
    ("click_element_by_index", {"index": 18}, {"index": 18, "while_holding_ctrl": False}, 1.0),
    ("click_element_by_index", {"index": 18, "while_holding_ctrl": None}, {"index": 18}, 1.0),
    ("click_element_by_index", {"index": 18}, {"index": 18, "while_holding_ctrl": True}, 0.7),
    ("click_element_by_index", {"index": 18}, {"index": 19}, 0.3),
    ("click_element_by_index", {"index": 18}, {"index": 19, "while_holding_ctrl": True}, 0.3),
    (
        "scroll",
        {"down": True, "num_pages": 1},
        {"down": True, "num_pages": 1.0, "frame_element_index": None},
        1.0,
    ),
    ("scroll", {"down": True, "num_pages": 1}, {"down": True, "num_pages": 1, "frame_element_index": 0}, 1.0),
    (
        "scroll",
        {"down": True, "num_pages": 1, "frame_element_index": 4},
        {"down": True, "num_pages": 3, "frame_element_index": 4},
        0.7,
    ),
    ("scroll", {"down": True, "num_pages": 1}, {"down": False, "num_pages": 1}, 0.3),
    ("scroll", {"down": True, "num_pages": 1}, {"down": True, "num_pages": 1, "frame_element_index": 4}, 0.3),
    ("scroll", {"down": True, "num_pages": 1, "frame_element_index": 4}, {"down": True, "num_pages": 1}, 0.3),
    (
        "input_text",
        {"index": 3, "text": "red shoes"},
        {"index": 3, "text": "red shoes", "clear_existing": True},
        1.0,
    ),
    ("input_text", {"index": 3, "text": "red shoes"}, {"index": 3, "text": "Red  Shoe"}, 0.7),
    (
        "input_text",
        {"index": 3, "text": "red shoes"},
        {"index": 3, "text": "red shoes", "clear_existing": False},
        0.7,
    ),
    ("input_text", {"index": 3, "text": "100"}, {"index": 3, "text": "1000"}, 0.3),
    ("input_text", {"index": 3, "text": "red shoes"}, {"index": 4, "text": "red shoes"}, 0.3),
    ("go_to_url", {"url": "https://a.com/x?b=1"}, {"url": "http://www.a.com/x/?b=1", "new_tab": False}, 1.0),
    ("go_to_url", {"url": "https://a.com/x?b=1"}, {"url": "https://a.com/x"}, 0.7),
    ("go_to_url", {"url": "https://a.com/x"}, {"url": "https://a.com/x", "new_tab": True}, 0.7),
    ("go_to_url", {"url": "https://a.com/x?day=2026-05-01"}, {"url": "https://a.com/x?day=2026-05-02"}, 0.3),
    ("go_to_url", {"url": "https://a.com/x"}, {"url": "https://a.com/y"}, 0.3),
    ("search_engine", {"query": "red shoes"}, {"query": "red shoes", "engine": "bing"}, 1.0),
    ("search_engine", {"query": "red shoes"}, {"query": "Red shoe"}, 0.7),
    ("search_engine", {"query": "flights in May"}, {"query": "flights in June"}, 0.3),
    ("switch_tab", {"tab_id": "0001"}, {"tab_id": "0001"}, 1.0),
    ("switch_tab", {"tab_id": "0001"}, {"tab_id": "0002"}, 0.3),
    ("close_tab", {"tab_id": "0001"}, {"tab_id": "0001"}, 1.0),
    ("close_tab", {"tab_id": "0001"}, {"tab_id": "0002"}, 0.3),
    ("done", {"text": "x", "success": True}, {"text": "x", "success": True, "files_to_display": []}, 1.0),
    ("done", {"text": "x", "success": True}, {"text": "wholly other", "success": True}, 0.7),
    (
        "done",
        {"text": "x", "success": True},
        {"text": "x", "success": True, "files_to_display": ["a.md"]},
        0.7,
    ),
    ("done", {"text": "x", "success": True}, {"text": "x"}, 0.3),
    ("done", {"text": "x", "success": True}, {"text": "x", "success": False}, 0.0),
    ("done", {"text": "x", "success": False}, {"text": "x", "success": True}, 0.0),
    ("done", {"text": "x"}, {"text": "x"}, 1.0),
    ("done", {"text": "x"}, {"text": "x", "success": False}, 0.3),
    # ours: the rest of the schema
    ("select_dropdown_option", {"index": 3, "text": "Large"}, {"index": 3, "text": "Large"}, 1.0),
    ("select_dropdown_option", {"index": 3, "text": "Large"}, {"index": 3, "text": "large "}, 0.7),
    ("select_dropdown_option", {"index": 3, "text": "Large"}, {"index": 3, "text": "Small"}, 0.3),
    ("select_dropdown_option", {"index": 3, "text": "Large"}, {"index": 4, "text": "Large"}, 0.3),
    ("get_dropdown_options", {"index": 3}, {"index": 3}, 1.0),
    ("get_dropdown_options", {"index": 3}, {"index": 4}, 0.3),
    ("upload_file_to_element", {"index": 3, "path": "a.pdf"}, {"index": 3, "path": "a.pdf"}, 1.0),
    ("upload_file_to_element", {"index": 3, "path": "a.pdf"}, {"index": 3, "path": "A.pdf"}, 0.3),
    ("upload_file_to_element", {"index": 3, "path": "a.pdf"}, {"index": 4, "path": "a.pdf"}, 0.3),
    ("send_keys", {"keys": "Enter"}, {"keys": "Enter"}, 1.0),
    ("send_keys", {"keys": "a"}, {"keys": "A"}, 0.3),
    ("scroll_to_text", {"text": "Opening hours"}, {"text": "Opening hours"}, 1.0),
    ("scroll_to_text", {"text": "Opening hours"}, {"text": "opening hours"}, 0.7),
    ("scroll_to_text", {"text": "Opening hours"}, {"text": "Prices"}, 0.3),
    (
        "extract_structured_data",
        {"query": "the price", "extract_links": False},
        {"query": "the price", "extract_links": False, "start_from_char": 0},
        1.0,
    ),
    (
        "extract_structured_data",
        {"query": "the price", "extract_links": False},
        {"query": "the price", "extract_links": True},
        0.7,
    ),
    (
        "extract_structured_data",
        {"query": "the price", "extract_links": False},
        {"query": "the price", "extract_links": False, "start_from_char": 9},
        0.7,
    ),
    (
        "extract_structured_data",
        {"query": "the price", "extract_links": False},
        {"query": "The prices", "extract_links": False},
        0.7,
    ),
    (
        "extract_structured_data",
        {"query": "the price", "extract_links": False},
        {"query": "the author", "extract_links": False},
        0.3,
    ),
    ("execute_js", {"code": "f()"}, {"code": "f()"}, 1.0),
    ("execute_js", {"code": "f()"}, {"code": "f( )"}, 0.3),
    ("go_back", {}, {}, 1.0),
    ("wait", {}, {"seconds": 3}, 1.0),
    ("wait", {"seconds": 3}, {"seconds": 5}, 0.7),
    (
        "write_file",
        {"file_name": "a.md", "content": "x"},
        {"file_name": "a.md", "content": "x", "append": False, "trailing_newline": True},
        1.0,
    ),
    ("write_file", {"file_name": "a.md", "content": "x"}, {"file_name": "a.md", "content": "y"}, 0.7),
    (
        "write_file",
        {"file_name": "a.md", "content": "x"},
        {"file_name": "a.md", "content": "x", "append": True},
        0.7,
    ),
    (
        "write_file",
        {"file_name": "a.md", "content": "x"},
        {"file_name": "a.md", "content": "x", "trailing_newline": False},
        0.7,
    ),
    (
        "write_file",
        {"file_name": "a.md", "content": "x"},
        {"file_name": "a.md", "content": "x", "leading_newline": True},
        0.7,
    ),
    ("write_file", {"file_name": "a.md", "content": "x"}, {"file_name": "b.md", "content": "x"}, 0.3),
    (
        "replace_file_str",
        {"file_name": "a.md", "old_str": "x", "new_str": "y"},
        {"file_name": "a.md", "old_str": "x", "new_str": "y"},
        1.0,
    ),
    (
        "replace_file_str",
        {"file_name": "a.md", "old_str": "x", "new_str": "y"},
        {"file_name": "a.md", "old_str": "q", "new_str": "y"},
        0.7,
    ),
    (
        "replace_file_str",
        {"file_name": "a.md", "old_str": "x", "new_str": "y"},
        {"file_name": "a.md", "old_str": "x", "new_str": "q"},
        0.7,
    ),
    (
        "replace_file_str",
        {"file_name": "a.md", "old_str": "x", "new_str": "y"},
        {"file_name": "b.md", "old_str": "x", "new_str": "y"},
        0.3,
    ),
    ("read_file", {"file_name": "a.md"}, {"file_name": "a.md"}, 1.0),
    ("read_file", {"file_name": "a.md"}, {"file_name": "b.md"}, 0.3),
]


def answer(*listed: Action) -> AgentOutput:
    return AgentOutput(actions=listed)


def click(index: int) -> Action:
    return Action(name="click_element_by_index", params={"index": index})


WAIT = Action(name="wait")
BACK = Action(name="go_back")


# ---------------------------------------------------------------------------------------------------- Table 4


@pytest.mark.parametrize(("name", "target", "predicted", "level"), TABLE_4)
def test_levels_are_those_of_table_4(name: str, target: dict, predicted: dict, level: float) -> None:
    """Every cell of Table 4, and our rules for the other actions, through the parser."""
    texts = [json.dumps({"action": [{name: params}]}) for params in (predicted, target)]
    assert score(*texts).value == level


def test_every_action_has_a_rule_for_every_parameter() -> None:
    """Each parameter of the schema is a key, secondary, ignored, or the success flag of done."""
    assert RULES.keys() == ACTIONS.keys()
    for name, spec in ACTIONS.items():
        rule = RULES[name]
        covered = [*rule.keys, *rule.secondary, *rule.ignored, *(["success"] if name == "done" else [])]
        assert sorted(covered) == sorted(param.name for param in spec.params)
    assert {name for name, _, _, _ in TABLE_4} == ACTIONS.keys()


def test_passive_actions_and_planning_files_weigh_half() -> None:
    """Passive actions and planning files weigh a half, all others one."""
    half = {"wait", "scroll", "go_back", "write_file", "replace_file_str", "read_file"}
    assert {name: rule.weight for name, rule in RULES.items()} == {
        name: 0.5 if name in half else 1.0 for name in ACTIONS
    }


@given(actions(), actions())
def test_a_pair_has_one_of_four_levels_and_one_pair_gets_exactly_its_level(
    predicted: Action, target: Action
) -> None:
    """One action against one action is 0, 0.3, 0.7 or 1, and 0 where the types differ."""
    level, why = action_level(predicted, target)
    assert level in LEVELS
    assert level == 0.0 or predicted.name == target.name
    assert score(answer(predicted), answer(target)).value == level
    assert why


@pytest.mark.parametrize(
    "name",
    [
        "click_element_by_index",
        "input_text",
        "select_dropdown_option",
        "get_dropdown_options",
        "upload_file_to_element",
    ],
)
def test_an_index_outside_the_prompt_is_invalid(name: str) -> None:
    """A wrong index is 0.0 if the prompt does not show it, else 0.3, also where no index is known."""
    target, other = ({"index": index, "text": "x", "path": "x"} for index in (3, 4))
    predicted, wanted = (answer(parse_action({name: params})) for params in (other, target))
    assert [score(predicted, wanted, indices).value for indices in ((), {3}, {3, 4}, None)] == [
        0.0,
        0.0,
        0.3,
        0.3,
    ]
    assert score(wanted, wanted, {3}).value == 1.0


def test_a_frame_outside_the_prompt_is_invalid_and_frame_0_is_the_page() -> None:
    """A scroll in an unknown frame is 0.0; frame 0 is no element and always valid."""

    def scroll(frame: int | None) -> AgentOutput:
        return answer(
            Action(name="scroll", params={"down": True, "num_pages": 1.0, "frame_element_index": frame})
        )

    assert [score(scroll(frame), scroll(None), {3}).value for frame in (None, 0, 3, 4)] == [
        1.0,
        1.0,
        0.3,
        0.0,
    ]
    click_0 = answer(Action(name="input_text", params={"index": 0, "text": "x"}))
    assert score(click_0, click_0, {3}).value == 0.0


# ----------------------------------------------------------------------------------- laws of the whole reward


@given(outputs())
def test_identity_is_one(output: AgentOutput) -> None:
    """An answer against itself is 1, as text and parsed, and every component is exact."""
    text = plain_text(output)
    result = score(text, text, used_indices(output))
    assert result.value == 1.0
    assert score(output, output).value == 1.0
    assert all(part.level == 1.0 and part.target == part.predicted for part in result.components)


@given(
    st.text() | json_values.map(json.dumps) | json_values.map(lambda value: json.dumps({"action": value})),
    outputs(),
)
def test_reward_is_total_and_bounded(text: str, target: AgentOutput) -> None:
    """Any text gets a reward in [0, 1] and a reason; what does not parse gets 0."""
    result = score(text, target, {1, 2})
    assert 0.0 <= result.value <= 1.0
    assert result.failure is None or result.value == 0.0
    assert result.explanation.startswith(f"{result.value:g} (")


@given(st.data(), outputs(), outputs(), st.none() | st.sets(st.integers(0, 6)))
def test_spelling_does_not_count(
    data: st.DataObject, predicted: AgentOutput, target: AgentOutput, indices: set[int] | None
) -> None:
    """Order of keys, spaces, fences, aliases and numbers as strings change neither side of the reward."""
    plain = score(plain_text(predicted), plain_text(target), indices)
    assert score(data.draw(spellings(predicted)), data.draw(spellings(target)), indices) == plain
    assert (
        score(canonical_text(predicted, thinking=False), canonical_text(target), indices).value == plain.value
    )


@given(outputs(5), outputs(5), st.data())
def test_raising_an_aligned_pair_never_lowers_the_reward(
    predicted: AgentOutput, target: AgentOutput, data: st.DataObject
) -> None:
    """With the alignment kept, making one aligned pair exact gives at least the reward before."""
    before = score(predicted, target)
    pairs = [part for part in before.components if part.target is not None and part.predicted is not None]
    if not pairs:
        return
    pair = data.draw(st.sampled_from(pairs))
    better = list(predicted.actions)
    better[pair.predicted] = target.actions[pair.target]
    assert score(replace(predicted, actions=tuple(better)), target).value >= before.value


@given(outputs(5), outputs(5))
def test_the_breakdown_explains_the_value(predicted: AgentOutput, target: AgentOutput) -> None:
    """Components name every action of both sides once, in order, and their soft-F1 is the reward."""
    result = score(predicted, target)
    for side, listed in (("target", target.actions), ("predicted", predicted.actions)):
        places = [getattr(part, side) for part in result.components if getattr(part, side) is not None]
        assert sorted(places) == list(range(len(listed)))
    aligned = [part for part in result.components if part.target is not None and part.predicted is not None]
    assert [part.predicted for part in aligned] == sorted(part.predicted for part in aligned)
    assert [part.target for part in aligned] == sorted(part.target for part in aligned)
    total = sum(RULES[action.name].weight for action in predicted.actions + target.actions)
    assert result.value == pytest.approx(
        2 * sum(part.weight * part.level for part in aligned) / total, abs=1e-9
    )
    assert round(result.value, 9) == result.value


def test_a_target_that_does_not_parse_is_an_error() -> None:
    """Only the response may be anything; a broken target is bad data."""
    with pytest.raises(ValueError, match="target of a state must be a valid answer"):
        score("x", "no answer")
    assert score(ParseFailure(reason="cut off"), answer(BACK)) == Reward(0.0, (), "no valid answer: cut off")


# ---------------------------------------------------------------------------------------------------- soft-F1


def brute_force(levels: list[list[float]], weights: list[float]) -> float:
    """Best weighted sum over all order-preserving alignments, by listing them."""
    best = 0.0
    for size in range(1, min(len(levels), len(levels[0])) + 1):
        for rows in itertools.combinations(range(len(levels)), size):
            for columns in itertools.combinations(range(len(levels[0])), size):
                best = max(best, sum(weights[t] * levels[t][p] for t, p in zip(rows, columns, strict=True)))
    return best


@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_alignment_equals_brute_force(data: st.DataObject, num_target: int, num_predicted: int) -> None:
    """The alignment increases on both sides, pairs no level 0, and reaches the best sum of all of them."""
    level = st.sampled_from(LEVELS)
    levels = data.draw(
        st.lists(
            st.lists(level, min_size=num_predicted, max_size=num_predicted),
            min_size=num_target,
            max_size=num_target,
        )
    )
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=num_target, max_size=num_target))
    pairs = align(levels, weights)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))
    assert all(levels[t][p] > 0 for t, p in pairs)
    assert sum(weights[t] * levels[t][p] for t, p in pairs) == pytest.approx(
        brute_force(levels, weights), abs=1e-12
    )


@given(outputs(5), outputs(5), st.none() | st.sets(st.integers(0, 6)))
def test_soft_f1_equals_precision_and_recall_by_brute_force(
    predicted: AgentOutput, target: AgentOutput, indices: set[int] | None
) -> None:
    """The reward is the harmonic mean of weighted precision and recall of the best alignment."""
    weights = [RULES[action.name].weight for action in target.actions]
    levels = [[action_level(p, t, indices)[0] for p in predicted.actions] for t in target.actions]
    earned = brute_force(levels, weights)
    precision, recall = (
        earned / sum(RULES[action.name].weight for action in predicted.actions),
        earned / sum(weights),
    )
    expected = 2 * precision * recall / (precision + recall) if earned else 0.0
    assert score(predicted, target, indices).value == pytest.approx(expected, abs=1.1e-9)


def test_actions_in_another_order_earn_less() -> None:
    """Swapped actions cannot both be aligned."""
    assert soft_f1([BACK, WAIT], [WAIT, BACK]).value == 0.5
    assert (
        soft_f1([click(2), click(1)], [click(1), click(2)]).value
        == 0.5
        < soft_f1([click(1), click(2)], [click(1), click(2)]).value
    )


def test_known_values_of_the_soft_f1() -> None:
    """One exact and one wrong key is 0.65, one of two 2/3, an extra passive action 0.8, nothing 0."""
    assert score(answer(click(1), click(9)), answer(click(1), click(2))).value == 0.65
    assert score(answer(click(1)), answer(click(1), click(2))).value == 0.666666667
    assert score(answer(click(1), WAIT), answer(click(1))).value == 0.8
    assert score(answer(click(1), click(2)), answer(WAIT, BACK)).value == 0.0


def test_two_actions_narrow_the_contrast() -> None:
    """Exact against 0.7 in one of two equal actions has sigma at most 0.080, which never passes the gate."""
    near = replace(click(2), params={"index": 2, "while_holding_ctrl": True})
    target = answer(click(1), click(2))
    values = [score(answer(click(1), second), target).value for second in (click(2), near)]
    stds = [gate([values[0]] * k + [values[1]] * (8 - k)).std for k in range(9)]
    assert values == [1.0, 0.85]
    assert max(stds) == pytest.approx(0.080, abs=5e-4)
    assert max(stds) < 0.10


def test_an_exact_0_55_is_competent() -> None:
    """A soft-F1 of exactly 0.55 comes out as 0.55 and is competent, in every order of the actions."""
    parts = [(1.0, "0.7"), (1.0, "0.7"), (1.0, "0.3"), (0.5, "1")]  # earned 2.2 of (3.5 + 4.5) / 2
    assert 2 * sum(Fraction(weight) * Fraction(level) for weight, level in parts) / 8 == Fraction(55, 100)
    core = replace(click(1), params={"index": 1, "while_holding_ctrl": True})
    for order in itertools.permutations(
        [(core, click(1)), (core, click(1)), (click(2), click(1)), (WAIT, WAIT)]
    ):
        predicted, target = zip(*order, strict=True)
        result = score(answer(*predicted, BACK, BACK), answer(*target))
        assert result.value == 0.55
        assert gate([result.value, 0.0]).is_competent
