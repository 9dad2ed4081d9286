"""What holds for the tests and for the notebooks that nbval runs again."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dobnb.book import kernel_environment

# Kernels inherit this process's environment: nbval's then run as those that wrote the notebooks did.
os.environ.update(kernel_environment(Path(__file__).parent))


def _refuse_skip(report: Any) -> None:
    """Where DOBNB_NO_SKIPS is set, as in CI, a skipped test fails: it checks nothing, and nobody would notice."""
    if os.environ.get("DOBNB_NO_SKIPS") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"no test may be skipped here (DOBNB_NO_SKIPS is set). {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield
    _refuse_skip(report)
    return report
