"""Laws of an observation: what gets an index, what is read, identity, frames, shadow roots, tabs and the
screenshot.
"""

import hashlib
from pathlib import Path

import pytest
from browser_lab import VIEWPORT, Lab, find, index, lab, lines, texts
from PIL import Image

from rmsweb.jsonl import dumps

__all__ = ["lab"]
pytestmark = pytest.mark.browser


def test_what_a_click_is_for_gets_an_index(lab: Lab) -> None:
    """Visible controls, links, labels of unseen controls, listeners and editable areas within 1,000 px have
    one, in document order; nothing else has.
    """
    seen = lab.open("controls.html")
    named = [(node.tag, node.text) for node in seen.nodes if node.index is not None]
    assert named == [
        ("input", "Your name"), ("input", ""), ("textarea", ""), ("select", ""), ("button", "Apply"), ("button", "Soon"), ("a", "Linked words"),  # noqa: E501
        ("label", "Agree"), ("input", "Plain"), ("p", "Heard text"), ("button", "One"), ("button", "Two"), ("div", "Essay"), ("div", "Role box"),  # noqa: E501
        ("canvas", ""), ("button", "Under glass"), ("button", "Below the fold"),
    ]  # fmt: skip
    assert [node.index for node in seen.nodes if node.index is not None] == list(range(1, len(named) + 1))
    assert not find(seen, text="Below the fold").in_viewport
    assert seen.page_stats["interactive"] == len(named)


def test_displayed_text_and_live_values_are_read(lab: Lab) -> None:
    """Displayed text stands on lines of its own, whitespace collapsed, one deeper than what it stands in;
    hidden, covered or far text does not.
    """
    seen = lab.open("controls.html")
    assert {
        "All kinds of controls",
        "5",
        "Your name",
        "Sold out",
        "Agree",
        "Plain",
        "Just text",
        "Inert",
        "Cover",
        "Under glass",
    } <= set(texts(seen))
    assert not {
        "for screen readers",
        "unseen",
        "Gone",
        "Faint",
        "Covered",
        "Far away",
        "Choose",
        "Small",
        "a note",
    } & set(texts(seen))
    state = lines(seen)
    assert state[state.index(f"[{index(seen, 'Apply')}]<button type=submit />") + 1] == "\tApply"
    assert f"[{index(seen, name='size')}]<select name=size options=Choose|Small|Large />" in state
    assert f"[{index(seen, name='note')}]<textarea name=note value=a note />" in state
    assert f"[{index(seen, 'Agree')}]<label type=checkbox checked=false />" in state
    assert find(seen, name="size").value == ""


def test_disabled_controls_have_no_index(lab: Lab) -> None:
    """Case 32: a disabled control keeps its line and value, without an index."""
    seen = lab.open("controls.html")
    shut = [node for node in seen.nodes if node.attributes.get("disabled")]
    assert [(node.tag, node.value, node.index) for node in shut] == [
        ("button", None, None),
        ("input", "kept", None),
    ]


def test_a_password_is_never_recorded(lab: Lab) -> None:
    """The value of a password field stands nowhere in the record."""
    seen = lab.open("controls.html")
    assert find(seen, name="code").value is None
    assert "hush" not in dumps(seen)


def test_a_node_keeps_its_key_and_new_ones_get_a_star(lab: Lab) -> None:
    """Keys stay with their nodes, only what is new is starred, and the fingerprint changes with what a person
    would see, not with time.
    """
    first = lab.open("moving.html")
    again = lab.see()
    assert not any(node.is_new for node in (*first.nodes, *again.nodes))
    assert [node.node_key for node in again.nodes] == [node.node_key for node in first.nodes]
    assert again.fingerprint == first.fingerprint
    lab.one(again, "click_element_by_index", index=index(again, "First"))
    swapped = lab.see()
    assert find(swapped, text="First").node_key == find(first, text="First").node_key
    assert index(swapped, "First") == index(first, "First") + 1
    assert swapped.fingerprint != first.fingerprint
    lab.one(swapped, "click_element_by_index", index=index(swapped, "Replace"))
    assert [node.text for node in lab.see().nodes if node.is_new and node.index] == ["Delete"]


def test_frames_and_shadow_roots_are_read_in_place(lab: Lab) -> None:
    """Cases 12, 13 and 14: frames of any origin and shadow roots, open or closed, are read in place, and what
    stands in them is clicked and typed into.
    """
    seen = lab.open("frames.html")
    assert [(node.tag, node.marker) for node in seen.nodes if node.marker] == [
        ("iframe", "iframe"), ("iframe", "iframe"), ("my-open", "shadow-open"), ("my-deep", "shadow-open"), ("my-closed", "shadow-closed"),  # noqa: E501
    ]  # fmt: skip
    assert texts(seen) == [
        "Above the frames",
        "Inside",
        "Inner",
        "Other origin",
        "Pay",
        "Deep",
        "Shut",
        "Slotted",
        "Below the frames",
    ]
    for text in ("Inner", "Deep", "Shut"):
        assert lab.one(seen, "click_element_by_index", index=index(seen, text)).error is None
    assert lab.log("frame", "deep", "closed") == [["frame", True], ["deep", True], ["closed", True]]
    assert lab.one(seen, "input_text", index=index(seen, name="typed"), text="shadow").error is None
    assert lab.one(seen, "input_text", index=index(seen, name="card"), text="4000").error is None
    assert lab.one(seen, "click_element_by_index", index=index(seen, "Pay")).error is None
    after = lab.see()
    assert (find(after, name="typed").value, find(after, name="card").value) == ("shadow", "4000")
    assert "Paid" in texts(after)


def test_the_screenshot_is_a_file_named_by_its_content(lab: Lab) -> None:
    """The picture has the viewport's size, and its record gives its path in the run folder and its hash."""
    for kind in ("jpeg", "png"):
        shot = lab.open("controls.html", image_format=kind).screenshot
        assert shot is not None
        data = (lab.folder / shot.path).read_bytes()
        assert (shot.width, shot.height) == VIEWPORT
        assert shot.sha256 == hashlib.sha256(data).hexdigest()
        assert shot.path.startswith(f"screenshots/{shot.sha256[:16]}.")
        with Image.open(lab.folder / shot.path) as picture:
            assert (picture.format, picture.size) == (kind.upper(), VIEWPORT)


def test_a_kill_leaves_no_torn_picture(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the process ends, a picture under a name that its content gave it is whole."""

    class Killed(BaseException):
        """The end of the process."""

    def half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise Killed

    lab.open("next.html")
    lab.js("document.body.append('torn')")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        with pytest.raises(Killed):
            lab.see()
    assert lab.see().screenshot is not None
    for path in (lab.folder / "screenshots").glob("*.jpg"):
        assert hashlib.sha256(path.read_bytes()).hexdigest()[:16] == path.stem


def test_scroll_containers_and_the_page_say_how_far_they_are_scrolled(lab: Lab) -> None:
    """A scroll container says how much lies above and below, has an index where nothing inside has, and hides
    what it has scrolled away.
    """
    seen = lab.open("scrolling.html")
    pane, inner = (node for node in seen.nodes if node.marker == "scroll")
    assert (pane.scroll_pages or (0, 0))[0] == 0
    assert (pane.scroll_pages or (0, 0))[1] > 3
    assert (pane.index, inner.index is not None) == (None, True)
    rows = [node for node in seen.nodes if node.text.startswith("Row")]
    assert [node.in_viewport for node in rows[:6]] == [True] * 5 + [False]
    page = lab.open("controls.html")
    assert (page.scroll_y, page.pages_above) == (0.0, 0.0)
    lab.one(page, "scroll", down=True, num_pages=1.5)
    moved = lab.see()
    assert (moved.scroll_y, moved.pages_above) == (720.0, 1.5)
    assert moved.pages_below == pytest.approx(page.pages_below - 1.5, abs=0.02)


def test_the_open_modal_alone_can_be_used(lab: Lab) -> None:
    """Case 15: while a half-transparent layer lies over the page, what it covers has no index; what stands on
    it has.
    """
    seen = lab.open("moving.html")
    lab.one(seen, "click_element_by_index", index=index(seen, "Banner"))
    covered = lab.see()
    assert [(node.text, node.is_new) for node in covered.nodes if node.index] == [("Accept", True)]
    error = lab.one(seen, "click_element_by_index", index=index(seen, "Submit")).error
    assert error is not None
    assert "is covered by <div id=cookies>" in error
    lab.one(covered, "click_element_by_index", index=index(covered, "Accept"))
    assert index(lab.see(), "Submit") == index(seen, "Submit")
