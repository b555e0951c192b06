"""Laws of the actions on local pages: what they do to the page, what they say, and that what cannot be done
is an error in words.
"""

import inspect
import time
from pathlib import Path
from typing import Any

import pytest
from browser_lab import MADE, Lab, find, index, lab, texts

from rmsweb.browser.actions import ACTIONS
from rmsweb.browser.controls import key_presses
from rmsweb.browser.execute import HANDLERS
from rmsweb.records import Action, sha256_text

__all__ = ["lab"]
pytestmark = pytest.mark.browser


def typed(lab: Lab, name: str, text: str, **more: bool) -> tuple[str, str]:
    """Types into a field of form.html: (error or message, value that the field holds then)."""
    lab.run(lab.session.goto("http://a.localhost/form.html"))
    seen = lab.see()
    result = lab.one(seen, "input_text", index=index(seen, name=name), text=text, **more)
    return result.error or result.message, find(lab.see(), name=name).value or ""


def test_every_action_has_a_handler_and_vice_versa() -> None:
    """Every action has a handler of its name that takes its parameters; no handler is without an action."""
    assert HANDLERS.keys() == ACTIONS.keys()
    for name, spec in ACTIONS.items():
        taken = list(inspect.signature(HANDLERS[name]).parameters)
        assert taken == ["window", *(param.name for param in spec.params)], name


def test_input_replaces_or_appends_with_trusted_events(lab: Lab) -> None:
    """The old text goes unless it is to stay; an empty text clears; the page gets trusted events."""
    assert typed(lab, "text", "new") == ('typed "new" into <input id=text>', "new")
    assert ["input", "text", True, ""] in lab.log("input")
    assert typed(lab, "text", " more", clear_existing=False)[1] == "old words more"
    assert typed(lab, "text", "")[1] == ""
    assert typed(lab, "area", "one\ntwo")[1] == "one\ntwo"
    assert typed(lab, "area", "long " * 100)[1] == "long " * 100


def test_input_is_read_back(lab: Lab) -> None:
    """Case 19: a masked or cut value is told, one that the page did not take is an error, a fixed field says
    so.
    """
    assert typed(lab, "mask", "12345678") == (
        "typed \"12345678\" into <input id=mask>; it now holds '12-34-56-78'",
        "12-34-56-78",
    )
    assert typed(lab, "short", "abcdefgh") == (
        "typed \"abcdefgh\" into <input id=short>; it now holds 'abcde'",
        "abcde",
    )
    assert typed(lab, "stubborn", "abc") == (
        f"element {index(lab.see(), name='stubborn')} did not take \"abc\": it holds ''",
        "",
    )
    assert "is read-only" in typed(lab, "fixed", "abc")[0]
    assert typed(lab, "secret", "hush") == ("typed the text into <input id=secret>", "")


def test_picked_values_are_set_and_read_back(lab: Lab) -> None:
    """Case 8: dates, ranges and numbers take a value in the form that their element has, or say what they
    hold instead.
    """
    assert typed(lab, "day", "2026-08-15")[1] == "2026-08-15"
    assert "holds ''" in typed(lab, "day", "15 August")[0]
    assert typed(lab, "range", "75")[1] == "75"
    assert typed(lab, "count", "12")[1] == "12"


def test_an_editable_area_takes_typed_text(lab: Lab) -> None:
    """Case 18: an editable area is replaced or appended to like a field."""
    for clear, expected in ((True, "new text"), (False, "old wordsnew text")):
        seen = lab.open("form.html")
        assert (
            lab.one(
                seen, "input_text", index=find(seen, tag="div").index, text="new text", clear_existing=clear
            ).error
            is None
        )
        assert lab.js("document.getElementById('essay').textContent") == expected


def test_one_click_is_one_toggle(lab: Lab) -> None:
    """Case 20: the label of an unseen checkbox toggles it once."""
    seen = lab.open("form.html")
    lab.one(seen, "click_element_by_index", index=index(seen, "Agree"))
    assert lab.js("document.getElementById('box').checked") is True
    assert find(lab.see(), text="Agree").attributes["checked"] == "true"


def test_enter_sends_a_form_once(lab: Lab) -> None:
    """Enter from send_keys, or as a line break in a field of one line, sends the form."""
    for how in ("keys", "break"):
        seen = lab.open("form.html")
        text = "tea" if how == "keys" else "tea\n"
        assert lab.one(seen, "input_text", index=index(seen, name="text"), text=text).error is None
        if how == "keys":
            assert lab.one(seen, "send_keys", keys="Enter").message == "pressed Enter"
        after = lab.see()
        assert (after.title, "text=tea" in after.url) == ("Next", True)


def test_names_and_chords_are_pressed_and_words_are_typed(lab: Lab) -> None:
    """Case 30: chords, names and sequences are pressed, words are typed, an unknown key of a chord is an
    error.
    """
    seen = lab.open("form.html")
    lab.one(seen, "click_element_by_index", index=index(seen, name="text"))
    for keys in ("Control+a", "Backspace", "hello"):
        assert lab.one(seen, "send_keys", keys=keys).error is None
    assert find(lab.see(), name="text").value == "hello"
    assert [entry[3] for entry in lab.log("keydown")] == ["Control", "a", "Backspace", *"hello"]
    assert (
        lab.one(seen, "send_keys", keys="Control+Nonsense").error
        == "there is no key 'Nonsense' in 'Control+Nonsense'"
    )
    assert key_presses("Shift+Tab Tab") == ["Shift+Tab", "Tab"]
    assert (key_presses("1+1=2"), key_presses("+"), key_presses("go on")) == (None, ["+"], None)


def test_a_dropdown_is_chosen_from_by_its_words(lab: Lab) -> None:
    """Case 3: an option is found by text or value whatever its case; the page gets input and change; the
    value is the shown text, none for the empty one.
    """
    seen = lab.open("dropdowns.html")
    assert find(seen, name="plain").value == ""
    for text in ("small size", "L"):
        assert (
            lab.one(seen, "select_dropdown_option", index=index(seen, name="plain"), text=text).error is None
        )
    assert find(lab.see(), name="plain").value == "Large"
    assert [entry[0] for entry in lab.log("input", "change")] == ["input", "change"] * 2
    assert lab.one(seen, "select_dropdown_option", index=index(seen, name="held"), text="Blue").error is None
    assert find(lab.see(), name="held").value == "Blue"
    lab.one(seen, "select_dropdown_option", index=index(seen, name="many"), text="B")
    assert find(lab.see(), name="many").value == "A, B"


def test_a_dropdown_that_cannot_be_used_says_why(lab: Lab) -> None:
    """Case 4: an unknown option gives the list, a disabled one and one that the page takes back are errors, a
    click says what to use.
    """
    seen = lab.open("dropdowns.html")
    number = index(seen, name="plain")
    listed = '"Choose" (selected)\n"Small size" value "s"\n"Large" value "l"\n"Huge" (disabled)'
    assert (lab.one(seen, "select_dropdown_option", index=number, text="Tiny").error or "").endswith(listed)
    assert (
        lab.one(seen, "select_dropdown_option", index=number, text="Huge").error
        == "the option 'Huge' is disabled"
    )
    assert "did not keep" in (
        lab.one(seen, "select_dropdown_option", index=index(seen, name="reverting"), text="Two").error or ""
    )
    error = lab.one(seen, "click_element_by_index", index=number).error or ""
    assert "select_dropdown_option" in error
    assert error.endswith(listed)
    result = lab.one(seen, "get_dropdown_options", index=number)
    assert result.show_once
    assert (result.content or "").endswith(listed)


def test_a_dropdown_of_the_pages_own_making_is_chosen_from(lab: Lab) -> None:
    """Case 5: a list that appears on a click is opened, and one option of it is clicked once."""
    seen = lab.open("dropdowns.html")
    number = find(seen, tag="div").index
    assert lab.one(seen, "select_dropdown_option", index=number, text="grey").error is None
    assert lab.js("window.__picked") == ["Grey"]


def test_files_are_uploaded_to_the_labelled_field(lab: Lab, tmp_path: Path) -> None:
    """Case 9: the label of a hidden file field stands for it; only files that were lent or the agent's own
    may be taken; a click is refused.
    """
    paper = tmp_path / "paper.txt"
    paper.write_text("x")
    seen = lab.open("form.html", uploads=(paper,))
    assert (
        lab.one(seen, "upload_file_to_element", index=index(seen, "Add file"), path="paper.txt").error is None
    )
    assert lab.js("document.getElementById('file').files[0].name") == "paper.txt"
    assert "no file" in (
        lab.one(seen, "upload_file_to_element", index=index(seen, "Add file"), path="passwd").error or ""
    )
    assert lab.one(seen, "upload_file_to_element", index=index(seen, "Add file"), path="/etc/passwd").error


def test_a_scroll_says_what_moved(lab: Lab) -> None:
    """Case 28: pages are heights of what is scrolled; a locked page scrolls its main pane; what cannot move
    says so.
    """
    seen = lab.open("scrolling.html")
    row = next(node.index for node in seen.nodes if node.marker == "scroll" and node.index)
    assert lab.one(seen, "scroll", down=True, num_pages=2.5, frame_element_index=row).message.startswith(
        f"scrolled element {row} down by 2.5 pages"
    )
    assert (lab.js("list.scrollTop"), lab.js("main.scrollTop")) == (250, 0)
    lab.one(seen, "scroll", down=True, num_pages=0.5)
    assert lab.js("main.scrollTop") == 240
    lab.one(seen, "scroll", down=False, num_pages=9.0)
    assert (
        lab.one(seen, "scroll", down=False, num_pages=1.0).message
        == "nothing moved: the page cannot scroll further up"
    )


def test_a_text_is_scrolled_into_view(lab: Lab) -> None:
    """Case 29: a displayed text is brought into view even where it is split over elements and lines; one that
    is not displayed is an error.
    """
    seen = lab.open("scrolling.html")
    assert lab.one(seen, "scroll_to_text", text='needle "in" the hay').error is None
    assert 0 <= lab.js("document.getElementById('needle').getBoundingClientRect().top") < 480
    assert "is not on the page" in (lab.one(seen, "scroll_to_text", text="only a title").error or "")


def test_a_target_below_the_fold_is_scrolled_to_first(lab: Lab) -> None:
    """Case 17: an element outside the viewport is clicked where it is after scrolling."""
    seen = lab.open("controls.html")
    lab.js(
        "document.querySelectorAll('button').forEach((b) => b.addEventListener('click', () => { window.__hit = b.textContent }))"  # noqa: E501
    )
    assert lab.one(seen, "click_element_by_index", index=index(seen, "Below the fold")).error is None
    assert lab.js("window.__hit") == "Below the fold"


def test_a_navigation_says_where_it_led(lab: Lab) -> None:
    """Case 31: pages open and the history goes back to the first of them; routes of a page count as history;
    failures give the reason.
    """
    seen = lab.open("next.html")
    assert lab.one(seen, "go_back").error == "there is no page to go back to in this tab"
    assert (
        lab.one(seen, "go_to_url", url="a.localhost/tabs.html").message
        == "opened http://a.localhost/tabs.html"
    )
    assert "(status 404)" in lab.one(seen, "go_to_url", url="http://a.localhost/nothing").message
    assert lab.one(seen, "go_back").message == "went back"
    here = lab.see()
    lab.one(here, "click_element_by_index", index=index(here, "Route"))
    assert lab.see().url == "http://a.localhost/route"
    lab.one(here, "go_back")
    assert (lab.see().url, "Start" in texts(lab.see())) == ("http://a.localhost/tabs.html", True)
    assert (
        lab.one(here, "go_to_url", url="http://no-such-host.invalid/").error
        == "could not open http://no-such-host.invalid/: name not resolved"
    )
    for url in ("file:///etc/passwd", "chrome://version", "javascript:alert(1)", "data:text/html,x"):
        assert "may not be opened" in (lab.one(here, "go_to_url", url=url).error or "")


def test_a_search_opens_the_engines_page(lab: Lab) -> None:
    """A search opens the engine's address with the query in it; an unknown engine is an error."""
    seen = lab.open("next.html", engines={"duckduckgo": "http://b.localhost/next.html?q={query}"})
    assert lab.one(seen, "search_engine", query="red shoes").error is None
    assert lab.see().url == "http://b.localhost/next.html?q=red+shoes"
    assert (
        lab.one(seen, "search_engine", query="a&b", engine="http://a.localhost/next.html?find={query}").error
        is None
    )
    assert lab.see().url == "http://a.localhost/next.html?find=a%26b"
    assert "unknown search engine" in (lab.one(seen, "search_engine", query="x", engine="lycos").error or "")


def test_tabs_are_opened_switched_and_closed_by_their_ids(lab: Lab) -> None:
    """Case 10: a tab that a click opens becomes the active one and is named; ids count; closing the active
    one leaves a valid one.
    """
    seen = lab.open("tabs.html")
    result = lab.one(seen, "click_element_by_index", index=index(seen, "New tab"))
    assert (result.opened_tab, "opened tab 0002 and switched to it" in result.message) == ("0002", True)
    there = lab.see()
    assert (there.active_tab, there.title, [tab.tab_id for tab in there.tabs]) == (
        "0002",
        "Next",
        ["0001", "0002"],
    )
    assert lab.one(there, "switch_tab", tab_id="0001").error is None
    seen = lab.see()
    assert lab.one(seen, "click_element_by_index", index=index(seen, "Soon")).opened_tab == "0003"
    assert lab.one(there, "close_tab", tab_id="0003").message == "closed tab 0003; the active tab is 0002"
    assert (
        lab.one(there, "switch_tab", tab_id="0009").error
        == "there is no tab '0009'; open tabs are 0001, 0002"
    )
    lab.one(there, "switch_tab", tab_id="0001")
    seen = lab.see()
    result = lab.one(seen, "click_element_by_index", index=index(seen, "Here"), while_holding_ctrl=True)
    assert (result.opened_tab, lab.see().active_tab) == ("0004", "0001")
    for tab_id in ("0001", "0002", "0004"):
        assert lab.one(seen, "close_tab", tab_id=tab_id).error is None
    assert [(tab.tab_id, tab.url) for tab in lab.see().tabs] == [("0005", "about:blank")]
    assert (
        lab.one(seen, "go_to_url", url="http://a.localhost/next.html", new_tab=True).message
        == "opened http://a.localhost/next.html in the new tab 0005"
    )


def test_dialogs_are_answered_and_told(lab: Lab) -> None:
    """Case 11: dialogs are answered at once, by rule, and stand in the next state and in no later one."""
    seen = lab.open("tabs.html")
    for text in ("Alert", "Ask", "Prompt"):
        assert lab.one(seen, "click_element_by_index", index=index(seen, text)).error is None
    after = lab.see()
    assert after.dialogs == (
        "alert 'Saved' (accepted)",
        "confirm 'Sure?' (accepted)",
        "prompt 'Name?' (dismissed)",
    )
    assert {"Yes", "null"} <= set(texts(after))
    assert lab.see().dialogs == ()


def test_downloads_are_kept_and_told(lab: Lab) -> None:
    """Case 26: a download lands among the agent's files under a name of its own, is named in the next state,
    and can be read.
    """
    seen = lab.open("tabs.html", name="downloads")
    for name in ("table.csv", "table-2.csv"):
        lab.one(seen, "click_element_by_index", index=index(seen, "Download"))
        assert lab.see().downloads == (name,)
    assert lab.one(seen, "read_file", file_name="table-2.csv").content == "File table-2.csv:\na,b\n1,2\n"


def test_a_pdf_is_kept_and_can_be_read(lab: Lab) -> None:
    """Case 25: a PDF lies once among the agent's files, shown or downloaded; where it is shown the state says
    so and extraction refuses it.
    """
    seen = lab.open("tabs.html", name="papers")
    assert lab.one(seen, "go_to_url", url="http://a.localhost/paper.pdf").error is None
    shown = lab.see()
    assert (shown.downloads, shown.is_pdf) == (("paper.pdf",), shown.url.endswith(".pdf"))
    assert lab.see().downloads == ()
    assert lab.one(shown, "read_file", file_name="paper.pdf").error is None
    if shown.is_pdf:
        assert "read_file" in (
            lab.one(shown, "extract_structured_data", query="q", extract_links=False).error or ""
        )
    lab.run(lab.session.goto("http://a.localhost/tabs.html"))
    seen = lab.see()
    assert lab.one(seen, "click_element_by_index", index=index(seen, "Paper")).error is None
    after = lab.see()
    assert after.downloads == ("paper-2.pdf",)
    assert after.screenshot is not None
    assert len(after.tabs) == (2 if after.is_pdf else 1)


@pytest.mark.parametrize(
    ("html", "action", "params"),
    [
        ("<a href=/silent>Go</a>", "click_element_by_index", {"index": 1}),
        ("<form action=/silent><button>Go</button></form>", "click_element_by_index", {"index": 1}),
        ("<form action=/silent><input></form>", "input_text", {"index": 1, "text": "x\n"}),
        ("<form action=/silent><input autofocus></form>", "send_keys", {"keys": "Enter"}),
        (
            "<select onchange=\"location = '/silent'\"><option>A<option>B</select>",
            "select_dropdown_option",
            {"index": 1, "text": "B"},
        ),
    ],
)
def test_a_page_that_does_not_answer_is_given_up(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, html: str, action: str, params: dict[str, Any]
) -> None:
    """Case 24: what leads to a server that never answers costs some seconds; the old page stays, the state
    says so, and no page is replaced.
    """
    monkeypatch.setattr("rmsweb.browser.window.NAVIGATION_WAIT_S", 0.5)
    MADE["silence.html"] = f"<title>Tabs</title>{html}"
    seen = lab.open("silence.html")
    assert lab.one(seen, action, **params).error is None
    after = lab.see()
    assert (after.title, lab.session.restarts) == ("Tabs", 0)
    assert any("did not answer" in warning for warning in after.warnings)


def test_the_state_waits_for_data_that_a_click_asked_for(lab: Lab) -> None:
    """What a request of the page brings stands in the next state."""
    seen = lab.open("tabs.html")
    lab.one(seen, "click_element_by_index", index=index(seen, "Late"))
    assert "Slow answer" in texts(lab.see())


def test_extraction_reads_the_whole_page(lab: Lab) -> None:
    """Case 33: tables, frames and shadow roots are in the text, hidden parts are not; links on request; the
    text is kept for a training record.
    """
    seen = lab.open("article.html")
    for links in (False, True):
        result = lab.one(seen, "extract_structured_data", query="prices", extract_links=links)
        assert result.extraction is not None
        text = result.extraction.answer
        assert "| Tea | 5 |\n| Cake | 50%25 |" in text
        assert "In a frame: 42" in text
        assert "In a shadow: 43" in text
        assert "Never shown" not in text
        assert ("(http://a.localhost/next.html)" in text) == links
        assert (lab.folder / result.extraction.page_text_path).read_text() == text
        assert result.extraction.page_text_sha256 == sha256_text(text)
    assert "no text from character 99999" in (
        lab.one(seen, "extract_structured_data", query="q", extract_links=False, start_from_char=99999).error
        or ""
    )


def test_a_script_returns_its_value_or_its_error(lab: Lab) -> None:
    """A script's value comes back, cut at 20,000 characters; its failure is an error; one that never ends is
    stopped.
    """
    seen = lab.open("next.html")
    assert lab.one(seen, "execute_js", code="document.title").message == "the script returned Next"
    assert (
        lab.one(seen, "execute_js", code="const a = await 2; return {a}").message
        == 'the script returned {"a": 2}'
    )
    assert (lab.one(seen, "execute_js", code="'x'.repeat(30000)").content or "").startswith(
        "x" * 20_000 + " ... (10000 more"
    )
    assert "the script failed: Error: no" in (
        lab.one(seen, "execute_js", code="throw new Error('no')").error or ""
    )


def test_files_are_written_read_and_shown_at_the_end(lab: Lab) -> None:
    """Files are written, changed and read; `done` gives text, flag and the files to show; a missing flag
    counts as not done.
    """
    seen = lab.open("next.html", name="notes")
    lab.one(seen, "write_file", file_name="a.md", content="one")
    lab.one(seen, "write_file", file_name="a.md", content="two", append=True)
    assert (
        lab.one(seen, "replace_file_str", file_name="a.md", old_str="two", new_str="three").message
        == "replaced 1 occurrence in a.md"
    )
    assert lab.one(seen, "read_file", file_name="a.md").content == "File a.md:\none\nthree\n"
    done = lab.one(seen, "done", text="found", success=True, files_to_display=["a.md", "missing.md"])
    assert (done.is_done, done.success, done.content) == (True, True, "found\n\na.md:\none\nthree\n")
    assert lab.one(seen, "done", text="lost").success is False


def test_wait_sleeps_and_is_capped(lab: Lab) -> None:
    """A wait takes the stated time; a negative one none."""
    seen = lab.open("next.html")
    started = time.monotonic()
    assert lab.one(seen, "wait", seconds=1).message == "waited 1 s"
    assert time.monotonic() - started >= 1
    assert lab.one(seen, "wait", seconds=-5).message == "waited 0 s"


def test_an_unknown_index_is_an_error(lab: Lab) -> None:
    """An index that the state does not have is an error that names it, for every action that takes one."""
    seen = lab.open("next.html")
    for action in (
        Action(name="click_element_by_index", params={"index": 99}),
        Action(name="input_text", params={"index": 0, "text": "a"}),
        Action(name="select_dropdown_option", params={"index": 99, "text": "a"}),
        Action(name="get_dropdown_options", params={"index": 99}),
        Action(name="upload_file_to_element", params={"index": -1, "path": "a"}),
        Action(name="scroll", params={"down": True, "num_pages": 1.0, "frame_element_index": 99}),
    ):
        error = lab.act(seen, action)[0].error
        assert error is not None
        assert action.name == "upload_file_to_element" or error.startswith("there is no element")
