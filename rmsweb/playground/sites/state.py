"""What an agent has done on a site, and the helpers that the sites share."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from rmsweb.playground.sites.page import Choice, Form, Line, Link, Page
from rmsweb.playground.tasks import OPTIONS, World


@dataclass(slots=True)
class SiteState:
    """What one browser context has done."""

    chosen: dict[str, str] = field(default_factory=dict)  # options, by label
    typed: dict[str, str] = field(default_factory=dict)  # fields of a form that is not yet sent
    cart: list[str] = field(default_factory=list)
    user: str = ""
    committed: dict[str, str] | None = None  # what was ordered or sent
    tried: set[str] = field(default_factory=set)  # pages that were in trouble once
    is_person: bool = False  # looks around without a task: unknown pages answer 404, the cart tells more

    def order(self, world: World) -> None:
        """Commit the item of the cart, or of the form, with what was chosen and what is assumed."""
        chosen = self.chosen | {label: value for label, value in self.typed.items() if value}
        item = self.cart[0] if self.cart else self.typed["item"]
        self.committed = {label: world.option(label, chosen) for label in world.want} | {"item": item}


def url(path: str, /, **params: str) -> str:
    """Return a path with a query."""
    return path + ("?" + urlencode(params) if params else "")


def local(path: str) -> str:
    """Return the path if it stays on the host, else "/"."""
    return path if path.startswith("/") and not path.startswith("//") else "/"


def cards(path: str, names: Sequence[str], *, new_tab: bool = False) -> list[Link]:
    """Return links to the pages of some names, drawn as cards."""
    return [Link(name, url(path, name=name), card=True, new_tab=new_tab) for name in names]


def other(site: str, links: tuple[Link, ...]) -> Page:
    """Return a page that leads nowhere useful."""
    return Page(f"{site} other", links, (Form("/", "continue"), Form("/print", "print")))


def nav(site_links: tuple[str, ...]) -> tuple[Link, ...]:
    """Return the navigation: home, then pages that lead nowhere useful unless the site has them."""
    return (Link("home", "/"), *(Link(label, f"/{label}") for label in site_links))


def shuffled(world: World, place: str, names: list[str]) -> list[str]:
    """Return names in an order that depends on the task and the place alone."""
    names = sorted(names)
    random.Random(f"{world.task_id}/{place}").shuffle(names)
    return names


def option(world: World, state: SiteState, label: str) -> Choice | Line:
    """Return a dropdown, or a chip once something is chosen."""
    if label in state.chosen:
        return Line(f"{label} {state.chosen[label]}", "chip")
    r = random.Random(f"{world.task_id}/{label}")
    wanted = [value for value in (world.want.get(label), world.default.get(label)) if value in OPTIONS[label]]
    options = {*wanted, *r.sample(OPTIONS[label], 3)}
    return Choice(label, tuple(sorted(options)))


def fact(label: str, value: str) -> Line:
    """Return one fact as a page tells it.

    The value comes first: it is as far before its label as an index is, and a tiny model learns one distance
    sooner than two.
    """
    return Line(label, value=value)


def snippet(world: World) -> list[Line]:
    """Return what a result list says of the fact that the task asks for: one line, or none."""
    return [fact(world.fact, world.snippet)] if world.fact else []


def facts(world: World, site: str, name: str, chosen: str = "") -> list[Line]:
    """Return a site's facts of a name as lines, in an order of their own."""
    values = world.facts(site, name, chosen)
    return [fact(label, values[label]) for label in shuffled(world, f"facts/{name}", list(values))]
