"""`dobnb check`: the verdict, the words and the exit code; files that hold no matrix are refused in one line."""

import subprocess
import sys
import zipfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dobnb.check import parse_fraction, verdict
from dobnb.cli import main

TIGHT = [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]
FAILS = [[0.1, 0.8, 0.1], [0.6, 0.2, 0.2], [0.3, 0.3, 0.4]]  # kappa 3/5, bound 4/5, gap 3/20 (chapter 2)


def write(folder: Path, name: str, content) -> str:
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif path.suffix == ".npz":
        np.savez(path, **content)
    else:
        np.save(path, np.array(content))
    return str(path)


def check(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["check", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def value(out: str, name: str) -> str:
    return next(line.removeprefix(name).split()[0] for line in out.splitlines() if line.startswith(name + "  "))


def test_a_tight_matrix(tmp_path, capsys):
    code, out, err = check(capsys, write(tmp_path, "tight.npy", TIGHT))
    assert (code, err) == (0, "")
    assert "The bound is tight: 1 pair of rows attains kappa, and rows 1 and 3 are mutually self-dominant." in out
    assert "Token 1 attends to itself (0.6) at least as much as token 3 attends to it (0.1)." in out
    assert "Token 3 attends to itself (0.7) at least as much as token 1 attends to it (0.1)." in out
    assert value(out, "kappa") == "0.6" and value(out, "gap") == "0" and "counted from 1" in out


def test_a_matrix_that_fails(tmp_path, capsys):
    code, out, err = check(capsys, write(tmp_path, "fails.npy", FAILS))
    assert (code, err) == (3, "")
    assert "not tight: 1 pair of rows attains kappa, rows 1 and 2, which are not mutually self-dominant." in out
    assert "Token 1 attends to itself (0.1) less than token 2 attends to it (0.6)." in out
    numbers = {"kappa": 0.6, "kappa of the factor": 0.65, "bound": 0.8, "gap": 0.15, "margin": 0.2}
    assert {name: float(value(out, name)) for name in numbers} == pytest.approx(numbers)
    assert value(out, "relative gap") == "50.0%"


def test_several_attaining_pairs_and_a_knife_edge(tmp_path, capsys):
    code, out, _ = check(capsys, write(tmp_path, "tie.npy", [[0.2, 0.1, 0.7], [0.1, 0.7, 0.2], [0.4, 0.5, 0.1]]))
    assert code == 0 and "2 pairs of rows attain kappa, and rows 1 and 2" in out
    assert "could flip this verdict" in out
    code, out, _ = check(capsys, write(tmp_path, "ring.npy", np.eye(3)[[1, 2, 0]]))
    assert code == 3 and "3 pairs of rows attain kappa, none of which is mutually self-dominant" in out
    assert "could flip" not in out


def test_equal_rows_have_no_relative_gap(tmp_path, capsys):
    code, out, _ = check(capsys, write(tmp_path, "equal.npy", np.full((2, 2), 0.5)))
    assert code == 0 and "undefined, kappa is 0" in out


def test_alpha_is_a_number_or_a_fraction(tmp_path, capsys):
    path = write(tmp_path, "swap.npy", [[0, 1], [1, 0]])  # gap 2 min(alpha, 1 - alpha), whole numbers are computed too
    for alpha, gap in (("1/4", 0.5), ("0.25", 0.5), ("0.75", 0.5), ("1/2", 1.0)):
        code, out, _ = check(capsys, path, "--alpha", alpha)
        assert code == 3 and float(value(out, "gap")) == pytest.approx(gap)
    for alpha in ("0", "1", "-1/2", "1/0", "nan", "half"):
        with pytest.raises(SystemExit) as stopped:
            main(["check", path, f"--alpha={alpha}"])
        assert stopped.value.code == 2 and "strictly between 0 and 1" in capsys.readouterr().err


def test_csv_of_decimals_and_of_fractions(tmp_path, capsys):
    decimals = "".join(",".join(map(str, row)) + "\n" for row in FAILS)
    code, out, _ = check(capsys, write(tmp_path, "decimals.csv", "\ufeff" + decimals.replace(",", ", ") + "\n"))
    assert code == 3 and float(value(out, "gap")) == pytest.approx(0.15) and "float64" in out
    fractions = "1/10,8/10,0.1\n3/5,1/5,1/5\n3/10,3/10,2/5\n"
    code, out, _ = check(capsys, write(tmp_path, "FRACTIONS.CSV", fractions))
    assert code == 3 and value(out, "gap") == "3/20" and value(out, "kappa of the factor") == "13/20"
    assert "Token 2 attends to itself (1/5) less than token 1 attends to it (4/5)." in out and "exact" in out


def test_npz_of_one_array_or_of_several(tmp_path, capsys):
    assert check(capsys, write(tmp_path, "one.npz", {"attention": TIGHT}))[0] == 0
    several = write(tmp_path, "several.npz", {"first": TIGHT, "second": FAILS})
    code, _, err = check(capsys, several)
    assert code == 2 and "2 arrays (first, second)" in err and "--array" in err
    assert check(capsys, several, "--array", "first")[0] == 0
    assert check(capsys, several, "--array", "second")[0] == 3
    assert "no array is called 'third'" in check(capsys, several, "--array", "third")[2]
    assert "only an .npz" in check(capsys, write(tmp_path, "a.npy", TIGHT), "--array", "first")[2]


def pickled(folder: Path) -> bytes:
    path = folder / "pickled.npy"
    np.save(path, np.array([[{}, 0], [0, 1]], dtype=object), allow_pickle=True)
    return path.read_bytes()


BAD = {
    "text.txt": ("1,0\n0,1\n", "suffix is '.txt'"),
    "none.csv": ("", "is empty"),
    "blank.csv": ("\n\n", "is empty"),
    "header.csv": ("a,b\n1,0\n0,1\n", "line 1, field 1 is 'a', not a number"),
    "semicolon.csv": ("1;0\n0;1\n", "line 1, field 1 is '1;0', not a number; separate numbers by commas"),
    "spaces.csv": ("1 0\n0 1\n", "line 1, field 1 is '1 0', not a number"),
    "word.csv": ("1,0\n0,one\n", "line 2, field 2 is 'one', not a number"),
    "zero.csv": ("1/0,0\n0,1\n", "line 1, field 1 is '1/0', not a number"),
    "ragged.csv": ("1,0\n0,1,0\n", "line 2 has 3 fields, line 1 has 2"),
    "binary.csv": (b"\xff\xfe\x00", "save it as UTF-8 text"),
    "nan.csv": ("nan,0\n0,1\n", "entry (0, 0) is nan; every entry must be a finite number (indices count from 0)"),
    "sum.csv": ("1,0\n0.5,0.6\n", "row (1,) sums to 1.1"),
    "sum-exact.csv": ("1,0\n1/2,1/3\n", "row (1,) sums to 5/6, not to exactly 1 (indices count from 0)"),
    "wide.csv": ("1,0\n", "shape (1, 2) is not square"),
    "wide-exact.csv": ("1/2,1/2\n", "shape (1, 2) is not one square matrix"),
    "underscore.csv": ("1_0,0\n0,1\n", "line 1, field 1 is '1_0', not a number"),
    "digits.csv": ("\u0661,0\n0,1\n", "line 1, field 1 is '\u0661', not a number"),
    "tiny.csv": ("1e-5000,1/2\n", "line 1, field 1 is '1e-5000', a number whose exponent is not within 300 of 0"),
    "huge.csv": ("1e999999999,1/2\n", "line 1, field 1 is '1e999999999', a number whose exponent"),
    "long.csv": (f"1/2,1/{'3' * 5000}\n", f"line 1, field 2 is '1/{'3' * 38}', more than 100 characters"),
    "nothing.npy": (b"", "no file of numpy's; write it with numpy.save or numpy.savez"),
    "garbage.npy": (b"0.5,0.5\n0.5,0.5\n", "no file of numpy's"),
    "pickle.npy": (b"\x80\x04N.", "no file of numpy's"),
    "text.npz": (b"no numpy file at all", "no file of numpy's"),
    "garbage.npz": (b"PK\x03\x04 no zip file", "cannot be read"),
    "nan.npy": (np.full((2, 2), np.nan), "entry (0, 0) is nan"),
    "negative.npy": ([[1.5, -0.5], [0, 1]], "entry (0, 1) is -0.5"),
    "vector.npy": ([0.5, 0.5], "shape (2,) is not square"),
    "number.npy": (1.0, "shape () is not square"),
    "one.npy": ([[1.0]], "N is 1"),
    "complex.npy": (np.eye(2, dtype=complex), "complex"),
    "words.npy": ([["a", "b"], ["c", "d"]], "not a numeric array"),
    "half.npy": (np.full((3, 3), 1 / 3, dtype=np.float16), "sums to"),
    "batch.npy": (np.stack([np.eye(2)] * 4), "shape (4, 2, 2) is a batch of matrices; save one of them"),
    "empty.npz": ({}, "0 arrays (none)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_matrix_is_refused_in_one_line(name, tmp_path, capsys):
    content, says = BAD[name]
    code, out, err = check(capsys, write(tmp_path, name, content))
    assert (code, out) == (2, "") and says in err
    assert err.count("\n") == 1 and err.startswith("dobnb: error: ") and name in err


def test_a_pickled_array_is_not_unpickled(tmp_path, capsys):
    code, _, err = check(capsys, write(tmp_path, "pickled.npy", pickled(tmp_path)))
    assert code == 2 and "it holds Python objects, which are never loaded" in err and err.count("\n") == 1
    np.savez(tmp_path / "pickled.npz", a=np.array([{}], dtype=object), allow_pickle=True)
    errors = [err, check(capsys, str(tmp_path / "pickled.npz"), "--array", "a")[2]]
    wide = np.zeros(1, dtype=[(f"field {k}", float) for k in range(1000)])  # numpy refuses so long a header
    errors.append(check(capsys, write(tmp_path, "wide.npy", wide))[2])
    assert "never loaded" in errors[1] and "its header is not that of a matrix" in errors[2]
    for error in errors:
        assert "trust" not in error and "allow_pickle" not in error and error.count("\n") == 1


def test_a_zip_file_of_other_things_is_refused(tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("readme.txt", "1,0")
    code, _, err = check(capsys, str(tmp_path / "other.npz"))
    assert code == 2 and "'readme.txt' in it is no array" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("1/3", Fraction(1, 3)), (" -0.25 ", Fraction(-1, 4)), ("2.5e-1", Fraction(1, 4)), (".5", Fraction(1, 2)),
     ("+3.E0", Fraction(3)), ("1e300", Fraction(10**300)), ("1e-300", Fraction(1, 10**300))],
)  # fmt: skip
def test_fractions_are_read_as_they_are_written(text, number):
    assert parse_fraction(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "half", "nan", "inf", "1/0", "1/2/3", "1 / 2", "1/-2", "1_0", "1/1_0", "\u0661/2", "\u00bd", "1e301", "1e-301",
     "1e999999999", "1e", ".", "0x1", "1j", "3" * 101],
)  # fmt: skip
def test_what_is_no_fraction_is_refused(text):
    with pytest.raises(ValueError, match=r"number|characters"):
        parse_fraction(text)


def test_numbers_that_differ_do_not_print_alike():
    _, words = verdict(np.array([[0.4, 0.6], [0.4 + 2**-30, 0.6 - 2**-30]]), Fraction(1, 2))
    assert "Token 1 attends to itself (0.4) less than token 2 attends to it (0.400000001)." in words
    half, tiny = Fraction(1, 2), Fraction(1, 10**40)
    _, words = verdict(np.array([[half - tiny, half + tiny], [half, half]]), half)
    assert f"Token 1 attends to itself (about 0.4{'9' * 39}) less than token 2 attends to it (1/2)." in words


def test_long_fractions_are_shortened():
    tiny = Fraction(1, 3**90)
    holds, words = verdict(np.array([[tiny, 1 - tiny], [1 - 2 * tiny, 2 * tiny]]), Fraction(1, 2))
    assert not holds and value(words, "kappa of the factor") == "about" and max(map(len, words.splitlines())) < 120
    huge = Fraction(1, 10**5000)  # more digits than Python writes
    assert "1e-5000" in verdict(np.array([[huge, 1 - huge], [1 - huge, huge]]), Fraction(1, 2))[1]


def test_a_truncated_file_is_refused(tmp_path, capsys):
    for name, content in (("cut.npy", TIGHT), ("cut.npz", {"a": np.random.default_rng(0).dirichlet(np.ones(64), 64)})):
        path = Path(write(tmp_path, name, content))
        path.write_bytes(path.read_bytes()[:-40])
        code, _, err = check(capsys, str(path))
        assert code == 2 and "cannot be read" in err and err.count("\n") == 1


def test_missing_files_and_folders_are_refused(tmp_path, capsys):
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "folder.csv").mkdir()
    for name, says in (("absent.npy", "No such file"), ("folder.npy", "directory"), ("folder.csv", "directory")):
        code, _, err = check(capsys, str(tmp_path / name))
        assert code == 2 and says in err and err.count("\n") == 1


def test_the_command_exits_with_the_verdict(tmp_path):
    for content, code in ((FAILS, 3), ([[1.0, 1.0], [0.0, 1.0]], 2)):
        command = [sys.executable, "-m", "dobnb", "check", write(tmp_path, "matrix.npy", content)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code and "Traceback" not in done.stderr
