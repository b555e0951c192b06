"""Controls of a page: clicking, typing, keys, dropdowns and file fields, on the very node that the agent saw.

Purpose: what a hand does, with the real mouse and keyboard: after scrolling, once the node stands still,
where nothing covers it.

ours: an input is read back from the page, and a click that another element would get is an error that names
it: a step that did not do what it should never looks like one that did.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from playwright.async_api import CDPSession, Error, Frame, Page
from playwright.async_api import TimeoutError as Overdue

from rmsweb.browser.files import AgentFiles
from rmsweb.browser.guard import Guard, Secrets
from rmsweb.records import ActionResult

POPUP_LIMIT_S = 3.0
CHOOSER_LIMIT_S = 1.0
SUGGESTIONS_LIMIT_MS = 1000  # a search field's suggestions are waited for so long
ANSWER_LIMIT_S = 0.5  # of a document that may be on its way to another one, which answers nothing
READ_LIMIT_S = 2.0
MAX_HOVERS = 3  # so often a node that hovering moves is looked for
MAX_TYPED_CHARS = 200  # a longer text is inserted at once

_CALL = """async ([token, name, args]) => {
  const dom = window.__rms;
  return !dom?.act || (token && dom.token !== token) ? {error: "is no longer on the page"} : await dom.act[name](...args);
}"""


_FILE_FIELD = "([token, node]) => (window.__rms?.token === token ? window.__rms.act.fileField(node) : null)"


class ActionProblem(Exception):
    """Why an action cannot be carried out; becomes the result's error."""


@dataclass(frozen=True, slots=True)
class Target:
    """A node that an observation showed: its frame's document and its number there."""

    label: str  # "element 5"
    frame: Frame
    token: str  # of the document
    node: int

    async def call(self, name: str, *args: Any) -> dict[str, Any]:
        """Calls a function of act.js on the node; ActionProblem where it answers with an error."""
        found = await call(self.frame, name, self.node, *args, token=self.token)
        if "error" in found:
            raise ActionProblem(f"{self.label} {found['error']}")
        return found


class Window(Protocol):
    """What an action may use of a session."""

    guard: Guard
    secrets: Secrets
    engines: Mapping[str, str]
    file_choosers: int  # how often a page has asked for a file

    @property
    def page(self) -> Page: ...
    @property
    def files(self) -> AgentFiles: ...
    @property
    def tab_ids(self) -> list[str]: ...
    @property
    def active_tab(self) -> str: ...
    def target(self, index: int) -> Target: ...
    def owner(self, frame: Frame) -> Target: ...
    async def cdp(self) -> CDPSession: ...
    async def settle(self) -> int: ...
    async def new_tab_within(self, seconds: float, known: set[str]) -> str | None: ...
    async def open_tab(self) -> None: ...
    async def switch_tab(self, tab_id: str) -> None: ...
    async def close_tab(self, tab_id: str) -> None: ...
    async def markdown(self, links: bool) -> str: ...
    def store_page(self, text: str) -> str: ...


async def call(frame: Frame, name: str, *args: Any, token: str = "") -> dict[str, Any]:
    """Calls a function of act.js in a frame and returns its plain answer."""
    found: dict[str, Any] = await frame.evaluate(_CALL, [token, name, list(args)])
    return found


async def ask(
    frame: Frame, name: str, *args: Any, token: str = "", limit_s: float = ANSWER_LIMIT_S
) -> dict[str, Any]:
    """The same of a document that may be gone by now or on its way to another one: {} where no answer comes."""
    try:
        return await asyncio.wait_for(call(frame, name, *args, token=token), limit_s)
    except (Error, TimeoutError):
        return {}


# ----------------------------------------------------------------------------------------- mouse and keyboard


async def _point(window: Window, target: Target, fact: Mapping[str, Any]) -> tuple[float, float]:
    """A node's click point in the top window; every frame on the way must be uncovered there."""
    x, y, frame = float(fact["x"]), float(fact["y"]), target.frame
    while frame.parent_frame is not None:
        owner = window.owner(frame)
        inner = await call(owner.frame, "frameAt", owner.node, x, y, token=owner.token)
        if "error" in inner:
            await owner.call("reveal")
            fact = await target.call("prepare")
            inner = await owner.call("frameAt", fact["x"], fact["y"])
        x, y, frame = float(inner["x"]), float(inner["y"]), owner.frame
    return x, y


async def _press_mouse(
    window: Window, target: Target, fact: Mapping[str, Any], *, ctrl: bool = False
) -> tuple[float, float, str]:
    """Clicks at a node's point; where that was and what to add to the message. ActionProblem where the page
    moved: then it has not got the press.

    Asked twice: when the pointer is there, because a node that hovering has moved is found again, and because
    nothing keeps a press from a frame that came over it or from a document that runs no scripts; and at the
    press, because a page may move things in between, which its own listeners alone see in time. The pointer
    rests after the first answer: another move would be another chance to put something else there.
    """
    for tries in range(1, 1 + MAX_HOVERS):
        x, y = await _point(window, target, fact)
        await window.page.mouse.move(x, y)
        over = await ask(target.frame, "reaches", target.node, fact["x"], fact["y"], token=target.token)
        if not over or over.get("yes"):  # a document that does not answer gets the press
            break
        fact = await target.call("prepare")
        if tries == MAX_HOVERS:
            raise ActionProblem(
                f"{target.label} moves under the pointer: {over.get('hit', 'nothing')} is in its place"
            )
    if ctrl:
        await window.page.keyboard.down("Control")
    try:
        await window.page.mouse.down()
        await window.page.mouse.up()
    finally:
        if ctrl:
            await window.page.keyboard.up("Control")
    became = await ask(
        target.frame, "pressed", token=target.token
    )  # a document that does not answer has got it
    if became.get("missed"):
        raise ActionProblem(f"{target.label} {became['missed']}")
    return (
        x,
        y,
        ""
        if became.get("clicked", True)
        else "; the page got the press but no click: look whether the press alone was enough",
    )


async def _refusal(frame: Frame) -> str:
    """What to add to a message where the browser refused to send a form."""
    words = (await ask(frame, "refused")).get("words")  # none from another page: the form was sent
    return f"; the browser did not send the form: {'; '.join(words)}" if words else ""


async def click(window: Window, p: dict[str, Any]) -> ActionResult:
    target, known, ctrl = window.target(p["index"]), set(window.tab_ids), bool(p["while_holding_ctrl"])
    fact = await target.call("prepare")
    if fact["tag"] == "select":
        options = _list_options((await target.call("options"))["options"])
        raise ActionProblem(
            f"{target.label} is a dropdown: use select_dropdown_option with one of\n{options}"
        )
    if fact["type"] == "file":
        raise ActionProblem(f"{target.label} is a file field: use upload_file_to_element")
    if fact["disabled"]:
        raise ActionProblem(f"{target.label} is disabled")
    asked = window.file_choosers
    x, y, note = await _press_mouse(window, target, fact, ctrl=ctrl)
    opened = await window.settle()
    message = (
        f"clicked {fact['what']}" + (f" at ({x:.0f}, {y:.0f})" if fact["tag"] == "canvas" else "") + note
    )
    if window.file_choosers > asked:
        message += "; it asks for a file: use upload_file_to_element on it"
    if fact["type"] in ("submit", "image"):
        message += await _refusal(target.frame)
    expected = fact["blank"] == "_blank" or opened > fact["opened"] or (ctrl and fact["tag"] == "a")
    tab = await window.new_tab_within(POPUP_LIMIT_S if expected else 0.0, known)
    if tab is None:
        return ActionResult(message=message)
    if not ctrl:
        await window.switch_tab(tab)
    where = "in the background" if ctrl else "and switched to it"
    return ActionResult(message=f"{message}; it opened tab {tab} {where}", opened_tab=tab)


async def _type(window: Window, text: str, *, line_break: str = "Enter") -> None:
    """Types a text; a long one is inserted line by line."""
    keyboard = window.page.keyboard
    for number, line in enumerate(text.split("\n")):
        if number:
            await keyboard.press(line_break)
        await (keyboard.insert_text(line) if len(text) > MAX_TYPED_CHARS else keyboard.type(line))


_PICKED = {"date", "time", "datetime-local", "month", "week", "color", "range"}
_NOT_TYPED = {
    "checkbox": "click it instead",
    "radio": "click it instead",
    "file": "use upload_file_to_element",
    "submit": "click it instead",
    "button": "click it instead",
    "image": "click it instead",
    "reset": "click it instead",
}


async def input_text(window: Window, p: dict[str, Any]) -> ActionResult:
    target, clear = window.target(p["index"]), p["clear_existing"] or not p["text"]
    text = window.secrets.fill(p["text"], _origin(target.frame))
    fact = await target.call("prepare")
    if fact["tag"] == "select":
        raise ActionProblem(f"{target.label} is a dropdown: use select_dropdown_option")
    if fact["tag"] == "input" and fact["type"] in _NOT_TYPED:
        raise ActionProblem(f"{target.label} is a {fact['type']} field: {_NOT_TYPED[fact['type']]}")
    if fact["disabled"] or fact["readonly"]:
        raise ActionProblem(
            f"{target.label} is {'disabled' if fact['disabled'] else 'read-only: click it instead'}"
        )
    if fact["role"] == "slider":
        raise ActionProblem(
            f"{target.label} is a slider and takes no text: click it, then press arrow keys with send_keys"
        )
    shown = (
        "the text"
        if fact["type"] == "password"
        else json.dumps(window.secrets.mask(p["text"]), ensure_ascii=False)
    )
    if fact["tag"] == "input" and fact["type"] in _PICKED:
        held = (await target.call("set", text))["value"]
        if held != text:
            raise ActionProblem(
                f"{target.label} is a {fact['type']} field and holds {held!r} after {shown} was given"
            )
        return ActionResult(message=f"set {fact['what']} to {shown}")
    await _press_mouse(window, target, fact)
    focused = await target.call("focus", clear)
    before = "" if clear else focused["value"] or ""
    typed = replace(target, node=focused["id"])
    lines = fact["tag"] == "textarea" or fact["editable"]  # there, Enter alone may send what was typed
    await (
        _type(window, text, line_break="Shift+Enter" if lines else "Enter")
        if text
        else window.page.keyboard.press("Delete")
    )
    await window.settle()
    if fact["suggests"] and text:
        await ask(
            target.frame,
            "suggestions",
            target.node,
            SUGGESTIONS_LIMIT_MS,
            token=target.token,
            limit_s=READ_LIMIT_S,
        )
    found = await ask(
        typed.frame, "read", typed.node, token=typed.token, limit_s=READ_LIMIT_S
    )  # nothing where Enter sent a form
    message = f"typed {shown} into {focused['what']}" + (await _refusal(target.frame) if "\n" in text else "")
    held = found.get("value")
    if held is None or ("\n" in text and not lines) or _plain(held) == _plain(before + text):
        return ActionResult(
            message=message + ("; choose one of its suggestions if some appear" if fact["combobox"] else "")
        )
    if text and (held == focused["value"] or not held):
        raise ActionProblem(f"{target.label} did not take {shown}: it holds {window.secrets.mask(held)!r}")
    actual = "something else" if fact["type"] == "password" else repr(window.secrets.mask(held))
    return ActionResult(message=f"{message}; it now holds {actual}")


def _plain(text: str) -> str:
    return " ".join(text.split())


_KEYS = {
    "enter": "Enter", "return": "Enter", "tab": "Tab", "escape": "Escape", "esc": "Escape", "backspace": "Backspace", "delete": "Delete", "del": "Delete",
    "space": "Space", "spacebar": "Space", "home": "Home", "end": "End", "insert": "Insert", "pageup": "PageUp", "page_up": "PageUp", "pgup": "PageUp",
    "pagedown": "PageDown", "page_down": "PageDown", "pgdn": "PageDown", "up": "ArrowUp", "down": "ArrowDown", "left": "ArrowLeft", "right": "ArrowRight",
    "arrowup": "ArrowUp", "arrowdown": "ArrowDown", "arrowleft": "ArrowLeft", "arrowright": "ArrowRight",
} | {f"f{number}": f"F{number}" for number in range(1, 13)}  # fmt: skip
_MODIFIERS = {
    "control": "Control", "ctrl": "Control", "shift": "Shift", "alt": "Alt", "option": "Alt", "meta": "Meta", "cmd": "Meta", "command": "Meta",
    "controlormeta": "Control",
}  # fmt: skip


def key_presses(keys: str) -> list[str] | None:
    """What to press for a `send_keys` text, in Playwright's names; None where the text is to be typed.
    ValueError for an unknown key of a chord.

    >>> key_presses("ctrl+a"), key_presses("Down down Enter"), key_presses("hello")
    (['Control+a'], ['ArrowDown', 'ArrowDown', 'Enter'], None)
    """
    presses = []
    for word in keys.split():
        *modifiers, key = word.split("+") if len(word) > 1 and not word.endswith("+") else [word]
        if modifiers and not all(name.lower() in _MODIFIERS for name in modifiers):
            return None
        name = _KEYS.get(key.lower()) or _MODIFIERS.get(key.lower()) or (key if len(key) == 1 else None)
        if name is None:
            if modifiers:
                raise ValueError(f"there is no key {key!r} in {word!r}")
            return None
        if not modifiers and len(key) == 1 and len(keys.split()) > 1:
            return None  # "a b" is a text
        presses.append("+".join([*(_MODIFIERS[m.lower()] for m in modifiers), name]))
    return presses or None


def _origin(frame: Frame) -> str:
    """URL of the document that a frame's script belongs to: a frame without a URL of its own is its parent's."""
    while frame.url.startswith("about:") and frame.parent_frame is not None:
        frame = frame.parent_frame
    return frame.url


async def _focused(frame: Frame) -> Frame:
    """The frame in or below this one that gets the keys."""
    for child in frame.child_frames:
        with suppress(Error):  # gone
            if await child.evaluate("document.hasFocus()"):
                return await _focused(child)
    return frame


async def send_keys(window: Window, p: dict[str, Any]) -> ActionResult:
    frame = await _focused(window.page.main_frame)
    keys = window.secrets.fill(p["keys"], _origin(frame))
    if not keys:
        raise ActionProblem("keys is empty")
    presses, known = key_presses(keys), set(window.tab_ids)
    if presses is None:
        await _type(window, keys)
        return ActionResult(message=f"typed {json.dumps(p['keys'], ensure_ascii=False)}")
    await _refusal(frame)  # of before
    for press in presses:
        await window.page.keyboard.press(press)
    await window.settle()
    refusal = await _refusal(frame) if "Enter" in presses else ""
    tab = await window.new_tab_within(0.0, known)
    if tab is not None:
        await window.switch_tab(tab)
    return ActionResult(
        message=f"pressed {', '.join(presses)}{refusal}"
        + (f"; it opened tab {tab} and switched to it" if tab else ""),
        opened_tab=tab,
    )


async def upload(window: Window, p: dict[str, Any]) -> ActionResult:
    target, path = window.target(p["index"]), window.files.upload(p["path"])
    element = (await target.frame.evaluate_handle(_FILE_FIELD, [target.token, target.node])).as_element()
    if element is not None:
        await element.set_input_files(str(path))
    else:  # perhaps a button that asks for a file
        fact = await target.call("prepare")
        try:
            async with window.page.expect_file_chooser(timeout=1000 * CHOOSER_LIMIT_S) as chooser:
                await _press_mouse(window, target, fact)
            await (await chooser.value).set_files(str(path))
        except Overdue:
            raise ActionProblem(
                f"{target.label} is no file field, belongs to none and asks for no file"
            ) from None
    await window.settle()
    return ActionResult(message=f"chose the file {path.name}")


# -------------------------------------------------------------------------------------------------- dropdowns


def _list_options(options: list[dict[str, Any]]) -> str:
    def line(o: dict[str, Any]) -> str:
        text, value = (json.dumps(o[key], ensure_ascii=False) for key in ("text", "value"))
        return (
            text
            + (f" value {value}" if value not in (text, '""') else "")
            + " (selected)" * bool(o["chosen"])
            + " (disabled)" * bool(o["off"])
        )

    return "\n".join(map(line, options[:200]))


async def _options(window: Window, target: Target) -> dict[str, Any]:
    """A dropdown's options; one of the page's own making is opened with a click where it is shut."""
    found = await target.call("options")
    if not found["native"] and not found["options"] and not found["disabled"]:
        await _press_mouse(window, target, await target.call("prepare"))
        await window.settle()
        found = await target.call("options")
    if not found["options"]:
        raise ActionProblem(
            f"{target.label} shows no options after a click; if something opened, click what it shows"
        )
    return found


async def get_options(window: Window, p: dict[str, Any]) -> ActionResult:
    target = window.target(p["index"])
    text = _list_options((await _options(window, target))["options"])
    return ActionResult(
        message=f"read the options of {target.label}",
        content=f"Options of {target.label}:\n{text}",
        show_once=True,
    )


async def _choose(window: Window, target: Target, number: int) -> list[str] | None:
    """Chooses an option of a native dropdown -> the texts of those it holds when the page has reacted; None
    where the page put something else in its place.
    """
    try:
        await target.call("choose", number)
        await window.settle()
        after = await ask(target.frame, "options", target.node, token=target.token, limit_s=READ_LIMIT_S)
    except Error as error:
        if "navigation" not in error.message and "detached" not in error.message:
            raise
        return None  # the choice made the page open another
    return None if "options" not in after else [o["text"] for o in after["options"] if o["chosen"]]


async def select(window: Window, p: dict[str, Any]) -> ActionResult:
    target, wanted = window.target(p["index"]), p["text"]
    found = await _options(window, target)
    if found["disabled"]:
        raise ActionProblem(f"{target.label} is disabled")
    tests: tuple[Callable[[dict[str, Any]], bool], ...] = (
        lambda o: o["text"] == _plain(wanted),
        lambda o: o["text"].lower() == _plain(wanted).lower(),
        lambda o: bool(wanted) and str(o["value"]).lower() == wanted.lower(),
    )
    option = next((o for test in tests for o in found["options"] if test(o)), None)
    if option is None:
        raise ActionProblem(
            f"{target.label} has no option {wanted[:100]!r}; its options are\n{_list_options(found['options'])}"
        )
    if option["off"]:
        raise ActionProblem(f"the option {option['text']!r} is disabled")
    if found["native"]:
        kept = await _choose(window, target, option["id"])
        if kept is not None and option["text"] not in kept:
            raise ActionProblem(f"the page did not keep the choice: {target.label} shows {', '.join(kept)!r}")
        note = ""
    else:
        place = replace(target, label=f"the option {option['text']!r}", node=option["id"])
        *_, note = await _press_mouse(window, place, await place.call("prepare"))
    return ActionResult(message=f"chose {option['text']!r} in {target.label}{note}")
