"""Laws that go across the browser layer: whatever the page or the browser does, an action gives a result, and
the next state is there.
"""

import contextlib
from typing import Any

import pytest
from browser_lab import MADE, Lab, index, lab, texts
from playwright.async_api import Error

from rmsweb.browser.actions import ACTIONS
from rmsweb.records import Action, ActionResult

__all__ = ["lab"]
pytestmark = pytest.mark.browser
LOCAL_ENGINE = "http://a.localhost/next.html?q={query}"


def some_action(name: str) -> Action:
    """An action of that name with any parameters of the right types."""
    values: dict[str, Any] = {"str": "none", "int": 1, "float": 1.0, "bool": False, "list": []}
    extra = {"wait": {"seconds": 0}, "search_engine": {"engine": LOCAL_ENGINE}}.get(name, {})
    return Action(
        name=name,
        params={param.name: values[param.kind] for param in ACTIONS[name].params if param.required} | extra,
    )


def kill(lab: Lab) -> None:
    """Ends the browser's process from within."""

    async def work() -> None:
        session = await lab.browser.process.new_browser_cdp_session()
        with contextlib.suppress(Error):
            await session.send("Browser.crash")

    lab.run(work())


def test_every_action_has_a_result_on_any_page(lab: Lab) -> None:
    """Each action of the schema gives one result with words, and none raises."""
    seen = lab.open("next.html")
    for name in ACTIONS:
        (result,) = lab.act(seen, some_action(name))
        assert result.error or result.message, name
        seen = lab.see()


def test_every_action_has_a_result_without_a_browser(lab: Lab) -> None:
    """Where the browser died between the state and the action, what needs it is an error; the next state
    comes from a fresh one at the same URL.
    """
    seen = lab.open("next.html")
    kill(lab)
    needless = {"wait", "write_file", "replace_file_str", "read_file", "done"}
    for name in ACTIONS:
        (result,) = lab.act(seen, some_action(name))
        assert result.error or name in needless, (name, result)
    after = lab.see()
    assert (after.url, after.title, lab.session.restarts) == (seen.url, "Next", 1)


def test_an_index_of_a_document_that_was_left_is_gone(lab: Lab) -> None:
    """Also where the new document is the same page again."""
    seen = lab.open("moving.html")
    lab.one(seen, "go_to_url", url="http://a.localhost/moving.html")
    number = index(seen, "Submit")
    assert (
        lab.one(seen, "click_element_by_index", index=number).error
        == f"element {number} is no longer on the page"
    )
    assert lab.log("click") == []


def test_an_index_that_was_never_shown_ends_a_step(lab: Lab) -> None:
    """As the first action it is an error; later the step ends before it and the result before it says why."""
    seen = lab.open("next.html")
    click = Action(name="click_element_by_index", params={"index": 99})
    assert [result.error for result in lab.act(seen, click)] == ["there is no element 99 in the state"]
    (result,) = lab.act(seen, some_action("wait"), click, some_action("wait"))
    assert result.error is None
    assert "no element 99 in the state, so 2 more actions were not carried out" in result.message


@pytest.mark.parametrize(
    "script",
    [
        "window.close()",
        "document.documentElement.remove()",
        "document.open(); document.close()",
        "location.reload()",
    ],
)
def test_a_page_that_removes_itself_is_still_observed(lab: Lab, script: str) -> None:
    """A page that closes its tab, empties itself or loads again costs nothing but what it showed."""
    seen = lab.open("next.html")
    lab.one(seen, "execute_js", code=f"setTimeout(() => {{ {script} }}); 1")
    after = lab.see()
    assert after.active_tab in {tab.tab_id for tab in after.tabs}
    assert lab.session.restarts == 0
    assert lab.one(after, "go_to_url", url="http://a.localhost/form.html").error is None
    assert lab.see().title == "Form"


@pytest.mark.slow
def test_a_page_that_cannot_be_read_is_left(lab: Lab) -> None:
    """A page that breaks what every script in it relies on costs itself, not the episode: a blank page is in
    its place, and the state says so.
    """
    MADE["broken.html"] = (
        "<title>Broken</title><script>window.Map = function () {};</script><button>Go</button>"
    )
    after = lab.open("broken.html")
    assert (after.url, lab.session.restarts) == ("about:blank", 1)
    assert "a blank page is in its place" in after.warnings[-1]
    assert lab.one(after, "go_to_url", url="http://a.localhost/next.html").error is None
    assert lab.see().title == "Next"


def test_a_popup_that_closes_itself_gives_the_page_back(lab: Lab) -> None:
    """After it the tab that opened it is active again, and usable."""
    seen = lab.open("tabs.html")
    popup = lab.one(seen, "click_element_by_index", index=index(seen, "Soon")).opened_tab
    assert popup is None or popup == "0002"
    lab.run(lab.session.window.new_tab_within(2.0, {"0001"}))
    if lab.session.window.active != "0002":
        assert lab.one(seen, "switch_tab", tab_id="0002").error is None
    lab.one(lab.see(), "execute_js", code="setTimeout(() => window.close(), 10); 1")
    lab.one(seen, "wait", seconds=1)
    after = lab.see()
    assert (after.active_tab, [tab.tab_id for tab in after.tabs]) == ("0001", ["0001"])
    assert lab.one(after, "click_element_by_index", index=index(after, "Here")).error is None
    assert "The next page" in texts(lab.see())


def test_an_address_that_does_not_answer_is_told_once(lab: Lab) -> None:
    """goto gives the reason; it is a warning in the next state and in no later one."""
    lab.open("next.html")
    result: ActionResult = lab.run(lab.session.goto("http://127.0.0.1:9/"))
    assert "could not open" in (result.error or "")
    assert any("could not open" in warning for warning in lab.see().warnings)
    assert lab.see().warnings == ()


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "chrome://version",
        "javascript:document.title='x'",
        "data:text/html,x",
        "view-source:http://a.localhost/",
    ],
)
def test_a_refused_address_leaves_the_page_alone(lab: Lab, url: str) -> None:
    """Only web pages are opened; after a refusal nothing has changed."""
    seen = lab.open("next.html")
    assert "may not be opened" in (lab.one(seen, "go_to_url", url=url).error or "")
    assert lab.see().fingerprint == seen.fingerprint
