"""The sites: state machines from (world, state, request) to a page or a redirect."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rmsweb.playground.sites import jobs, shop, wiki
from rmsweb.playground.sites.page import Page
from rmsweb.playground.sites.state import SiteState
from rmsweb.playground.tasks import OPTIONS, World

SITES: dict[str, Callable[[World, SiteState, str, dict[str, str]], Page | str]] = {"shop": shop.respond, "jobs": jobs.respond, "wiki": wiki.respond}


@dataclass(slots=True)
class SiteSession:
    """One context's view of the playground: the world of its task and what was done in it."""

    world: World
    state: SiteState = field(default_factory=SiteState)

    def request(self, host: str, path: str, params: dict[str, str]) -> Page | str:
        """A request -> a page, or the path to go on to."""
        site = host.split(".")[0]
        if site not in SITES:
            return Page("site missing", (), ())
        if path == "/choose":
            name, value = params.get("name", ""), params.get("value", "")
            if name in OPTIONS and value in OPTIONS[name]:
                self.state.chosen[name] = value
            back = params.get("next", "/")
            return back if back.startswith("/") and not back.startswith("//") else "/"
        return SITES[site](self.world, self.state, path, params)

    def check(self, answer: str | None) -> tuple[bool, str]:
        """Whether the task was carried out, and why not."""
        return self.world.solved(answer, self.state.committed)
