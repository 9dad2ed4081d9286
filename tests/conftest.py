"""Fixtures that several test files share."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

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


@pytest.fixture(scope="session")
def pages() -> Path:
    """Folder of the built pages, which show the notebooks as they are now."""
    from dobnb import book

    root = Path(__file__).parents[1]
    if not book.is_rendered(root):
        book.html(root)
    return root / "_build" / "html"


QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """Chromium or Chrome, as it is installed; without one, what needs it skips."""
    from playwright.sync_api import sync_playwright

    from dobnb.pdf import BROWSERS

    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        pytest.skip("no Chromium or Chrome is installed; on Debian: apt-get install chromium")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=QUIET)
        yield opened
        opened.close()
