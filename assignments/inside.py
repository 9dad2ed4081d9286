"""Goes into a student's kernel as text, before their first cell, and runs the tests from there.

A test gets the given names as they are without the student, and Python's and numpy's own functions, so that a question
or the measure it is marked by is not changed by binding a name anew. It is no wall: all this is one process.
"""

import builtins
import contextlib
import io
import sys

_PACKAGES = {"builtins", "dobnb", "fractions", "math", "numpy"}
_run, _compile, _given, _kept = exec, compile, {"__name__": "__main__"}, []  # type: ignore[var-annotated]


def begin(given: list[str]) -> None:
    """Run the `given` cells, as far as they run alone, and keep what they bind and what modules hold.

    :param given: their sources.
    """
    for source in given:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            _run(source, _given)
    for name, module in sys.modules.items():
        if name in _PACKAGES or name.startswith("dobnb."):
            _kept.append((vars(module), dict(vars(module))))


def test(source: str) -> None:
    """Run a test with the student's names, but for those that are given, or Python's own.

    :raises Exception: whatever the test raises.
    """
    for module, held in _kept:
        module.update(held)
    theirs = {name: what for name, what in vars(sys.modules["__main__"]).items() if name not in vars(builtins)}
    _run(_compile(source, "test", "exec"), {**theirs, **_given})
