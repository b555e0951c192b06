"""What a context has done on a site, and the small helpers that the sites share."""

import random
from dataclasses import dataclass, field
from urllib.parse import urlencode

from rmsweb.playground.sites.page import Choice, Line, Link
from rmsweb.playground.tasks import OPTIONS, World


@dataclass(slots=True)
class SiteState:
    """Mutable state of one context."""

    chosen: dict[str, str] = field(default_factory=dict)  # options, by label
    typed: dict[str, str] = field(default_factory=dict)  # submitted form fields that are not yet committed
    cart: list[str] = field(default_factory=list)
    user: str = ""
    committed: dict[str, str] | None = None  # what was ordered or sent


def url(path: str, **params: str) -> str:
    """Path with a query."""
    return path + ("?" + urlencode(params) if params else "")


def nav(site_links: tuple[str, ...]) -> tuple[Link, ...]:
    """The navigation: home, then pages that lead nowhere useful."""
    return (Link("home", "/"), *(Link(label, f"/{label}") for label in site_links))


def shuffled(world: World, place: str, names: list[str]) -> list[str]:
    """Names in an order that depends on the task and the place alone."""
    names = sorted(names)
    random.Random(f"{world.task_id}/{place}").shuffle(names)
    return names


def option(world: World, state: SiteState, label: str) -> Choice | Line:
    """A dropdown, or a chip once something is chosen."""
    if label in state.chosen:
        return Line(f"{label} {state.chosen[label]}", "chip")
    r = random.Random(f"{world.task_id}/{label}")
    wanted = [value for value in (world.want.get(label), world.default.get(label)) if value in OPTIONS[label]]
    options = {*wanted, *r.sample(OPTIONS[label], 3)}
    return Choice(label, tuple(sorted(options)))


def facts(world: World, name: str, chosen: str = "") -> list[Line]:
    """The facts of a name as lines, in an order of their own."""
    values = world.facts(name, chosen)
    return [Line(f"{label} {values[label]}") for label in shuffled(world, f"facts/{name}", list(values))]
