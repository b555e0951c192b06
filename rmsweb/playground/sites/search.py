"""The search engine, whose results are pages of all other sites, and the news site, which may block.

`search_engine` actions lead here.
"""

from rmsweb.playground.sites.page import Form, Line, Link, Page
from rmsweb.playground.sites.state import SiteState, facts, local, nav, other, shuffled, snippet, url
from rmsweb.playground.tasks import World

NAV = nav(("maps", "mail", "settings"))
PAGES = {
    "shop": "/item",
    "jobs": "/job",
    "wiki": "/article",
    "travel": "/hotel",
    "office": "/section",
    "news": "/article",
}


def _query(value: str = "") -> Form:
    return Form("/find", "go", {"query": value})


def _link(site: str, name: str, label: str) -> Link:
    return Link(label, f"http://{site}.localhost{url(PAGES[site], name=name)}", card=True)


def _results(world: World, query: str) -> Page:
    """Return the results of a query.

    A name of the task has one result on each of some sites, and what one of them said some time ago. Any
    other query finds articles about something else.
    """
    if query not in world.names:
        links = [_link("wiki", name, name) for name in shuffled(world, query, list(world.others[4:8]))]
        return Page("search results", NAV, (_query(query), *links))
    rest = ["travel", "office", "news"] if world.template == "search.news" else ["shop", "jobs", "travel"]
    sites = shuffled(world, query, list({world.source, "wiki", *rest}))
    stale = snippet(world) if query == world.item and "news" not in sites else []
    return Page("search results", NAV, (_query(query), *(_link(site, query, site) for site in sites), *stale))


def respond(world: World, state: SiteState, path: str, params: dict[str, str]) -> Page | str:
    """Return the page that a request leads to."""
    if path == "/":
        return Page("search home", NAV, (_query(), Form("/random", "random"), Form("/help", "help")))
    if path == "/find":
        return _results(world, params.get("query", ""))
    return other("search", NAV)


def news(world: World, state: SiteState, path: str, params: dict[str, str]) -> Page | str:
    """Return a page of the news site.

    It answers in the lucky tasks. Else it asks, with status 403, for a proof that nobody can give.
    """
    name = params.get("name", "")
    if path == "/verify":
        return local(params.get("next", "/"))
    if world.lucky and name in world.names:
        return Page(
            "news item",
            nav(("events", "archive", "contact")),
            (Line(name, "heading"), *facts(world, "wiki", name), Form("/share", "share")),
        )
    form = Form(url("/verify", next=url(path, **params)), "verify", post=True)
    return Page(
        "news denied",
        (),
        (Line("access denied", "heading"), Line("please verify that you are human", "chip"), form),
        status=403,
    )
