"""Pages: a small model of widgets that all sites share, and its rendering to HTML.

Purpose: a site is a state machine from requests to pages. The server renders a page to HTML; the replay
renders the same page to the state that the browser layer makes of that HTML. What a person wants to see and
an agent need not read (field labels, the logo, pictures) is drawn by CSS.
"""

import html
import json
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from urllib.parse import urlencode
from zlib import crc32

STATIC = Path(__file__).parent.parent / "static"
PICTURES = {
    "shop": ("chair", "lamp", "table", "vase"),
    "jobs": ("office", "plant"),
    "wiki": ("hills", "coast"),
    "travel": ("coast", "hills"),
    "office": ("office", "plant"),
    "news": ("hills", "office"),
}
WITH_PICTURE = ("item", "form", "cart", "review")  # pages that show what their heading names
TABLES = (("wiki", "item"), ("news", "item"), ("office", "document"))  # pages with their facts in a table
SHOW_FITTING = (  # shows the suggestions with the first letter that was typed
    "for(const a of this.parentNode.querySelectorAll('a'))"
    "a.hidden=!this.value||a.textContent[0].toLowerCase()!==this.value[0].toLowerCase()"
)


@dataclass(frozen=True, slots=True)
class Link:
    """A link with its text."""

    label: str
    href: str
    card: bool = False  # drawn as a card with a picture
    new_tab: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text: a heading, a chosen option (chip), or the label of a fact below the fact's value."""

    text: str
    kind: str = "fact"  # fact, heading, chip
    value: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A dropdown that submits itself when an option is chosen; it starts at a placeholder."""

    name: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Suggest:
    """A text field with suggestions; one of them must be clicked, the typed text alone counts for nothing."""

    name: str
    options: tuple[str, ...]

    def shown(self, typed: str) -> tuple[str, ...]:
        """Return the suggestions for a typed text: those with its first letter."""
        return tuple(option for option in self.options if typed and option[0].lower() == typed[0].lower())


@dataclass(frozen=True, slots=True)
class Form:
    """Text fields (name -> first value) and one button."""

    action: str
    button: str
    fields: dict[str, str] = field(default_factory=dict)
    post: bool = False


Widget = Link | Line | Choice | Suggest | Form


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    `title` is two words, the site and the page's name. `path` is the page's own, or where a choice leads on.
    """

    title: str
    nav: tuple[Link, ...]
    widgets: tuple[Widget, ...]
    path: str = "/"
    status: int = 200

    @property
    def site(self) -> str:
        """The site that the page belongs to."""
        return self.title.split()[0]

    @property
    def name(self) -> str:
        """The name of the page within its site."""
        return self.title.split()[1]


def choose_url(path: str, name: str, value: str) -> str:
    """Return where a dropdown sends its choice; the server then goes back to `path`."""
    return "/choose?" + urlencode({"next": path, "name": name, "value": value})


@cache
def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _picture(site: str, name: str) -> str:
    """Return a drawing without any text; which one and in which colour depends on the name."""
    number = crc32(name.encode())
    drawing = _static(f"pictures/{PICTURES[site][number % len(PICTURES[site])]}.svg")
    attributes = f'aria-hidden="true" viewBox="0 0 120 72" class="picture" style="--hue:{number // 7 % 360}"'
    return f"<svg {attributes}>{drawing}</svg>"


def group(widget: Widget) -> str:
    """Return the group of a widget; neighbours of one group are drawn together."""
    if isinstance(widget, Link):
        return "cards" if widget.card else "links"
    if isinstance(widget, Line):
        return {"fact": "facts", "heading": "heading", "chip": "chips"}[widget.kind]
    if isinstance(widget, (Choice, Suggest)):
        return "chips"
    return "fields" if widget.fields else "buttons"


def _widget(widget: Widget, page: Page) -> str:
    if isinstance(widget, Link):
        target = ' target="_blank"' if widget.new_tab else ""
        link = f'<a href="{html.escape(widget.href)}"{target}>{html.escape(widget.label)}</a>'
        picture = _picture(page.site, widget.label) if page.site in PICTURES else ""
        return f'<div class="card">{picture}{link}</div>' if widget.card else link
    if isinstance(widget, Line):
        value = f"<b>{html.escape(widget.value)}</b>" if widget.value else ""
        return f"<p>{value}<span>{html.escape(widget.text)}</span></p>"
    if isinstance(widget, Choice):
        options = '<option value="">choose</option>' + "".join(
            f"<option>{html.escape(option)}</option>" for option in widget.options
        )
        target = json.dumps(choose_url(page.path, widget.name, ""))
        change = html.escape(f"if(this.value)location.href={target}+encodeURIComponent(this.value)")
        attributes = f'name="{widget.name}" autocomplete="off" onchange="{change}"'
        select = f"<select {attributes}>{options}</select>"
        return f'<div class="field" data-label="{widget.name}">{select}</div>'
    if isinstance(widget, Suggest):
        links = "".join(
            f'<a href="{html.escape(choose_url(page.path, widget.name, option))}" hidden>{option}</a>'
            for option in widget.options
        )
        field = f'<input name="{widget.name}" autocomplete="off" oninput="{SHOW_FITTING}">'
        return f'<div class="field suggest" data-label="{widget.name}">{field}{links}</div>'
    fields = "".join(
        f'<div class="field" data-label="{name}">'
        f'<input name="{name}" value="{html.escape(value)}" autocomplete="off"></div>'
        for name, value in widget.fields.items()
    )
    method, minor = "post" if widget.post else "get", "" if widget.post or widget.fields else ' class="minor"'
    button = f"<button>{html.escape(widget.button)}</button>"
    return f'<form action="{html.escape(widget.action)}" method="{method}"{minor}>{fields}{button}</form>'


def _section(kind: str, widgets: list[Widget], page: Page) -> str:
    """Return neighbouring widgets of one group as HTML, in their order."""
    if kind == "heading":
        text = " ".join(widget.text for widget in widgets if isinstance(widget, Line))
        picture = _picture(page.site, text) if page.name in WITH_PICTURE else ""
        return f"{picture}<h1>{html.escape(text)}</h1>"
    if kind == "facts" and (page.site, page.name) in TABLES:
        rows = "".join(
            f"<tr><td>{html.escape(widget.value)}</td><td>{html.escape(widget.text)}</td></tr>"
            for widget in widgets
            if isinstance(widget, Line)
        )
        return f"<table>{rows}</table>"
    return f'<section class="{kind}">' + "".join(_widget(widget, page) for widget in widgets) + "</section>"


def render_html(page: Page) -> str:
    """Return the page as an HTML document."""
    nav = "".join(_widget(link, page) for link in page.nav)
    body = "".join(_section(kind, list(widgets), page) for kind, widgets in groupby(page.widgets, group))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<title>{html.escape(page.title)}</title><link rel="icon" href="data:,">'
        f'<style>{_static("site.css")}</style></head><body class="{page.site}">'
        f'<header><div class="logo" data-name="{page.site}"></div><nav>{nav}</nav></header>'
        f'<main class="{page.name}">{body}</main><footer></footer></body></html>'
    )
