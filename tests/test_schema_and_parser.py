"""Laws of the action table and its parser: total on any text, canonical text is a fixed point, spans hold the
action list.
"""

import json
import typing

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rmsweb.browser import actions as a
from rmsweb.records import Action, AgentOutput, ParseFailure

VALUES: dict[str, st.SearchStrategy[typing.Any]] = {
    "str": st.text(max_size=12).filter(lambda s: s.isprintable()),
    "int": st.integers(1, 99),
    "float": st.floats(0, 100),
    "bool": st.booleans(),
    "list": st.lists(st.text(max_size=5).filter(lambda s: s.isprintable()), max_size=3),
}


@st.composite
def any_action(draw: st.DrawFn) -> Action:
    """An action of the schema with all required and some optional parameters."""
    spec = a.ACTIONS[draw(st.sampled_from(sorted(a.ACTIONS)))]
    params = {}
    for param in spec.params:
        if param.required or draw(st.booleans()):
            value = VALUES["str"].map(lambda s: (s + "0000")[:4]) if param.length else VALUES[param.kind]
            params[param.name] = draw(value)
    return Action(name=spec.name, params=params)


outputs = st.builds(
    AgentOutput,
    actions=st.lists(any_action(), min_size=1, max_size=3).map(tuple),
    evaluation_previous_goal=VALUES["str"],
    memory=VALUES["str"],
    next_goal=VALUES["str"],
)


@given(st.text())
@example("{" * 20000)
@example('{"action":' * 2000)
@example('{"action":[{"wait":{"seconds":NaN}}]}')
@example('{"action":[{"wait":{"seconds":1e999}}]}')
@example('{"action":[{"done":{"text":"\\ud800"}}]}')
@example('{"action":[]}')
@example('{"action":[{"wait":{},"go_back":{}}]}')
def test_the_parser_is_total(text: str) -> None:
    """Any text gives an AgentOutput or a ParseFailure with a reason."""
    output = a.parse_agent_output(text)
    assert isinstance(output, AgentOutput) or output.reason
    assert (a.action_span(text) is None) == isinstance(output, ParseFailure)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=8,
    )
)
def test_the_parser_is_total_on_any_json(value: typing.Any) -> None:
    """Any JSON as the action list is either parsed or refused."""
    assert a.parse_agent_output(json.dumps({"action": value})) is not None


@given(outputs)
def test_canonical_text_is_a_fixed_point(output: AgentOutput) -> None:
    """Parsing a canonical text and writing it again gives the same bytes."""
    text = a.canonical_text(output, thinking=False)
    parsed = a.parse_agent_output(text)
    assert isinstance(parsed, AgentOutput)
    assert a.canonical_text(parsed, thinking=False) == text
    assert [a.with_defaults(action) for action in parsed.actions] == [
        a.with_defaults(action) for action in output.actions
    ]


@given(
    outputs,
    st.sampled_from([None, 1, 2, "\t"]),
    st.sampled_from(["", "Here you are:\n", "```json\n"]),
    st.booleans(),
)
def test_layout_does_not_matter(output: AgentOutput, indent: typing.Any, before: str, reverse: bool) -> None:
    """Spaces, fences, text around, and the order of keys change nothing; the span holds exactly the action
    list.
    """
    data = json.loads(a.canonical_text(output, thinking=False))
    if reverse:
        data = dict(reversed(data.items()))
    text = before + json.dumps(data, indent=indent) + ("\n```" if before.startswith("`") else "")
    parsed = a.parse_agent_output(text)
    assert isinstance(parsed, AgentOutput)
    assert a.canonical_text(parsed, thinking=False) == a.canonical_text(output, thinking=False)
    span = a.action_span(text)
    assert span is not None
    assert json.loads(text[slice(*span)]) == data["action"]
    assert text[span[0]] == "["
    assert text[span[1] - 1] == "]"


@pytest.mark.parametrize(
    ("given_name", "params", "name", "parsed"),
    [
        (
            "click",
            {"index": 3, "ctrl": None},
            "click_element_by_index",
            {"index": 3, "while_holding_ctrl": None},
        ),
        (
            "input",
            {"index": 0, "text": "x", "clear": False},
            "input_text",
            {"index": 0, "text": "x", "clear_existing": False},
        ),
        (
            "search",
            {"query": "q", "search_engine": "bing"},
            "search_engine",
            {"query": "q", "engine": "bing"},
        ),
        ("search_google", {"query": "q"}, "search_engine", {"query": "q", "engine": "google"}),
        (
            "scroll",
            {"down": True, "pages": 2, "index": 4},
            "scroll",
            {"down": True, "num_pages": 2.0, "frame_element_index": 4},
        ),
        ("extract", {"query": "q"}, "extract_structured_data", {"query": "q", "extract_links": False}),
        ("go_back", None, "go_back", {}),
        ("go_back", {"why": 1}, "go_back", {}),
        ("done", {"text": "x"}, "done", {"text": "x"}),
        ("click_element_by_index", {"index": "3"}, "click_element_by_index", {"index": 3}),
    ],
)
def test_aliases_and_convertible_values_are_understood(
    given_name: str, params: typing.Any, name: str, parsed: dict[str, typing.Any]
) -> None:
    """Newer and older names mean the same action; what was not given is not made up."""
    assert a.parse_action({given_name: params}) == Action(name=name, params=parsed)


@pytest.mark.parametrize(
    ("obj", "reason"),
    [
        ({"fly": {}}, "unknown action"),
        ({"click": {}}, "lacks index"),
        ({"click": {"index": 0}}, "below 1"),
        ({"click": {"index": True}}, "not an integer"),
        ({"click": {"index": 1.5}}, "not an integer"),
        ({"input": {"index": 1, "text": 5}}, "not a string"),
        ({"switch_tab": {"tab_id": "12"}}, "4 characters"),
        ({"go_to_url": {"url": "x", "new_tab": None}}, "not true or false"),
        ({"scroll": {"down": True, "num_pages": 1, "pages": 2}}, "given twice"),
        ({"wait": []}, "not an object"),
        ({"wait": {}, "go_back": {}}, "exactly one key"),
        ("wait", "exactly one key"),
    ],
)
def test_bad_actions_are_refused_with_the_reason(obj: typing.Any, reason: str) -> None:
    """A wrong action is never repaired by a guess."""
    with pytest.raises(ValueError, match=reason):
        a.parse_action(obj)


def test_two_objects_are_not_an_answer() -> None:
    """The parser does not choose between two answers, nor between two equal keys."""
    one = '{"action":[{"go_back":{}}]}'
    assert isinstance(a.parse_agent_output(one + " or " + one), ParseFailure)
    assert isinstance(
        a.parse_agent_output('{"action":[{"go_back":{}}],"action":[{"wait":{}}]}'), ParseFailure
    )


def test_present_keys_and_unknown_parameters_are_kept_apart() -> None:
    """The parser says which keys stood in the text and how many parameters it left out."""
    output = a.parse_agent_output('{"memory":"m","extra":1,"action":[{"click":{"index":1,"force":true}}]}')
    assert isinstance(output, AgentOutput)
    assert output.present_keys == ("memory", "extra", "action")
    assert output.ignored_params == 1
    assert output.thinking is None


def test_the_schema_names_every_action_and_parameter() -> None:
    """The prompt's schema comes from the same table."""
    text = a.SCHEMA
    assert all(
        f"- {spec.name}(" in text and all(param.name in text for param in spec.params)
        for spec in a.ACTIONS.values()
    )
    assert len(a.ACTIONS) == 20
