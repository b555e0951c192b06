"""One action: from its name and parameters to what it did.

Purpose: carries out every action of the schema. Clicking, typing and choosing are in `controls`; here are
navigation, tabs, scrolling, files, extraction and scripts, and the one place that turns whatever goes wrong
into an `error` in words that the agent can use.

ours: a scroll that moved nothing says so, a text that is not found is an error, and a failed navigation gives
the reason.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from playwright.async_api import Error

from rmsweb.browser import controls
from rmsweb.browser.actions import with_defaults
from rmsweb.browser.controls import ActionProblem, Window, call
from rmsweb.browser.extract import piece
from rmsweb.browser.guard import BLANK, complete_url, search_url
from rmsweb.records import Action, ActionResult, Extraction, sha256_text

ACTION_LIMIT_S = 10.0
NAVIGATION_LIMIT_S = 20.0
LONGEST_WAIT_S = 30
MAX_JS_CHARS = 20_000
SHORT_ANSWER_CHARS = 1_000
Extractor = Callable[[str, str, bool], Awaitable[str]]

# ------------------------------------------------------------------------------------------------- navigation


async def _go(window: Window, url: str, new_tab: bool = False) -> ActionResult:
    problem = window.guard.problem(url)
    if problem:
        raise ActionProblem(problem)
    if new_tab and window.page.url != BLANK:
        await window.open_tab()
    tab = f" in the new tab {window.active_tab}" if new_tab else ""
    try:
        response = await window.page.goto(
            url, wait_until="domcontentloaded", timeout=NAVIGATION_LIMIT_S * 1000
        )
    except Error as error:
        reason = error.message.splitlines()[0]
        if "Download is starting" in reason or "net::ERR_ABORTED" in reason:
            return ActionResult(
                message=f"{url[:200]} opened no page: it was downloaded, answered with nothing, or led to where nothing may be opened"
            )
        raise ActionProblem(f"could not open {url[:200]}: {_network_words(reason)}") from None
    await window.settle()
    status = f" (status {response.status})" if response is not None and response.status >= 400 else ""
    return ActionResult(
        message=f"opened {url[:200]}{tab}{status}", opened_tab=window.active_tab if new_tab else None
    )


def _network_words(reason: str) -> str:
    """Playwright's words for a failed navigation -> plain ones."""
    match = re.search(r"net::ERR_([A-Z_]+)", reason)
    if match:
        return match[1].replace("_", " ").lower()
    return (
        f"no answer within {NAVIGATION_LIMIT_S:g} s"
        if "Timeout" in reason
        else reason.removeprefix("Page.goto: ")[:200]
    )


async def _go_to_url(window: Window, p: dict[str, Any]) -> ActionResult:
    return await _go(window, complete_url(p["url"]), p["new_tab"])


async def _search(window: Window, p: dict[str, Any]) -> ActionResult:
    result = await _go(window, complete_url(search_url(p["query"], p["engine"], window.engines)))
    return replace(
        result, message=f"searched for {json.dumps(p['query'], ensure_ascii=False)}: {result.message}"
    )


async def _go_back(window: Window, p: dict[str, Any]) -> ActionResult:
    history = await (await window.cdp()).send("Page.getNavigationHistory")
    current = history["currentIndex"]
    if current == 0 or history["entries"][current - 1]["url"] == BLANK:
        raise ActionProblem("there is no page to go back to in this tab")
    await window.page.go_back(wait_until="domcontentloaded", timeout=NAVIGATION_LIMIT_S * 1000)
    await window.settle()
    return ActionResult(message="went back")


async def _wait(window: Window, p: dict[str, Any]) -> ActionResult:
    seconds = min(max(p["seconds"], 0), LONGEST_WAIT_S)
    await asyncio.sleep(seconds)
    return ActionResult(message=f"waited {seconds} s")


async def _switch_tab(window: Window, p: dict[str, Any]) -> ActionResult:
    await window.switch_tab(_known_tab(window, p["tab_id"]))
    return ActionResult(message=f"switched to tab {p['tab_id']}")


async def _close_tab(window: Window, p: dict[str, Any]) -> ActionResult:
    await window.close_tab(_known_tab(window, p["tab_id"]))
    return ActionResult(message=f"closed tab {p['tab_id']}; the active tab is {window.active_tab}")


def _known_tab(window: Window, tab_id: str) -> str:
    if tab_id not in window.tab_ids:
        raise ActionProblem(f"there is no tab {tab_id!r}; open tabs are {', '.join(window.tab_ids)}")
    return tab_id


async def _scroll(window: Window, p: dict[str, Any]) -> ActionResult:
    index, pages = p["frame_element_index"] or None, p["num_pages"] if p["down"] else -p["num_pages"]
    if index is None:
        where, moved = "the page", await call(window.page.main_frame, "scroll", None, pages)
    else:
        target = window.target(index)
        inner = next((f for f in target.frame.child_frames if window.owner(f).node == target.node), None)
        where, moved = (
            target.label,
            await (call(inner, "scroll", None, pages) if inner else target.call("scroll", pages)),
        )
    if abs(moved["moved"]) < 1:
        return ActionResult(
            message=f"nothing moved: {where} cannot scroll further {'down' if pages > 0 else 'up'}"
        )
    way = "down" if moved["moved"] > 0 else "up"
    return ActionResult(
        message=f"scrolled {where} {way} by {abs(moved['moved']) / moved['height']:.1f} pages; {moved['below']:.1f} pages are below"
    )


async def _scroll_to_text(window: Window, p: dict[str, Any]) -> ActionResult:
    for frame in window.page.frames:
        try:
            found = await call(frame, "scrollToText", p["text"])
        except Error:  # a frame that is just being loaded has no text
            continue
        if found.get("found"):
            if frame.parent_frame is not None:
                await window.owner(frame).call("reveal")
            return ActionResult(message=f"scrolled to {json.dumps(p['text'][:100], ensure_ascii=False)}")
    raise ActionProblem(f"the text {p['text'][:100]!r} is not on the page; it may be worded otherwise")


# ------------------------------------------------------------------------------ reading, files, scripts, done


async def _extract(window: Window, p: dict[str, Any], extractor: Extractor) -> ActionResult:
    """Page text from a character on -> the extractor's answer; the text is kept, so that the question can
    become a training sample.
    """
    query = p["query"]
    part = piece(
        await asyncio.wait_for(window.markdown(p["extract_links"]), ACTION_LIMIT_S), p["start_from_char"]
    )
    if not part.text.strip():
        hint = ""
        if part.total == 0 and window.files.names():
            hint = f"; a PDF or a download is read with read_file: {', '.join(window.files.names())}"
        raise ActionProblem(
            f"the page has no text from character {p['start_from_char']} on (it has {part.total} characters){hint}"
        )
    path = window.store_page(part.text)
    answer = await extractor(query, part.text, p["extract_links"])
    more = f"\n(the page goes on: start_from_char={part.next_char})" if part.next_char is not None else ""
    short = len(answer) < SHORT_ANSWER_CHARS
    return ActionResult(
        message=f"extracted: {answer}{more}"
        if short
        else f"extracted {len(answer)} characters for {query[:100]!r}{more}",
        content=f"Query: {query}\n{answer}{more}",
        show_once=not short,
        extraction=Extraction(
            query=query, page_text_path=path, page_text_sha256=sha256_text(part.text), answer=answer
        ),
    )


async def _execute_js(window: Window, p: dict[str, Any]) -> ActionResult:
    code = window.secrets.fill(p["code"], window.page.url)
    try:
        value = await window.page.evaluate(code)
    except Error as error:
        if "SyntaxError" not in error.message:
            raise ActionProblem(f"the script failed: {_first_line(error)}") from None
        try:
            value = await window.page.evaluate(
                f"async () => {{\n{code}\n}}"
            )  # statements with `return` or `await`
        except Error as second:
            raise ActionProblem(f"the script failed: {_first_line(second)}") from None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > MAX_JS_CHARS:
        text = text[:MAX_JS_CHARS] + f" ... ({len(text) - MAX_JS_CHARS} more characters)"
    await window.settle()
    return ActionResult(
        message=f"the script returned {text[:200]}",
        content=text if len(text) > 200 else None,
        show_once=len(text) > 200,
    )


async def _write_file(window: Window, p: dict[str, Any]) -> ActionResult:
    name = p.pop("file_name")
    window.files.write(name, p.pop("content"), **p)
    return ActionResult(message=f"{'appended to' if p['append'] else 'wrote'} {name}")


async def _replace_file_str(window: Window, p: dict[str, Any]) -> ActionResult:
    count = window.files.replace(p["file_name"], p["old_str"], p["new_str"])
    return ActionResult(message=f"replaced {count} occurrence{'s' if count > 1 else ''} in {p['file_name']}")


async def _read_file(window: Window, p: dict[str, Any]) -> ActionResult:
    text = window.files.read(p["file_name"])
    return ActionResult(
        message=f"read {p['file_name']} ({len(text)} characters)",
        content=f"File {p['file_name']}:\n{text}",
        show_once=True,
    )


async def _done(window: Window, p: dict[str, Any]) -> ActionResult:
    """Ends the episode.

    A file that is named but not there is left out: it must not keep the agent from finishing.
    """
    shown = [name for name in p["files_to_display"] or () if name in window.files.names()]
    text = p["text"] + "".join(f"\n\n{name}:\n{window.files.read(name)}" for name in shown)
    return ActionResult(message=p["text"][:200], content=text, is_done=True, success=p["success"])


# --------------------------------------------------------------------------------------------------- dispatch

Handler = Callable[[Window, dict[str, Any]], Awaitable[ActionResult]]
_HANDLERS: dict[str, Handler] = {
    "search_engine": _search,
    "go_to_url": _go_to_url,
    "go_back": _go_back,
    "wait": _wait,
    "click_element_by_index": controls.click,
    "input_text": controls.input_text,
    "upload_file_to_element": controls.upload,
    "switch_tab": _switch_tab,
    "close_tab": _close_tab,
    "scroll": _scroll,
    "send_keys": controls.send_keys,
    "scroll_to_text": _scroll_to_text,
    "get_dropdown_options": controls.get_options,
    "select_dropdown_option": controls.select,
    "write_file": _write_file,
    "replace_file_str": _replace_file_str,
    "read_file": _read_file,
    "execute_js": _execute_js,
    "done": _done,
}
_NAVIGATION = {"search_engine", "go_to_url", "go_back"}


def _first_line(error: Error) -> str:
    return error.message.split("\n")[0].removeprefix("Page.evaluate: ")[:300]


def _limit_s(action: Action) -> float:
    """Longest time that an action may take; an extraction's model call has its own limits."""
    if action.name in _NAVIGATION:
        return NAVIGATION_LIMIT_S + 5
    return LONGEST_WAIT_S + ACTION_LIMIT_S if action.name == "wait" else ACTION_LIMIT_S


async def execute(action: Action, window: Window, extractor: Extractor) -> ActionResult:
    """Carries out one action.

    Whatever goes wrong on the page is the result's error; only the extractor's own exceptions pass.
    """
    started, params = time.monotonic(), with_defaults(action)
    try:
        if action.name == "extract_structured_data":
            result = await _extract(window, params, extractor)
        else:
            result = await asyncio.wait_for(_HANDLERS[action.name](window, params), _limit_s(action))
    except (ActionProblem, ValueError) as problem:
        result = ActionResult(error=str(problem))
    except TimeoutError:
        result = ActionResult(error=f"{action.name} took longer than {_limit_s(action):g} s")
    except Error as error:
        result = ActionResult(error=f"{action.name} failed: {_first_line(error)}")
    mask = window.secrets.mask
    return replace(
        result,
        error=mask(result.error) if result.error else None,
        message=mask(result.message),
        content=mask(result.content) if result.content else None,
        duration_s=round(time.monotonic() - started, 3),
    )
