"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE: `default`, `ci` (derandomized), `deep` (2,000 examples a law), `quick` (40). One torch thread."""

import os
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=100, **_COMMON)
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, print_blob=True, **_COMMON)
settings.register_profile("deep", max_examples=2000, **_COMMON)
settings.register_profile("quick", max_examples=40, derandomize=True, database=None, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> None:
    """Sums in torch depend on the number of threads; a module that does not import torch does not pay for it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
