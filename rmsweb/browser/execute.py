"""One action: from its name and parameters to what it did.

Purpose: carry out every action of the schema with the handler of its name. Clicking and typing are in
`controls`, choosing is in `dropdowns`; here are navigation, tabs, scrolling, files, extraction and scripts,
and the one place that turns whatever goes wrong into an `error` in words that the agent can use.

ours: a scroll that moved nothing says so, a text that is not found is an error, and a failed navigation gives
the reason.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from playwright.async_api import Error

from rmsweb.browser.actions import with_defaults
from rmsweb.browser.controls import (
    click_element_by_index,
    input_text,
    send_keys,
    upload_file_to_element,
)
from rmsweb.browser.dropdowns import get_dropdown_options, select_dropdown_option
from rmsweb.browser.extract import piece
from rmsweb.browser.guard import BLANK, complete_url, search_url
from rmsweb.browser.page import ActionProblem, ScrollFacts, call, first_line, quoted
from rmsweb.browser.window import Window
from rmsweb.records import Action, ActionResult, Extraction, sha256_text

ACTION_LIMIT_S = 10.0
NAVIGATION_LIMIT_S = 20.0
LONGEST_WAIT_S = 30
MAX_JS_CHARS = 20_000
SHORT_ANSWER_CHARS = 1_000

# ------------------------------------------------------------------------------------------------- navigation


async def go_to_url(window: Window, url: str, new_tab: bool = False) -> ActionResult:
    """Open a URL as people type it."""
    url = complete_url(url)
    problem = window.guard.problem(url)
    if problem:
        raise ActionProblem(problem)
    if new_tab and window.page.url != BLANK:
        await window.open_tab()
    tab = f" in the new tab {window.active}" if new_tab else ""
    try:
        response = await window.page.goto(
            url, wait_until="domcontentloaded", timeout=NAVIGATION_LIMIT_S * 1000
        )
    except Error as error:
        reason = first_line(error)
        if "Download is starting" in reason or "net::ERR_ABORTED" in reason:
            why = "it was downloaded, answered with nothing, or led to where nothing may be opened"
            return ActionResult(message=f"{url[:200]} opened no page: {why}")
        raise ActionProblem(f"could not open {url[:200]}: {_network_words(reason)}") from None
    await window.settle()
    status = f" (status {response.status})" if response is not None and response.status >= 400 else ""
    return ActionResult(
        message=f"opened {url[:200]}{tab}{status}", opened_tab=window.active if new_tab else None
    )


def _network_words(reason: str) -> str:
    """Return Playwright's words for a failed navigation as plain ones."""
    match = re.search(r"net::ERR_([A-Z_]+)", reason)
    if match:
        return match[1].replace("_", " ").lower()
    if "Timeout" in reason:
        return f"no answer within {NAVIGATION_LIMIT_S:g} s"
    return reason.removeprefix("Page.goto: ")[:200]


async def search_engine(window: Window, query: str, engine: str) -> ActionResult:
    """Open the results page of a search."""
    result = await go_to_url(window, search_url(query, engine, window.step.engines))
    return replace(result, message=f"searched for {quoted(query)}: {result.message}")


async def go_back(window: Window) -> ActionResult:
    """Go one page back in the tab's history, but not to the blank page that a tab begins with."""
    history = await (await window.cdp()).send("Page.getNavigationHistory")
    current = history["currentIndex"]
    if current == 0 or history["entries"][current - 1]["url"] == BLANK:
        raise ActionProblem("there is no page to go back to in this tab")
    await window.page.go_back(wait_until="domcontentloaded", timeout=NAVIGATION_LIMIT_S * 1000)
    await window.settle()
    return ActionResult(message="went back")


async def wait(window: Window, seconds: int) -> ActionResult:
    """Wait, at most LONGEST_WAIT_S."""
    seconds = min(max(seconds, 0), LONGEST_WAIT_S)
    if window.options.waits:
        await asyncio.sleep(seconds)
    return ActionResult(message=f"waited {seconds} s")


async def switch_tab(window: Window, tab_id: str) -> ActionResult:
    """Make a tab the active one."""
    await window.switch_tab(_known_tab(window, tab_id))
    return ActionResult(message=f"switched to tab {tab_id}")


async def close_tab(window: Window, tab_id: str) -> ActionResult:
    """Close a tab."""
    await window.close_tab(_known_tab(window, tab_id))
    return ActionResult(message=f"closed tab {tab_id}; the active tab is {window.active}")


def _known_tab(window: Window, tab_id: str) -> str:
    if tab_id not in window.tabs:
        raise ActionProblem(f"there is no tab {tab_id!r}; open tabs are {', '.join(window.tabs)}")
    return tab_id


async def scroll(
    window: Window, down: bool, num_pages: float, frame_element_index: int | None
) -> ActionResult:
    """Scroll the page, a frame, or the scroll container around an element."""
    pages, where, frame, target = num_pages if down else -num_pages, "the page", window.page.main_frame, None
    if frame_element_index:
        target = window.target(frame_element_index)
        where = target.label
        for inner in target.frame.child_frames:
            if window.owner(inner).node == target.node:
                frame, target = inner, None
                break
    way: ScrollFacts = await (target.call("scroll", pages) if target else call(frame, "scroll", None, pages))
    moved = way["moved"]
    if abs(moved) < 1:
        further = "down" if pages > 0 else "up"
        return ActionResult(message=f"nothing moved: {where} cannot scroll further {further}")
    direction, by, below = "down" if moved > 0 else "up", abs(moved) / way["height"], way["below"]
    told = f"scrolled {where} {direction} by {by:.1f} pages; {below:.1f} pages are below"
    return ActionResult(message=told)


async def scroll_to_text(window: Window, text: str) -> ActionResult:
    """Scroll to a text of the page, in whatever frame it is."""
    for frame in window.page.frames:
        try:
            found = await call(frame, "scrollToText", text)
        except Error:  # a frame that is just being loaded has no text
            continue
        if found.get("found"):
            if frame.parent_frame is not None:
                await window.owner(frame).call("reveal")
            return ActionResult(message=f"scrolled to {quoted(text[:100])}")
    raise ActionProblem(f"the text {text[:100]!r} is not on the page; it may be worded otherwise")


# ------------------------------------------------------------------------------ reading, files, scripts, done


def _store_page(folder: Path, text: str) -> str:
    """Keep a page text in the run folder; return its relative path."""
    path = Path("pages") / f"{sha256_text(text)[:16]}.md"
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text, encoding="utf-8", newline="")
    return path.as_posix()


async def extract_structured_data(
    window: Window, query: str, extract_links: bool, start_from_char: int
) -> ActionResult:
    """Give the page's text from a character on to the extractor and return its answer.

    The text is kept, so that the question can become a training sample.
    """
    page = await asyncio.wait_for(window.markdown(extract_links), ACTION_LIMIT_S)
    part = piece(page, start_from_char)
    if not part.text.strip():
        hint = f"the page has no text from character {start_from_char} on (it has {part.total} characters)"
        names = window.files.names()
        if part.total == 0 and names:
            hint += f"; a PDF or a download is read with read_file: {', '.join(names)}"
        raise ActionProblem(hint)
    path = _store_page(window.folder, part.text)
    answer = await window.step.extractor(query, part.text, extract_links)
    more = f"\n(the page goes on: start_from_char={part.next_char})" if part.next_char is not None else ""
    short = len(answer) < SHORT_ANSWER_CHARS
    told = f"extracted: {answer}" if short else f"extracted {len(answer)} characters for {query[:100]!r}"
    return ActionResult(
        message=told + more,
        content=f"Query: {query}\n{answer}{more}",
        show_once=not short,
        extraction=Extraction(
            query=query, page_text_path=path, page_text_sha256=sha256_text(part.text), answer=answer
        ),
    )


async def execute_js(window: Window, code: str) -> ActionResult:
    """Run a script in the page: an expression, or statements with `return` or `await`."""
    code = window.secrets.fill(code, window.page.url)
    try:
        try:
            value = await window.page.evaluate(code)
        except Error as error:
            if "SyntaxError" not in error.message:
                raise
            value = await window.page.evaluate(f"async () => {{\n{code}\n}}")
    except Error as error:
        raise ActionProblem(f"the script failed: {_reason(error)}") from None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > MAX_JS_CHARS:
        text = text[:MAX_JS_CHARS] + f" ... ({len(text) - MAX_JS_CHARS} more characters)"
    await window.settle()
    long = len(text) > 200
    return ActionResult(
        message=f"the script returned {text[:200]}", content=text if long else None, show_once=long
    )


async def write_file(
    window: Window,
    file_name: str,
    content: str,
    append: bool,
    trailing_newline: bool,
    leading_newline: bool,
) -> ActionResult:
    """Write a file of the agent's own."""
    window.files.write(
        file_name,
        content,
        append=append,
        trailing_newline=trailing_newline,
        leading_newline=leading_newline,
    )
    return ActionResult(message=f"{'appended to' if append else 'wrote'} {file_name}")


async def replace_file_str(window: Window, file_name: str, old_str: str, new_str: str) -> ActionResult:
    """Replace a text wherever it is in a file of the agent's own."""
    count = window.files.replace(file_name, old_str, new_str)
    return ActionResult(message=f"replaced {count} occurrence{'s' if count > 1 else ''} in {file_name}")


async def read_file(window: Window, file_name: str) -> ActionResult:
    """Show a file's text for one step."""
    text = window.files.read(file_name)
    return ActionResult(
        message=f"read {file_name} ({len(text)} characters)",
        content=f"File {file_name}:\n{text}",
        show_once=True,
    )


async def done(window: Window, text: str, success: bool, files_to_display: list[str] | None) -> ActionResult:
    """End the episode.

    A file that is named but does not exist is left out: it must not keep the agent from finishing.
    """
    shown = [name for name in files_to_display or () if name in window.files.names()]
    content = text + "".join(f"\n\n{name}:\n{window.files.read(name)}" for name in shown)
    return ActionResult(message=text[:200], content=content, is_done=True, success=success)


# --------------------------------------------------------------------------------------------------- dispatch

Handler = Callable[..., Awaitable[ActionResult]]
_HANDLERS: tuple[Handler, ...] = (
    search_engine,
    go_to_url,
    go_back,
    wait,
    click_element_by_index,
    input_text,
    upload_file_to_element,
    switch_tab,
    close_tab,
    extract_structured_data,
    scroll,
    send_keys,
    scroll_to_text,
    get_dropdown_options,
    select_dropdown_option,
    write_file,
    replace_file_str,
    read_file,
    execute_js,
    done,
)
HANDLERS = {handler.__name__: handler for handler in _HANDLERS}
_LIMITS_S = dict.fromkeys(("search_engine", "go_to_url", "go_back"), NAVIGATION_LIMIT_S + 5) | {
    "wait": LONGEST_WAIT_S + ACTION_LIMIT_S
}


def _reason(error: Error) -> str:
    return first_line(error).removeprefix("Page.evaluate: ")[:300]


async def execute(action: Action, window: Window) -> ActionResult:
    """Carry out one action.

    Whatever goes wrong on the page is the result's error; only the extractor's own exceptions pass.
    """
    started, limit_s = time.monotonic(), _LIMITS_S.get(action.name, ACTION_LIMIT_S)
    extracts = action.name == "extract_structured_data"  # the model call has limits of its own
    try:
        work = HANDLERS[action.name](window, **with_defaults(action))
        result = await asyncio.wait_for(work, None if extracts else limit_s)
    except (ActionProblem, ValueError) as problem:
        result = ActionResult(error=str(problem))
    except TimeoutError:
        result = ActionResult(error=f"{action.name} took longer than {limit_s:g} s")
    except Error as error:
        result = ActionResult(error=f"{action.name} failed: {_reason(error)}")
    mask = window.secrets.mask
    return replace(
        result,
        error=mask(result.error) if result.error else None,
        message=mask(result.message),
        content=mask(result.content) if result.content else None,
        duration_s=round(time.monotonic() - started, 3),
    )
