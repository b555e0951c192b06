"""The encyclopedia: results with a snippet, articles with a table of facts and related articles."""

from rmsweb.playground.sites.page import Form, Line, Link, Page, Widget
from rmsweb.playground.sites.state import SiteState, facts, nav, other, shuffled, snippet, url
from rmsweb.playground.tasks import World

NAV = nav(("history", "portal", "donate"))


def _search(value: str = "") -> Form:
    return Form("/search", "lookup", {"article": value})


def _links(names: list[str]) -> list[Link]:
    return [Link(name, url("/article", name=name)) for name in names]


def _results(world: World, query: str) -> Page:
    path = url("/search", article=query)
    if query not in (world.item, world.via or world.item):
        return Page(
            "wiki results",
            NAV,
            (_search(query), *_links(shuffled(world, query, list(world.others[4:8])))),
            path,
        )
    links = _links(shuffled(world, query, [query, *world.others[:3]]))
    return Page(
        "wiki results", NAV, (_search(query), *links, *(snippet(world) if query == world.item else [])), path
    )


def _article(world: World, name: str) -> Page:
    related = list(world.others[4:7]) + ([world.item] if name == world.via else [world.others[7]])
    widgets: tuple[Widget, ...] = (
        Line(name, "heading"),
        *facts(world, "wiki", name),
        *_links(shuffled(world, name, related)),
        Form("/edit", "edit"),
        Form("/cite", "cite"),
    )
    return Page("wiki item", NAV, widgets, url("/article", name=name))


def respond(world: World, state: SiteState, path: str, params: dict[str, str]) -> Page | str:
    """Return the page that a request leads to."""
    name = params.get("name", "")
    if path == "/":
        return Page(
            "wiki home",
            NAV,
            (_search(), *_links(shuffled(world, "home", list(world.others[:4]))), Form("/random", "random")),
            "/",
        )
    if path == "/search":
        return _results(world, params.get("article", ""))
    if path == "/article" and name in world.names:
        return _article(world, name)
    return other("wiki", NAV)
