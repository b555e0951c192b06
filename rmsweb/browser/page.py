"""The bridge to the page's own scripts: how Python asks them, and the shape of what they answer.

Purpose: the JS files of this folder run in every document as one function, which leaves its answers on
`window.__rms`. A node is named by its document's token and its number there, never by a selector.
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from playwright.async_api import Error, Frame

ANSWER_LIMIT_S = 0.5  # a document on its way to another one answers nothing
_PARTS = ("dom.js", "observe.js", "act.js")
SCRIPT = "\n".join(
    (
        "(() => {\nif (window.__rms) return;",
        *((Path(__file__).parent / name).read_text(encoding="utf-8") for name in _PARTS),
        "})();",
    )
)
CALL = """async ([token, name, args]) => {
  const page = window.__rms, gone = !page || (token && page.token !== token);
  return gone ? {error: "is no longer on the page"} : await page[name](...args);
}"""


class ElementFacts(TypedDict):
    """What `prepare` says of an element to be used; `x` and `y` are its click point in CSS px."""

    tag: str
    type: str
    role: str
    what: str  # in words: `<a id=next> "Next"`
    disabled: bool
    readonly: bool
    editable: bool  # contenteditable
    combobox: bool  # may show suggestions
    suggests: bool  # will show suggestions
    opened: int  # how often the document has called window.open
    blank: str  # the target of the link, where it is another window
    x: float
    y: float


class FocusFacts(TypedDict):
    """The field that `focus` gave the focus to."""

    id: int
    what: str
    value: str | None


class Option(TypedDict):
    """One option of a dropdown; `id` is its place in a native one, else the number of its node."""

    id: int
    text: str
    value: str
    chosen: bool
    off: bool  # disabled


class Dropdown(TypedDict):
    """A dropdown with its options; `native` means a <select>."""

    native: bool
    disabled: bool
    options: list[Option]


class ScrollFacts(TypedDict):
    """How far something scrolled: `moved` and `height` in CSS px, `below` in heights."""

    moved: float
    height: float
    below: float


class Line(TypedDict):
    """One line of a document's report: an element or a text.

    `indexed` asks for an index. The other fields are those of records.Element; a text has the required ones.
    """

    id: int
    indexed: bool
    tag: str
    text: str
    box: list[float]
    in_viewport: bool
    is_new: bool
    depth: int
    role: NotRequired[str | None]
    attributes: NotRequired[dict[str, str]]
    value: NotRequired[str | None]
    options: NotRequired[list[str]]
    marker: NotRequired[Literal["scroll", "iframe", "shadow-open", "shadow-closed"] | None]
    scroll_pages: NotRequired[list[float] | None]
    frame: NotRequired[dict[str, Any]]  # handed back to the frame's own pass, see `observe`


class Report(TypedDict):
    """What one pass over a document finds; lengths in CSS px."""

    token: str
    lines: list[Line]
    stats: dict[str, int]
    sealed: bool  # an element shows something that is not in the tree
    title: str
    scroll: float
    height: float
    full: float
    pdf: bool


class ActionProblem(Exception):
    """Why an action cannot be carried out; becomes the result's error."""


@dataclass(frozen=True, slots=True)
class Target:
    """A node that an observation showed: its frame's document and its number there."""

    label: str  # "element 5"
    frame: Frame
    token: str  # of the document
    node: int

    async def call(self, name: str, *args: Any) -> Any:
        """Call a function of the page's scripts on the node; ActionProblem if it answers with an error."""
        found = await call(self.frame, name, self.node, *args, token=self.token)
        if "error" in found:
            raise self.problem(found["error"])
        return found

    async def ask(self, name: str, *args: Any, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        """Do the same; {} if the document is gone or does not answer in time."""
        return await ask(self.frame, name, self.node, *args, token=self.token, limit_s=limit_s)

    def problem(self, words: str) -> ActionProblem:
        """Return the error that says this of the node."""
        return ActionProblem(f"{self.label} {words}")


async def call(frame: Frame, name: str, *args: Any, token: str = "") -> Any:
    """Call a function of the page's scripts in a frame and return its plain answer."""
    return await frame.evaluate(CALL, [token, name, list(args)])


async def ask(
    frame: Frame, name: str, *args: Any, token: str = "", limit_s: float = ANSWER_LIMIT_S
) -> dict[str, Any]:
    """Call a function in a document that may be gone or leaving; {} if no answer comes in time."""
    try:
        found: dict[str, Any] = await asyncio.wait_for(call(frame, name, *args, token=token), limit_s)
    except (Error, TimeoutError):
        return {}
    return found


def first_line(error: Error) -> str:
    """Return the first line of Playwright's message."""
    return error.message.split("\n")[0]


def quoted(text: str) -> str:
    """Return a text in double quotes, with escapes."""
    return json.dumps(text, ensure_ascii=False)
