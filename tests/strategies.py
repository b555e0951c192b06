"""Hypothesis generators that several test files share: actions, answers in any spelling, hostile texts,
reward lists.
"""

import json
from typing import Any

from hypothesis import strategies as st

from rmsweb.browser.actions import ACTIONS, ALIASES, ParamSpec
from rmsweb.records import Action, AgentOutput

WORDS = [
    "red",
    "shoes",
    "Shoe",
    "100",
    "1000",
    "the",
    "a",
    "March",
    "May",
    "not",
    "Boston",
    "Café",
    "non-vegetarian",
    "vegetarian",
    "2",
    "",
    "!",
    "é",
]
URLS = [
    "https://www.a.com/x?b=1&c=2",
    "a.com/x/?c=2&b=1",
    "http://a.com/x",
    "a.com/h?checkin=2026-05-01",
    "a.com/h?checkin=2026-05-02",
    "https://b.com:8080/%20y#z",
    "http://[",
    "about:blank",
    "",
]

free_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
phrases = st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join) | free_text
urls = st.sampled_from(URLS) | free_text
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | free_text,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*ACTIONS, *ALIASES, "action", "index", "text"]) | free_text, inner, max_size=4
        )
    ),
    max_leaves=12,
)


def _parameter(spec: ParamSpec) -> st.SearchStrategy[Any]:
    if spec.kind == "int":
        values: st.SearchStrategy[Any] = st.integers(max(spec.minimum or 0, 0), 6)
    elif spec.kind == "float":
        values = st.sampled_from([0.5, 1.0, 2.0, 10.0])
    elif spec.kind == "bool":
        values = st.booleans()
    elif spec.kind == "list":
        values = st.lists(st.sampled_from(["a.md", "b.md"]), max_size=2)
    elif spec.length:
        values = st.sampled_from(["0001", "0002", "ab12"])
    else:
        values = urls if spec.name == "url" else phrases
    return st.none() | values if spec.optional else values


@st.composite
def actions(draw: st.DrawFn, names: tuple[str, ...] = tuple(ACTIONS)) -> Action:
    """A valid action as the parser would give it: required parameters (a `done` may lack its flag) and some
    of the others.
    """
    name = draw(st.sampled_from(names))
    params = {}
    for spec in ACTIONS[name].params:
        needed = spec.required and (name, spec.name) != ("done", "success")
        if needed or draw(st.booleans()):
            params[spec.name] = draw(_parameter(spec))
    return Action(name=name, params=params)


def outputs(max_actions: int = 4) -> st.SearchStrategy[AgentOutput]:
    """An answer with one to `max_actions` actions."""
    return st.lists(actions(), min_size=1, max_size=max_actions).map(
        lambda found: AgentOutput(actions=tuple(found), memory="m", next_goal="g")
    )


def plain_text(output: AgentOutput) -> str:
    """The answer as JSON, nothing normalised."""
    return json.dumps(
        {
            "memory": output.memory,
            "next_goal": output.next_goal,
            "action": [{found.name: found.params} for found in output.actions],
        }
    )


@st.composite
def spellings(draw: st.DrawFn, output: AgentOutput) -> str:
    """The same answer in another spelling: aliases, order of keys and parameters, numbers as strings, spaces,
    fences.
    """
    listed = []
    for action in output.actions:
        implied = {alias: extra for alias, (name, extra) in ALIASES.items() if name == action.name}
        same = [alias for alias, extra in implied.items() if all(name in action.params for name in extra)]
        params = {}
        for name, value in draw(st.permutations(list(action.params.items()))):
            spec = next(spec for spec in ACTIONS[action.name].params if spec.name == name)
            key = draw(st.sampled_from([name, *spec.aliases]))
            params[key] = (
                str(value) if spec.kind == "int" and value is not None and draw(st.booleans()) else value
            )
        listed.append({draw(st.sampled_from([action.name, *same])): params})
    members = draw(
        st.permutations([("memory", output.memory), ("next_goal", output.next_goal), ("action", listed)])
    )
    text = json.dumps(
        dict(members), indent=draw(st.sampled_from([None, 0, 2])), ensure_ascii=draw(st.booleans())
    )
    return draw(st.sampled_from(["{}", "```json\n{}\n```", "Here it is: {} done", "\n {}\t"])).replace(
        "{}", text, 1
    )


def used_indices(*found: AgentOutput) -> set[int]:
    """Every element index that the answers name."""
    return {
        action.params[key]
        for output in found
        for action in output.actions
        for key in ("index", "frame_element_index")
        if action.params.get(key) is not None
    }


LEVELS = (1.0, 0.7, 0.3, 0.0)  # Table 4
level_rewards = st.lists(st.sampled_from(LEVELS), min_size=2, max_size=10)
any_rewards = st.lists(st.floats(0, 1).map(lambda value: round(value, 9)), min_size=2, max_size=10)
rewards = level_rewards | any_rewards
