"""Goes into a student's kernel as text, before their first cell, and runs the tests from there.

A test gets the given names as they are without the student, and Python's and numpy's own functions, so that a question
or the measure it is marked by is not changed by binding a name anew. It is no wall: all this is one process.
"""

import builtins
import contextlib
import importlib.abc
import io
import sys
import types
from collections.abc import Iterator

ALONE = "# Write it yourself:"
"""What a test starts with that asks for a function which `dobnb` has: while it runs, the package refuses to work."""
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
    with _without_dobnb() if source.startswith(ALONE) else contextlib.nullcontext():
        _run(_compile(source, "test", "exec"), {**theirs, **_given})
    for module, held in _kept:
        changed = [name for name, what in held.items() if module.get(name) is not what]
        if changed and not _ours(held["__name__"]):  # ours keeps what it compiled
            raise RuntimeError(f"{held['__name__']}.{changed[0]} was changed while the test ran")


def _ours(module: object) -> bool:
    return str(module).partition(".")[0] == "dobnb"


def _refused(*_: object, **__: object) -> None:
    raise RuntimeError("write it yourself: dobnb may not be used in this question")


class _Closed(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if _ours(name):
            _refused()


@contextlib.contextmanager
def _without_dobnb() -> Iterator[None]:
    """The package's functions raise, by whatever name they are called, and nothing more of it can be imported."""
    functions = {
        what: what.__code__
        for name, module in list(sys.modules.items())
        if _ours(name)
        for what in vars(module).values()
        if isinstance(what, types.FunctionType) and _ours(what.__module__) and not what.__closure__
    }
    closed = _Closed()
    sys.meta_path.insert(0, closed)
    for function in functions:
        function.__code__ = _refused.__code__
    try:
        yield
    finally:
        for function, code in functions.items():
            function.__code__ = code
        sys.meta_path.remove(closed)
