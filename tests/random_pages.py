"""Hypothesis generator of hostile pages: every element has an id of its own, and the page writes down which
of them a trusted press or click reached.
"""

import html
import itertools
from dataclasses import dataclass, field

from hypothesis import strategies as st

# In every document, before anything else: [type, ids on the event's way, ids of the controls of labels on it,
# ids of the labels of controls on it]. The way goes through closed shadow roots, where the same function
# listens, and through the frames around the document.
LOGGER = """<script>{
top.__log ??= [];
const entries = new WeakMap(), id = (node) => node.getAttribute("id");
window.__note = (event) => {
  if (!event.isTrusted) return;
  if (!entries.has(event)) { entries.set(event, [event.type, [], [], []]); top.__log.push(entries.get(event)); }
  const [, ids, controls, labels] = entries.get(event), path = event.composedPath().filter((node) => node instanceof Element);
  for (let inner = window; inner !== top; inner = inner.parent)
    for (let n = inner.frameElement; n; n = n.parentNode ?? n.host) if (n.nodeType === 1) path.push(n);
  ids.push(...path.map(id));
  for (const node of path) {
    if (node.localName === "label" && node.control) controls.push(id(node.control));
    if (!node.matches("form")) for (const label of node.labels ?? []) labels.push(id(label));
  }
};
for (const type of ["pointerdown", "mousedown", "click"]) window.addEventListener(type, __note, true);
}</script>"""  # noqa: E501
# What some pages do to the names that a script in them would like to rely on.
PRELUDES = (
    "",
    # as old libraries did
    "Array.prototype.toJSON = function () { return '[' + this.join() + ']'; }; Object.prototype.extra = 1;",
    "Array.from = (list) => [].slice.call(list); window.NodeList = window.Event = function () {};",
    "JSON.stringify = () => '?'; window.getComputedStyle = () => ({}); performance.now = () => 0;",
)


def one_of(words: str) -> st.SearchStrategy[str]:
    """One of the words."""
    return st.sampled_from(words.split())


WORDS = (
    "Go",
    "Cancel order",
    "مرحبا بالعالم",
    "\u202eevil\u202c",
    "𝔘𝔫𝔦 🜁🚀👩‍👩‍👧",
    "é" * 3,
    "x" * 400,
    "\u200b",
    "<b>&amp;",
    "0",
    "",
)
text = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
LONG = st.sampled_from(("🚀" * 5000, "a" * 10_000, "\u202e" * 10_000, "x🚀" * 3333))
PLACES = [
    f"position:{how};left:{x}px;top:{y}px"
    for how in ("absolute", "fixed", "relative")
    for x in (-300, 5, 500)
    for y in (-40, 30, 450, 1400, 9000)
]
STYLES = (
    st.sampled_from(PLACES)
    | one_of(
        "width:0 width:1px width:3px width:24px width:100% width:5000px height:0 height:1px height:3px height:24px height:5000px margin:-20px"  # noqa: E501
    )
    | one_of(
        "display:none display:contents display:grid display:inline-block visibility:hidden visibility:visible opacity:0 opacity:.5 overflow:hidden"  # noqa: E501
    )
    | one_of(
        "overflow:auto;height:60px overflow:scroll;max-height:40px transform:rotate(30deg) transform:scale(0) transform:translateX(-2000px)"  # noqa: E501
    )
    | one_of(
        "pointer-events:none cursor:pointer z-index:9 clip-path:inset(40%) float:right writing-mode:vertical-rl background:white"  # noqa: E501
    )
    | one_of("content-visibility:auto position:fixed;inset:0;background:white;z-index:5")
    | st.just("animation:slide 1s infinite alternate")
)
FLAGS = one_of(
    "hidden inert disabled readonly required multiple checked open draggable=true popover dir=rtl autofocus contenteditable"  # noqa: E501
)
ROLES = one_of(
    "button link option listbox combobox textbox menuitem slider presentation dialog checkbox nonsense"
)
HANDLERS = (
    "this.remove()", "throw 1", "alert(1)", "event.stopImmediatePropagation()", "location.hash = 'x'", "window.open('next.html')", "",  # noqa: E501
    "this.replaceWith(document.createElement('button'))",
    "document.body.prepend(Object.assign(document.createElement('button'), {innerText: 'New', id: 'new' + Math.random()}))",  # noqa: E501
)  # fmt: skip
COVER = "const c = document.createElement('div'); c.id = 'cover'; c.style = 'position:fixed;inset:0;z-index:99'; document.body.append(c)"  # noqa: E501
SHIFT = "const s = document.createElement('button'); s.id = 'shift'; s.style = 'display:block;height:40px;width:100%'; document.body.prepend(s)"  # noqa: E501
NAMES = (
    "id",
    "title",
    "children",
    "parentNode",
    "localName",
    "style",
    "inert",
    "getAttribute",
    "q",
    "",
)  # in a form they hide its own properties


@dataclass
class Node:
    """An element of a page: tag, attributes as they stand in the tag, children and the script lines that
    belong to it.
    """

    tag: str
    attributes: list[str] = field(default_factory=list)
    children: "list[Node | str]" = field(default_factory=list)
    kind: str = (
        ""  # frame, open, closed, declared: what stands inside is a document or a shadow root of its own
    )
    script: str = ""


def _quoted(name: str, value: str) -> str:
    return f'{name}="{html.escape(value)}"'


@st.composite
def attributes(draw: st.DrawFn) -> list[str]:
    """Some attributes: styles, switches, roles, handlers, names, very long values."""
    styles = ";".join(draw(st.lists(STYLES, max_size=2)))
    found = [_quoted("style", styles)] if styles else []
    found += draw(st.lists(FLAGS, max_size=1))
    some = [
        ROLES.map(lambda role: f"role={role}"),
        st.sampled_from(("-1", "0", "99999999999", "a")).map(lambda number: f"tabindex={number}"),
        st.sampled_from(HANDLERS).map(lambda code: _quoted("onclick", code)),
        st.just(_quoted("onmouseover", COVER)),
        st.just(_quoted("onmousemove", SHIFT)),
        st.sampled_from(
            ("aria-label", "title", "placeholder", "data-state", "value", "role", "aria-labelledby")
        ).flatmap(lambda name: (text | LONG).map(lambda value: _quoted(name, value))),
        st.sampled_from(
            (
                "aria-hidden=true",
                "aria-disabled=true",
                "aria-autocomplete=list",
                "maxlength=3",
                "list=n1",
                "href",
                "form=n2",
                "slot=x",
            )
        ),
        st.integers(1, 12).map(lambda number: f"for=n{number}"),
    ]
    return found + draw(st.lists(st.one_of(some), max_size=3))


@st.composite
def leaves(draw: st.DrawFn) -> Node:
    """A control or a line of text."""
    tag = draw(
        one_of(
            "button button a input input input select textarea label canvas p span div img video summary area dialog my-tag"  # noqa: E501
        )
    )
    found = draw(attributes())
    if tag == "a":
        found.append(
            draw(
                st.sampled_from(
                    (
                        "href=#x",
                        "href=next.html",
                        "href=next.html target=_blank",
                        "href='javascript:void 0'",
                        "",
                    )
                )
            )
        )
    if tag == "input":
        kind = draw(
            one_of(
                "text checkbox radio range date number file submit hidden password color image email nonsense"
            )
        )
        found += [f"type={kind}", f"name={draw(st.sampled_from(NAMES))}"]
    if tag == "select":
        options = [
            Node("option", draw(st.lists(FLAGS, max_size=1)), [draw(text)])
            for _ in range(draw(st.integers(0, 3)))
        ]
        return Node(tag, [*found, f"name={draw(st.sampled_from(NAMES))}"], [*options])
    return Node(tag, found, [draw(text)])


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> Node:
    """An element with what stands inside it."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(leaves())
    kind = draw(st.sampled_from(("", "", "", "", "frame", "open", "closed", "declared")))
    plain = draw(one_of("div div form label fieldset ul table details a button section span"))
    tag = {"": plain, "frame": "iframe"}.get(kind, "div")
    inside: list[Node | str] = [*draw(st.lists(trees(depth - 1), min_size=1, max_size=4))]
    listening = draw(
        st.sampled_from(
            ("", "", "el.addEventListener('click', () => 0);", "setTimeout(() => {" + SHIFT + "}, 150);")
        )
    )
    return Node(tag, draw(attributes()), inside, kind, listening)


def render(tree: Node, numbers: "itertools.count[int]") -> str:
    """HTML of an element and what stands inside; ids count n1, n2, ... in document order over all frames and
    shadow roots.
    """
    name = f"n{next(numbers)}"
    inner = "".join(
        html.escape(child, quote=False) if isinstance(child, str) else render(child, numbers)
        for child in tree.children
    )
    script = tree.script
    if tree.kind == "frame":
        return f'<{tree.tag} id={name} {" ".join(tree.attributes)} srcdoc="{html.escape(LOGGER + inner)}"></{tree.tag}>'  # noqa: E501
    if tree.kind == "declared":
        inner = f"<template shadowrootmode=open>{inner}</template>"
    elif tree.kind:
        listening = "for (const type of ['pointerdown', 'mousedown', 'click']) root.addEventListener(type, __note, true);"  # noqa: E501
        script += f"const root = el.attachShadow({{mode: '{tree.kind}'}}); {listening} root.append(...Array.prototype.slice.call(el.childNodes));"  # noqa: E501
    around = (
        f"<script>{{ const el = document.getElementById('{name}'); if (el) {{ {script} }} }}</script>"
        if script
        else ""
    )
    return f"<{tree.tag} id={name} {' '.join(tree.attributes)}>{inner}</{tree.tag}>{around}"


@st.composite
def pages(draw: st.DrawFn) -> str:
    """A page of a few such elements."""
    numbers = itertools.count(1)
    body = "".join(render(tree, numbers) for tree in draw(st.lists(trees(), min_size=2, max_size=6)))
    broken = "for (const el of document.querySelectorAll('p, a')) el.append('\\ud83d', Object.assign(document.createElement('b'), {title: '\\udc00'}));"  # noqa: E501
    style = "<style>@keyframes slide { to { translate: 200px 60px; } }</style>"
    first, last = draw(st.sampled_from(PRELUDES)), draw(st.sampled_from(("", "", broken)))
    head = f"<!doctype html><meta charset=utf-8><title>{html.escape(draw(text))}</title>{LOGGER}{style}"
    return f"{head}<script>{first}</script>{body}<script>{last}</script>"
