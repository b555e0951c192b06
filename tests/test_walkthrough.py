"""docs/walkthrough.md is what scripts/walkthrough.py prints."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import walkthrough

MEASURED = re.compile(r"-?\d+\.\d{3,}")  # counts, rewards and constants have fewer decimals
UNITS = 5  # of the last decimal: another processor sums in another order


def measured(text: str) -> Iterator[tuple[float, float]]:
    """Yield each measured number and its tolerance."""
    for found in MEASURED.findall(text):
        yield float(found), UNITS * 10.0 ** -len(found.partition(".")[2])


@pytest.fixture(scope="module")
def printed() -> str:
    """The page as the script prints it here."""
    return "\n\n".join(walkthrough.sections(sample=False)) + "\n"


def test_the_page_is_what_the_script_prints(printed: str) -> None:
    """Words agree exactly, measured numbers as far as another processor's rounding lets them."""
    page = walkthrough.PAGE.read_text(encoding="utf-8")
    assert MEASURED.sub("#", printed).split() == MEASURED.sub("#", page).split()
    pairs = list(zip(measured(printed), measured(page), strict=True))
    assert len(pairs) > 200
    assert all(abs(here - there) <= tolerance for (here, _), (there, tolerance) in pairs)


def test_the_walkthrough_shows_every_part_of_the_loss(printed: str) -> None:
    """One accepted and one rejected group, a ratio that is not 1, a reference that is not the old policy."""
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    cells = {row[5] for row in rows if len(row) == 7 and row[0].isdigit()}
    assert {"accepted", "not competent", "no contrast"} <= cells
    tokens = [row for row in rows if len(row) == 8 and row[5] in ("yes", "no")]
    assert any(abs(float(row[4]) - 1) > 0.1 for row in tokens), "the first update must show in the ratios"
    assert any(row[1] != row[2] for row in tokens), "the step before must show in the reference"


def test_the_stored_rollouts_are_those_that_the_sampler_draws(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sampling anew gives the committed tokens.

    A uniform number would have to fall on the edge of a token's share for another processor to differ.
    """
    stored = walkthrough.ROLLOUTS.read_text(encoding="utf-8")
    monkeypatch.setattr(walkthrough, "ROLLOUTS", tmp_path / "rollouts.json")
    assert sum(1 for _ in walkthrough.sections(sample=True)) > 20
    assert (tmp_path / "rollouts.json").read_text(encoding="utf-8") == stored
