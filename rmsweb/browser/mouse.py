"""The mouse: a real click on the very node that the agent saw.

Purpose: an element is clicked after scrolling, once it has come to rest, and only if nothing covers it.

ours: a click that another element would get is an error that names it, so a step that did not do what it
should never looks like one that did.
"""

from dataclasses import dataclass

from rmsweb.browser.page import ElementFacts, Target, call
from rmsweb.browser.window import Window

MAX_HOVERS = 3  # times that a node which hovering moves is looked for


@dataclass(frozen=True, slots=True)
class Press:
    """Where the mouse was pressed in the top window (CSS px), and what to add to the message."""

    x: float
    y: float
    note: str


async def _point(window: Window, target: Target, facts: ElementFacts) -> tuple[float, float]:
    """Return a node's click point in the top window; every frame on the way must be uncovered there."""
    x, y, frame = facts["x"], facts["y"], target.frame
    while frame.parent_frame is not None:
        owner = window.owner(frame)
        inner = await call(owner.frame, "frameAt", owner.node, x, y, token=owner.token)
        if "error" in inner:
            await owner.call("reveal")
            facts = await target.call("prepare")
            inner = await owner.call("frameAt", facts["x"], facts["y"])
        x, y, frame = inner["x"], inner["y"], owner.frame
    return x, y


async def press(window: Window, target: Target, facts: ElementFacts, *, ctrl: bool = False) -> Press:
    """Click at a node's point. ActionProblem if the page moved: then it has not got the press.

    Check the target twice. After moving the mouse, because hovering may move the node, and because nothing
    keeps a press from a frame that came over it or from a document that runs no scripts. And at the press,
    because a page may move things in between, which its own listeners alone see in time. The pointer rests
    after the first check: another move would be another chance to put something else there.
    """
    for tries in range(1, 1 + MAX_HOVERS):
        x, y = await _point(window, target, facts)
        await window.page.mouse.move(x, y)
        over = await target.ask("reaches", facts["x"], facts["y"])
        if not over or over.get("yes"):  # a document that does not answer gets the press
            break
        facts = await target.call("prepare")
        if tries == MAX_HOVERS:
            hit = over.get("hit", "nothing")
            raise target.problem(f"moves under the pointer: {hit} is in its place")
    if ctrl:
        await window.page.keyboard.down("Control")
    try:
        await window.page.mouse.down()
        await window.page.mouse.up()
    finally:
        if ctrl:
            await window.page.keyboard.up("Control")
    became = await target.ask("pressed")  # a document that does not answer has got the press
    if became.get("missed"):
        raise target.problem(became["missed"])
    lost = "; the page got the press but no click: look whether the press alone was enough"
    return Press(x, y, "" if became.get("clicked", True) else lost)
