"""State text: the lines that the policy reads of an Observation, and the fingerprint of a state.

Purpose: the one place that knows the format of the state. It is Browser Use 0.7.10's: a tab per displayed
ancestor, `*` before what is new, `[index]<tag attribute=value />`, and text on a line of its own, one deeper
than its element.

ours: values come from the live property, not from the attribute, so what was typed is seen; a line keeps its
place in document order and the first and the last line say how much of the page lies above and below.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rmsweb.records import Element, Observation, Tab

# Attributes shown by default, in this order; `value` and `options` come from Element.value and
# Element.options.
ATTRIBUTES = (
    "title", "type", "checked", "name", "role", "value", "options", "placeholder", "alt", "aria-label",
    "aria-expanded", "aria-checked", "aria-selected", "aria-valuemin", "aria-valuemax", "aria-valuenow",
    "pattern", "min", "max", "minlength", "maxlength", "step", "required", "multiple", "accept",
    "autocomplete", "disabled", "aria-disabled",
)  # fmt: skip
MAX_ATTRIBUTE_CHARS = 100
_MARKERS = {
    "scroll": "|SCROLL|",
    "iframe": "|IFRAME|",
    "shadow-open": "|SHADOW(open)|",
    "shadow-closed": "|SHADOW(closed)|",
}


@dataclass(frozen=True, slots=True)
class StateLine:
    """One line of the state, newline included.

    `distance` is how far (CSS px) it lies from the viewport: what is cut first is farthest.
    """

    text: str
    index: int | None = None
    distance: float = 0.0


def _attribute(node: Element, name: str) -> str | None:
    if name == "value":
        return node.value
    if name == "options":
        text = "|".join(node.options)
        return f"{len(node.options)} options: {text}" if len(text) > MAX_ATTRIBUTE_CHARS else text or None
    if name == "role" and node.attributes.get("role") == node.tag:
        return None
    return node.attributes.get(name)


def _attributes(node: Element, names: Sequence[str]) -> str:
    """Return ` name=value` for each attribute that has a value.

    Of two equal values longer than five characters the first stays.
    """
    parts, seen = [], set()
    for name in names:
        value = _attribute(node, name)
        if value is None or value == "" or (len(value) > 5 and value in seen):
            continue
        seen.add(value)
        value = " ".join(value.split())
        parts.append(
            f" {name}={value if len(value) <= MAX_ATTRIBUTE_CHARS else value[:MAX_ATTRIBUTE_CHARS] + '...'}"
        )
    return "".join(parts)


def _line(node: Element, names: Sequence[str]) -> str:
    tabs = "\t" * node.depth
    if node.tag == "#text":
        return f"{tabs}{node.text}\n"
    marker = _MARKERS.get(node.marker or "", "")
    index = f"{'*' if node.is_new else ''}[{node.index}]" if node.index is not None else ""
    scroll = ""
    if node.scroll_pages is not None:
        scroll = f" ({node.scroll_pages[0]:.1f} pages above, {node.scroll_pages[1]:.1f} pages below)"
    return f"{tabs}{marker}{index}<{node.tag}{_attributes(node, names)} />{scroll}\n"


def _distance(node: Element, height: int) -> float:
    if node.in_viewport or node.box is None:
        return 0.0
    _, y, _, h = node.box
    return max(0.0, y - height, -(y + h))


def render_nodes(
    observation: Observation, attributes: Sequence[str] = ATTRIBUTES, *, edges: bool = True
) -> list[StateLine]:
    """Return the state's lines in document order; with `edges`, the first and last say what lies beyond.

    >>> page = Observation(url="", title="", tabs=(), active_tab="0001", viewport=(640, 480), nodes=(
    ...     Element(index=1, node_key="a", tag="button"),
    ...     Element(index=None, node_key="b", tag="#text", text="Apply", depth=1)))
    >>> "".join(line.text for line in render_nodes(page))
    '[Start of page]\\n[1]<button />\\n\\tApply\\n[End of page]\\n'
    """
    height = observation.viewport[1]
    lines = [
        StateLine(_line(node, attributes), node.index, _distance(node, height)) for node in observation.nodes
    ]
    if not lines:
        lines = [StateLine("empty page\n")]
    if edges:
        above, below = observation.pages_above, observation.pages_below
        first = (
            f"... {above:.1f} pages above, scroll up to see them ...\n"
            if above >= 0.05
            else "[Start of page]\n"
        )
        last = (
            f"... {below:.1f} pages below, scroll down to see them ...\n"
            if below >= 0.05
            else "[End of page]\n"
        )
        lines = [StateLine(first), *lines, StateLine(last)]
    return lines


def fingerprint(url: str, tabs: Iterable[Tab], nodes: Iterable[Element], scroll_y: float) -> str:
    """Return the sha256 of what a person would call the state, without indices, stars or time.

    It covers the url, the tabs, (tag, text, value, checked) of every line, and how far the page is scrolled.
    """
    lines = [(node.tag, node.text, node.value, node.attributes.get("checked")) for node in nodes]
    data = [url, [(tab.url, tab.title) for tab in tabs], lines, round(scroll_y)]
    return hashlib.sha256(json.dumps(data, ensure_ascii=True).encode()).hexdigest()
