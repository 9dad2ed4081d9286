"""Files that are whole or absent."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write to; it takes the place of `path` when the context ends, and is gone if that raises.

    So the file is whole or not there: on failure the old one, if any, stays as it was. Makes missing folders. A process
    killed meanwhile leaves a hidden file behind, ``.NAME.….tmp``.

    :raises OSError: the folder cannot be written, or is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a file of text, UTF-8, as :func:`replacing` does.

    :raises OSError: the folder cannot be written, or is full.
    """
    with replacing(path) as file:
        file.write(text.encode())


def write_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, a list of plain values on one line, as :func:`replacing` does.

    :raises ValueError: a number that is not finite.
    :raises OSError: the folder cannot be written, or is full.
    """
    write_text(path, _pretty(record, "\n") + "\n")


def _pretty(value: Any, line: str) -> str:
    """JSON, indented; `line` ends a line and begins the next. Strings stay as they are, spaces included."""
    inner = line + " "
    if isinstance(value, Mapping) and value:
        fields = (f"{json.dumps(name)}: {_pretty(one, inner)}" for name, one in value.items())
        return "{" + ",".join(inner + field for field in fields) + line + "}"
    if isinstance(value, list | tuple) and any(isinstance(one, list | tuple | Mapping) for one in value):
        return "[" + ",".join(inner + _pretty(one, inner) for one in value) + line + "]"
    return json.dumps(value, allow_nan=False)


def short(value: Any) -> float:
    """A number as records have it: six significant digits, enough for people and for a file."""
    return float(f"{float(value):.6g}")
