"""The public service: nested sections, a form in several steps, and documents that open in a new tab."""

from rmsweb.playground.sites.page import Form, Line, Page
from rmsweb.playground.sites.state import SiteState, cards, facts, nav, option, other, shuffled, snippet, url
from rmsweb.playground.tasks import World

NAV = nav(("documents", "contact", "about"))


def _home(world: World) -> Page:
    first = world.via or (world.item if world.template == "office.form" else world.others[3])
    return Page(
        "office home",
        NAV,
        (
            *cards("/section", shuffled(world, "home", [*world.others[:3], first])),
            Form("/map", "map"),
            Form("/help", "help"),
        ),
    )


def _section(world: World, name: str, failed: bool) -> Page:
    """Return a section: its figures, the first step of its form, and the sections below it."""
    below = [*world.others[4:6], world.item if name == world.via else world.others[6]]
    lines = [
        Line(name, "heading"),
        *([Line("applicant error", "chip")] if failed else []),
        *facts(world, "office", name),
    ]
    form = Form(url("/apply", name=name), "continue", {"applicant": ""}, post=True)
    return Page(
        "office item",
        NAV,
        (*lines, form, *cards("/section", shuffled(world, name, below)), Form("/print", "print")),
    )


def _documents(world: World) -> Page:
    stale = snippet(world) if world.template == "office.document" else []
    names = shuffled(world, "documents", [world.item, *world.others[:3]])
    return Page(
        "office results",
        NAV,
        (
            *cards("/document", names, new_tab=True),
            *stale,
            Form("/archive", "archive"),
            Form("/orders", "orders"),
        ),
    )


def _details(world: World, state: SiteState) -> Page:
    """Return the second step: a choice of region leads on, and so does the button; then one is assumed."""
    buttons = (Form("/review", "continue"), Form("/", "cancel"), Form("/help", "help"))
    return Page(
        "office form",
        NAV,
        (Line(state.typed["item"], "heading"), option(world, state, "region"), *buttons),
        "/review",
    )


def _review(world: World, state: SiteState) -> Page:
    if world.lucky:  # sent without a last look
        state.order(world)
    given = [
        Line(f"applicant {state.typed['applicant']}", "chip"),
        Line(f"region {world.option('region', state.chosen)}", "chip"),
    ]
    buttons = (
        Form("/send", "send", post=True),
        Form("/", "cancel"),
        Form("/draft", "save"),
        Form("/help", "help"),
    )
    return Page("office review", NAV, (Line(state.typed["item"], "heading"), *given, *buttons), "/review")


def respond(world: World, state: SiteState, path: str, params: dict[str, str]) -> Page | str:
    """Return the page that a request leads to, or the path of a redirect."""
    name = params.get("name", "")
    known = name in world.names
    if path == "/":
        return _home(world)
    if path == "/section" and known:
        return _section(world, name, "failed" in params)
    if path == "/documents":
        return _documents(world)
    if path == "/document" and known:
        buttons = (Form("/print", "print"), Form("/download", "save"))
        return Page("office document", NAV, (Line(name, "heading"), *facts(world, "office", name), *buttons))
    if path == "/apply" and known:
        applicant = params.get("applicant") or world.default.get("applicant")  # the account's name
        if not applicant or (not params.get("applicant") and applicant != world.want["applicant"]):
            return url("/section", name=name, failed="1")
        state.typed = {"item": name, "applicant": applicant}
        return "/details"
    if path == "/details" and state.typed:
        return _details(world, state)
    if path == "/review" and state.typed:
        return _review(world, state)
    if path == "/send" and state.typed:
        state.order(world)
        return "/sent"
    if path == "/sent":
        return Page(
            "office sent",
            NAV,
            (Line("form sent", "heading"), Form("/", "continue"), Form("/receipt", "print")),
        )
    return other("office", NAV)
