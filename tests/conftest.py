"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE: `default`, `ci` (derandomized), `deep` (2,000 examples a
law), `quick` (40). One torch thread.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("default", max_examples=100, **_COMMON)
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, print_blob=True, **_COMMON)
settings.register_profile("deep", max_examples=2000, **_COMMON)
settings.register_profile("quick", max_examples=40, derandomize=True, database=None, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> None:
    """Sums in torch depend on the number of threads; a module without torch does not pay for it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def teacher_url() -> Iterator[str]:
    """URL of the scripted roles, served by a process of its own."""
    command = [sys.executable, "-u", "-m", "rmsweb.playground", "teacher", "--port", "0"]
    process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.match(r"(http\S+) serves", process.stdout.readline())
        assert found is not None, "the scripted teacher did not start"
        yield found[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
