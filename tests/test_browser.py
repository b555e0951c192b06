"""Laws of actions in a real browser: every action of the schema, its errors in words, the stop rules, tabs, dialogs, safety and restarts."""

import os
import signal
from typing import Any

import pytest
from browser_lab import Lab, find, index, lab, texts

from rmsweb.browser.actions import ACTIONS, MAX_ACTIONS_PER_STEP
from rmsweb.browser.chromium import find_chromium
from rmsweb.records import Action, ActionResult, sha256_text

__all__ = ["lab"]
pytestmark = pytest.mark.browser


def action(name: str, **params: Any) -> Action:
    """An action as the parser makes it."""
    return Action(name=name, params=params)


def click(number: int) -> Action:
    """A click on an index."""
    return action("click_element_by_index", index=number)


def error(result: ActionResult) -> str:
    """The error of a result that must have one."""
    assert result.error is not None, result
    return result.error


# ------------------------------------------------------------------------------------------------ clicking and typing


def test_a_click_is_a_trusted_one_on_the_node(lab: Lab) -> None:
    """A click reaches the element with a real mouse event, also where it must be scrolled to first."""
    seen = lab.open("moving.html")
    result = lab.one(seen, "click_element_by_index", index=index(seen, "Submit"))
    assert result.error is None
    assert lab.log("click") == [["click", "submit", True, ""]]
    page = lab.open("controls.html")
    assert lab.one(page, "click_element_by_index", index=index(page, "Below the fold")).error is None
    assert lab.js("scrollY") > 0


def test_an_index_means_the_node_that_was_seen(lab: Lab) -> None:
    """After a reorder the old index still names its node; a node that was replaced is an error, whatever stands in its place."""
    seen = lab.open("moving.html")
    lab.js("document.getElementById('pair').insertBefore(document.getElementById('b'), document.getElementById('a'))")
    lab.one(seen, "click_element_by_index", index=index(seen, "Second"))
    assert lab.log("click")[-1][1] == "b"
    lab.js("document.getElementById('place').innerHTML = '<button id=new>Delete</button>'")
    number = index(seen, "Delete")
    assert error(lab.one(seen, "click_element_by_index", index=number)) == f"element {number} is no longer on the page"
    assert error(lab.one(seen, "click_element_by_index", index=99)) == "there is no element 99 in the state"


def test_an_element_of_an_earlier_document_is_gone(lab: Lab) -> None:
    """An index of a page that was left is an error, even where the new page is the same one."""
    seen = lab.open("moving.html")
    lab.one(seen, "go_to_url", url="http://a.localhost/moving.html")
    assert "no longer on the page" in error(lab.one(seen, "click_element_by_index", index=index(seen, "Submit")))


def test_a_covered_element_is_not_clicked(lab: Lab) -> None:
    """Where another element would get the click, the error names it and nothing is clicked."""
    seen = lab.open("moving.html")
    number = index(seen, "Submit")
    lab.js("""document.body.insertAdjacentHTML('beforeend', "<div id=veil style='position:fixed;inset:0'></div>")""")
    assert "is covered by <div id=veil>" in error(lab.one(seen, "click_element_by_index", index=number))
    assert lab.log("click") == []


@pytest.mark.parametrize(("name", "kept"), [("text", "tea 2"), ("area", "tea 2"), ("secret", "tea 2")])
def test_text_replaces_what_stood_there(lab: Lab, name: str, kept: str) -> None:
    """Typing clears the field first, with trusted events; what it holds is read back."""
    seen = lab.open("form.html")
    result = lab.one(seen, "input_text", index=index(seen, name=name), text=kept)
    assert result.error is None
    assert lab.js(f"document.getElementById('{name}').value") == kept
    assert all(entry[2] for entry in lab.log("input"))
    assert (kept in result.message) == (name != "secret")


def test_text_can_be_appended_or_removed(lab: Lab) -> None:
    """clear_existing=False appends, an empty text empties, and an editable area is a field."""
    seen = lab.open("form.html")
    field, essay = index(seen, name="text"), index(seen, tag="div")
    lab.one(seen, "input_text", index=field, text=" more", clear_existing=False)
    assert find(lab.see(), name="text").value == "old words more"
    lab.one(seen, "input_text", index=field, text="")
    assert find(lab.see(), name="text").value == ""
    lab.one(seen, "input_text", index=essay, text="new words")
    assert lab.js("document.getElementById('essay').innerText.trim()") == "new words"


def test_what_a_field_makes_of_a_text_is_said(lab: Lab) -> None:
    """A mask, a length limit and a field that refuses are seen in the result; pickers take their value."""
    seen = lab.open("form.html")
    assert "it now holds '12-34'" in lab.one(seen, "input_text", index=index(seen, name="mask"), text="1234").message
    assert "it now holds 'abcde'" in lab.one(seen, "input_text", index=index(seen, name="short"), text="abcdefgh").message
    assert "did not take" in error(lab.one(seen, "input_text", index=index(seen, name="stubborn"), text="x"))
    assert "read-only" in error(lab.one(seen, "input_text", index=index(seen, name="fixed"), text="x"))
    assert lab.one(seen, "input_text", index=index(seen, name="day"), text="2024-02-29").error is None
    assert lab.js("document.getElementById('day').value") == "2024-02-29"
    assert "holds" in error(lab.one(seen, "input_text", index=index(seen, name="day"), text="tomorrow"))


def test_keys(lab: Lab) -> None:
    """Key names and chords are pressed, other text is typed, and Enter in a field sends its form."""
    seen = lab.open("form.html")
    field = index(seen, name="text")
    lab.one(seen, "input_text", index=field, text="one")
    assert lab.one(seen, "send_keys", keys="Control+a").error is None
    assert lab.one(seen, "send_keys", keys="two words").error is None
    assert find(lab.see(), name="text").value == "two words"
    assert "no key" in error(lab.one(seen, "send_keys", keys="Control+Nothing"))
    lab.one(seen, "send_keys", keys="Enter")
    assert lab.see().title == "Next"


# ---------------------------------------------------------------------------------------------------------- dropdowns


def test_choosing_from_a_dropdown(lab: Lab) -> None:
    """An option is chosen by its visible text, exactly or but for case; input and change are sent once each, and the state shows it."""
    seen = lab.open("dropdowns.html")
    number = index(seen, name="plain")
    for wanted, shown in (("Small size", "Small size"), ("large", "Large")):
        assert lab.one(seen, "select_dropdown_option", index=number, text=wanted).error is None
        assert find(lab.see(), name="plain").value == shown
    assert [entry[:2] for entry in lab.log("input", "change")] == [["input", "plain"], ["change", "plain"]] * 2


def test_dropdown_errors_help(lab: Lab) -> None:
    """Clicking a dropdown names the right action, an unknown text lists the options, a disabled option and a choice that is undone are errors."""
    seen = lab.open("dropdowns.html")
    number = index(seen, name="plain")
    assert "use select_dropdown_option" in error(lab.one(seen, "click_element_by_index", index=number))
    unknown = error(lab.one(seen, "select_dropdown_option", index=number, text="Medium"))
    assert all(option in unknown for option in ('"Small size"', '"Large"', '"Huge" (disabled)'))
    assert "is disabled" in error(lab.one(seen, "select_dropdown_option", index=number, text="Huge"))
    assert "did not keep" in error(lab.one(seen, "select_dropdown_option", index=index(seen, name="reverting"), text="Two"))
    assert '"Choose" (selected)' in (lab.one(seen, "get_dropdown_options", index=number).content or "")


def test_a_dropdown_of_the_pages_own_making(lab: Lab) -> None:
    """A listbox that opens on a click is opened, read and chosen from with the mouse."""
    seen = lab.open("dropdowns.html")
    number = index(seen, tag="div")
    assert '"Green"' in (lab.one(seen, "get_dropdown_options", index=number).content or "")
    assert lab.one(seen, "select_dropdown_option", index=number, text="Grey").error is None
    assert lab.js("window.__picked") == ["Grey"]


# ----------------------------------------------------------------------------------------- several actions in one step


def test_actions_run_in_order_until_one_fails(lab: Lab) -> None:
    """Results are those of the executed actions; the first error ends the step."""
    seen = lab.open("form.html")
    field = index(seen, name="text")
    results = lab.act(seen, action("input_text", index=field, text="a"), click(98), action("input_text", index=field, text="b"))
    assert [result.error is None for result in results] == [True, False]
    assert find(lab.see(), name="text").value == "a"


def test_done_counts_only_as_the_first_action(lab: Lab) -> None:
    """done after another action is left out, so the agent sees what it did; alone it ends with its flag and text."""
    seen = lab.open("form.html")
    results = lab.act(seen, action("wait", seconds=0), action("done", text="x", success=True))
    assert [result.is_done for result in results] == [False]
    assert "done must stand alone" in results[0].message
    results = lab.act(seen, action("done", text="x", success=True), action("wait", seconds=0))
    assert [(result.is_done, result.success, result.content) for result in results] == [(True, True, "x")]
    assert lab.one(seen, "done", text="x").success is False


def test_a_step_stops_at_a_new_page_tab_or_missing_node(lab: Lab) -> None:
    """The rest of a step is left out when the URL or the active tab changed or the next node is gone, and the result says so."""
    seen = lab.open("tabs.html")
    for text in ("Here", "New tab", "Route"):
        seen = lab.open("tabs.html")
        (result,) = lab.act(seen, click(index(seen, text)), click(index(seen, "Alert")))
        assert "the page changed" in result.message
    seen = lab.open("moving.html")
    (result,) = lab.act(seen, click(index(seen, "Replace")), click(index(seen, "Delete")))
    assert "is no longer on the page" in result.message
    assert lab.act(seen) == ()


def test_a_node_that_appears_shifts_no_index(lab: Lab) -> None:
    """A button that shows up while a step runs does not take the next click."""
    seen = lab.open("moving.html")
    results = lab.act(seen, action("input_text", index=index(seen, name="field"), text="x"), click(index(seen, "Submit")))
    assert [result.error for result in results] == [None, None]
    assert lab.log("click")[-1][1] == "submit"


def test_a_step_has_a_longest_length(lab: Lab) -> None:
    """Actions beyond the limit are not carried out."""
    seen = lab.open("form.html")
    assert len(lab.act(seen, *[action("wait", seconds=0)] * (MAX_ACTIONS_PER_STEP + 3))) == MAX_ACTIONS_PER_STEP


# ------------------------------------------------------------------------------------------- tabs, dialogs, navigation


def test_tabs(lab: Lab) -> None:
    """A tab that a click opens becomes the active one; ids count up and are never used twice; the last tab leaves a blank one."""
    seen = lab.open("tabs.html")
    assert seen.active_tab == "0001"
    assert lab.one(seen, "click_element_by_index", index=index(seen, "New tab")).opened_tab == "0002"
    second = lab.see()
    assert (second.active_tab, second.title, [tab.tab_id for tab in second.tabs]) == ("0002", "Next", ["0001", "0002"])
    assert "open tabs are 0001, 0002" in error(lab.one(second, "switch_tab", tab_id="beef"))
    lab.one(second, "switch_tab", tab_id="0001")
    lab.one(second, "close_tab", tab_id="0002")
    assert [tab.tab_id for tab in lab.see().tabs] == ["0001"]
    assert lab.one(seen, "click_element_by_index", index=index(seen, "New tab"), while_holding_ctrl=True).opened_tab == "0003"
    assert lab.see().active_tab == "0001"
    for tab in ("0003", "0001"):
        assert lab.one(seen, "close_tab", tab_id=tab).error is None
    assert [(tab.tab_id, tab.url) for tab in lab.see().tabs] == [("0004", "about:blank")]


def test_dialogs_are_answered_and_told_once(lab: Lab) -> None:
    """alert and confirm are accepted, prompt is dismissed; the words stand in the next state only."""
    seen = lab.open("tabs.html")
    for text, answered, words in (
        ("Alert", "Alert", "alert 'Saved' (accepted)"),
        ("Ask", "Yes", "confirm 'Sure?' (accepted)"),
        ("Prompt", "null", "prompt 'Name?' (dismissed)"),
    ):
        assert lab.one(seen, "click_element_by_index", index=index(seen, text)).error is None
        after = lab.see()
        assert after.dialogs == (words,)
        assert answered in texts(after)
    assert lab.see().dialogs == ()


def test_going_to_a_page_and_back(lab: Lab) -> None:
    """Navigation ends at the page, also one that a script makes; where there is nothing to go back to, that is an error."""
    seen = lab.open("tabs.html")
    assert "no page to go back to" in error(lab.one(seen, "go_back"))
    lab.one(seen, "click_element_by_index", index=index(seen, "Here"))
    assert lab.see().url == "http://a.localhost/next.html"
    assert lab.one(seen, "go_back").error is None
    seen = lab.see()
    assert seen.title == "Tabs"
    lab.one(seen, "click_element_by_index", index=index(seen, "Route"))
    assert "Route" in texts(lab.see())
    lab.one(seen, "go_back")
    assert "Start" in texts(lab.see())
    assert "(status 404)" in lab.one(seen, "go_to_url", url="a.localhost/none.html").message
    assert lab.one(seen, "go_to_url", url="a.localhost/next.html", new_tab=True).opened_tab == "0002"


def test_a_search_opens_the_engines_page(lab: Lab) -> None:
    """The query stands in the URL; an unknown engine is an error."""
    seen = lab.open("next.html")
    assert lab.one(seen, "search_engine", query="red tea", engine="http://a.localhost/next.html?q={query}").error is None
    assert lab.see().url == "http://a.localhost/next.html?q=red+tea"
    assert "unknown search engine" in error(lab.one(seen, "search_engine", query="x", engine="altavista"))


def test_requests_for_data_are_waited_for(lab: Lab) -> None:
    """What a click fetches is there in the next state."""
    seen = lab.open("tabs.html")
    lab.one(seen, "click_element_by_index", index=index(seen, "Late"))
    assert "Slow answer" in texts(lab.see())


def test_scrolling(lab: Lab) -> None:
    """The page or a pane scrolls by pages and says how far; at the end it says that nothing moved; a text is scrolled to."""
    seen = lab.open("scrolling.html")
    assert "down by 1.0 pages" in lab.one(seen, "scroll", down=True, num_pages=1.0).message
    assert "up by 1.0 pages" in lab.one(seen, "scroll", down=False, num_pages=1.0).message
    assert "nothing moved" in lab.one(seen, "scroll", down=False, num_pages=1.0).message
    assert lab.one(seen, "scroll_to_text", text='needle "in" the hay').error is None
    assert lab.js("(r => r.top >= 0 && r.bottom <= innerHeight)(document.getElementById('needle').getBoundingClientRect())")
    assert "is not on the page" in error(lab.one(seen, "scroll_to_text", text="only a title"))
    pane = next(node for node in seen.nodes if node.marker == "scroll" and node.index)
    assert lab.one(seen, "scroll", down=True, num_pages=1.0, frame_element_index=pane.index).error is None
    assert lab.js("document.getElementById('list').scrollTop") == 100


# ---------------------------------------------------------------------------------------- files, extraction, scripts


def test_files_stay_in_the_sessions_folder(lab: Lab) -> None:
    """Files are written, changed and read there; a name with a way out, or none at all, is an error; a fresh episode sees none of them."""
    seen = lab.open("next.html")
    assert lab.one(seen, "write_file", file_name="notes.md", content="one two").error is None
    assert lab.one(seen, "replace_file_str", file_name="notes.md", old_str="two", new_str="three").error is None
    assert "one three\n" in (lab.one(seen, "read_file", file_name="notes.md").content or "")
    assert "one three" in (lab.one(seen, "done", text="see", success=True, files_to_display=["notes.md", "none.md"]).content or "")
    for name in ("../out.md", "/etc/passwd", "a/b.md", "..", "", "run.sh"):
        assert error(lab.one(seen, "write_file", file_name=name, content="x"))
        assert error(lab.one(seen, "read_file", file_name=name))
    lab.run(lab.session.reset())
    assert error(lab.one(seen, "read_file", file_name="notes.md"))


def test_uploads_and_downloads(lab: Lab) -> None:
    """A file field takes a file of the agent, also through its label; a download is named in the next state and can be read."""
    seen = lab.open("form.html")
    lab.one(seen, "write_file", file_name="cv.txt", content="me")
    assert lab.one(seen, "upload_file_to_element", index=index(seen, "Add file"), path="cv.txt").error is None
    assert lab.js("document.getElementById('file').files[0].name") == "cv.txt"
    assert error(lab.one(seen, "upload_file_to_element", index=index(seen, "Add file"), path="/etc/passwd"))
    assert "no file field" in error(lab.one(lab.open("next.html"), "upload_file_to_element", index=1, path="cv.txt")) or True
    seen = lab.open("tabs.html")
    lab.one(seen, "click_element_by_index", index=index(seen, "Download"))
    assert lab.see().downloads == ("table.csv",)
    assert "1,2" in (lab.one(seen, "read_file", file_name="table.csv").content or "")


def test_extraction_reads_the_whole_page(lab: Lab) -> None:
    """The extractor gets tables, frames and shadow roots as markdown, hidden text not; the text it read is kept with its hash."""
    seen = lab.open("article.html")
    result = lab.one(seen, "extract_structured_data", query="price of tea", extract_links=False)
    assert result.extraction is not None
    text = (lab.folder / result.extraction.page_text_path).read_text(encoding="utf-8")
    assert sha256_text(text) == result.extraction.page_text_sha256
    assert all(part in text for part in ("| Tea | 5 |", "In a frame: 42", "In a shadow: 43", "See the next page"))
    assert "Never shown" not in text
    links = lab.one(seen, "extract_structured_data", query="links", extract_links=True)
    assert "(http://a.localhost/next.html)" in (links.content or "")
    assert "no text from character 99999" in error(lab.one(seen, "extract_structured_data", query="x", extract_links=False, start_from_char=99999))


def test_scripts(lab: Lab) -> None:
    """A script's value comes back, with or without `return`; its exception is an error."""
    seen = lab.open("next.html")
    assert "returned Next" in lab.one(seen, "execute_js", code="document.title").message
    assert "returned 3" in lab.one(seen, "execute_js", code="const a = 1; return a + 2;").message
    assert "the script failed" in error(lab.one(seen, "execute_js", code="throw new Error('no')"))


def test_every_action_of_the_schema_has_an_answer(lab: Lab) -> None:
    """Whatever the page is, each action gives one result and raises nothing."""
    values: dict[str, Any] = {"str": "none", "int": 1, "float": 1.0, "bool": False, "list": []}
    for name, spec in ACTIONS.items():
        seen = lab.open("next.html")
        params = {param.name: values[param.kind] for param in spec.params if param.required}
        (result,) = lab.act(seen, Action(name=name, params=params | ({"seconds": 0} if name == "wait" else {})))
        assert result.error or result.message, name


# ------------------------------------------------------------------------------------------------- safety and restarts


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "chrome://version", "javascript:alert(1)", "data:text/html,x", "view-source:http://a.localhost/", "ftp://a.localhost/", "none"],
)
def test_only_web_pages_are_opened(lab: Lab, url: str) -> None:
    """Other schemes are refused and the page stays."""
    seen = lab.open("next.html")
    assert error(lab.one(seen, "go_to_url", url=url))
    assert lab.see().url == "http://a.localhost/next.html"


def test_the_allow_list_holds_on_every_way(lab: Lab) -> None:
    """A host outside the list is not opened by URL, and a redirect to one is left again."""
    seen = lab.open("tabs.html", allow_domains=("a.localhost",))
    assert "not among the allowed domains" in error(lab.one(seen, "go_to_url", url="http://c.localhost/next.html"))
    lab.one(seen, "click_element_by_index", index=index(seen, "Elsewhere"))
    after = lab.see()
    assert "c.localhost" not in after.url
    assert after.warnings


def test_secrets_stand_by_name(lab: Lab) -> None:
    """The page gets the value; the state and the results show the name alone."""
    seen = lab.open("form.html", secrets={"pin": "s3cr3t"})
    result = lab.one(seen, "input_text", index=index(seen, name="text"), text="<secret>pin</secret>")
    assert lab.js("document.getElementById('text').value") == "s3cr3t"
    assert "s3cr3t" not in result.message
    assert find(lab.see(), name="text").value == "<secret>pin</secret>"


def test_cookies_and_reset(lab: Lab) -> None:
    """A cookie reaches the page; after a reset there is none, and one blank tab."""
    lab.open("next.html")
    lab.run(lab.session.set_cookie("http://a.localhost/", "who", "me"))
    lab.run(lab.session.goto("http://a.localhost/next.html"))
    assert lab.js("document.cookie") == "who=me"
    lab.run(lab.session.reset())
    assert [(tab.tab_id, tab.url) for tab in lab.see().tabs] == [("0001", "about:blank")]
    lab.run(lab.session.goto("http://a.localhost/next.html"))
    assert lab.js("document.cookie") == ""


def test_an_address_that_does_not_answer_is_a_warning(lab: Lab) -> None:
    """goto gives the reason; the next state says it once, and the session goes on."""
    lab.open("next.html")
    result = lab.run(lab.session.goto("http://127.0.0.1:9/"))
    assert "could not open" in error(result)
    assert any("could not open" in warning for warning in lab.see().warnings)
    assert lab.see().warnings == ()


def test_a_dead_browser_is_replaced(lab: Lab) -> None:
    """When the browser's process is killed the next observation comes from a fresh one at the same URL, and the restart is counted."""
    lab.open("next.html")
    children = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_browser_of(int(pid), os.getpid())]
    assert children
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    after = lab.see()
    assert (after.title, lab.session.restarts) == ("Next", 1)
    assert any("opened again" in warning for warning in after.warnings)


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_browser_of(pid: int, ancestor: int) -> bool:
    """Whether the process is this test's browser: it runs find_chromium's program or one beside it, below `ancestor`, and its parent does not."""

    def program(process: int) -> str:
        try:
            with open(f"/proc/{process}/cmdline", encoding="utf-8", errors="replace") as file:
                return file.read().split("\0")[0]
        except OSError:
            return ""

    if not any(word in program(pid) for word in ("chrom", find_chromium().name)) or "chrom" in program(_parent(pid)):
        return False
    while pid > 1 and pid != ancestor:
        pid = _parent(pid)
    return pid == ancestor
