"""Situations of real pages: dialogs, frames, shadow roots, layers over the page, late and huge pages, files.

Numbers as in docs/situations.md.
"""

import pytest
from browser_lab import Lab, click, find, index, lab, names, texts

from rmsweb.prompt import PromptConfig, build_prompt
from rmsweb.records import Observation, Text

__all__ = ["lab"]
pytestmark = pytest.mark.browser


def test_dialogs_in_a_row_in_frames_and_on_leaving_are_answered(lab: Lab) -> None:
    """Case 11: every dialog is answered by rule, in order, also two in a row, one of a frame, and the one
    that would keep the page from being left.
    """
    seen = lab.open("dialogs.html")
    for name in ("Delete", "Twice", "Inner", "Edit"):
        assert click(lab, seen, name).error is None
    after = lab.see()
    said = ("confirm 'Delete the row?'", "confirm 'First?'", "confirm 'Second?'", "alert 'From the frame'")
    assert after.dialogs == tuple(f"{text} (accepted)" for text in said)
    assert "true true" in texts(after)
    assert "Delete" not in names(after)
    assert lab.one(after, "go_to_url", url="http://a.localhost/next.html").error is None
    left = lab.see()
    assert left.title == "Next"
    assert [text.split()[0] for text in left.dialogs] == ["beforeunload"]


def test_a_scrolled_frame_is_read_and_clicked_in_place(lab: Lab) -> None:
    """Case 12: elements of a frame that stands aside and is scrolled get real clicks where they are; what it
    scrolled away has no place in view.
    """
    seen = lab.open("scrolled_frame.html")
    for name in ("Own", "Heard"):
        assert click(lab, seen, name).error is None
    assert lab.log() == [["own", True], ["heard", True]]
    assert not [node for node in seen.nodes if node.text == "Scrolled away" and node.in_viewport]


def test_nested_frames_of_other_origins_are_read_and_clicked(lab: Lab) -> None:
    """Case 13: fields three frames deep and in a tiny frame take a text, what lies below a frame's fold is
    reached by scrolling it, all text is read.
    """
    seen = lab.open("nested.html")
    for name, text in (("first", "two"), ("card", "three"), ("number", "4000")):
        assert lab.one(seen, "input_text", index=index(seen, name=name, tag="input"), text=text).error is None
    after = lab.see()
    assert [find(after, name=name, tag="input").value for name in ("first", "card", "number")] == [
        "two",
        "three",
        "4000",
    ]
    assert "last" not in [node.attributes.get("name") for node in after.nodes]
    frame = index(after, name="tall")
    assert lab.one(after, "scroll", down=True, num_pages=9.0, frame_element_index=frame).message.startswith(
        f"scrolled element {frame} down"
    )
    low = lab.see()
    assert (low.scroll_y, "The bottom" in texts(low)) == (0.0, True)
    assert lab.one(low, "input_text", index=index(low, name="last"), text="end").error is None
    result = lab.one(low, "extract_structured_data", query="q", extract_links=False)
    assert all(
        text in (result.content or "") for text in ("Level one", "Level two", "Other origin", "The bottom")
    )


def test_shadow_roots_in_shadow_roots_are_read_in_place(lab: Lab) -> None:
    """Case 14: a banner in a shadow root covers the page until it is answered; then what lies three roots
    deep and what is slotted is there once and works.
    """
    seen = lab.open("shadows.html")
    assert names(seen) == ["Agree"]
    assert click(lab, seen, "Agree").error is None
    page = lab.see()
    assert names(page) == ["Deep button", "", "Slotted link", "Under the banner", "Sealed button"]
    assert "Sealed words" in texts(page)
    assert click(lab, page, "Deep button").error is None
    assert lab.one(page, "input_text", index=index(page, name="deep"), text="words").error is None
    assert find(lab.see(), name="deep").value == "words"
    assert click(lab, page, "Sealed button").error is None
    assert [entry for entry in lab.log() if len(entry) == 2] == [["agree", True], ["deep", True]]
    assert "a-sealed" in [entry[1] for entry in lab.log("click")]
    assert click(lab, page, "Slotted link").error is None
    assert lab.see().title == "Next"


@pytest.mark.parametrize(("kind", "blocked"), [("opaque", True), ("half", True), ("through", False)])
def test_a_layer_that_takes_clicks_takes_the_indices_below_it(lab: Lab, kind: str, blocked: bool) -> None:
    """Case 15: what a layer covers, frames too, has no index, and a click on it is an error; an opaque one
    hides text, one that lets clicks pass nothing.
    """
    before = lab.open("overlay.html")
    lab.js(f"window.cover('{kind}')")
    seen = lab.see()
    assert {"Save", "Framed"} & set(names(seen)) == (set() if blocked else {"Save", "Framed"})
    assert ("Yes" in names(seen)) == (kind != "through")
    assert ({"Old words", "Framed words"} <= set(texts(seen))) == (kind != "opaque")
    for name in ("Save", "Framed"):
        error = click(lab, before, name).error
        assert ("is covered by <div id=cover>" in (error or "")) == blocked
        assert (error is None) != blocked
    assert [entry[0] for entry in lab.log("click", "framed")] == ([] if blocked else ["click", "framed"])


def test_the_active_slide_alone_is_offered(lab: Lab) -> None:
    """Case 16: slides that are inert and moved away have no index; the next one is starred."""
    seen = lab.open("carousel.html")
    assert names(seen) == ["First offer", "Next slide"]
    click(lab, seen, "Next slide")
    after = lab.see()
    assert [(node.text, node.is_new) for node in after.nodes if node.index] == [
        ("Second offer", True),
        ("Next slide", False),
    ]


def test_an_application_that_never_stops_loading_is_still_read(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 24: neither an open stream nor a hanging picture holds the state up; it says that the page is
    empty; after a wait the content is there.
    """
    seen = lab.open("spa.html")
    assert names(seen) == []
    assert "empty page\n" in state_text(seen)
    lab.one(seen, "wait", seconds=2)
    after = lab.see()
    assert (texts(after), names(after)) == (["Inbox", "Compose"], ["Compose"])
    monkeypatch.setattr("rmsweb.browser.execute.NAVIGATION_LIMIT_S", 0.5)
    assert (
        lab.one(after, "go_to_url", url="http://a.localhost/silent").error
        == "could not open http://a.localhost/silent: no answer within 0.5 s"
    )


def state_text(seen: Observation) -> str:
    """The text of the prompt with that state."""
    prompt = build_prompt(PromptConfig(prompt_budget=100_000), task_text="t", observation=seen, history=())
    return "".join(
        part.text for message in prompt.messages for part in message.parts if isinstance(part, Text)
    )


def test_a_pdf_is_kept_however_it_comes(lab: Lab) -> None:
    """Case 25: a PDF that a link opens here, attaches, or opens in a new tab is stored under its name, told
    once, and read as text.
    """
    seen = lab.open("tabs.html", name="pdfs")
    stored = []
    for link, text in (("Inline", "Forty two"), ("Attached", "Forty three"), ("Paper", "Forty two")):
        assert click(lab, seen, link).error is None
        after = lab.see()
        (name,) = after.downloads
        stored.append(name)
        assert text in (lab.one(after, "read_file", file_name=name).content or "")
        assert lab.see().downloads == ()
        lab.run(lab.session.goto("http://a.localhost/tabs.html"))
        seen = lab.see()
    assert stored == ["paper.pdf", "report 1.pdf", "paper-2.pdf"]


def test_links_that_lead_to_no_page_leave_the_page(lab: Lab) -> None:
    """Case 26: a link that is answered with nothing leaves the page as it was and costs no error; a download
    after it is named as ever.
    """
    seen = lab.open("tabs.html", name="no page")
    assert click(lab, seen, "Nothing").error is None
    after = lab.see()
    assert (after.title, after.url, after.warnings, after.downloads) == ("Tabs", seen.url, (), ())
    assert click(lab, after, "Download").error is None
    assert lab.see().downloads == ("table.csv",)


def test_a_page_of_thousands_of_links_offers_those_near_the_window(lab: Lab) -> None:
    """Case 27: a state comes without a restart; far elements have no index, the prompt's text is cut with a
    mark at a line, a footer's button works.
    """
    seen = lab.open("huge.html")
    assert lab.session.restarts == 0
    assert len(names(seen)) > 1000
    assert all(node.box is not None and -1000 <= node.box[1] <= 480 + 1000 for node in seen.nodes)
    prompt = build_prompt(PromptConfig(prompt_budget=100_000), task_text="t", observation=seen, history=())
    shown = [
        part.text
        for message in prompt.messages
        for part in message.parts
        if isinstance(part, Text) and part.tag == "element"
    ]
    assert shown[-1].startswith("(state cut at 40000 characters")
    assert sum(map(len, shown[:-1])) <= 40_000
    assert set(prompt.indices) == set(range(1, len(prompt.indices) + 1))
    assert click(lab, seen, "Wanted").error is None
    assert lab.see().title == "Found"


def test_a_long_page_is_extracted_piece_by_piece(lab: Lab) -> None:
    """Case 33: following start_from_char gives every line once."""
    seen = lab.open("article.html")
    lab.js(
        "document.body.insertAdjacentHTML('beforeend', Array.from({length: 3000}, (_, i) => `<p>Line ${i} of many</p>`).join(''))"  # noqa: E501
    )
    start: int | None = 0
    read = ""
    while start is not None:
        result = lab.one(
            seen, "extract_structured_data", query="q", extract_links=False, start_from_char=start
        )
        assert result.extraction is not None
        read += result.extraction.answer
        more = (result.content or "").rpartition("start_from_char=")
        start = int(more[2].rstrip(")")) if more[1] else None
    assert [line for line in read.splitlines() if line.startswith("Line")] == [
        f"Line {i} of many" for i in range(3000)
    ]
    assert "| Tea | 5 |" in read


def test_a_click_that_a_late_cookie_banner_would_get_is_an_error(lab: Lab) -> None:
    """Case 34: a click that the banner would get is an error that names it; the banner's button is starred,
    and after it the click works.
    """
    seen = lab.open("banner.html")
    lab.one(seen, "wait", seconds=1)
    assert "is covered by <div id=cookies>" in (click(lab, seen, "Send order").error or "")
    assert lab.log("click") == []
    shown = lab.see()
    assert [(node.text, node.is_new) for node in shown.nodes if node.index] == [("Accept all", True)]
    click(lab, shown, "Accept all")
    after = lab.see()
    assert click(lab, after, "Send order").error is None
    assert lab.see().title == "Next"


def test_a_canvas_is_one_element(lab: Lab) -> None:
    """Case 35: a canvas is listed once, a click hits its centre and tells where that is, and nothing drawn in
    it is invented.
    """
    seen = lab.open("canvas.html")
    assert [(node.tag, node.index) for node in seen.nodes if node.index] == [("canvas", 1)]
    assert click(lab, seen, tag="canvas").message == "clicked <canvas id=map> at (100, 60)"
    assert "Hit 100 60" in texts(lab.see())
