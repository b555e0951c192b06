"""The travel site: flights with suggested places, hotels with a filter and a calendar, confirmations."""

from rmsweb.playground.sites.page import Form, Line, Link, Page, Suggest
from rmsweb.playground.sites.state import SiteState, cards, facts, nav, option, other, shuffled, url
from rmsweb.playground.tasks import OPTIONS, World

NAV = nav(("hotels", "deals", "contact"))


def _place(world: World, state: SiteState, label: str) -> Line | Suggest:
    """Return a field with suggestions, or a chip once one is picked."""
    if label in state.chosen:
        return Line(f"{label} {state.chosen[label]}", "chip")
    return Suggest(label, world.places)


def _home(world: World, state: SiteState) -> Page:
    listed = [*world.others[:2], world.item if world.template == "travel.date" else world.others[2]]
    form = (
        _place(world, state, "origin"),
        _place(world, state, "destination"),
        Form("/flight", "book", post=True),
    )
    return Page("travel home", NAV, (*form, *cards("/hotel", shuffled(world, "home", listed))), "/")


def _hotels(world: World, state: SiteState) -> Page:
    """Return the list of hotels; a chosen kind of room changes all but the wanted one."""
    room = state.chosen.get("room", "")
    listed = shuffled(
        world, f"hotels/{room}", [world.item, *(world.others[3:6] if room else world.others[:5])]
    )
    return Page(
        "travel results",
        NAV,
        (option(world, state, "room"), *cards("/hotel", listed), Form("/map", "map")),
        "/hotels",
    )


def _hotel(world: World, state: SiteState, name: str) -> Page:
    path, day = url("/hotel", name=name), state.chosen.get("day")
    date = Line(f"day {day}", "chip") if day else Link("date", url("/calendar", name=name))
    prices = facts(world, "travel", name, world.option("room", state.chosen))
    buttons = (
        Form(url("/hold", name=name), "book", post=True),
        Form("/share", "share"),
        Form("/map", "map"),
        Form("/reviews", "reviews"),
    )
    return Page("travel item", NAV, (Line(name, "heading"), *prices, date, *buttons), path)


def _calendar(name: str) -> Page:
    back = url("/hotel", name=name)
    days = [Link(day, url("/choose", next=back, name="day", value=day)) for day in OPTIONS["day"]]
    return Page(
        "travel calendar",
        NAV,
        (Line(name, "heading"), *days, Form(back, "close")),
        url("/calendar", name=name),
    )


def respond(world: World, state: SiteState, path: str, params: dict[str, str]) -> Page | str:
    """Return the page that a request leads to, or the path of a redirect."""
    name = params.get("name", "")
    known = name in world.names
    if path == "/":
        return _home(world, state)
    if path == "/hotels":
        return _hotels(world, state)
    if path == "/hotel" and known:
        return _hotel(world, state, name)
    if path == "/calendar" and known:
        return _calendar(name)
    if path == "/flight":
        state.committed = {label: world.option(label, state.chosen) for label in world.want}
        return "/ordered"
    if path == "/hold" and known:
        state.cart = [name]
        if world.lucky:  # it needs no confirmation
            state.order(world)
        return "/review"
    if path == "/review" and state.cart:
        day = [Line(f"day {state.chosen['day']}", "chip")] if "day" in state.chosen else []
        buttons = (
            Form("/confirm", "confirm", post=True),
            Form("/", "cancel"),
            Form("/receipt", "print"),
            Form("/share", "share"),
        )
        return Page("travel review", NAV, (Line(state.cart[0], "heading"), *day, *buttons), path)
    if path == "/confirm":
        if state.cart:
            state.order(world)
        return "/ordered"
    if path == "/ordered":
        heading = Line("booking confirmed" if state.committed else "no booking", "heading")
        return Page("travel ordered", NAV, (heading, Form("/", "continue"), Form("/receipt", "print")), path)
    return other("travel", NAV)
