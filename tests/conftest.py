"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine may stall any example, so no example has a deadline; else the profile is Hypothesis's own choice.
settings.register_profile("no deadline", settings(), deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real data that the tests may read."""
    folder = os.environ.get("DOBNB_TEST_DATA")
    if not folder:
        pytest.skip("DOBNB_TEST_DATA names no folder of real data")
    return Path(folder)
