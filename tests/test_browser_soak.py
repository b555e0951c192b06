"""Sessions leave nothing behind: a short run of scripts/soak.py, and that it would say so."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent / "scripts" / "soak.py"


@pytest.mark.slow
@pytest.mark.browser
def test_sessions_side_by_side_leave_nothing_behind() -> None:
    """Four sessions play for two minutes: no page or context is left, and the last half minute needs no more
    than 115% of the second one's memory.
    """
    done = subprocess.run(
        [sys.executable, str(SOAK), "--sessions", "4", "--minutes", "2"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "no leak"), done.stdout + done.stderr
