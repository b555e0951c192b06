"""One state of a page: put the reports of its frames together into the list of lines.

Purpose: one in-page pass per frame. A frame's lines follow the line of its element, and indices run 1..N in
document order.

ours: a node is known by the number of its frame and its number in that frame's document. Both stay the same
from one observation to the next, and a document's random token tells a node from one of a page that was
loaded since.
"""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from playwright.async_api import Error, Frame, Page

from rmsweb.browser.page import SCRIPT, Line, Report
from rmsweb.records import Element, Observation

MAX_FRAMES = 100
MAX_FRAME_DEPTH = 5
MIN_FRAME_PX = 10
_ADOPT = "function (root) { window.__rms?.adopt(this, root); }"
OBSERVE = "(place) => (window.__rms ? window.__rms.report(place) : null)"


@dataclass(slots=True)
class FrameBook:
    """What is known of a tab's frames.

    `numbers` has a number for each, `owners` the node in the parent document that holds it, `tokens` the
    token of its document at the last observation. `opened` are the tokens of documents whose closed shadow
    roots were asked for.
    """

    numbers: "WeakKeyDictionary[Frame, int]" = field(default_factory=WeakKeyDictionary)
    owners: "WeakKeyDictionary[Frame, int]" = field(default_factory=WeakKeyDictionary)
    frames: dict[int, Frame] = field(default_factory=dict)
    tokens: dict[int, str] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)

    def number(self, frame: Frame) -> int:
        """Return the frame's number; the main frame comes first and has 0."""
        return self.numbers.setdefault(frame, len(self.numbers))

    async def owner(self, frame: Frame) -> int:
        """Return the number of the node that holds a child frame."""
        if frame not in self.owners:
            handle = await frame.frame_element()
            self.owners[frame] = await handle.evaluate("(element) => window.__rms.idOf(element)")
        return self.owners[frame]


async def _open_roots(frame: Frame) -> None:
    """Tell the page's scripts of the closed shadow roots that came with a document's HTML.

    No script of the page made them, so no hook saw them.
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


_STATS = {
    "links": "links", "interactive": "interactive", "iframes": "iframes", "scrolls": "scroll containers",
    "open": "shadow(open)", "closed": "shadow(closed)", "images": "images", "total": "total elements",
}  # fmt: skip
_ONLY_IF_ANY = {"open", "closed", "images"}


@dataclass(slots=True)
class _Reader:
    book: FrameBook
    mask: Callable[[str], str]
    nodes: list[Element] = field(default_factory=list)
    stats: Counter[str] = field(default_factory=Counter)
    indices: int = 0
    frames_read: int = 0

    async def frame(self, frame: Frame, place: dict[str, Any], depth: int = 0, level: int = 0) -> Report:
        """Read a frame and those inside it; return the frame's own report."""
        text = await frame.evaluate(OBSERVE, place)
        if text is None:  # a document that was there before the script
            await frame.evaluate(SCRIPT)
            text = await frame.evaluate(OBSERVE, place)
        report: Report = json.loads(self.mask(text))
        if report["sealed"] and report["token"] not in self.book.opened:
            self.book.opened.add(report["token"])
            await _open_roots(frame)
            return await self.frame(frame, place, depth, level)
        number = self.book.number(frame)
        self.book.tokens[number], self.book.frames[number] = report["token"], frame
        self.frames_read += 1
        self.stats.update(report["stats"])
        deeper = report["stats"]["iframes"] and level < MAX_FRAME_DEPTH
        children = await self._children(frame) if deeper else {}
        for line in report["lines"]:
            self.nodes.append(self._element(number, depth, line))
            child, inner = children.get(line["id"]), line.get("frame")
            if child is None or inner is None or min(line["box"][2:]) < MIN_FRAME_PX:
                continue
            if self.frames_read < MAX_FRAMES:
                with suppress(Error):  # a frame that is being loaded is read next time
                    await self.frame(child, inner, depth + line["depth"] + 1, level + 1)
        return report

    async def _children(self, frame: Frame) -> dict[int, Frame]:
        found = {}
        for child in frame.child_frames:
            with suppress(Error):  # gone while it was looked at
                found[await self.book.owner(child)] = child
        return found

    def _element(self, number: int, depth: int, line: Line) -> Element:
        self.indices += line["indexed"]
        x, y, width, height = map(float, line["box"])
        pages = line.get("scroll_pages")
        return Element(
            index=self.indices if line["indexed"] else None,
            node_key=f"{number}:{line['id']}",
            tag=line["tag"],
            role=line.get("role"),
            attributes=line.get("attributes", {}),
            text=line["text"],
            value=line.get("value"),
            options=tuple(line.get("options", ())),
            box=(x, y, width, height),
            in_viewport=line["in_viewport"],
            is_new=line["is_new"],
            depth=depth + line["depth"],
            marker=line.get("marker"),
            scroll_pages=(float(pages[0]), float(pages[1])) if pages else None,
        )


async def read_page(page: Page, book: FrameBook, mask: Callable[[str], str]) -> Observation:
    """Read the page's frames; return an observation that knows of nothing but the page.

    `mask` is applied to the page's JSON text before it is looked at. Playwright's Error if the page changes
    meanwhile.
    """
    book.number(page.main_frame)
    reader = _Reader(book, mask)
    report = await reader.frame(page.main_frame, {})
    scroll, height = report["scroll"], max(1, report["height"])
    return Observation(
        url=page.url,
        title=report["title"],
        tabs=(),
        active_tab="",
        viewport=(0, 0),
        scroll_y=float(scroll),
        pages_above=round(scroll / height, 2),
        pages_below=round(max(0.0, report["full"] - height - scroll) / height, 2),
        page_stats={
            name: reader.stats[key]
            for key, name in _STATS.items()
            if key not in _ONLY_IF_ANY or reader.stats[key]
        },
        nodes=tuple(reader.nodes),
        is_pdf=report["pdf"],
    )
