"""The job board: a listing with a region filter, an application in two steps, and a login with saved jobs."""

from rmsweb.playground.sites.page import Form, Line, Link, Page, Widget
from rmsweb.playground.sites.state import SiteState, cards, facts, nav, option, other, shuffled, url
from rmsweb.playground.tasks import World

NAV = nav(("companies", "alerts", "login"))


def _rows(world: World, place: str, names: list[str]) -> list[Link]:
    return cards("/job", shuffled(world, place, names))


def _home(world: World, state: SiteState) -> Page:
    listed = list(world.others[:4]) if world.user else [*world.others[:3], world.item]
    widgets: tuple[Widget, ...] = (
        Form("/search", "browse", {"title": ""}),
        option(world, state, "region"),
        *_rows(world, "home", listed),
        Link("saved", "/saved"),
    )
    return Page("jobs home", NAV, widgets, "/")


def _job(world: World, state: SiteState, name: str) -> Page:
    region = world.option("region", state.chosen)
    form = Form(
        url("/apply", name=name), "continue", {"applicant": state.typed.get("applicant", "")}, post=True
    )
    widgets: tuple[Widget, ...] = (
        Line(name, "heading"),
        *facts(world, "jobs", name, region),
        form,
        Form("/save", "save"),
        Form("/report", "report"),
    )
    return Page("jobs item", NAV, widgets, url("/job", name=name))


def _login(state: SiteState, failed: bool) -> Page:
    message = [Line("login error", "heading")] if failed else []
    form = Form("/enter", "enter", {"user": "", "code": ""}, post=True)
    return Page("jobs login", NAV, (*message, form, Link("register", "/register")), "/login")


def respond(world: World, state: SiteState, path: str, params: dict[str, str]) -> Page | str:
    """Return the page that a request leads to, or the path of a redirect."""
    name = params.get("name", "")
    if path == "/":
        return _home(world, state)
    if path == "/search":
        found = [params.get("title", "")] if params.get("title") in world.names else list(world.others[4:7])
        return Page(
            "jobs results",
            NAV,
            (Form("/search", "browse", {"title": params.get("title", "")}), *_rows(world, "search", found)),
            url(path, **params),
        )
    if path == "/job" and name in world.names:
        return _job(world, state, name)
    if path == "/login":
        return _login(state, "failed" in params)
    if path == "/enter":
        code = params.get("code") or world.default.get("code")  # a remembered code
        if world.user and (params.get("user"), code) == (world.user, world.want["code"]):
            state.user = world.user
            return "/saved"
        return url("/login", failed="1")
    if path == "/saved":
        if not state.user:
            return "/login"
        return Page(
            "jobs saved",
            NAV,
            (*_rows(world, "saved", [*world.others[4:7], world.item]), Link("logout", "/logout")),
            path,
        )
    if path == "/logout":
        state.user = ""
        return "/"
    if path == "/apply" and name in world.names:
        state.typed = {"item": name, "applicant": params.get("applicant", "")}
        return "/form"
    if path == "/form" and state.typed:
        widgets = (
            Line(state.typed["item"], "heading"),
            option(world, state, "shift"),
            Form("/send", "send", post=True),
            Form("/", "cancel"),
        )
        return Page("jobs form", NAV, widgets, path)
    if path == "/send" and state.typed:
        state.order(world)
        return "/sent"
    if path == "/sent":
        return Page(
            "jobs sent",
            NAV,
            (Line("request sent", "heading"), Form("/", "continue"), Form("/receipt", "print")),
            path,
        )
    return other("jobs", NAV)
