"""The equality condition on a matrix of the user's own: reading the file, and the verdict in plain words."""

from __future__ import annotations

import csv
import re
import zipfile
import zlib
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from dobnb.equality import NEAR_TIE, EqualityReport, check_equality
from dobnb.errors import DobnbError
from dobnb.exact import ExactReport, exact_equality, rounded, shorten
from dobnb.stochastic import as_stochastic

NUMPY_FILES = (b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")
"""What the files of numpy.save, of numpy.savez, and of numpy.savez without an array begin with."""
NUMBER = re.compile(r"[+-]?(?:\d+/\d+|(?:\d+\.?\d*|\.\d+)(?:e(?P<exponent>[+-]?\d+))?)", re.ASCII | re.IGNORECASE)


class MatrixFileError(DobnbError):
    """A file holds no matrix that can be read."""


def read_matrix(path: Path, array: str | None = None) -> np.ndarray:
    """One matrix out of a file: floats, or fractions where a ``.csv`` writes any entry as ``1/3``.

    :param path: ``.npy``, ``.npz``, or ``.csv`` with one row a line, numbers separated by commas, no header.
    :param array: which array of an ``.npz``; needed where it holds several.
    :return: shape as stored, of floats, or of ``fractions.Fraction`` (dtype object). Entries are not checked.
    :raises MatrixFileError: no such file, another format, a pickled array, an entry that is no number
        (as a fraction: see :func:`parse_fraction`), nothing in it.
    """
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz", ".csv"):
        raise MatrixFileError(f"{path}: the suffix is {suffix!r}; save the matrix as .npy, .npz or .csv")
    if array is not None and suffix != ".npz":
        raise MatrixFileError(f"{path}: only an .npz has named arrays; leave out --array")
    try:
        if suffix == ".csv":
            return _read_csv(path)
        with open(path, "rb") as file:
            if not file.read(6).startswith(NUMPY_FILES):
                raise MatrixFileError(f"{path}: it is no file of numpy's; write it with numpy.save or numpy.savez")
            file.seek(0)
            loaded = np.load(file, allow_pickle=False)
            return _member(path, loaded, array) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    except OSError as error:
        raise MatrixFileError(f"{path}: {error.strerror or error}; pass the path of a file that can be read") from None
    except (ValueError, EOFError, MemoryError, csv.Error, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split())
        if "pickle" in reason:  # numpy's words go on to advise loading it all the same
            objects = "it holds Python objects, which are never loaded"
            reason = objects if "object" in reason.lower() else "its header is not that of a matrix"
        wanted = "save it as UTF-8 text" if suffix == ".csv" else "save numbers with numpy.save or savez, no objects"
        raise MatrixFileError(f"{path}: it cannot be read ({reason}); {wanted}") from None


def _member(path: Path, loaded: np.lib.npyio.NpzFile, array: str | None) -> np.ndarray:
    names = ", ".join(loaded.files) or "none"
    if array is None and len(loaded.files) != 1:
        raise MatrixFileError(f"{path}: it holds {len(loaded.files)} arrays ({names}); name one with --array NAME")
    if array is not None and array not in loaded.files:
        raise MatrixFileError(f"{path}: no array is called {array!r}; it holds {names}")
    member = loaded[array or loaded.files[0]]
    if not isinstance(member, np.ndarray):  # a zip file may hold anything, numpy returns its bytes
        raise MatrixFileError(f"{path}: {array or loaded.files[0]!r} in it is no array; write it with numpy.savez")
    return member


def parse_fraction(text: str) -> Fraction:
    """A number as it is written, without rounding.

    :param text: ``1/3``, ``0.25`` or ``2.5e-1``, with a sign or without, in ASCII digits; spaces around it are ignored.
    :raises ValueError: no such number, a zero denominator, more than 100 characters, or an exponent outside
        -300 ... 300, with which computing could take forever.

    >>> parse_fraction("0.25"), parse_fraction("1/3")
    (Fraction(1, 4), Fraction(1, 3))
    """
    text = text.strip()
    if len(text) > 100:
        raise ValueError("more than 100 characters")
    found = NUMBER.fullmatch(text)
    if not found:
        raise ValueError("not a number")
    if abs(int(found["exponent"] or 0)) > 300:
        raise ValueError("a number whose exponent is not within 300 of 0")
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise ValueError("not a number") from None


def _parse_float(text: str) -> float:
    try:
        if not text.isascii() or "_" in text:  # Python reads more than other programs write
            raise ValueError
        return float(text)
    except ValueError:
        raise ValueError("not a number") from None


def _read_csv(path: Path) -> np.ndarray:
    lines = [
        (number, row)
        for number, row in enumerate(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()), 1)
        if row
    ]
    if not lines:
        raise MatrixFileError(f"{path}: it is empty; write one row of the matrix a line")
    exact = any("/" in cell for _, row in lines for cell in row)
    parse = parse_fraction if exact else _parse_float
    matrix: list[list[Fraction | float]] = []
    for number, row in lines:
        if len(row) != len(lines[0][1]):
            first = f"line {lines[0][0]} has {len(lines[0][1])}"
            raise MatrixFileError(f"{path}: line {number} has {len(row)} fields, {first}; every row needs as many")
        matrix.append([])
        for field, cell in enumerate(row, 1):
            try:
                matrix[-1].append(parse(cell))
            except ValueError as error:
                wanted = "separate numbers by commas, and leave out headers"
                where = f"line {number}, field {field}"
                raise MatrixFileError(f"{path}: {where} is {cell[:40]!r}, {error}; {wanted}") from None
    return np.array(matrix, dtype=object if exact else float)


def _show(number: Any, digits: int = 6) -> str:
    return shorten(number, digits) if isinstance(number, Fraction) else f"{float(number):.{digits}g}"


def _show_both(x: Any, y: Any) -> tuple[str, str]:
    """Two numbers, in as many digits as it takes to tell them apart."""
    write = rounded if isinstance(x, Fraction) and isinstance(y, Fraction) else _show
    digits = next(digits for digits in count(6) if x == y or write(x, digits) != write(y, digits))
    return _show(x, digits), _show(y, digits)


def verdict(A: np.ndarray, alpha: Fraction) -> tuple[bool, str]:
    """Whether the layerwise bound of one matrix is tight (book: thm-equality), and the numbers and the reason in words.

    :param A: row-stochastic, shape (N, N), of floats, or of fractions (dtype object), which are computed exactly.
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`; for fractions :func:`dobnb.exact.exact_equality`.
    """
    report: EqualityReport | ExactReport
    if A.dtype == object:
        report = exact_equality(A, alpha)
    else:
        A = as_stochastic(A).numpy()
        report = check_equality(A, float(alpha))

    holds, attaining = bool(report.holds), int(report.attaining)
    i, j = (int(token) for token in report.pair)
    relative = "undefined, kappa is 0"
    if report.kappa > 0:
        relative = f"{float(report.relative_gap):.1%} of (1 - alpha) kappa"
    numbers = {
        "kappa": _show(report.kappa),
        "kappa of the factor": _show(report.factor_kappa),
        "bound": _show(report.bound),
        "gap": _show(report.gap),
        "relative gap": relative,
        "margin": _show(report.margin),
    }
    arithmetic = "exact fractions" if A.dtype == object else "float64"
    lines = [f"{len(A)} tokens, counted from 1; alpha {alpha}; {arithmetic}"]
    lines += [f"{name:<20} {number}" for name, number in numbers.items()]
    pairs = f"{attaining} pair{'s' * (attaining > 1)} of rows attain{'s' * (attaining == 1)} kappa"
    if holds:
        lines.append(f"The bound is tight: {pairs}, and rows {i + 1} and {j + 1} are mutually self-dominant.")
    else:
        which = f"rows {i + 1} and {j + 1}, which are not" if attaining == 1 else "none of which is"
        lines.append(f"The bound is not tight: {pairs}, {which} mutually self-dominant.")
    for own, other in ((i, j), (j, i)):
        kept, given = _show_both(A[own, own], A[other, own])
        compared = "at least as much as" if A[own, own] >= A[other, own] else "less than"
        lines.append(
            f"Token {own + 1} attends to itself ({kept}) {compared} token {other + 1} attends to it ({given})."
        )
    if report.margin < NEAR_TIE:
        lines.append(
            f"The margin is below {NEAR_TIE:g}: the rounding of a float32 forward pass could flip this verdict."
        )
    return holds, "\n".join(lines)
