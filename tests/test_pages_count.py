"""The count of scripts/pages_sample.py agrees with observe.js on a page of all kinds of controls, and would tell
a missing index and a needless one.
"""  # noqa: E501

from pathlib import Path
from typing import Any

import pytest
from browser_lab import Lab, lab

__all__ = ["lab"]
pytestmark = pytest.mark.browser
COUNT = (Path(__file__).parent.parent / "scripts" / "pages_count.js").read_text(encoding="utf-8")


def test_the_count_agrees_and_tells_differences(lab: Lab) -> None:
    """All that is expected has an index and only the canvas is no control; without its index a button is
    missing, with one a paragraph is noise.
    """
    seen = lab.open("controls.html")
    own = [int(node.node_key.split(":")[1]) for node in seen.nodes if node.index is not None]
    apply = next(
        int(node.node_key.split(":")[1])
        for node in seen.nodes
        if node.text == "Apply" and node.index is not None
    )

    def count(indexed: list[int]) -> tuple[list[str], list[str]]:
        lab.js(
            "window.__heard = new Set([document.getElementById('heard'), document.getElementById('root')])"
        )
        found: dict[str, Any] = lab.run(lab.session.window.page.evaluate(COUNT, indexed))
        return found["missing"], found["noise"]

    assert count(own) == ([], ['<canvas class="null"> '])
    assert count([number for number in own if number != apply])[0] == ['<button class="null"> Apply']
    assert (
        '<p class="null"> Just text'
        in count([*own, lab.js("window.__rms.idOf(document.getElementById('quiet'))")])[1]
    )
