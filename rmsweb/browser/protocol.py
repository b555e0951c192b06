"""The browser session as the rest of the package sees it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from rmsweb.records import Action, ActionResult, Observation

Extractor = Callable[[str, str, bool], Awaitable[str]]  # (query, page text, with links) -> answer


class SessionLike(Protocol):
    """What episodes and environments need of a browser session (`browser.session.Session`).

    `engines` maps the names of search engines to URLs with {query}.
    """

    engines: Mapping[str, str]
    restarts: int  # how often a page or the browser was replaced

    async def reset(self) -> None: ...

    async def set_cookie(self, name: str, value: str, *urls: str) -> None: ...

    async def goto(self, url: str) -> object: ...

    async def observe(self) -> Observation: ...

    async def act(
        self, actions: Sequence[Action], observation: Observation, extractor: Extractor
    ) -> tuple[ActionResult, ...]: ...
