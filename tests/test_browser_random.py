"""Random hostile pages: nothing raises, whatever the page is made of, and no press lands on another node than
the one that the index stood for.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from browser_lab import MADE, Lab, lab
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_pages import COVER, LOGGER, SHIFT, pages

from rmsweb.browser.actions import ACTIONS
from rmsweb.browser.state import render_nodes
from rmsweb.jsonl import dumps
from rmsweb.records import Action, Observation

__all__ = ["lab"]
# A page that fails is longer than Hypothesis likes to print; its warning would stand in place of what failed.
pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore:Generating overly large repr")]
# A smaller failing page takes a browser minutes to find: what failed is shown as it is.
COMMON: Any = {
    "suppress_health_check": list(HealthCheck),
    "deadline": None,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
}
# Presses the mouse, or presses keys or runs code that may press a button by themselves; the rest must leave
# the page untouched.
AIMED = {"click_element_by_index", "input_text", "get_dropdown_options", "upload_file_to_element"}
FREE = {"send_keys", "execute_js", "select_dropdown_option"}
# What a page does between the state and the action.
CHANGES = (
    "0",
    "document.body.replaceChildren(...[...document.body.children].reverse())",
    "document.querySelectorAll('*').forEach((el, i) => { if (i % 3 == 2) el.remove() })",
    "document.body.innerHTML += ''",
    COVER + "; 0",
    SHIFT + "; 0",
    "document.querySelectorAll('button, a, input').forEach((el) => { el.disabled = true; el.style.translate = '80px 30px' })",  # noqa: E501
)
PARAMETERS: dict[str, dict[str, Any]] = {
    "wait": {"seconds": 0},
    "search_engine": {"query": "x", "engine": "http://a.localhost/next.html?q={query}"},
    "go_to_url": {"url": "http://a.localhost/next.html"},
    "upload_file_to_element": {"path": "note.md"},
    "write_file": {"file_name": "note.md", "content": "x"},
    "read_file": {"file_name": "note.md"},
    "execute_js": {"code": "document.querySelectorAll('*').length + '\\ud83d'"},
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": st.sampled_from(["0001", "0002", "Go", "Enter", "Tab", "🚀 مرحبا", "x" * 300]),
    "float": st.sampled_from([0.5, 1.0, 30.0]),
    "bool": st.booleans(),
    "list": st.just(["note.md"]),
}


@st.composite
def plans(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[Action, float, str]:
    """An action, where among the state's indices its own lies (1: not among them), and what the page does
    before it.
    """
    name = draw(st.sampled_from(names))
    params = dict(PARAMETERS.get(name, {}))
    for spec in ACTIONS[name].params:
        if spec.name not in params and (spec.required or "index" in spec.name):
            params[spec.name] = 0 if spec.kind == "int" else draw(VALUES[spec.kind])
    return Action(name=name, params=params), draw(st.floats(0, 1)), draw(st.sampled_from(CHANGES))


def aimed(action: Action, place: float, seen: Observation) -> Action:
    """The action on one of the state's elements, or on one that was never shown."""
    shown = [*(node.index for node in seen.nodes if node.index is not None), 999]
    index = shown[int(place * (len(shown) - 1))]
    return Action(
        name=action.name,
        params={key: index if "index" in key else value for key, value in action.params.items()},
    )


def check_state(seen: Observation) -> None:
    """Indices count from 1 in document order, keys are unique, record and text can be written as UTF-8."""
    assert [node.index for node in seen.nodes if node.index is not None] == list(
        range(1, 1 + seen.page_stats["interactive"])
    )
    assert len({node.node_key for node in seen.nodes}) == len(seen.nodes)
    dumps(seen).encode()
    "".join(line.text for line in render_nodes(seen)).encode()


def check_press(name: str, wanted: str | None, log: list[Any]) -> None:
    """Every press and click stands on the wanted element, in it, on its label or on the control that it
    labels.
    """
    if name not in FREE:
        for entry in log:
            assert name in AIMED, (name, entry)
            assert wanted in {*entry[1], *entry[2], *entry[3]}, (name, wanted, entry)


def act_on(lab: Lab, page: str, steps: Sequence[tuple[Action, float, str]]) -> None:
    """Some actions, each on a state after which and before which the page may have changed."""
    MADE["random.html"] = page
    seen = lab.open("random.html")
    check_state(seen)
    for planned, place, change in steps:
        action, on_page = aimed(planned, place, seen), "random.html" in seen.url
        if on_page:
            lab.js(f"() => {{ if (document.body) {{ {change} }} }}")  # an earlier change may have removed it
            lab.js("top.__log = []")
        (result,) = lab.act(seen, action)
        assert result.error or result.message
        dumps(result).encode()
        wanted = next(
            (node.attributes.get("id") for node in seen.nodes if node.index == action.params.get("index")),
            None,
        )
        seen, past = lab.see(), seen
        check_state(seen)
        if on_page and seen.url == past.url and seen.active_tab == past.active_tab:
            check_press(action.name, wanted, lab.js("top.__log ?? []"))
    assert lab.session.restarts == 0


STEPS = st.tuples(plans(("click_element_by_index",)), plans(tuple(ACTIONS)), plans(tuple(ACTIONS)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (COVER, "is covered by <div id=cover>"),
        (SHIFT, "is in its place"),
        ("this.remove()", "is no longer on the page"),
    ],
)
def test_a_press_that_would_miss_is_kept_from_the_page(lab: Lab, change: str, words: str) -> None:
    """A page that changes under the pointer, before the press, makes the click an error that says what is
    there now; no node gets a press.
    """
    MADE["random.html"] = f"{LOGGER}<button id=go style='height:30px' onmousemove=\"{change}\">Go</button>"
    seen = lab.open("random.html")
    error = lab.one(seen, "click_element_by_index", index=1).error or ""
    assert words in error
    assert lab.js("top.__log") == []


@pytest.mark.parametrize(
    "change",
    [COVER, SHIFT, "this.remove()", "this.style.translate = '200px 0'", "this.replaceWith(this.cloneNode())"],
)
def test_a_press_that_the_page_moves_away_from_is_no_click_elsewhere(lab: Lab, change: str) -> None:
    """A page that changes between press and release gives the browser's click to what both have in common,
    which nobody aimed at.
    """
    MADE["random.html"] = (
        f"{LOGGER}<div id=around><button id=go style='height:30px' onmousedown=\"{change}\"><b id=word>Go</b></button></div>"  # noqa: E501
    )
    result = lab.one(lab.open("random.html"), "click_element_by_index", index=1)
    assert "the press but no click" in result.message
    assert [entry[0] for entry in lab.js("top.__log")] == ["pointerdown", "mousedown"]


def test_a_page_that_captures_the_pointer_gets_its_click(lab: Lab) -> None:
    """Carousels and maps capture the pointer, so that the click goes to them although the element has not
    moved.
    """
    capture = "<script>onpointerdown = (event) => document.getElementById('box').setPointerCapture(event.pointerId)</script>"  # noqa: E501
    MADE["random.html"] = f"{LOGGER}{capture}<div id=box><button id=pin>Pin</button></div>"
    result = lab.one(lab.open("random.html"), "click_element_by_index", index=1)
    assert "no click" not in result.message
    assert [entry[1][0] for entry in lab.js("top.__log") if entry[0] == "click"] == ["box"]


def test_a_form_that_hides_its_methods_keeps_no_press_from_its_button(lab: Lab) -> None:
    """A field called getAttribute or closest hides the form's method; the button that hovering moves off is
    still found and pressed.
    """
    once = "this.style.translate = '0 150px'; this.onmousemove = null"
    fields = "<input name=getAttribute hidden><input name=closest hidden>"
    button = f'<button type=button onmousemove="{once}" onclick="document.title = \'pressed\'">Go</button>'
    MADE["random.html"] = f"<form style='height:300px'>{fields}{button}</form>"
    assert lab.one(lab.open("random.html"), "click_element_by_index", index=1).error is None
    assert lab.js("document.title") == "pressed"


@settings(max_examples=25, **COMMON)
@given(pages(), STEPS)
def test_random_pages_keep_the_laws(lab: Lab, page: str, steps: Sequence[tuple[Action, float, str]]) -> None:
    """A few pages, for every run of the tests: a click, then two actions of any kind."""
    act_on(lab, page, steps)


@pytest.mark.slow
@settings(max_examples=200, **COMMON)
@given(pages(), STEPS)
def test_two_hundred_random_pages_keep_the_laws(
    lab: Lab, page: str, steps: Sequence[tuple[Action, float, str]]
) -> None:
    """The same law on many pages."""
    act_on(lab, page, steps)
