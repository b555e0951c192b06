"""Situations of real pages: fields, dropdowns, pickers and files.

A number is that of the list of situations in docs/situations.md.
"""

from pathlib import Path

import pytest
from browser_lab import Lab, click, find, index, lab, lines, texts

from rmsweb.records import Action

__all__ = ["lab"]
pytestmark = pytest.mark.browser


def test_a_choice_agrees_with_the_pages_model_or_is_an_error(lab: Lab) -> None:
    """Case 3: a page that keeps only what came with both events keeps the choice; one that takes it back
    after it asked its server makes it an error.
    """
    seen = lab.open("dropdowns.html")
    assert find(seen, name="tick").value == ""
    assert lab.one(seen, "select_dropdown_option", index=index(seen, name="tick"), text="South").error is None
    assert (lab.js("window.__model"), find(lab.see(), name="tick").value) == ("South", "South")
    error = lab.one(seen, "select_dropdown_option", index=index(seen, name="late"), text="Two").error or ""
    assert error.endswith("did not keep the choice: element " + f"{index(seen, name='late')} shows 'One'")


def test_a_click_on_a_dropdown_lists_its_options(lab: Lab) -> None:
    """Case 4: text, value, what is selected and what is disabled, also by its group; nothing pops up; a long
    list says how many options it has.
    """
    seen = lab.open("dropdowns.html")
    number = index(seen, name="six")
    listed = (
        '"One" value "1" (selected)\n"Two" value "2"\n"Three" (disabled)\n"Four"\n"Five"\n"Six" (disabled)'
    )
    assert (click(lab, seen, name="six").error or "").endswith(listed)
    assert f"[{number}]<select name=six value=One options=One|Two|Three|Four|Five|Six />" in lines(lab.see())
    for text in ("Three", "Six"):
        assert (
            lab.one(seen, "select_dropdown_option", index=number, text=text).error
            == f"the option {text!r} is disabled"
        )
    assert lab.one(seen, "select_dropdown_option", index=number, text="five").error is None
    assert find(lab.see(), name="six").value == "Five"
    lab.js(
        "document.getElementById('six').innerHTML = Array.from({length: 50}, (_, i) => `<option>Choice ${i}</option>`).join('')"  # noqa: E501
    )
    assert any("options=50 options: Choice 0|Choice 1|" in line for line in lines(lab.see()))


def test_a_dropdown_that_opens_elsewhere_in_the_page_is_chosen_from(lab: Lab) -> None:
    """Case 5: asking for the options opens the list, the next state stars them, asking again does not shut
    it, and a choice is one click.
    """
    seen = lab.open("portal.html")
    number = index(seen, "Choose a fruit")
    for _ in range(2):
        content = lab.one(seen, "get_dropdown_options", index=number).content or ""
        assert content.endswith('"Apple"\n"Pear"\n"Plum"')
    opened = lab.see()
    assert [node.text for node in opened.nodes if node.is_new and node.index] == ["Apple", "Pear", "Plum"]
    assert lab.one(opened, "select_dropdown_option", index=number, text="pear").error is None
    assert (lab.js("window.__picked"), texts(lab.see())) == (["Pear"], ["Pear", "Elsewhere"])
    again = lab.see()
    assert lab.one(again, "select_dropdown_option", index=index(again, "Pear"), text="Plum").error is None
    assert lab.js("window.__picked") == ["Pear", "Plum"]


def test_a_row_that_was_filled_anew_is_another_element(lab: Lab) -> None:
    """Case 6: scrolling an option's list leaves the page alone; a row that stands for another option then is
    another element, and starred.
    """
    seen = lab.open("virtual.html")
    first, second = (
        Action(
            name="scroll",
            params={"down": True, "num_pages": pages, "frame_element_index": index(seen, "Option 3")},
        )
        for pages in (12.4, 12.6)
    )
    click_third = Action(name="click_element_by_index", params={"index": index(seen, "Option 3")})
    results = lab.act(seen, first, click_third)
    assert len(results) == 1
    assert f"element {index(seen, 'Option 3')} is no longer on the page" in results[0].message
    assert (lab.js("list.scrollTop"), lab.js("scrollY"), lab.js("window.__picked")) == (2480, 0, [])
    moved = lab.see()
    assert {node.text for node in moved.nodes if node.is_new and node.index} >= {"Option 126", "Option 130"}
    second = Action(
        name="scroll", params=dict(second.params) | {"frame_element_index": index(moved, "Option 126")}
    )
    assert lab.act(moved, second)[0].error is None
    there = lab.see()
    assert click(lab, there, "Option 253").error is None
    assert (lab.js("window.__picked"), lab.js("scrollY")) == (["Option 253"], 0)
    assert click(lab, there, "Option 253").error is None  # where nothing was scrolled it is the same element


def test_a_suggestion_must_be_chosen(lab: Lab) -> None:
    """Case 7: typing keeps the focus, late suggestions stand starred in the next state, and the chosen one is
    sent.
    """
    seen = lab.open("autocomplete.html")
    assert (
        "choose one of its suggestions"
        in lab.one(seen, "input_text", index=index(seen, name="city"), text="pa").message
    )
    open_list = lab.see()
    assert lab.js("window.__blurred") == 0
    assert [node.text for node in open_list.nodes if node.is_new and node.index] == ["Paris", "Parma"]
    click(lab, open_list, "Parma")
    chosen = lab.see()
    assert find(chosen, name="city").value == "Parma"
    click(lab, chosen, "Send")
    assert lab.see().url.endswith("?city=Parma")


def test_dates_are_set_or_clicked(lab: Lab) -> None:
    """Case 8: a read-only field says so and its calendar's days are elements; native fields of every kind
    hold exactly what was given.
    """
    seen = lab.open("dates.html")
    assert "is read-only: click it instead" in (
        lab.one(seen, "input_text", index=index(seen, name="when"), text="2026-08-05").error or ""
    )
    click(lab, seen, name="when")
    days = lab.see()
    assert [node.text for node in days.nodes if node.is_new and node.index] == list("1234567")
    click(lab, days, "5")
    after = lab.see()
    assert find(after, name="when").value == "2026-08-05"
    given = {
        "day": "2026-08-15",
        "hour": "14:30",
        "month": "2026-08",
        "count": "42",
        "both": "2026-08-15T14:30",
        "week": "2026-W33",
    }
    for name, text in given.items():
        assert lab.one(after, "input_text", index=index(after, name=name), text=text).error is None
    now = lab.see()
    assert {name: find(now, name=name).value for name in given} == given


def test_files_go_to_the_field_that_was_meant(lab: Lab, tmp_path: Path) -> None:
    """Case 9: a label stands for its field wherever that is, a click on a file field says what to use, and a
    chooser that a button opens blocks nothing.
    """
    paper = tmp_path / "paper.txt"
    paper.write_text("x")
    seen = lab.open("upload.html", uploads=(paper,))
    assert (
        lab.one(seen, "upload_file_to_element", index=index(seen, "Add file"), path="paper.txt").error is None
    )
    assert (lab.js("hidden.files.length"), lab.js("plain.files.length")) == (1, 0)
    assert "use upload_file_to_element" in (click(lab, seen, name="plain").error or "")
    assert "it asks for a file: use upload_file_to_element" in click(lab, seen, "Browse").message
    assert lab.see().title == "Upload"
    assert (
        lab.one(seen, "upload_file_to_element", index=index(seen, "Browse"), path="paper.txt").error is None
    )
    assert lab.js("window.__made.files[0].name") == "paper.txt"
    assert lab.one(seen, "upload_file_to_element", index=index(seen, "Idle"), path="paper.txt").error == (
        f"element {index(seen, 'Idle')} is no file field, belongs to none and asks for no file"
    )


def test_a_tab_that_opens_late_is_listed(lab: Lab) -> None:
    """Case 10: a popup that opens after its action stands in the next state's tabs, the active tab stays, and
    every id has four characters of its own.
    """
    seen = lab.open("tabs.html")
    assert click(lab, seen, "Later").opened_tab is None
    lab.one(seen, "wait", seconds=1)
    after = lab.see()
    assert (after.active_tab, [tab.tab_id for tab in after.tabs]) == ("0001", ["0001", "0002"])
    assert lab.one(after, "close_tab", tab_id="0001").error is None
    last = lab.see()
    assert (last.active_tab, last.title, {len(tab.tab_id) for tab in last.tabs}) == ("0002", "Next", {4})
