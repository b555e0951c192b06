"""The shop: search, categories with pages, sorting, a product with options, cart, order."""

from collections.abc import Sequence

from rmsweb.playground.sites.page import Form, Line, Link, Page
from rmsweb.playground.sites.state import SiteState, cards, facts, nav, option, other, shuffled, snippet, url
from rmsweb.playground.tasks import CATEGORIES, World

NAV = nav(("offers", "help", "cart"))


def _search(value: str = "") -> Form:
    return Form("/search", "search", {"product": value})


def _list(
    world: World, state: SiteState, path: str, names: list[str], extra: Sequence[Line | Link], query: str = ""
) -> Page:
    """Return a list of products, in the order given until another is chosen; `extra` comes below it."""
    key = state.chosen.get("sort", "")
    if key:
        names = sorted(names, key=lambda name: name if key == "name" else world.facts("shop", name)[key])
    widgets = (_search(query), option(world, state, "sort"), *cards("/item", names), *extra)
    return Page("shop results", NAV, widgets, path)


def _home(world: World) -> Page:
    featured = [*world.others[:3], world.item] if world.template == "shop.buy" else list(world.others[:4])
    categories = [Link(label, url("/category", name=label)) for label in CATEGORIES]
    return Page(
        "shop home", NAV, (_search(), *categories, *cards("/item", shuffled(world, "home", featured))), "/"
    )


def _results(world: World, state: SiteState, query: str) -> Page:
    path = url("/search", product=query)
    if state.is_person and query in world.names and query != world.item:
        found = [query, *(name for name in world.others[4:8] if name != query)]
        return _list(world, state, path, found, [], query)
    if query != world.item:
        return _list(world, state, path, shuffled(world, query, list(world.others[4:8])), [], query)
    below = snippet(world) if world.want else []
    return _list(world, state, path, shuffled(world, query, [world.item, *world.others[:3]]), below, query)


def _category(world: World, state: SiteState, name: str, second: bool) -> Page:
    path = url("/category", name=name, **({"page": "2"} if second else {}))
    if not second:
        return _list(
            world,
            state,
            path,
            shuffled(world, path, list(world.others[:3])),
            [Link("next", url("/category", name=name, page="2"))],
        )
    here = [world.item] if name == world.category else []
    return _list(
        world,
        state,
        path,
        shuffled(world, path, [*here, *world.others[3:6]]),
        [Link("previous", url("/category", name=name))],
    )


def _item(world: World, state: SiteState, name: str) -> Page:
    path = url("/item", name=name)
    color = world.option("color", state.chosen)
    actions = [
        Form(url("/add", name=name), "add", post=True),
        Form("/wishlist", "wishlist"),
        Form("/share", "share"),
    ]
    widgets = (
        Line(name, "heading"),
        *facts(world, "shop", name, color),
        option(world, state, "color"),
        option(world, state, "size"),
        *actions,
    )
    return Page("shop item", NAV, widgets, path)


def respond(world: World, state: SiteState, path: str, params: dict[str, str]) -> Page | str:
    """Return the page that a request leads to, or the path of a redirect."""
    name = params.get("name", "")
    if path == "/":
        return _home(world)
    if path == "/search":
        return _results(world, state, params.get("product", ""))
    if path == "/category" and name in CATEGORIES:
        return _category(world, state, name, params.get("page") == "2")
    if path == "/item" and name in world.names:
        return _item(world, state, name)
    if path == "/add" and name in world.names:
        state.cart = [name]
        return "/cart"
    if path == "/cart":
        lines = [Line(item, "heading") for item in state.cart]
        if state.is_person:
            for item in state.cart:
                color = world.option("color", state.chosen)
                chips = [Line(f"{name} {value}", "chip") for name, value in state.chosen.items()]
                lines += [*facts(world, "shop", item, color), *chips]
        return Page(
            "shop cart",
            NAV,
            (
                *lines,
                Form("/order", "order", post=True),
                Form("/clear", "clear", post=True),
                Form("/", "continue"),
            ),
            "/cart",
        )
    if path == "/clear":
        state.cart = []
        return "/cart"
    if path == "/order":
        if state.cart:
            state.order(world)
        return "/ordered"
    if path == "/ordered":
        return Page(
            "shop ordered",
            NAV,
            (
                Line("order confirmed" if state.committed else "cart empty", "heading"),
                Form("/", "continue"),
                Form("/receipt", "print"),
            ),
            path,
        )
    return other("shop", NAV)
