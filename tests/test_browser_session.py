"""Laws of a session: stop rules of a step, node identity over steps, the allow-list, secrets, restarts,
isolation of sessions.
"""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from browser_lab import REQUESTS, Lab, extractor, find, index, lab, texts
from playwright.async_api import Error

from rmsweb.browser.chromium import Browser, BrowserDied, BrowserOptions, find_chromium
from rmsweb.browser.guard import Guard, Secrets, complete_url
from rmsweb.browser.session import Session
from rmsweb.evaluation.environments import LiveWeb
from rmsweb.jsonl import dumps
from rmsweb.prompt import PromptConfig
from rmsweb.records import Action, Observation, Task
from rmsweb.runner import browser_pool

__all__ = ["lab"]
pytestmark = pytest.mark.browser


def click(seen: Observation, text: str) -> Action:
    """A click on the element of that name."""
    return Action(name="click_element_by_index", params={"index": index(seen, text)})


def test_an_action_finds_its_node_after_the_page_moved_it(lab: Lab) -> None:
    """Case 1: indices keep their meaning within a step: elements that are inserted or swapped do not get
    another one's click.
    """
    seen = lab.open("moving.html")
    typing = Action(name="input_text", params={"index": index(seen, name="field"), "text": "x"})
    assert [result.error for result in lab.act(seen, typing, click(seen, "Submit"))] == [None, None]
    assert [entry[1] for entry in lab.log("click")] == ["field", "submit"]
    seen = lab.open("moving.html")
    lab.act(seen, click(seen, "First"), click(seen, "Second"))
    assert [entry[1] for entry in lab.log("click")] == ["a", "b"]


def test_a_replaced_element_is_not_clicked(lab: Lab) -> None:
    """Case 2: an element that was replaced ends the step; as the first action it is an error; its successor
    is left alone.
    """
    seen = lab.open("moving.html")
    results = lab.act(seen, click(seen, "Replace"), click(seen, "Delete"), click(seen, "Submit"))
    assert len(results) == 1
    assert "is no longer on the page, so 2 more actions were not carried out" in results[0].message
    assert (
        lab.act(seen, click(seen, "Delete"))[0].error
        == f"element {index(seen, 'Delete')} is no longer on the page"
    )
    assert "new" not in [entry[1] for entry in lab.log("click")]


def test_an_element_that_goes_by_itself_is_an_error_that_names_it(lab: Lab) -> None:
    """Case 2: a click after the page removed the element by itself, or on an index that never was, hits
    nothing, and the next state is fresh.
    """
    seen = lab.open("moving.html")
    lab.js("setTimeout(() => document.getElementById('a').remove(), 200)")
    lab.one(seen, "wait", seconds=1)
    assert (
        lab.one(seen, "click_element_by_index", index=index(seen, "First")).error
        == f"element {index(seen, 'First')} is no longer on the page"
    )
    assert (
        lab.one(seen, "click_element_by_index", index=9999).error == "there is no element 9999 in the state"
    )
    assert lab.log("click") == []
    after = lab.see()
    assert "First" not in texts(after)
    assert lab.one(after, "click_element_by_index", index=index(after, "Second")).error is None
    assert [entry[1] for entry in lab.log("click")] == ["b"]


def test_a_step_ends_where_the_page_changes(lab: Lab) -> None:
    """After a new URL or a new active tab the rest is left out, also where the new page has a node of the
    same number.
    """
    for text in ("Here", "New tab", "Route"):
        seen = lab.open("tabs.html")
        results = lab.act(seen, click(seen, text), click(seen, "Alert"))
        assert len(results) == 1
        assert "the page changed" in results[0].message
    seen = lab.open("tabs.html")
    lab.run(lab.session.goto("http://a.localhost/next.html"))
    assert "no longer on the page" in (lab.act(seen, click(seen, "Alert"))[0].error or "")


def test_a_step_ends_at_an_error_and_before_done(lab: Lab) -> None:
    """An error ends the step; `done` is carried out only as the first action; at most ten actions are carried
    out.
    """
    seen = lab.open("next.html")
    done, lost = (
        Action(name="done", params={"text": "a", "success": True}),
        Action(name="switch_tab", params={"tab_id": "zzzz"}),
    )
    still = Action(name="scroll", params={"down": False, "num_pages": 1.0})
    assert len(lab.act(seen, lost, still)) == 1
    assert [result.is_done for result in lab.act(seen, still, done)] == [False]
    assert [result.is_done for result in lab.act(seen, done, still)] == [True]
    assert len(lab.act(seen, *[still] * 12)) == 10


def test_the_allow_list_holds_for_links_redirects_popups_and_frames(lab: Lab) -> None:
    """No page or frame of a host that is not allowed is ever shown, however it is reached; what may not be
    opened is said.
    """
    seen = lab.open("tabs.html", allow_domains=("a.localhost",))
    assert "not among the allowed domains" in (
        lab.one(seen, "go_to_url", url="http://b.localhost/next.html").error or ""
    )
    lab.one(seen, "click_element_by_index", index=index(seen, "Elsewhere"))
    shown = lab.see()
    assert "next page" not in " ".join(texts(shown))
    assert any("c.localhost" in warning for warning in shown.warnings)
    assert shown.title == "Tabs"
    framed = lab.open("frames.html", allow_domains=("a.localhost",))
    assert "Other origin" not in texts(framed)
    assert any("b.localhost" in warning for warning in framed.warnings)
    lab.js("window.open('http://b.localhost/next.html')")
    assert not any("b.localhost" in tab.url for tab in lab.see().tabs)


def test_a_redirect_to_a_forbidden_host_is_not_sent(lab: Lab) -> None:
    """Neither a page, a frame nor a popup gives it a request, also after a detour over an allowed host; the
    old page stays; allowed redirects are followed.
    """
    seen = lab.open("tabs.html", allow_domains=("a.localhost", "b.localhost"))
    REQUESTS.clear()
    result = lab.one(seen, "go_to_url", url="http://a.localhost/to-b-to-c")
    assert "led to where nothing may be opened" in result.message
    lab.one(seen, "click_element_by_index", index=index(seen, "Elsewhere"))
    lab.js(
        "document.body.insertAdjacentHTML('beforeend', '<iframe src=/to-c></iframe><iframe src=http://b.localhost/to-c></iframe>')"
    )
    lab.js("window.open('/to-b-to-c') && 1")
    lab.one(seen, "wait", seconds=1)
    after = lab.see()
    assert {host for host, _ in REQUESTS} == {"a.localhost", "b.localhost"}
    assert [path for host, path in REQUESTS if host == "b.localhost"].count("to-c") >= 2
    assert (after.title, len(after.tabs)) == ("Tabs", 1)
    assert any("not opened: the host c.localhost" in warning for warning in after.warnings)
    assert lab.one(after, "go_to_url", url="http://b.localhost/to-a").error is None
    assert lab.see().url == "http://a.localhost/next.html"


def test_secrets_are_typed_but_never_recorded(lab: Lab) -> None:
    """The page gets the value, records and page texts only its name; an unknown name is an error."""
    seen = lab.open("form.html", secrets={"a.localhost": {"pin": '4"711'}})
    result = lab.one(seen, "input_text", index=index(seen, name="text"), text="<secret>pin</secret>")
    assert lab.js("document.getElementById('text').value") == '4"711'
    after = lab.see()
    page = lab.one(after, "extract_structured_data", query="q", extract_links=False)
    assert find(after, name="text").value == "<secret>pin</secret>"
    assert '4\\"711' not in dumps(after) + dumps(result) + dumps(page)
    assert "no secret named" in (
        lab.one(seen, "input_text", index=index(seen, name="text"), text="<secret>other</secret>").error or ""
    )


def test_a_secret_is_given_to_its_own_domain_alone(lab: Lab) -> None:
    """Wherever else it would go (a field, keys, a script, a frame of another host) the action is an error and
    the page gets nothing.
    """
    secrets = {
        "c.localhost": {"pin": "4711"},
        "b.localhost": {"card": "4000"},
        "localhost.evil": {"pin": "0815"},
    }
    seen = lab.open("form.html", secrets=secrets)
    refused = "the secret 'pin' may not be given to this site"
    assert (
        lab.one(seen, "input_text", index=index(seen, name="text"), text="<secret>pin</secret>").error
        == refused
    )
    lab.one(seen, "click_element_by_index", index=index(seen, name="text"))
    assert lab.one(seen, "send_keys", keys="<secret>pin</secret>").error == refused
    assert lab.one(seen, "execute_js", code="document.title = '<secret>pin</secret>'").error == refused
    assert (lab.js("text.value"), lab.see().title) == ("old words", "Form")
    framed = lab.open("nested.html", secrets=secrets)
    assert (
        lab.one(framed, "input_text", index=index(framed, name="number"), text="<secret>pin</secret>").error
        == refused
    )
    assert (
        lab.one(framed, "input_text", index=index(framed, name="number"), text="<secret>card</secret>").error
        is None
    )
    own = lab.open("http://c.localhost/form.html", secrets=secrets)
    lab.one(own, "click_element_by_index", index=index(own, name="secret"))
    result = lab.one(own, "send_keys", keys="<secret>pin</secret>")
    assert (lab.js("secret.value"), "4711" in dumps(result)) == ("4711", False)


def test_reset_forgets_everything(lab: Lab) -> None:
    """After a reset there is one blank page with the first id, and no cookie or file of before."""
    seen = lab.open("next.html", name="forgetful")
    lab.run(lab.session.set_cookie("who", "me", "http://a.localhost/"))
    lab.one(seen, "write_file", file_name="a.md", content="x")
    lab.run(lab.session.goto("http://a.localhost/next.html"))
    assert lab.js("document.cookie") == "who=me"
    lab.run(lab.session.reset())
    blank = lab.see()
    assert ([tab.tab_id for tab in blank.tabs], blank.url, blank.nodes) == (["0001"], "about:blank", ())
    lab.run(lab.session.goto("http://a.localhost/next.html"))
    assert lab.js("document.cookie") == ""
    assert lab.one(blank, "read_file", file_name="a.md").error == "there is no file 'a.md'; files: none"


def test_a_pooled_session_opens_one_context(lab: Lab, tmp_path: Path) -> None:
    """An episode's session has no page before its environment's reset, one context after it, and leaves none;
    a cookie reaches all its URLs.
    """
    config = PromptConfig(viewport=(640, 480), image_format="jpeg")
    _, open_session = browser_pool(tmp_path, host_map=None, config=config, headless=True)
    task = Task(task_id="t", benchmark="live", split="dev", text="Look around.", start_url=None)
    urls = ("http://a.localhost/next.html", "http://b.localhost/next.html")

    async def episode() -> tuple[list[int], list[str]]:
        counts, cookies = [len(lab.browser.process.contexts)], []
        session = await open_session(lab.browser, "job")
        counts.append(len(lab.browser.process.contexts))
        assert await LiveWeb().reset(session, task) == "about:blank"
        await session.set_cookie("who", "me", *urls)
        counts.append(len(lab.browser.process.contexts))
        for url in urls:
            await session.goto(url)
            cookies.append(await session.window.page.evaluate("document.cookie"))
        await session.close()
        return [*counts, len(lab.browser.process.contexts)], cookies

    (before, *counts), cookies = lab.run(episode())
    assert ([count - before for count in counts], cookies) == ([0, 1, 0], ["who=me", "who=me"])


def test_a_crashed_page_and_a_dead_browser_are_replaced(lab: Lab) -> None:
    """Both come back at the URL where they were, with the environment's cookie; the state says so and the
    restarts are counted.
    """
    lab.open("next.html")
    lab.run(lab.session.set_cookie("who", "me", "http://a.localhost/"))

    async def crash() -> None:
        with contextlib.suppress(Error):
            await lab.session.window.page.goto("chrome://crash", timeout=2000)

    async def kill() -> None:
        session = await lab.browser.process.new_browser_cdp_session()
        with contextlib.suppress(Error):
            await session.send("Browser.crash")

    for number, break_it in enumerate((crash, kill), 1):
        lab.run(break_it())
        seen = lab.see()
        assert (seen.url, lab.session.restarts, seen.active_tab != "") == (
            "http://a.localhost/next.html",
            number,
            True,
        )
        assert any("opened again" in warning for warning in seen.warnings)
        assert lab.js("document.cookie") == "who=me"
    assert lab.browser.alive


def test_a_page_that_never_answers_is_replaced(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without an end costs the page, not the episode."""
    for module in ("session", "window"):
        monkeypatch.setattr(f"rmsweb.browser.{module}.PAGE_LIMIT_S", 1.0)
    monkeypatch.setattr("rmsweb.browser.execute.ACTION_LIMIT_S", 1.0)
    seen = lab.open("next.html")
    assert lab.one(seen, "execute_js", code="while (true) {}").error == "execute_js took longer than 1 s"
    after = lab.see()
    assert (after.title, lab.session.restarts) == ("Next", 1)


def test_sessions_of_one_browser_share_nothing(lab: Lab, tmp_path: Path) -> None:
    """Sessions side by side have their own cookies, tabs and ids."""

    async def visit(name: str) -> tuple[str, Observation]:
        session = await Session.open(lab.browser, tmp_path, pause_s=0)
        await session.set_cookie("who", name, "http://a.localhost/")
        await session.goto("http://a.localhost/next.html")
        seen = await session.observe()
        await session.act([click(seen, "Back to the form")], seen, extractor)
        cookie = await session.window.page.evaluate("document.cookie")
        seen = await session.observe()
        await session.close()
        return str(cookie), seen

    async def both() -> list[tuple[str, Observation]]:
        return await asyncio.gather(*(visit(name) for name in ("x", "y", "z")))

    found = lab.run(both())
    assert [cookie for cookie, _ in found] == ["who=x", "who=y", "who=z"]
    assert {(seen.title, seen.active_tab) for _, seen in found} == {("Form", "0001")}
    assert len({seen.fingerprint for _, seen in found}) == 1


def test_a_browser_that_is_missing_or_does_not_start_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrong path is named; something that is no browser is a BrowserDied."""
    monkeypatch.setenv("RMSWEB_CHROMIUM", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="RMSWEB_CHROMIUM"):
        find_chromium()
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)

    async def launch() -> None:
        async with Browser.launch(BrowserOptions(executable=str(fake))):
            pass

    with pytest.raises(BrowserDied, match="does not start"):
        asyncio.run(launch())


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://a.org/", True), ("https://www.a.org:8443/x?u=b.org", True), ("http://a.org./", True), ("about:blank", True), ("http://ba.org/", False),  # noqa: E501
        ("http://a.org.evil.org/", False), ("http://a.org@evil.org/", False), ("http://evil.org/a.org", False), ("ftp://a.org/", False), ("a.org", False),  # noqa: E501
        ("http:///x", False), ("http://[bad/", False), ("about:config", False), ("view-source:http://a.org", False),  # noqa: E501
    ],
)  # fmt: skip
def test_urls_are_judged_by_scheme_and_host(url: str, allowed: bool) -> None:
    """Only http and https, and only hosts at or below an allowed domain."""
    assert (Guard(["*.a.org"]).problem(url) is None) == allowed


def test_urls_are_completed_and_secrets_masked() -> None:
    """A host without a scheme gets one, other texts stay; of two secrets the longer is masked first; without
    secrets nothing is filled.
    """
    assert complete_url("127.0.0.1:80/x") == "http://127.0.0.1:80/x"
    assert complete_url("javascript:alert(1)") == "javascript:alert(1)"
    assert (
        Secrets({"x.org": {"a": "12", "b": "1234"}}).mask("1234 12")
        == "<secret>b</secret> <secret>a</secret>"
    )
    assert Secrets().fill("<secret>a</secret>", "http://x.org") == "<secret>a</secret>"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a\ud83d", "a\ufffd"),
        ("\udc00\ud83d", "\ufffd\ufffd"),
        ("🚀", "🚀"),
        ("\\ud83d", "\\ud83d"),
        ("\\\ud83d", "\\\ufffd"),
        ('"\n', '"\n'),
    ],
)
def test_half_of_a_surrogate_pair_is_replaced(text: str, kept: str) -> None:
    """In a text, and in JSON that escapes such halves alone, as the page's JSON.stringify does; a backslash
    before the letters `ud` is no escape.
    """
    assert Secrets().mask(text) == kept
    escaped = json.dumps(text, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    assert json.loads(Secrets().mask_json(escaped)) == kept
