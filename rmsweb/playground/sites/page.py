"""Pages: a small widget model that every site speaks, and its rendering to HTML.

Purpose: a site is a state machine from requests to pages; the server renders a page to HTML, the tests' replay renders the same page
to the state that the browser layer makes of that HTML. Text that a person wants to see but an agent need not read (field labels, the
logo, pictures) is drawn by CSS.
"""

import html
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import quote, urlencode
from zlib import crc32

STATIC = Path(__file__).parent.parent / "static"


@dataclass(frozen=True, slots=True)
class Link:
    label: str
    href: str
    card: bool = False  # drawn as a card with a picture


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text: a heading, a fact or a chosen option."""

    text: str
    kind: str = "fact"  # fact, heading, chip


@dataclass(frozen=True, slots=True)
class Choice:
    """A dropdown that submits itself; it starts at a placeholder."""

    name: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Text fields (name -> value shown at first) and one button."""

    action: str
    button: str
    fields: dict[str, str] = field(default_factory=dict)
    post: bool = False


Widget = Link | Line | Choice | Form


@dataclass(frozen=True, slots=True)
class Page:
    """A page; `title` is two words, the site and the page's name. `path` is where it stands."""

    title: str
    nav: tuple[Link, ...]
    widgets: tuple[Widget, ...]
    path: str = "/"


def choose_url(path: str, name: str, value: str) -> str:
    """Where a dropdown sends its choice; the server goes back to `path`."""
    return "/choose?" + urlencode({"next": path, "name": name, "value": value})


@cache
def _style() -> str:
    return (STATIC / "site.css").read_text(encoding="utf-8")


def _picture(name: str) -> str:
    """A drawn picture without any text: two shapes in colours that depend on the name."""
    hue = crc32(name.encode()) % 360
    x, y, second = 30 + hue % 60, 20 + hue % 50, (hue + 40) % 360
    return (
        f'<svg aria-hidden="true" viewBox="0 0 120 60" class="picture"><rect width="120" height="60" fill="hsl({hue} 45% 86%)"/>'
        f'<circle cx="{x}" cy="34" r="17" fill="hsl({hue} 45% 58%)"/>'
        f'<rect x="{y}" y="40" width="44" height="12" rx="3" fill="hsl({second} 40% 45%)"/></svg>'
    )


def _widget(widget: Widget, path: str) -> str:
    if isinstance(widget, Link):
        picture = _picture(widget.label) if widget.card else ""
        return f'<div class="{"card" if widget.card else "more"}">{picture}<a href="{html.escape(widget.href)}">{html.escape(widget.label)}</a></div>'
    if isinstance(widget, Line):
        return f'<p class="{widget.kind}">{html.escape(widget.text)}</p>'
    if isinstance(widget, Choice):
        options = '<option value="">choose</option>' + "".join(f"<option>{html.escape(option)}</option>" for option in widget.options)
        change = f"location.href='/choose?next='+encodeURIComponent('{quote(path, safe='/?=&')}')+'&name={widget.name}&value='+encodeURIComponent(this.value)"
        return f'<div class="field" data-label="{widget.name}"><select name="{widget.name}" onchange="{html.escape(change)}">{options}</select></div>'
    fields = "".join(
        f'<div class="field" data-label="{name}"><input name="{name}" value="{html.escape(value)}" autocomplete="off"></div>'
        for name, value in widget.fields.items()
    )
    return (
        f'<form action="{html.escape(widget.action)}" method="{"post" if widget.post else "get"}">{fields}<button>{html.escape(widget.button)}</button></form>'
    )


def render_html(page: Page) -> str:
    """The page as an HTML document."""
    site = page.title.split()[0]
    nav = "".join(f'<a href="{html.escape(link.href)}">{html.escape(link.label)}</a>' for link in page.nav)
    body = "".join(_widget(widget, page.path) for widget in page.widgets)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(page.title)}</title><link rel="icon" href="data:,">'
        f'<style>{_style()}</style></head><body class="{site}"><header><div class="logo" data-name="{site}"></div><nav>{nav}</nav></header>'
        f'<main class="{page.title.split()[1]}">{body}</main><footer></footer></body></html>'
    )
