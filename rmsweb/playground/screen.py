"""Where things lie on a page without a browser, and a picture of it.

Purpose: the replay's screenshots and boxes. The layout follows site.css closely enough that the same pages
fit into the same viewport, and that a box lies where the browser draws it, give or take the font.

ours: pillow's own font is used, so that a picture does not depend on the machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import groupby
from typing import Any
from zlib import crc32

from PIL import Image, ImageColor, ImageDraw, ImageFont

from rmsweb.playground.sites.page import TABLES, WITH_PICTURE, Form, Line, Link, Page, Suggest, Widget, group

Box = tuple[float, float, float, float]  # left, top, width, height in CSS px of the document
LINE = 17.55  # height of a line of text
TEXT = 15.0  # height of the letters' box
HEADER = 38.3
FOOTER = 31.85
COLORS = {
    "shop": "#1d5fd1", "jobs": "#0b7a5c", "wiki": "#5b3fb0", "travel": "#b4541a", "office": "#33475b",
    "search": "#2f6f9f", "news": "#a11d33",
}  # fmt: skip
BANDS = {
    "home": 42.95, "login": 24.3, "form": LINE, "cart": 21.6, "saved": 21.6, "other": 21.6, "review": LINE,
    "denied": 54.0, "busy": 54.0, "ordered": 34.0, "sent": 34.0,
}  # fmt: skip  # height of what CSS writes above a page's content
PANELS = ("form", "login", "cart", "ordered", "sent", "other", "review", "denied", "busy")
PANEL_PICTURES = {"form": 66.0, "cart": 66.0, "review": 59.0}
ROWS = {"jobs": (39.6, 5.0, 69.0), "office": (30.4, 4.0, 57.0), "search": (25.55, 4.0, 13.0)}  # cards as rows
QUALITY = 60  # of a JPEG


@dataclass(slots=True, eq=False)
class Node:
    """An element or a text of a document, with its number there."""

    number: int
    tag: str  # a, button, input, select or #text
    widget: Widget
    text: str = ""
    name: str = ""  # of a field
    value: str = ""  # of a field: typed or chosen
    href: str = ""
    options: tuple[str, ...] = ()
    field: "Node | None" = None  # the field that a suggestion belongs to
    box: Box = (0.0, 0.0, 0.0, 0.0)

    @property
    def shown(self) -> bool:
        """Whether the node is displayed: a suggestion is where its field's text has its first letter."""
        typed = self.field.value if self.field else ""
        return self.field is None or (typed != "" and typed[0].lower() == self.text[0].lower())


Part = tuple[Widget, list[Node]]


@lru_cache(4)
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


@lru_cache(4096)
def text_width(text: str, size: int = 13) -> float:
    """Return how wide a text is drawn, in CSS px."""
    return float(_font(size).getlength(text))


@dataclass(slots=True)
class _Flow:
    """Boxes beside each other, in rows that are as high as their highest box."""

    left: float
    top: float
    width: float
    gap: float = 8.0
    x: float = 0.0
    row: float = 0.0

    def place(self, width: float, height: float) -> tuple[float, float]:
        """Return the left and upper edge of the next box."""
        if self.x and self.x + width > self.width:
            self.x, self.top, self.row = 0.0, self.top + self.row + self.gap, 0.0
        left = self.left + self.x
        self.x, self.row = self.x + width + self.gap, max(self.row, height)
        return left, self.top

    @property
    def bottom(self) -> float:
        return self.top + self.row


def _word(nodes: Sequence[Node], x: float, y: float, size: int = 13) -> None:
    """Put texts one below the other."""
    for node in nodes:
        node.box = (x, y, text_width(node.text, size), TEXT)
        y += LINE


def _form(flow: _Flow, nodes: Sequence[Node], field_width: float) -> None:
    labelled = any(node.tag == "input" for node in nodes)
    down = 14.85 if labelled else 0.0
    for node in nodes:
        if node.tag == "#text":
            continue
        width = field_width if node.tag != "button" else text_width(node.text) * 1.05 + 34
        x, y = flow.place(width, 29 + down)
        node.box = (x, y + down, width, 29.0)
        if node.tag == "button":
            _word([nodes[-1]], x + 17, y + down + 7)


def _field(flow: _Flow, nodes: Sequence[Node], width: float) -> None:
    """Put a dropdown or a field with suggestions below its label."""
    shown = [node for node in nodes[1:] if node.shown and node.tag == "a"]
    inner = _Flow(0.0, 43.85, width, gap=3.0)
    places = [inner.place(text_width(node.text) + 16, 22.55) for node in shown]
    x, y = flow.place(width, inner.bottom)
    nodes[0].box = (x, y + 14.85, 132.0, 29.0)
    for node, (left, top) in zip(shown, places, strict=True):
        node.box = (x + left, y + top + 3, text_width(node.text) + 16, 19.55)
        _word([nodes[nodes.index(node) + 1]], x + left + 8, y + top + 5)


def _cards(page: Page, parts: Sequence[Part], x: float, y: float, width: float) -> float:
    height, gap, indent = ROWS.get(page.site, (0.0, 8.0, 0.0))
    across = width if height else (width - 24) / 4
    picture = (across - 14) * 0.6
    flow = _Flow(x, y, width + 1, gap)
    for _, nodes in parts:
        left, top = flow.place(across, height or picture + 53.4)
        wide = text_width(nodes[0].text)
        at = (
            (left + indent, top + height / 2 - 8)
            if height
            else (left + (across - wide) / 2, top + picture + 13)
        )
        _word(nodes, *at)
        nodes[1].box = nodes[0].box
    return flow.bottom


def _links(page: Page, parts: Sequence[Part], x: float, y: float, width: float) -> float:
    column, calendar = page.site == "wiki", page.name == "calendar"
    flow = _Flow(x + column, y + 26.55 * column + 25.55 * calendar, width + 1, gap=0.0 if column else 8.0)
    for _, nodes in parts:
        wide, high = text_width(nodes[0].text) + 24, 26.55 if column else LINE + 6
        if column or calendar:
            wide, high = (width - 2, high) if column else ((width - 48) / 7, 51.55)
        left, top = flow.place(wide, high)
        nodes[0].box = (left, top, wide, high)
        _word(nodes[1:], left + 12, top + (high - TEXT) / 2)
    return flow.bottom + column


def _facts(page: Page, parts: Sequence[Part], x: float, y: float, width: float) -> float:
    if (page.site, page.name) in TABLES:
        for row, (_, nodes) in enumerate(parts):
            for node, across in zip(nodes, (0.0, 0.352), strict=True):
                _word([node], x + 13 + across * width, y + 6 + 26.55 * row)
        return y + 26.55 * len(parts) + 1
    start = 110.0 if page.name == "results" else 0.0
    for column, (_, nodes) in enumerate(parts):
        across = x + start + 13 + (width - start) / len(parts) * column
        _word(nodes[:1], across, y + 9, 16)
        _word(nodes[1:], across, y + 30)
    return y + 55.15


def _section(kind: str, page: Page, parts: Sequence[Part], x: float, y: float, width: float) -> float:
    """Give the nodes of neighbouring widgets their boxes; return the section's lower edge."""
    if kind == "cards":
        return _cards(page, parts, x, y, width)
    if kind == "links":
        return _links(page, parts, x, y, width)
    if kind == "facts":
        return _facts(page, parts, x, y, width)
    if kind == "heading":
        size = 14 if page.name == "login" else 21
        _word([nodes[0] for _, nodes in parts], x, y + 1, size)
        return y + 1.2 * size + (18.4 if page.site == "wiki" else 0.0)
    framed = kind == "fields" and page.name in ("home", "results")
    edge, wide = (11.0, 230.0) if framed else (0.0, 132.0)
    flow = _Flow(x + edge, y + 0.73 * edge, width - 2 * edge)
    for widget, nodes in parts:
        if isinstance(widget, Form):
            _form(flow, nodes, wide)
        elif isinstance(widget, Line):
            across = text_width(nodes[0].text) + 26
            left, top = flow.place(across, 29.55)
            _word(nodes, left + 13, top + 7)
        else:
            _field(flow, nodes, 200.0 if isinstance(widget, Suggest) else 132.0)
    return flow.bottom + 0.91 * edge


def lay_out(page: Page, parts: Sequence[Part], width: int) -> float:
    """Give every node its box; return the height of the document in CSS px."""
    right, narrower = width - 16.0, 0.92 if page.site == "wiki" else 1.0  # its font has serifs
    for _, nodes in reversed(parts[: len(page.nav)]):
        wide = narrower * text_width(nodes[0].text)
        right -= wide
        nodes[0].box = (right, 10.4, wide, 17.5)
        _word(nodes[1:], right, 11.4)
        right -= 16
    panel, item = page.name in PANELS, page.name == "item"
    outer = min(560.0 if panel else 920.0, width)
    edge, gap = (21.0, 14.0) if panel else (16.0, 8.0)
    top = HEADER + (14.0 if panel else 0.0)
    x, y, inner = (width - outer) / 2 + edge, top + (17.0 if panel else 8.0), outer - 2 * edge
    if item:
        x, inner, gap = x + 198, inner - 198, 10.0
    if page.name in BANDS and not (page.name == "home" and page.site == "news"):
        y += BANDS[page.name] + gap
    sections = [
        (kind, list(found)) for kind, found in groupby(parts[len(page.nav) :], lambda part: group(part[0]))
    ]
    for kind, found in sections:
        if kind == "heading":
            y += PANEL_PICTURES.get(page.name, 0.0) + (gap if page.name in PANEL_PICTURES else 0.0)
        y = _section(kind, page, found, x, y, inner) + gap
    if item:  # its picture reaches over nine rows of a grid
        y += gap * max(0, 9 - len(sections))
    return max(y - gap + (17.0 if panel else 8.0), top + (250.0 if panel else 330.0)) + FOOTER


# ---------------------------------------------------------------------------------------------- the picture


def _drawing(pen: ImageDraw.ImageDraw, name: str, box: Sequence[float]) -> None:
    """Draw something that depends on a name alone."""
    number = crc32(name.encode())
    left, top, right, bottom = box
    hue = number // 7 % 360
    pen.rectangle((left, top, right, bottom), fill=ImageColor.getrgb(f"hsl({hue},40%,92%)"))
    inner = (left + (right - left) / 3, top + (bottom - top) / 5, right - (right - left) / 3, bottom - 2)
    fill = ImageColor.getrgb(f"hsl({hue},65%,58%)")
    (pen.rectangle if number % 2 else pen.ellipse)(inner, fill=fill)


def _texts(node: Node) -> Iterator[tuple[float, float, str]]:
    x, y, _, _ = node.box
    if node.tag == "#text":
        yield x, y, node.text.capitalize() if isinstance(node.widget, Link) else node.text
    elif node.tag in ("input", "select"):
        yield x, y - 17, node.name.capitalize()
        yield x + 7, y + 7, node.value or ("choose" if node.tag == "select" else "")


def _frame(pen: ImageDraw.ImageDraw, page: Page, node: Node, box: Sequence[float]) -> None:
    """Draw what lies below the words of an element."""
    main, left, top = COLORS.get(page.site, "#444444"), box[0], box[1]
    if node.tag == "button":
        pen.rounded_rectangle(box, 5, fill=main)
    elif node.tag in ("input", "select"):
        pen.rounded_rectangle(box, 5, fill="white", outline="#b4bcc9")
    elif isinstance(node.widget, Link) and node.widget.card:
        size = (46.0, 20.0) if page.site in ROWS else (132.0, 79.0)
        at = (left - size[0] - 8, top - 3) if page.site in ROWS else ((left + box[2]) / 2 - 66, top - 85)
        if page.site != "search":
            _drawing(pen, node.text, (*at, at[0] + size[0], at[1] + size[1]))
    elif node.widget not in page.nav:
        pen.rounded_rectangle(box, 6, outline="#dfe3ea", fill="#eef2f8")


def draw(
    page: Page | None, nodes: Sequence[Node], viewport: tuple[int, int], scroll: float, kind: str
) -> bytes:
    """Return what the viewport shows of a laid-out page, as a PNG or JPEG file."""
    picture = Image.new("RGB", viewport, "white" if page is None else "#f4f5f7")
    pen = ImageDraw.Draw(picture)
    if page is not None:
        pen.rectangle((0, -scroll, viewport[0], HEADER - scroll), fill=COLORS.get(page.site, "#444444"))
        pen.text((16, 9 - scroll), page.site.capitalize(), fill="white", font=_font(18))
    for node in nodes:
        x, y, width, height = node.box
        y -= scroll
        if page is None or not node.shown or y > viewport[1] or y + height < 0:
            continue
        if node.tag != "#text":
            _frame(pen, page, node, (x, y, x + width, y + height))
        heading = isinstance(node.widget, Line) and node.widget.kind == "heading"
        if heading and page.name in WITH_PICTURE:
            size = (180.0, 108.0) if page.name == "item" else (110.0, 66.0)
            at = (x - 198, y) if page.name == "item" else (x, y - 80)
            _drawing(pen, node.text, (*at, at[0] + size[0], at[1] + size[1]))
        light = node.tag == "#text" and (isinstance(node.widget, Form) or node.widget in page.nav)
        for left, top, words in _texts(node):
            color = "white" if light else "#23272f"
            pen.text((left, top - scroll), words, fill=color, font=_font(21 if heading else 13))
    data = BytesIO()
    if kind == "jpeg":
        picture.save(data, "JPEG", quality=QUALITY)
    else:
        picture.save(data, "PNG", compress_level=1)
    return data.getvalue()
