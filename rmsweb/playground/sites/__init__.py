"""The sites: functions from (world, state, request) to a page, or to the path of a redirect."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rmsweb.playground.sites import jobs, office, search, shop, travel, wiki
from rmsweb.playground.sites.page import Line, Link, Page
from rmsweb.playground.sites.state import SiteState, local, url
from rmsweb.playground.tasks import World

SITES: dict[str, Callable[[World, SiteState, str, dict[str, str]], Page | str]] = {
    "shop": shop.respond,
    "jobs": jobs.respond,
    "wiki": wiki.respond,
    "travel": travel.respond,
    "office": office.respond,
    "search": search.respond,
    "news": search.news,
}

BUTTONS = (
    "archive cite download draft edit help map orders print random receipt report reviews save share wishlist"
)
NOWHERE = {f"/{name}" for name in BUTTONS.split()}  # pages behind buttons that lead nowhere useful


@dataclass(slots=True)
class SiteSession:
    """The playground as one browser context sees it: the world of its task and what was done in it.

    `trouble` is the share of the pages that fail once.
    """

    world: World
    trouble: float = 0.0
    state: SiteState = field(default_factory=SiteState)

    def request(self, host: str, path: str, params: dict[str, str]) -> Page | str:
        """Return the page that a request leads to, or the path of a redirect."""
        site = host.split(".")[0]
        if site not in SITES:
            return Page("site missing", (), (), status=404 if self.state.is_person else 200)
        if path == "/choose":
            name, value = params.get("name", ""), params.get("value", "")
            if value in self.world.choices(name):
                self.state.chosen[name] = value
            return local(params.get("next", "/"))
        answer = SITES[site](self.world, self.state, path, params)
        place = f"{self.world.task_id}/{site}{path}"
        if (
            isinstance(answer, Page)
            and place not in self.state.tried
            and random.Random(f"trouble/{place}").random() < self.trouble
        ):
            self.state.tried.add(place)  # another try succeeds
            return Page(
                f"{site} busy",
                (Link("home", "/"),),
                (Line("page busy", "heading"), Link("retry", url(path, **params))),
                status=503,
            )
        if isinstance(answer, Page) and self.state.is_person and answer.name == "other":
            known = {link.href for link in answer.nav} | NOWHERE
            return answer if path in known else replace(answer, status=404)
        return answer

    def check(self, answer: str | None) -> tuple[bool, str]:
        """Return whether the task was carried out, and the reason."""
        return self.world.solved(answer, self.state.committed)
