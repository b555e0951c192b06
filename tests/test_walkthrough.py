"""docs/walkthrough.md is what scripts/walkthrough.py prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Measured numbers have decimals; counts, rewards and gates are words and must agree exactly.
MEASURED = re.compile(r"-?\d+\.\d{4,}")


def test_the_page_is_what_the_script_prints() -> None:
    """Words agree exactly, measured numbers as far as another processor's rounding lets them."""
    command = [sys.executable, str(ROOT / "scripts" / "walkthrough.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    page = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
    assert MEASURED.sub("#", done.stdout) == MEASURED.sub("#", page)
    printed, written = (list(map(float, MEASURED.findall(text))) for text in (done.stdout, page))
    assert printed == pytest.approx(written, abs=0.02)
    assert len(written) > 200
