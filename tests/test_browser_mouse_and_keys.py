"""Situations of real pages: what hands do and find: scrolling, typing, keys, toggles, rows, hovering,
dragging. Numbers as in docs/situations.md.
"""

import pytest
from browser_lab import Lab, click, find, index, lab, lines, names, texts

__all__ = ["lab"]
pytestmark = pytest.mark.browser


def test_a_target_is_scrolled_to_before_its_point_is_chosen(lab: Lab) -> None:
    """Case 17: below the fold, under a fixed decoy, or clipped by a pane: the element's own handler gets the
    click.
    """
    seen = lab.open("below.html")
    for name in ("Target", "Clipped"):
        assert not find(seen, text=name).in_viewport
        assert click(lab, seen, name).error is None
    assert [entry[1] for entry in lab.log("click")] == ["target", "clipped"]


def test_editable_areas_keep_their_line_breaks(lab: Lab) -> None:
    """Case 18: plain, model-backed and nested editors hold exactly the new text, or the old with it; a line
    break sends nothing.
    """
    seen = lab.open("editors.html")
    for name, held in (("Plain", "plain"), ("Model", "model"), ("Nested", "nested")):
        assert (
            lab.one(seen, "input_text", index=index(seen, name), text="first line").message
            == f'typed "first line" into <div id={held}> "{name}"'
        )
        assert lab.js(f"document.getElementById('{held}').innerText.trim()") == "first line"
        assert (
            lab.one(seen, "input_text", index=index(seen, name), text=" more", clear_existing=False).error
            is None
        )
        assert lab.js(f"document.getElementById('{held}').innerText.trim()") == "first line more"
    assert lab.js("window.__model") == "first line more"
    for index_of in ({"text": "Chat"}, {"name": "area"}, {"text": "Model"}):
        assert lab.one(seen, "input_text", index=index(seen, **index_of), text="one\ntwo").error is None
    assert lab.js("[chat.innerText, area.value, window.__model]") == ["one\ntwo"] * 3
    assert lab.js("window.__sent") == []


def test_a_controlled_fields_model_gets_the_text(lab: Lab) -> None:
    """Case 19: a page that trusts only a hand keeps what was typed; an empty text clears; what the page made
    of a text is told.
    """
    seen = lab.open("controlled.html")
    assert lab.one(seen, "input_text", index=index(seen, name="tracked"), text="second").error is None
    assert (lab.js("window.__model"), find(lab.see(), name="tracked").value) == ("second", "second")
    assert lab.one(seen, "input_text", index=index(seen, name="tracked"), text="").error is None
    assert lab.js("window.__model") == ""
    assert lab.one(
        seen, "input_text", index=index(seen, name="upper"), text="def", clear_existing=False
    ).message.endswith("it now holds 'ABCDEF'")
    assert lab.one(seen, "input_text", index=index(seen, name="later"), text="x").message.endswith(
        "it now holds 'checked'"
    )


def test_a_toggle_of_any_making_is_one_element(lab: Lab) -> None:
    """Case 20: label and unseen box are one element; a click toggles once, whatever the toggle is made of,
    and the state shows it.
    """
    seen = lab.open("toggles.html")
    assert names(seen) == ["Agree", "Letters", "Dark", "Small", "Large"]
    for name in ("Agree", "Letters", "Dark", "Large"):
        assert click(lab, seen, name).error is None
    assert lab.js("window.__toggled") == ["box", "aria", "plain"]
    after = lab.see()
    assert find(after, text="Agree").attributes["checked"] == "true"
    assert find(after, text="Letters").attributes["aria-checked"] == "true"
    assert [find(after, text=name).attributes["checked"] for name in ("Small", "Large")] == ["false", "true"]
    assert "Light" in names(after)


def test_what_hovering_shows_is_reached_by_a_click_on_its_parent(lab: Lab) -> None:
    """Case 21: there is no hover action; a click leaves the pointer where it is, so what that shows is in the
    next state and can be clicked, and not before.
    """
    seen = lab.open("hover.html")
    assert not {"Phones", "Tablets", "Remove"} & set(names(seen))
    click(lab, seen, "Products")
    menu = lab.see()
    assert [node.text for node in menu.nodes if node.is_new and node.index] == ["Phones", "Tablets"]
    click(lab, menu, "Help")
    assert "A word of help" in texts(lab.see())
    click(lab, menu, name="row")
    row = lab.see()
    assert "Tablets" not in names(row)
    assert click(lab, row, "Remove").error is None
    assert lab.see().title == "Removed"
    click(lab, row, "Products")
    menu = lab.see()
    assert click(lab, menu, "Tablets").error is None
    assert lab.see().url.endswith("?2")


def test_nothing_claims_to_drag(lab: Lab) -> None:
    """Case 22: a range takes a value or arrow keys; a slider of the page's making shows its value and takes
    clicks and keys, no text; nothing drags.
    """
    seen = lab.open("sliders.html")
    assert lab.one(seen, "input_text", index=index(seen, name="range"), text="75").error is None
    assert ["input", "range", False, ""] in lab.log("input")
    assert lab.one(seen, "send_keys", keys="ArrowRight ArrowRight").error is None
    assert find(lab.see(), name="range").value == "85"
    assert "holds '80'" in (
        lab.one(seen, "input_text", index=index(seen, name="range"), text="79").error or ""
    )
    assert (
        f"[{index(seen, 'Price')}]<div role=slider aria-label=Price aria-valuemin=0 aria-valuemax=10 aria-valuenow=3 />"  # noqa: E501
        in lines(seen)
    )
    assert "takes no text" in (lab.one(seen, "input_text", index=index(seen, "Price"), text="7").error or "")
    assert lab.js("slider.ariaValueNow") == "3"
    click(lab, seen, "Price")
    lab.one(seen, "send_keys", keys="ArrowRight ArrowRight")
    assert find(lab.see(), text="Price").attributes["aria-valuenow"] == "7"
    assert not {"Alpha", "Beta"} & set(names(seen))


def test_rows_lines_and_cards_that_listen_have_one_index_each(lab: Lab) -> None:
    """Case 23: whatever hears clicks has one index, plain words and the root that only delegates have none;
    links to one place keep their own names.
    """
    seen = lab.open("rows.html")
    expected = [
        "Order one5",
        "Order two7",
        "Heard line",
        "Item one",
        "Item two",
        "A red kettle",
        "Kettle K1",
        "Buy",
        "Inside a link",
        "Inside a link",
    ]
    assert names(seen) == expected
    for name in expected[:8]:
        assert click(lab, seen, name).error is None
    assert lab.js("window.__hits") == [
        "t1",
        "t2",
        "heard",
        "Item one",
        "Item two",
        "image",
        "title",
        "button",
    ]
    assert f"[{index(seen, 'A red kettle')}]<a alt=A red kettle />" in lines(seen)
    assert click(lab, seen, "Inside a link", tag="a").error is None
    assert lab.js("window.__hits").pop() == "inside"


def test_scrolling_moves_what_was_meant(lab: Lab) -> None:
    """Case 28: a fixed block in the middle swallows no scroll of the page; an open dialog's pane is scrolled
    instead of it; shares of a page are exact.
    """
    seen = lab.open("panes.html")
    for pages, y in ((0.5, 240), (2.5, 1440)):
        assert lab.one(seen, "scroll", down=True, num_pages=pages).error is None
        assert lab.js("scrollY") == y
    lab.one(seen, "scroll", down=False, num_pages=5.0)
    assert "nothing moved" in lab.one(seen, "scroll", down=False, num_pages=1.0).message
    lab.js("window.notice()")  # a notice at the edge is no dialog that holds the page
    lab.one(seen, "scroll", down=True, num_pages=1.0)
    assert (lab.js("scrollY"), lab.js("small.parentNode.scrollTop")) == (480, 0)
    lab.one(seen, "scroll", down=False, num_pages=1.0)
    lab.js("window.show()")
    after = lab.see()
    assert lab.one(after, "scroll", down=True, num_pages=1.0).error is None
    assert (lab.js("terms.scrollTop"), lab.js("scrollY")) == (200, 0)
    pane = next(node.index for node in after.nodes if node.attributes.get("id") == "terms")
    assert lab.one(after, "scroll", down=True, num_pages=0.5, frame_element_index=pane).error is None
    assert (lab.js("terms.scrollTop"), lab.js("scrollY")) == (300, 0)


def test_a_text_in_a_frame_is_scrolled_to(lab: Lab) -> None:
    """Case 29: a text far down in a frame far down the page ends inside the viewport; one that is nowhere
    moves nothing and is an error.
    """
    seen = lab.open("panes.html")
    assert "is not on the page" in (lab.one(seen, "scroll_to_text", text="no such words").error or "")
    assert lab.js("scrollY") == 0
    assert lab.one(seen, "scroll_to_text", text="A note in the frame").error is None
    inner = "frame.getBoundingClientRect().top + frame.contentDocument.getElementById('note').getBoundingClientRect().top"  # noqa: E501
    assert 0 <= lab.js(inner) <= 470
    assert [node.in_viewport for node in lab.see().nodes if node.text == "A note in the frame"] == [True]


def test_keys_and_chords_reach_the_page_as_they_are(lab: Lab) -> None:
    """Case 30: Enter sends once, Control+a with Backspace empties, Shift+Tab goes back, Escape shuts the
    dialog, and every event has its code and modifiers.
    """
    seen = lab.open("keys.html")
    click(lab, seen, name="one")
    for keys in ("Control+a", "Backspace", "hello", "Enter"):
        assert lab.one(seen, "send_keys", keys=keys).error is None
    assert (lab.js("one.value"), len(lab.log("submit"))) == ("hello", 1)
    letters = [[f"Key{letter.upper()}", letter, False, False] for letter in "hello"]
    chord = [
        ["ControlLeft", "Control", True, False],
        ["KeyA", "a", True, False],
        ["Backspace", "Backspace", False, False],
    ]
    assert lab.js("window.__keys") == [*chord, *letters, ["Enter", "Enter", False, False]]
    for keys, there in (("Tab", "two"), ("Shift+Tab", "one")):
        lab.one(seen, "send_keys", keys=keys)
        assert lab.js("document.activeElement.id") == there
    lab.js("dialog.showModal()")
    assert names(lab.see()) == ["Answer"]
    lab.one(seen, "send_keys", keys="Escape")
    assert lab.js("dialog.open") is False


def test_disabled_controls_become_usable(lab: Lab) -> None:
    """Case 32: a disabled control is marked and has no index, one that only says so is marked and works, one
    that was enabled is starred.
    """
    seen = lab.open("disabled.html")
    assert names(seen) == ["Not yet", "I agree"]
    state = lines(seen)
    assert "<button disabled=true />" in "\n".join(state)
    assert "<input name=shut value=kept disabled=true />" in "\n".join(state)
    assert f"[{index(seen, 'Not yet')}]<button aria-disabled=true />" in state
    click(lab, seen, "Not yet")
    assert lab.js("window.__soon") == 1
    click(lab, seen, "I agree")
    lab.one(seen, "wait", seconds=1)
    assert [(node.text, node.is_new) for node in lab.see().nodes if node.index] == [
        ("Not yet", False),
        ("I agree", False),
        ("Go on", True),
    ]
