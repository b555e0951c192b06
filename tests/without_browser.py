"""The playground without a browser, for tests: a session, and the scripts on the replay."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from rmsweb import runner
from rmsweb.browser.chromium import BrowserOptions
from rmsweb.browser.session import Session
from rmsweb.playground.document import Document
from rmsweb.playground.environment import ENVIRONMENTS, ReplayEnvironment
from rmsweb.playground.replay import ReplayBrowser, open_session
from rmsweb.playground.screen import draw

FOLDER = Path(tempfile.mkdtemp(prefix="rmsweb-test-"))  # of pictures and files
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


class Undrawn(ReplayBrowser):
    """A browser whose pages all look alike, for tests that do not look."""

    def picture(self, document: Document, kind: str) -> bytes:
        """Return a white picture."""
        return _white(*self.options.viewport, kind)


@cache
def _white(width: int, height: int, kind: str) -> bytes:
    return draw(None, (), (width, height), 0.0, kind)


def replay_session() -> tuple[ReplayEnvironment, Session]:
    """Return an environment with a session of its own, whose pictures are white."""
    environment, options = ReplayEnvironment(), BrowserOptions(viewport=(640, 480))
    return environment, open_session(Undrawn(environment.server, options), FOLDER)


def without_browser(patch: pytest.MonkeyPatch) -> None:
    """Let collect.py and evaluate.py work on the replay without a flag; nothing else of them changes."""
    patch.setitem(ENVIRONMENTS, "playground", ReplayEnvironment)
    patch.setattr(runner, "find_chromium", lambda: None)
