"""A document without a browser: a page's controls, what was done to them, and what the browser layer asks.

Purpose: what observe.js and act.js find in Chromium, found in the page's widgets. The names and shapes of the
answers are those of `browser.page`.
"""

import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

from rmsweb.playground.screen import Node, Part, lay_out, text_width
from rmsweb.playground.sites.page import (
    Choice,
    Form,
    Line,
    Link,
    Page,
    Suggest,
    Widget,
    choose_url,
    render_html,
)

MARGIN = 1000  # px around the viewport in which elements get an index, as in dom.js
GONE = {"error": "is no longer on the page"}
TAKES_NO_TEXT = "takes no text; if it listens to keys, click it and use send_keys"
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lead:
    """Where a document leads: a URL, with the fields of a POST; a link to the page itself adds no history."""

    url: str
    fields: dict[str, str] | None = None
    link: bool = False
    new_tab: bool = False


def _encoded(fields: dict[str, str]) -> str:
    """Return the query of a form as a browser writes it."""
    return urlencode(fields, safe="*").replace("~", "%7E")


class Document:
    """One document, from its loading on; `page` is None for a blank page."""

    def __init__(self, url: str, page: Page | None, token: str, viewport: tuple[int, int]) -> None:
        self.url, self.page, self.token, self.viewport = url, page, token, viewport
        self.title = page.title if page else ""
        self.parts: list[Part] = []
        self.nodes: list[Node] = []
        for widget in (*page.nav, *page.widgets) if page else ():
            found = list(self._nodes_of(widget))
            self.parts.append((widget, found))
        self.lead: Lead | None = None  # where the last action leads; the old document still answers
        self.aim: Node | None = None  # what the next press is meant for
        self.focused: Node | None = None
        self.marked = (0, 0)  # anchor and caret in the focused field
        self.scroll = 0.0
        self._full, self._stale = 0.0, True
        self._previous: set[int] | None = None

    def _node(self, tag: str, widget: Widget, text: str = "", **fields: Any) -> Node:
        node = Node(len(self.nodes) + 1, tag, widget, text, **fields)
        self.nodes.append(node)
        return node

    def _nodes_of(self, widget: Widget) -> Iterator[Node]:
        """Yield a widget's nodes in document order."""
        assert self.page is not None
        if isinstance(widget, Link):
            yield self._node("a", widget, widget.label, href=widget.href)
            yield self._node("#text", widget, widget.label)
        elif isinstance(widget, Line):
            yield from (self._node("#text", widget, text) for text in (widget.value, widget.text) if text)
        elif isinstance(widget, Choice):
            yield self._node("select", widget, name=widget.name, options=("choose", *widget.options))
        elif isinstance(widget, Suggest):
            field = self._node("input", widget, name=widget.name)
            yield field
            for option in widget.options:
                href = choose_url(self.page.path, widget.name, option)
                yield self._node("a", widget, option, href=href, field=field)
                yield self._node("#text", widget, option, field=field)
        else:
            yield from (
                self._node("input", widget, name=name, value=value) for name, value in widget.fields.items()
            )
            yield self._node("button", widget, widget.button)
            yield self._node("#text", widget, widget.button)

    # ------------------------------------------------------------------------------------------- geometry

    @property
    def full(self) -> float:
        """The document's height in CSS px, at least the viewport's."""
        if self._stale and self.page:
            self._full, self._stale = lay_out(self.page, self.parts, self.viewport[0]), False
        return float(max(round(self._full), self.viewport[1]))

    def scroll_to(self, top: float) -> None:
        """Scroll as far as the document goes."""
        self.scroll = max(0.0, min(float(round(top)), self.full - self.viewport[1]))

    def _reveal(self, node: Node) -> None:
        """Scroll a node to the middle of the viewport where nothing of it shows."""
        _, y, _, height = node.box
        if self.full > self.viewport[1] and not self._inside(node):
            self.scroll_to(y + height / 2 - self.viewport[1] / 2)

    def _inside(self, node: Node, margin: float = 0.0) -> bool:
        _, y, _, height = node.box
        y -= self.scroll
        return min(y + height, self.viewport[1] + margin) - max(y, -margin) > 1

    # --------------------------------------------------------------------------------------- observing

    def report(self) -> str:
        """Return the answer to observe.js's `report`, as JSON."""
        full, lines, stats = self.full, list[Answer](), dict.fromkeys(("iframes", "scrolls", "images"), 0)
        for node in self.nodes:
            if node.shown and self._inside(node, MARGIN):
                lines.append(self._line(node))
        indexed = [line for line in lines if line["indexed"]]
        now = {line["id"] for line in indexed}
        for line in indexed:
            line["is_new"] = self._previous is not None and line["id"] not in self._previous
        self._previous = now
        stats |= {"interactive": len(indexed), "links": sum(line["tag"] == "a" for line in indexed)}
        report = {
            "token": self.token,
            "lines": lines,
            "stats": stats | {"open": 0, "closed": 0, "total": self._elements()},
            "sealed": False,
            "title": self.title,
            "scroll": self.scroll,
            "height": self.viewport[1],
            "full": full,
            "pdf": False,
        }
        return json.dumps(report)

    def _elements(self) -> int:
        """Return how many elements are displayed, <html> and <body> among them."""
        if self.page is None:
            return 2
        body = render_html(self.page).partition("</head>")[2]
        hidden = sum(node.tag == "a" and not node.shown for node in self.nodes)
        found = re.findall(r"<(?!option)([a-z]+)", body)
        return 1 + len(found) + found.count("table") - hidden  # a parser puts <tbody> into a table

    def _line(self, node: Node) -> Answer:
        x, y, width, height = node.box
        text = node.tag == "#text"
        line = {
            "id": node.number,
            "indexed": not text,
            "tag": node.tag,
            "text": node.text,
            "box": [round(length, 1) for length in (x, y - self.scroll, width, height)],
            "in_viewport": self._inside(node),
            "is_new": False,
            "depth": int(text and not isinstance(node.widget, Line)),
        }
        if node.name:
            line["attributes"] = {"name": node.name, "autocomplete": "off"}
            line |= {"value": node.value, "options": list(node.options)}
        return line

    # ------------------------------------------------------------------------------ answers to act.js's calls

    def answer(self, token: str, name: str, args: list[Any]) -> Answer:
        """Answer a call of the browser layer by its name in act.js."""
        if token and token != self.token:
            return GONE
        if name in _OF_A_NODE:
            node = self.nodes[args[0] - 1]
            return _OF_A_NODE[name](self, node, *args[1:]) if node.shown else GONE
        return _OF_THE_PAGE[name](self, *args)

    def _prepare(self, node: Node) -> Answer:
        self._reveal(node)
        self.aim = node
        return {
            "tag": node.tag,
            "type": {"input": "text", "button": "submit", "select": "select-one"}.get(node.tag, ""),
            "role": "",
            "what": f"<{node.tag}>" + (f' "{node.text}"' if node.text else ""),
            "blank": "_blank" if isinstance(node.widget, Link) and node.widget.new_tab else "",
            "x": node.box[0] + node.box[2] / 2,
            "y": node.box[1] + node.box[3] / 2 - self.scroll,
        } | dict.fromkeys(("disabled", "readonly", "editable", "combobox", "suggests", "opened"), 0)

    def _options(self, node: Node) -> Answer:
        chosen = node.value or "choose"
        options = [
            {
                "id": number,
                "text": text,
                "value": text if number else "",
                "chosen": text == chosen,
                "off": False,
            }
            for number, text in enumerate(node.options)
        ]
        return {"native": node.tag == "select", "disabled": False, "options": options}

    def _choose(self, node: Node, number: int) -> Answer:
        self.focus(node)
        node.value = node.options[number] if number else ""
        if number and self.page:
            self.lead = Lead(self.absolute(choose_url(self.page.path, node.name, node.value)))
        return {}

    def _focus(self, node: Node, clear: bool) -> Answer:
        field = node if node.tag == "input" else self.focused
        if field is None or field.tag != "input":
            return {"error": TAKES_NO_TEXT}
        self.focus(field)
        if not clear:
            self.marked = (len(field.value),) * 2
        return {"id": field.number, "what": "<input>", "value": field.value}

    def _read(self, node: Node) -> Answer:
        return {"value": node.value if node.tag == "input" else None}

    def _scroll(self, _: object, pages: float) -> Answer:
        before, height = self.scroll, self.viewport[1]
        self.scroll_to(before + pages * height)
        rest = self.full - height - self.scroll
        return {"moved": self.scroll - before, "height": height, "below": rest / height}

    def _scroll_to_text(self, wanted: str) -> Answer:
        needle, words, places = " ".join(wanted.split()).lower(), "", list[tuple[int, Node]]()
        full = self.full
        for node in self.nodes:
            if node.tag == "#text" and node.shown:
                words += "" if node.field else " "  # suggestions are drawn in a line, without a space
                places.append((len(words), node))
                words += node.text.lower()
        at = words.find(needle) if needle else -1
        if at < 0 or not full:
            return {"found": False}
        self._reveal([node for start, node in places if start <= at][-1])
        return {"found": True}

    def _html(self) -> str:
        """Return what is displayed, in the shape of act.js's `html`."""
        if self.page is None:
            return "<body></body>"
        body = re.sub(
            r"<svg.*?</svg>", "", render_html(self.page).partition("</head>")[2].split("</html>")[0]
        )
        fields = iter([node for node in self.nodes if node.name])
        links = iter([node for node in self.nodes if node.tag == "a"])

        def field(_: re.Match[str]) -> str:
            node = next(fields)
            return html.escape(node.value or ("choose" if node.options else "")) + " "

        def link(match: re.Match[str]) -> str:
            if not next(links).shown:
                return ""
            return f'<a href="{html.escape(self.absolute(html.unescape(match[1])))}">{match[2]}</a>'

        body = re.sub(r"<select.*?</select>|<input.*?>", field, body)
        return re.sub(r'<a href="([^"]*)"[^>]*>(.*?)</a>', link, body)

    # ---------------------------------------------------------------------------------- what a hand does

    def absolute(self, href: str) -> str:
        """Return a link's address; links to other sites keep the port, as the server writes them."""
        port = urlsplit(self.url).netloc.partition(":")[2]
        return urljoin(self.url, href.replace(".localhost/", f".localhost:{port}/") if port else href)

    def focus(self, node: Node | None) -> None:
        """Give a control the focus, and mark all that a field holds."""
        self.focused = node
        self.marked = (0, len(node.value)) if node and node.tag == "input" else (0, 0)

    def click(self, node: Node, *, pointer: bool = True) -> None:
        """Do what a click on a control does; one with the pointer puts the caret below it."""
        self.focus(node)
        widget = node.widget
        if node.tag == "a":
            new_tab = isinstance(widget, Link) and widget.new_tab
            self.lead = Lead(self.absolute(node.href), link=True, new_tab=new_tab)
        elif node.tag == "button" and isinstance(widget, Form):
            self._submit(widget)
        elif pointer:
            half = node.box[2] / 2 - 8
            caret = sum(text_width(node.value[: end + 1]) <= half for end in range(len(node.value)))
            self.marked = (caret, caret)

    def _submit(self, form: Form) -> None:
        fields = {node.name: node.value for node in self.nodes if node.widget is form and node.name}
        action = self.absolute(form.action)
        if form.post:
            self.lead = Lead(action, fields)
        else:
            self.lead = Lead(f"{action.split('?')[0]}?{_encoded(fields)}")

    def insert(self, text: str) -> None:
        """Put a text in the place of what is marked in the focused field; a dropdown jumps to the letter."""
        node = self.focused
        if node is None or not node.name:
            return
        if node.tag == "select":
            first = [n for n, option in enumerate(node.options) if option.startswith(text.lower())]
            if text and first and node.options[first[0]] != (node.value or "choose"):
                self._choose(node, first[0])
            return
        start, end = sorted(self.marked)
        node.value = node.value[:start] + text + node.value[end:]
        self.marked = (start + len(text),) * 2
        self._stale = True

    def press(self, key: str, held: tuple[str, ...]) -> None:
        """Do what a key does, with the keys that are held."""
        node = self.focused
        if key == "Tab" and set(held) <= {"Shift"}:
            self._tab(-1 if held else 1)
        elif node is not None and key in ("Enter", "Space") and node.tag in ("a", "button"):
            if node.tag == "button" or key == "Enter":
                self.click(node, pointer=False)
        elif node is not None and node.tag == "input":
            self._edit(node, key, held)
        elif node is not None and node.tag == "select" and key in _STEPS and not held:
            at = node.options.index(node.value or "choose")
            to = min(max(at + _STEPS[key], 0), len(node.options) - 1)
            if to != at:
                self._choose(node, to)
        elif not held and key in _SCROLLS:
            self.scroll_to(self.scroll + _SCROLLS[key] * self.viewport[1])
        elif len(key) == 1 and not set(held) - {"Shift"}:
            self.insert(key)

    def _tab(self, way: int) -> None:
        """Move the focus through the controls in their order; beyond the last one nothing has it."""
        stops = [None, *(node for node in self.nodes if node.shown and node.tag != "#text")]
        at = stops.index(self.focused) if self.focused in stops else 0
        self.focus(stops[(at + way) % len(stops)])
        if self.focused:
            self._reveal(self.focused)

    def _edit(self, node: Node, key: str, held: tuple[str, ...]) -> None:
        """Do what a key does in a text field."""
        anchor, caret = self.marked
        start, end = sorted(self.marked)
        if key == "Enter":
            if isinstance(node.widget, Form):
                self._submit(node.widget)
        elif key.lower() == "a" and held == ("Control",):
            self.marked = (0, len(node.value))
        elif key in ("Backspace", "Delete") and not set(held) - {"Shift"}:
            if start == end:
                grow = (max(start - 1, 0), end) if key == "Backspace" else (start, end + 1)
                self.marked = grow
            self.insert("")
        elif key in _MOVES and not set(held) - {"Shift"}:
            edge = {-1: start, 1: end}.get(_MOVES[key])
            if edge is not None and start != end and not held:
                caret = edge
            else:
                caret = min(max(caret + _MOVES[key], 0), len(node.value))
            self.marked = (anchor if held else caret, caret)
        elif (len(key) == 1 or key == "Space") and not set(held) - {"Shift"}:
            letter = " " if key == "Space" else key
            self.insert(letter.upper() if held else letter)


_FAR = 10**9
_MOVES = {
    "ArrowLeft": -1, "ArrowRight": 1, "Home": -_FAR, "End": _FAR, "ArrowUp": -_FAR, "ArrowDown": _FAR,
}  # fmt: skip  # of the caret
_STEPS = {
    "ArrowDown": 1, "ArrowRight": 1, "ArrowUp": -1, "ArrowLeft": -1, "Home": -_FAR, "End": _FAR,
    "PageDown": 3, "PageUp": -3,
}  # fmt: skip  # of a dropdown's choice
_SCROLLS = {
    "PageDown": 0.875, "PageUp": -0.875, "Space": 0.875, "Home": -_FAR, "End": _FAR, "ArrowDown": 0.083,
    "ArrowUp": -0.083,
}  # fmt: skip  # in pages
_OF_A_NODE: dict[str, Callable[..., Answer]] = {
    "prepare": Document._prepare,
    "options": Document._options,
    "choose": Document._choose,
    "focus": Document._focus,
    "read": Document._read,
    "reaches": lambda *_: {"yes": True},
    "check": lambda *_: {},
}
_OF_THE_PAGE: dict[str, Callable[..., Any]] = {
    "pressed": lambda *_: {"clicked": True, "missed": ""},
    "refused": lambda *_: {"words": []},
    "scroll": Document._scroll,
    "scrollToText": Document._scroll_to_text,
    "html": Document._html,
}
