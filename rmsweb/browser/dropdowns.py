"""Dropdowns: list the options and choose one, natively or in a list of the page's own making."""

from collections.abc import Callable
from dataclasses import replace

from playwright.async_api import Error

from rmsweb.browser.mouse import press
from rmsweb.browser.page import ActionProblem, Dropdown, Option, Target, quoted
from rmsweb.browser.window import Window
from rmsweb.records import ActionResult

READ_LIMIT_S = 2.0
MAX_OPTIONS = 200  # listed in a message


def _line(option: Option) -> str:
    text, value = quoted(option["text"]), quoted(option["value"])
    shown = f" value {value}" if value not in (text, '""') else ""
    return text + shown + " (selected)" * option["chosen"] + " (disabled)" * option["off"]


def option_list(dropdown: Dropdown) -> str:
    """Return the options of a dropdown, one a line."""
    return "\n".join(map(_line, dropdown["options"][:MAX_OPTIONS]))


def plain(text: str) -> str:
    """Return a text with single spaces."""
    return " ".join(text.split())


async def _open(window: Window, target: Target) -> Dropdown:
    """Return a dropdown with its options; one of the page's own making is opened if it is shut."""
    found: Dropdown = await target.call("options")
    if not found["native"] and not found["options"] and not found["disabled"]:
        await press(window, target, await target.call("prepare"))
        await window.settle()
        found = await target.call("options")
    if not found["options"]:
        raise target.problem("shows no options after a click; if something opened, click what it shows")
    return found


async def get_dropdown_options(window: Window, index: int) -> ActionResult:
    """List the options of a dropdown."""
    target = window.target(index)
    options = option_list(await _open(window, target))
    return ActionResult(
        message=f"read the options of {target.label}",
        content=f"Options of {target.label}:\n{options}",
        show_once=True,
    )


async def _choose(window: Window, target: Target, number: int) -> list[str] | None:
    """Choose an option of a native dropdown; return the texts of those chosen once the page has reacted.

    None if the page put something else in the dropdown's place.
    """
    try:
        await target.call("choose", number)
        await window.settle()
        after = await target.ask("options", limit_s=READ_LIMIT_S)
    except Error as error:
        if "navigation" not in error.message and "detached" not in error.message:
            raise
        return None  # the choice made the page open another
    return None if "options" not in after else [o["text"] for o in after["options"] if o["chosen"]]


async def select_dropdown_option(window: Window, index: int, text: str) -> ActionResult:
    """Choose the option with a text: exactly, else in any case, else by its value."""
    target = window.target(index)
    dropdown = await _open(window, target)
    if dropdown["disabled"]:
        raise target.problem("is disabled")
    wanted = plain(text)
    tests: tuple[Callable[[Option], bool], ...] = (
        lambda option: option["text"] == wanted,
        lambda option: option["text"].lower() == wanted.lower(),
        lambda option: text != "" and option["value"].lower() == text.lower(),
    )
    option = next((option for test in tests for option in dropdown["options"] if test(option)), None)
    if option is None:
        raise target.problem(f"has no option {text[:100]!r}; its options are\n{option_list(dropdown)}")
    label = f"the option {option['text']!r}"
    place = replace(target, label=label, node=option["id"])
    if option["off"]:
        raise place.problem("is disabled")
    note = ""
    if dropdown["native"]:
        kept = await _choose(window, target, option["id"])
        if kept is not None and option["text"] not in kept:
            shown = ", ".join(kept)
            raise ActionProblem(f"the page did not keep the choice: {target.label} shows {shown!r}")
    else:
        note = (await press(window, place, await place.call("prepare"))).note
    return ActionResult(message=f"chose {option['text']!r} in {target.label}{note}")
