"""The equality condition on a matrix of the user's own: reading the file, and the verdict in plain words."""

from __future__ import annotations

import csv
import zipfile
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np

from dobnb.equality import NEAR_TIE, EqualityReport, check_equality
from dobnb.errors import DobnbError
from dobnb.exact import ExactReport, exact_equality
from dobnb.stochastic import as_stochastic


class MatrixFileError(DobnbError):
    """A file holds no matrix that can be read."""


def read_matrix(path: Path, array: str | None = None) -> np.ndarray:
    """One matrix out of a file: floats, or fractions where a ``.csv`` writes any entry as ``1/3``.

    :param path: ``.npy``, ``.npz``, or ``.csv`` with one row a line, numbers separated by commas, no header.
    :param array: which array of an ``.npz``; needed where it holds several.
    :return: shape as stored, of floats, or of ``fractions.Fraction`` (dtype object). Entries are not checked.
    :raises MatrixFileError: no such file, another format, a pickled array, an entry that is no number, nothing in it.
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
            loaded = np.load(file, allow_pickle=False)
            return _member(path, loaded, array) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    except OSError as error:
        raise MatrixFileError(f"{path}: {error.strerror or error}; pass the path of a file that can be read") from None
    except (ValueError, EOFError, MemoryError, csv.Error, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split())
        wanted = "save it as UTF-8 text" if suffix == ".csv" else "save numbers with numpy.save or savez, no objects"
        raise MatrixFileError(f"{path}: it cannot be read ({reason}); {wanted}") from None


def _member(path: Path, loaded: np.lib.npyio.NpzFile, array: str | None) -> np.ndarray:
    names = ", ".join(loaded.files) or "none"
    if array is None and len(loaded.files) != 1:
        raise MatrixFileError(f"{path}: it holds {len(loaded.files)} arrays ({names}); name one with --array NAME")
    if array is not None and array not in loaded.files:
        raise MatrixFileError(f"{path}: no array is called {array!r}; it holds {names}")
    return loaded[array or loaded.files[0]]


def _read_csv(path: Path) -> np.ndarray:
    lines = [
        (number, row)
        for number, row in enumerate(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()), 1)
        if row
    ]
    if not lines:
        raise MatrixFileError(f"{path}: it is empty; write one row of the matrix a line")
    parse = Fraction if any("/" in cell for _, row in lines for cell in row) else float
    matrix = []
    for number, row in lines:
        if len(row) != len(lines[0][1]):
            first = f"line {lines[0][0]} has {len(lines[0][1])}"
            raise MatrixFileError(f"{path}: line {number} has {len(row)} fields, {first}; every row needs as many")
        for field, cell in enumerate(row, 1):
            try:
                parse(cell)
            except (ValueError, ZeroDivisionError):
                wanted = "separate numbers by commas, and leave out headers"
                where = f"line {number}, field {field}"
                raise MatrixFileError(f"{path}: {where} is {cell[:40]!r}, not a number; {wanted}") from None
        matrix.append([parse(cell) for cell in row])
    return np.array(matrix, dtype=object if parse is Fraction else float)


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

    def show(number: object) -> str:
        return str(number) if isinstance(number, Fraction) else f"{float(number):.6g}"

    holds, attaining = bool(report.holds), int(report.attaining)
    i, j = (int(token) for token in report.pair)
    relative = "undefined, kappa is 0"
    if report.kappa > 0:
        relative = f"{float(report.relative_gap):.1%} of (1 - alpha) kappa"
    numbers = {
        "kappa": show(report.kappa),
        "kappa of the factor": show(report.factor_kappa),
        "bound": show(report.bound),
        "gap": show(report.gap),
        "relative gap": relative,
        "margin": show(report.margin),
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
        compared = "at least as much as" if A[own, own] >= A[other, own] else "less than"
        lines.append(
            f"Token {own + 1} attends to itself ({show(A[own, own])}) {compared} "
            f"token {other + 1} attends to it ({show(A[other, own])})."
        )
    if report.margin < NEAR_TIE:
        lines.append("The margin is below 1e-06: the rounding of a float32 forward pass could flip this verdict.")
    return holds, "\n".join(lines)
