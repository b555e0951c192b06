"""Controls of a page: clicking, typing, keys and file fields.

Purpose: what a hand does, with the real mouse and keyboard. Each action of the schema has a handler of its
name here, in `dropdowns` or in `execute`, with the action's parameters.

ours: an input is read back from the page.
"""

from contextlib import suppress
from dataclasses import replace

from playwright.async_api import Error, Frame
from playwright.async_api import TimeoutError as Overdue

from rmsweb.browser.dropdowns import READ_LIMIT_S, option_list, plain
from rmsweb.browser.mouse import press
from rmsweb.browser.page import ActionProblem, ElementFacts, FocusFacts, ask, quoted
from rmsweb.browser.window import Window
from rmsweb.records import ActionResult

POPUP_LIMIT_S = 3.0
CHOOSER_LIMIT_S = 1.0
SUGGESTIONS_LIMIT_MS = 1000  # longest wait for a search field's suggestions
MAX_TYPED_CHARS = 200  # a longer text is inserted at once
_FILE_FIELD = "([token, node]) => (window.__rms?.token === token ? window.__rms.fileField(node) : null)"


async def _refusal(frame: Frame) -> str:
    """Return what to add to a message if the browser refused to send a form."""
    words = (await ask(frame, "refused")).get("words")  # none from another page: the form was sent
    return f"; the browser did not send the form: {'; '.join(words)}" if words else ""


async def click_element_by_index(window: Window, index: int, while_holding_ctrl: bool | None) -> ActionResult:
    """Click an element, and follow the tab that it opens."""
    target, known, ctrl = window.target(index), {*window.tabs}, bool(while_holding_ctrl)
    facts: ElementFacts = await target.call("prepare")
    if facts["tag"] == "select":
        options = option_list(await target.call("options"))
        raise target.problem(f"is a dropdown: use select_dropdown_option with one of\n{options}")
    if facts["type"] == "file":
        raise target.problem("is a file field: use upload_file_to_element")
    if facts["disabled"]:
        raise target.problem("is disabled")
    asked = window.file_choosers
    at = await press(window, target, facts, ctrl=ctrl)
    opened = await window.settle()
    place = f" at ({at.x:.0f}, {at.y:.0f})" if facts["tag"] == "canvas" else ""
    message = f"clicked {facts['what']}{place}{at.note}"
    if window.file_choosers > asked:
        message += "; it asks for a file: use upload_file_to_element on it"
    if facts["type"] in ("submit", "image"):
        message += await _refusal(target.frame)
    expected = facts["blank"] == "_blank" or opened > facts["opened"] or (ctrl and facts["tag"] == "a")
    tab = await window.new_tab_within(POPUP_LIMIT_S if expected else 0.0, known)
    if tab is None:
        return ActionResult(message=message)
    if not ctrl:
        await window.switch_tab(tab)
    where = "in the background" if ctrl else "and switched to it"
    return ActionResult(message=f"{message}; it opened tab {tab} {where}", opened_tab=tab)


async def _type(window: Window, text: str, *, line_break: str = "Enter") -> None:
    """Type a text; a long one is inserted line by line."""
    keyboard = window.page.keyboard
    for number, line in enumerate(text.split("\n")):
        if number:
            await keyboard.press(line_break)
        await (keyboard.insert_text(line) if len(text) > MAX_TYPED_CHARS else keyboard.type(line))


_PICKED = {"date", "time", "datetime-local", "month", "week", "color", "range"}
_CLICKED = {"checkbox", "radio", "submit", "button", "image", "reset"}


def _refuse_to_type(facts: ElementFacts) -> str | None:
    """Return why no text can be typed into an element, and what to do instead."""
    if facts["tag"] == "select":
        return "is a dropdown: use select_dropdown_option"
    if facts["tag"] == "input" and facts["type"] in _CLICKED:
        return f"is a {facts['type']} field: click it instead"
    if facts["tag"] == "input" and facts["type"] == "file":
        return "is a file field: use upload_file_to_element"
    if facts["disabled"]:
        return "is disabled"
    if facts["readonly"]:
        return "is read-only: click it instead"
    if facts["role"] == "slider":
        return "is a slider and takes no text: click it, then press arrow keys with send_keys"
    return None


async def input_text(window: Window, index: int, text: str, clear_existing: bool) -> ActionResult:
    """Type into a field and read back what it holds."""
    target, clear, given = window.target(index), clear_existing or not text, text
    text = window.secrets.fill(text, _origin(target.frame))
    facts: ElementFacts = await target.call("prepare")
    if problem := _refuse_to_type(facts):
        raise target.problem(problem)
    hidden = facts["type"] == "password"
    shown = "the text" if hidden else quoted(window.secrets.mask(given))
    if facts["tag"] == "input" and facts["type"] in _PICKED:
        held = (await target.call("set", text))["value"]
        if held != text:
            raise target.problem(f"is a {facts['type']} field and holds {held!r} after {shown} was given")
        return ActionResult(message=f"set {facts['what']} to {shown}")
    await press(window, target, facts)
    if facts["tag"] in ("a", "button"):  # the press may have led away
        await window.settle()
    focused: FocusFacts = await target.call("focus", clear)
    before = "" if clear else focused["value"] or ""
    field = replace(target, node=focused["id"])
    lines = facts["tag"] == "textarea" or facts["editable"]  # there, Enter alone may send what was typed
    if text:
        await _type(window, text, line_break="Shift+Enter" if lines else "Enter")
    else:
        await window.page.keyboard.press("Delete")
    await window.settle()
    if facts["suggests"] and text:
        await target.ask("suggestions", SUGGESTIONS_LIMIT_MS, limit_s=READ_LIMIT_S)
    read = await field.ask("read", limit_s=READ_LIMIT_S)  # nothing if Enter sent a form
    held = read.get("value")
    message = f"typed {shown} into {focused['what']}"
    if "\n" in text:
        message += await _refusal(target.frame)
    if held is None or ("\n" in text and not lines) or plain(held) == plain(before + text):
        hint = "; choose one of its suggestions if some appear" if facts["combobox"] else ""
        return ActionResult(message=message + hint)
    masked = repr(window.secrets.mask(held))
    if text and (held == focused["value"] or not held):
        raise target.problem(f"did not take {shown}: it holds {masked}")
    return ActionResult(message=f"{message}; it now holds {'something else' if hidden else masked}")


_NAMES_OF_KEYS = {
    "Enter": "enter return", "Tab": "tab", "Escape": "escape esc", "Backspace": "backspace",
    "Delete": "delete del", "Space": "space spacebar", "Home": "home", "End": "end", "Insert": "insert",
    "PageUp": "pageup page_up pgup", "PageDown": "pagedown page_down pgdn", "ArrowUp": "up arrowup",
    "ArrowDown": "down arrowdown", "ArrowLeft": "left arrowleft", "ArrowRight": "right arrowright",
} | {f"F{number}": f"f{number}" for number in range(1, 13)}  # fmt: skip
_NAMES_OF_MODIFIERS = {
    "Control": "control ctrl controlormeta",
    "Shift": "shift",
    "Alt": "alt option",
    "Meta": "meta cmd command",
}


def _by_name(names: dict[str, str]) -> dict[str, str]:
    return {name: key for key, words in names.items() for name in words.split()}


_MODIFIERS = _by_name(_NAMES_OF_MODIFIERS)
_KEYS = _by_name(_NAMES_OF_KEYS) | _MODIFIERS


def key_presses(keys: str) -> list[str] | None:
    """Return what to press for a `send_keys` text, in Playwright's names; None if the text is to be typed.

    ValueError for an unknown key of a chord.

    >>> key_presses("ctrl+a"), key_presses("Down down Enter"), key_presses("hello")
    (['Control+a'], ['ArrowDown', 'ArrowDown', 'Enter'], None)
    """
    presses = []
    for word in keys.split():
        *modifiers, key = word.split("+") if len(word) > 1 and not word.endswith("+") else [word]
        if modifiers and not all(name.lower() in _MODIFIERS for name in modifiers):
            return None
        name = _KEYS.get(key.lower()) or (key if len(key) == 1 else None)
        if name is None:
            if modifiers:
                raise ValueError(f"there is no key {key!r} in {word!r}")
            return None
        if not modifiers and len(key) == 1 and len(keys.split()) > 1:
            return None  # "a b" is a text
        presses.append("+".join([*(_MODIFIERS[m.lower()] for m in modifiers), name]))
    return presses or None


def _origin(frame: Frame) -> str:
    """Return the URL of the document that a frame's script belongs to: about: frames are their parent's."""
    while frame.url.startswith("about:") and frame.parent_frame is not None:
        frame = frame.parent_frame
    return frame.url


async def _focused(frame: Frame) -> Frame:
    """Return the frame in or below this one that gets the keys."""
    for child in frame.child_frames:
        with suppress(Error):  # gone
            if await child.evaluate("document.hasFocus()"):
                return await _focused(child)
    return frame


async def send_keys(window: Window, keys: str) -> ActionResult:
    """Press keys and chords, or type a text."""
    frame = await _focused(window.page.main_frame)
    filled = window.secrets.fill(keys, _origin(frame))
    if not filled:
        raise ActionProblem("keys is empty")
    presses, known = key_presses(filled), {*window.tabs}
    if presses is None:
        await _type(window, filled)
        return ActionResult(message=f"typed {quoted(keys)}")
    await _refusal(frame)  # clear earlier validation messages
    for key in presses:
        await window.page.keyboard.press(key)
    await window.settle()
    refusal = await _refusal(frame) if "Enter" in presses else ""
    tab = await window.new_tab_within(0.0, known)
    message = f"pressed {', '.join(presses)}{refusal}"
    if tab is not None:
        await window.switch_tab(tab)
        message += f"; it opened tab {tab} and switched to it"
    return ActionResult(message=message, opened_tab=tab)


async def upload_file_to_element(window: Window, index: int, path: str) -> ActionResult:
    """Give a file to a file field, or to the element that asks for one when it is clicked."""
    target, file = window.target(index), window.files.upload(path)
    element = (await target.frame.evaluate_handle(_FILE_FIELD, [target.token, target.node])).as_element()
    if element is not None:
        await element.set_input_files(str(file))
    else:  # perhaps a button that asks for a file
        facts: ElementFacts = await target.call("prepare")
        try:
            async with window.page.expect_file_chooser(timeout=1000 * CHOOSER_LIMIT_S) as chooser:
                await press(window, target, facts)
            await (await chooser.value).set_files(str(file))
        except Overdue:
            raise target.problem("is no file field, belongs to none and asks for no file") from None
    await window.settle()
    return ActionResult(message=f"chose the file {file.name}")
