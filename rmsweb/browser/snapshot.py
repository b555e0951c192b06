"""One state of a page: what dom.js reports of every frame, put together into the list of lines.

Purpose: one in-page pass per frame; a frame's lines stand after the line of its element, and indices run 1..N
in document order.

ours: a node is known by the number of its frame and the number that dom.js gave it there; both stay the same
from one observation to the next, and a document's random token tells a node from one of a page that was
loaded since.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from playwright.async_api import Error, Frame, Page

from rmsweb.records import Element

MAX_FRAMES = 100
MAX_FRAME_DEPTH = 5
MIN_FRAME_PX = 10
SCRIPT = "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("dom.js", "act.js"))
_ADOPT = "function (root) { window.__rms?.adopt(this, root); }"
_OBSERVE = "(options) => (window.__rms?.act ? window.__rms.report(options) : null)"


@dataclass(slots=True)
class FrameBook:
    """What is known of a tab's frames: a number for each, and the node in the parent document that holds it."""

    numbers: "WeakKeyDictionary[Frame, int]" = field(default_factory=WeakKeyDictionary)
    owners: "WeakKeyDictionary[Frame, int]" = field(default_factory=WeakKeyDictionary)
    tokens: dict[int, str] = field(
        default_factory=dict
    )  # frame number -> token of the document that was observed last
    opened: set[str] = field(
        default_factory=set
    )  # tokens of documents whose closed shadow roots were asked for
    frames: dict[int, Frame] = field(default_factory=dict)

    def number(self, frame: Frame) -> int:
        """The frame's number; the main frame comes first and has 0."""
        return self.numbers.setdefault(frame, len(self.numbers))

    async def owner(self, frame: Frame) -> int:
        """Number of the node that holds a child frame."""
        if frame not in self.owners:
            handle = await frame.frame_element()
            self.owners[frame] = await handle.evaluate("(element) => window.__rms.idOf(element)")
        return self.owners[frame]


async def _open_roots(frame: Frame) -> None:
    """Tells dom.js of the closed shadow roots that came with a document's HTML, which no script of the page
    made.
    """
    context, top = frame.page.context, frame.parent_frame is None
    try:
        cdp = await context.new_cdp_session(frame.page if top else frame)
    except Error:  # a frame in its parent's process
        cdp = await context.new_cdp_session(frame.page)
    nodes = [(await cdp.send("DOM.getDocument", {"depth": -1, "pierce": True}))["root"]]
    for node in nodes:
        roots = node.get("shadowRoots", [])
        nodes += [*node.get("children", []), *roots, *filter(None, [node.get("contentDocument")])]
        for root in roots:
            if root["shadowRootType"] == "closed":
                host, inner = [
                    (await cdp.send("DOM.resolveNode", {"backendNodeId": n["backendNodeId"]}))["object"][
                        "objectId"
                    ]
                    for n in (node, root)
                ]
                call = {"functionDeclaration": _ADOPT, "objectId": host, "arguments": [{"objectId": inner}]}
                await cdp.send("Runtime.callFunctionOn", call)
    await cdp.detach()


@dataclass(slots=True)
class PageRead:
    """What an observation takes from the page itself."""

    nodes: tuple[Element, ...]
    stats: dict[str, int]
    title: str
    scroll_y: float
    pages_above: float
    pages_below: float
    is_pdf: bool


_STATS = {
    "links": "links", "interactive": "interactive", "iframes": "iframes", "scrolls": "scroll containers", "open": "shadow(open)",
    "closed": "shadow(closed)", "images": "images", "total": "total elements",
}  # fmt: skip
_ONLY_WHERE_ANY = {"open", "closed", "images"}


@dataclass(slots=True)
class _Reader:
    book: FrameBook
    mask: Callable[[str], str]
    lines: list[tuple[int, int, dict[str, Any]]] = field(
        default_factory=list
    )  # frame number, depth of the frame, line
    stats: dict[str, int] = field(default_factory=dict)
    frames_read: int = 0

    async def frame(self, frame: Frame, options: dict[str, Any], depth: int, level: int) -> dict[str, Any]:
        """Reads a frame and those inside it; returns the frame's own report."""
        text = await frame.evaluate(_OBSERVE, options)
        if text is None:  # a document that was there before the script
            await frame.evaluate(SCRIPT)
            text = await frame.evaluate(_OBSERVE, options)
        report: dict[str, Any] = json.loads(self.mask(text))
        if report["sealed"] and report["token"] not in self.book.opened:
            self.book.opened.add(report["token"])
            await _open_roots(frame)
            return await self.frame(frame, options, depth, level)
        number = self.book.number(frame)
        self.book.tokens[number], self.book.frames[number] = report["token"], frame
        self.frames_read += 1
        for name, count in report["stats"].items():
            self.stats[name] = self.stats.get(name, 0) + count
        children = (
            await self._children(frame) if report["stats"]["iframes"] and level < MAX_FRAME_DEPTH else {}
        )
        for line in report["lines"]:
            self.lines.append((number, depth, line))
            child = children.get(line["k"]) if "f" in line else None
            if child is not None and min(line["b"][2:]) >= MIN_FRAME_PX and self.frames_read < MAX_FRAMES:
                try:
                    await self.frame(child, line["f"], depth + line["d"] + 1, level + 1)
                except Error:  # a frame that is being loaded is read next time
                    continue
        return report

    async def _children(self, frame: Frame) -> dict[int, Frame]:
        found = {}
        for child in frame.child_frames:
            try:
                found[await self.book.owner(child)] = child
            except Error:  # gone while it was looked at
                continue
        return found


def _element(number: int, depth: int, line: dict[str, Any], index: int | None) -> Element:
    x, y, width, height = line["b"]
    scroll = line.get("s")
    return Element(
        index=index,
        node_key=f"{number}:{line['k']}",
        tag=line["t"],
        role=line.get("r"),
        attributes=line.get("a") or {},
        text=line.get("x") or "",
        value=line.get("v"),
        options=tuple(line.get("o") or ()),
        box=(float(x), float(y), float(width), float(height)),
        in_viewport=line["p"],
        is_new=line["n"],
        depth=depth + line["d"],
        marker=line.get("m"),
        scroll_pages=(float(scroll[0]), float(scroll[1])) if scroll else None,
    )


async def read_page(page: Page, book: FrameBook, mask: Callable[[str], str]) -> PageRead:
    """Reads the page's frames.

    `mask` is applied to the page's JSON text before it is looked at. Playwright's Error where the page
    changes meanwhile.
    """
    book.number(page.main_frame)
    reader = _Reader(book, mask)
    report = await reader.frame(page.main_frame, {}, 0, 0)
    nodes, count = [], 0
    for number, depth, line in reader.lines:
        count += line["i"]
        nodes.append(_element(number, depth, line, count if line["i"] else None))
    height = max(1, report["height"])
    return PageRead(
        nodes=tuple(nodes),
        stats={
            name: reader.stats.get(key, 0)
            for key, name in _STATS.items()
            if key not in _ONLY_WHERE_ANY or reader.stats.get(key)
        },
        title=report["title"],
        scroll_y=float(report["scroll"]),
        pages_above=round(report["scroll"] / height, 2),
        pages_below=round(max(0.0, report["full"] - height - report["scroll"]) / height, 2),
        is_pdf=report["pdf"],
    )
