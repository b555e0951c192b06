"""Further situations of documentation sites, dashboards, component libraries and old sites.

Numbers as in docs/situations.md.
"""

import pytest
from browser_lab import Lab, click, find, index, lab, lines, names, texts

from rmsweb.records import Observation

__all__ = ["lab"]
pytestmark = pytest.mark.browser


def starred(seen: Observation) -> list[str]:
    """Names of what has an index and is new."""
    return [node.text for node in seen.nodes if node.index is not None and node.is_new]


def test_a_link_to_a_heading_brings_it_into_view(lab: Lab) -> None:
    """Situation 36: the address changes, the heading is in view, and what stood below the fold is usable."""
    seen = lab.open("docs_site.html")
    assert click(lab, seen, "Setup").error is None
    after = lab.see()
    assert after.url.endswith("#setup")
    assert [node.in_viewport for node in after.nodes if node.text == "Setup steps"] == [True]
    assert click(lab, after, "Copy").error is None


def test_a_drawer_is_there_only_while_it_is_shown(lab: Lab) -> None:
    """Situation 37: what is moved out of the window has no index; while it slides in a click waits until its
    target stands still.
    """
    seen = lab.open("docs_site.html")
    assert not {"Guide", "Close"} & set(names(seen))
    click(lab, seen, "Menu")
    drawer = lab.see()
    assert {"Guide", "Close"} <= set(names(drawer))
    assert click(lab, drawer, "Guide").error is None
    assert lab.see().url.endswith("?guide")


def test_a_link_that_is_broken_over_lines_is_clicked_on_a_line(lab: Lab) -> None:
    """Situation 38: the click hits a line of the link, not the gap in the middle of its rectangle."""
    seen = lab.open("docs_site.html")
    assert click(lab, seen, "the very long introduction to everything").error is None
    assert lab.see().url.endswith("?wrapped")


def test_folded_details_are_there_once_unfolded(lab: Lab) -> None:
    """Situation 39: what a fold hides is not there; a click on its summary shows it, starred."""
    seen = lab.open("docs_site.html")
    assert "Advanced options" not in texts(seen)
    click(lab, seen, "Advanced")
    assert starred(lab.see()) == ["Advanced options"]


def test_a_note_is_in_the_state_while_it_is_shown(lab: Lab) -> None:
    """Situation 40: a note after a click stands in the next state and in no later one."""
    seen = lab.open("docs_site.html")
    click(lab, seen, "Copy")
    assert "Copied!" in texts(lab.see())
    lab.one(seen, "wait", seconds=1)
    assert "Copied!" not in texts(lab.see())


def test_the_panel_of_the_chosen_tab_alone_is_read(lab: Lab) -> None:
    """Situation 41: only the chosen tab's panel is there, and the state says which tab that is."""
    seen = lab.open("dashboard.html")
    assert "Invite" not in names(seen)
    click(lab, seen, "People")
    after = lab.see()
    assert starred(after) == ["Invite"]
    assert [find(after, text=name).attributes["aria-selected"] for name in ("Orders", "People")] == [
        "false",
        "true",
    ]


def test_cells_under_the_head_of_a_grid_are_clicked_where_they_are(lab: Lab) -> None:
    """Situation 42: cells under a sticky head are clicked where they are, a sorted row is told from the one
    before it, a cell is edited with keys.
    """
    seen = lab.open("dashboard.html")
    assert (
        lab.one(seen, "scroll", down=True, num_pages=0.4, frame_element_index=index(seen, "Ada")).error
        is None
    )
    assert lab.js("grid.scrollTop") == 48
    for name in ("Bob", "Ada"):  # half and wholly under the head
        assert click(lab, seen, name).error is None
        assert lab.js("out.textContent") == f"Cell {name}"
    assert lab.one(seen, "send_keys", keys="Enter").error is None
    editing = lab.see()
    assert lab.one(editing, "input_text", index=index(editing, name="editor"), text="Alan\n").error is None
    assert "Saved Alan" in texts(lab.see())
    click(lab, lab.see(), "Name")
    assert click(lab, editing, "Bob").error == f"element {index(editing, 'Bob')} is no longer on the page"


def test_shapes_of_a_chart_that_listen_have_a_name(lab: Lab) -> None:
    """Situation 43: shapes that listen have an index and the name that they carry."""
    seen = lab.open("dashboard.html")
    assert {"Spring", "Autumn"} <= set(names(seen))
    click(lab, seen, "Autumn")
    assert "Bar Autumn" in texts(lab.see())


def test_slotted_options_are_chosen_through_the_shadow_root(lab: Lab) -> None:
    """Situation 44: a list in a shadow root whose options stand outside of it is read and chosen from."""
    seen = lab.open("components.html")
    number = index(seen, "Language")
    assert (lab.one(seen, "get_dropdown_options", index=number).content or "").endswith(
        '"German" value "de"\n"French" value "fr"'
    )
    assert lab.one(seen, "select_dropdown_option", index=number, text="fr").error is None
    assert (lab.js("window.__chosen"), "French" in names(lab.see())) == (["fr"], True)


def test_a_button_component_is_one_element(lab: Lab) -> None:
    """Situation 45: a host that listens and the button that fills it are one element, named by what is
    slotted; a field is named by its label in the root.
    """
    seen = lab.open("components.html")
    assert names(seen).count("Save") == 1
    assert click(lab, seen, "Save").error is None
    assert lab.see().title == "Saved"
    assert find(seen, text="Your name").attributes["name"] == "shadowed"


def test_a_popover_is_in_the_state_while_it_is_open(lab: Lab) -> None:
    """Situation 46: a menu in the top layer is there only while it is open, and works."""
    seen = lab.open("components.html")
    assert "Archive" not in names(seen)
    click(lab, seen, "More")
    menu = lab.see()
    assert starred(menu) == ["Archive"]
    click(lab, menu, "Archive")
    assert lab.see().title == "Archived"


def test_what_lets_clicks_through_is_no_target(lab: Lab) -> None:
    """Situation 47: an element without pointer events is text, not a target."""
    seen = lab.open("components.html")
    assert "Ghost" in texts(seen)
    assert "Ghost" not in names(seen)


def test_a_modal_dialog_alone_can_be_used(lab: Lab) -> None:
    """Situation 48: an open modal alone can be used; what lies below is an error that names its cover."""
    seen = lab.open("components.html")
    click(lab, seen, "Ask")
    modal = lab.see()
    assert names(modal) == ["Confirm"]
    assert "is covered by <dialog id=dialog>" in (click(lab, seen, "Save").error or "")
    click(lab, modal, "Confirm")
    assert lab.see().title == "Answer yes"


def test_stars_are_rated_through_their_labels(lab: Lab) -> None:
    """Situation 49: of unseen radio buttons the labels are the targets, each with its title and state."""
    seen = lab.open("components.html")
    one, two = (node for node in seen.nodes if node.index and node.tag == "label")
    assert (one.attributes["title"], two.attributes["title"], two.attributes["checked"]) == (
        "One star",
        "Two stars",
        "false",
    )
    assert two.index is not None
    assert lab.one(seen, "click_element_by_index", index=two.index).error is None
    assert lab.js("s2.checked")


def test_what_a_feed_adds_is_in_the_next_state(lab: Lab) -> None:
    """Situation 50: a ticking clock holds no state up for ever; each scroll to the end brings more posts into
    the next state.
    """
    seen = lab.open("feed.html", quiet_limit_s=0.6)
    assert lab.js("feed.children.length") == 10
    lab.one(seen, "scroll", down=True, num_pages=5.0)
    after = lab.see()
    assert "Post 12" in starred(after)
    assert lab.session.restarts == 0
    assert click(lab, after, "Post 12").error is None
    assert lab.see().url.endswith("?12")


def test_a_library_that_rewrote_the_language_does_not_disturb(lab: Lab) -> None:
    """Situation 51: a page that replaced what the layer could use (Array.from, toJSON, timers) and allows no
    other scripts is read and used like any other.
    """
    seen = lab.open("old_library.html")
    assert names(seen) == ["2", "", ""]
    assert find(seen, name="year").options == ("2007", "2008")
    assert lab.one(seen, "input_text", index=index(seen, name="q"), text="new").error is None
    assert lab.one(seen, "select_dropdown_option", index=index(seen, name="year"), text="2008").error is None
    assert click(lab, seen, "2").error is None
    after = lab.see()
    assert (after.title, find(after, name="q").value, find(after, name="year").value) == (
        "Second page",
        "new",
        "2008",
    )


def test_an_editor_that_is_a_frames_whole_body_is_typed_into(lab: Lab) -> None:
    """Situation 52: an editable body has an index and takes a text."""
    seen = lab.open("rich.html")
    assert lab.one(seen, "input_text", index=index(seen, "Body text"), text="new words").error is None
    assert lab.js("mce.contentDocument.body.innerText.trim()") == "new words"


def test_a_frame_that_runs_no_scripts_is_used_like_any_other(lab: Lab) -> None:
    """Situation 53: a sandboxed frame is read, and its field takes a text."""
    seen = lab.open("rich.html")
    assert "Other origin" in texts(seen)
    assert lab.one(seen, "input_text", index=index(seen, name="card"), text="4000").error is None
    assert find(lab.see(), name="card").value == "4000"


def test_a_field_that_only_opens_the_real_one_passes_the_text_on(lab: Lab) -> None:
    """Situation 54: a click that opens another field over the one that was named gives it the text, and the
    result says so.
    """
    seen = lab.open("rich.html")
    assert (
        lab.one(seen, "input_text", index=index(seen, name="fake"), text="shoes").message
        == 'typed "shoes" into <input id=real>'
    )
    assert (lab.js("real.value"), lab.js("fake.value")) == ("shoes", "")


def test_an_element_that_was_rendered_anew_is_another_one(lab: Lab) -> None:
    """Situation 55: an element that was replaced by its like since the state is an error that says so; the
    next state has its successor, starred.
    """
    seen = lab.open("rich.html")
    lab.js("hydrated.replaceChildren(hydrated.firstChild.cloneNode(true))")
    assert click(lab, seen, "Buy").error == f"element {index(seen, 'Buy')} is no longer on the page"
    assert starred(lab.see()) == ["Buy"]


def test_labels_of_clipped_radios_are_the_targets(lab: Lab) -> None:
    """Situation 56: of controls that are only clipped away the labels are the targets, and show what is
    chosen.
    """
    seen = lab.open("icons.html")
    assert click(lab, seen, "Week").error is None
    after = lab.see()
    assert [find(after, text=name).attributes["checked"] for name in ("Day", "Week")] == ["false", "true"]
    assert names(after)[:2] == ["Day", "Week"]


def test_buttons_without_visible_words_say_their_name(lab: Lab) -> None:
    """Situation 57: a button whose name only readers of the screen get says it in its line."""
    seen = lab.open("icons.html")
    state = lines(seen)
    assert f"[{index(seen, 'Next month')}]<button aria-label=Next month />" in state
    assert f"[{index(seen, 'Close all')}]<button aria-label=Close all />" in state
    click(lab, seen, "Next month")
    assert lab.js("window.__hits") == ["next"]


def test_a_wrapper_of_one_control_is_no_target(lab: Lab) -> None:
    """Situation 58: a listener around nothing but one control is no target of its own; one that shows words
    besides it is.
    """
    seen = lab.open("icons.html")
    assert [(node.tag, node.text) for node in seen.nodes if node.index][-3:] == [
        ("input", ""),
        ("div", "A row with words More"),
        ("button", "More"),
    ]
    assert click(lab, seen, "A row with words More").error is None
    assert lab.js("window.__hits") in (["row"], ["more", "row"])


def test_a_refused_form_says_why(lab: Lab) -> None:
    """Situation 59: what the browser shows in a bubble that is not in the page stands in the result, however
    the form was sent.
    """
    seen = lab.open("native.html")
    assert "the browser did not send the form: <input id=mail>: " in click(lab, seen, "Send").message
    lab.one(seen, "input_text", index=index(seen, name="mail"), text="me@example.com")
    message = lab.one(seen, "input_text", index=index(seen, name="code"), text="12\n").message
    assert "the browser did not send the form: <input>: " in message
    assert "did not send" in lab.one(seen, "send_keys", keys="Enter").message
    assert lab.see().title == "Native"
    assert (
        "did not send"
        not in lab.one(seen, "input_text", index=index(seen, name="code"), text="1234\n").message
    )
    assert lab.see().title == "Next"


def test_a_dropdown_whose_options_are_a_copy_is_an_error(lab: Lab) -> None:
    """Situation 60: options without a size are none; the error says what to do, and what the click opened is
    in the next state.
    """
    seen = lab.open("native.html")
    error = lab.one(seen, "select_dropdown_option", index=index(seen, "Pick one"), text="Large").error or ""
    assert "shows no options after a click; if something opened, click what it shows" in error
    after = lab.see()
    assert starred(after) == ["Small", "Large"]
    click(lab, after, "Large")
    assert "Large" in names(lab.see())


def test_what_leaves_the_browser_holds_nothing_up(lab: Lab) -> None:
    """Situation 61: links to other programs and printing hold nothing up and leave the page as it is."""
    seen = lab.open("native.html")
    for name in ("Mail us", "Call us", "Print"):
        assert click(lab, seen, name).error is None
    after = lab.see()
    assert (after.title, after.url, len(after.tabs), "Printed" in names(after)) == (
        "Native",
        seen.url,
        1,
        True,
    )


def test_a_page_that_asks_for_a_password_holds_nothing_up(lab: Lab) -> None:
    """Situation 62: a login box of the browser blocks nothing: the result tells the status or that the page
    could not be opened.
    """
    seen = lab.open("next.html")
    result = lab.one(seen, "go_to_url", url="http://a.localhost/private")
    assert "401" in result.message or "could not open" in (result.error or "")
    assert lab.one(seen, "go_to_url", url="http://a.localhost/form.html").error is None
    assert lab.see().title == "Form"


def test_a_set_of_frames_is_read_and_clicked(lab: Lab) -> None:
    """Situation 63: the frames of a frame set are read and used."""
    seen = lab.open("frameset.html")
    assert {"The next page", "Other origin"} <= set(texts(seen))
    assert lab.one(seen, "input_text", index=index(seen, name="card"), text="4000").error is None
    assert click(lab, seen, "Back to the form").error is None
    after = lab.see()
    assert (find(after, name="card").value, find(after, name="text").value) == ("4000", "old words")


def test_a_frame_that_is_drawn_smaller_is_clicked_where_it_is_drawn(lab: Lab) -> None:
    """Situation 64: a click in a scaled frame lands where the element is drawn, and so does its box."""
    seen = lab.open("native.html")
    left, top, width, _ = find(seen, text="Preview", tag="button").box or (0, 0, 0, 0)
    origin = lab.js("(({left, top}) => [left, top])(small.getBoundingClientRect())")
    assert (left, top, width) == pytest.approx((origin[0] + 126, origin[1] + 61, 50), abs=1.5)
    assert click(lab, seen, "Preview", tag="button").error is None
    assert "Hit" in names(lab.see())
