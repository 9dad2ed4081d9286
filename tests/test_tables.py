"""Tables: where rows come from, how they are divided and prepared, what is refused, and the baselines."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.special import ndtr

from dobnb import tables
from dobnb.tables import PARTS, TableError, baselines, load_table, make_table, prepare, read_split, score, split_rows


def frame(n: int = 60, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    data = pd.DataFrame({"a": draw.normal(size=n), "b": draw.integers(0, 5, n), "c": draw.exponential(size=n)})
    return data.assign(y=data.a + data.b - data.c)


def csv(folder: Path, data: pd.DataFrame) -> Path:
    path = folder / "mine.csv"
    data.to_csv(path, index=False)
    return path


def test_california_is_split_as_the_reference_does(test_data: Path) -> None:
    reference = read_split(test_data / "rtdl_california_split", 20640)
    assert [len(reference[part]) for part in PARTS] == [13209, 3303, 4128]
    table = load_table("california", data_home=test_data / "scikit_learn_data")
    given = load_table(
        "california", data_home=test_data / "scikit_learn_data", split=test_data / "rtdl_california_split"
    )
    ours = split_rows(np.zeros(20640), "regression")
    for part in PARTS:
        assert np.array_equal(ours[part], reference[part])
    assert table.digest == given.digest and table.split != given.split
    assert table.task == "regression" and table.metric == "RMSE" and len(table.features) == 8


def test_higgs_rows_at_hand(test_data: Path) -> None:
    table = load_table(test_data / "higgs_sample.npz")
    # val and test are exactly those of the 98 050-row benchmark (the README beside the file)
    assert {part: len(table.y[part]) for part in PARTS} == {"train": 16075, "val": 15688, "test": 19610}
    assert table.task == "classification" and table.metric == "accuracy" and len(table.features) == 28


def test_higgs_by_name_loses_the_row_with_missing_values(monkeypatch: pytest.MonkeyPatch) -> None:
    data = frame(101).drop(columns="y")
    data.loc[100, ["a", "c"]] = np.nan
    y = pd.Series(["0", "1"] * 50 + ["1"], dtype="category")
    asked = {}

    def fetch(**arguments: object) -> SimpleNamespace:
        asked.update(arguments)
        return SimpleNamespace(data=data, target=y)

    monkeypatch.setattr(tables.datasets, "fetch_openml", fetch)
    table = load_table("higgs", data_home="some/folder")
    assert asked["data_id"] == 23512 and asked["data_home"] == "some/folder"
    assert sum(len(table.y[part]) for part in PARTS) == 100
    assert all(table.y[part].mean() == 0.5 for part in PARTS)  # stratified


def test_diabetes_needs_no_download() -> None:
    table = load_table("diabetes")
    assert sum(len(table.y[part]) for part in PARTS) == 442
    assert len(table.features) == 10 and table.task == "regression"


def test_data_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(**_: object) -> None:
        raise OSError("no route\nto host")

    monkeypatch.setattr(tables.datasets, "fetch_california_housing", fetch)
    with pytest.raises(TableError, match=r"cannot be fetched: no route to host; .* \(data_home, --data-home\)"):
        load_table("california")


def test_a_csv_of_ones_own(tmp_path: Path) -> None:
    path = csv(tmp_path, frame())
    table = load_table(path)
    assert table.name == "mine" and table.features == ("a", "b", "c") and table.task == "regression"
    assert [len(table.y[part]) for part in PARTS] == [38, 10, 12]
    other = load_table(path, target="a")
    assert other.features == ("b", "c", "y") and other.digest != table.digest
    rows = split_rows(frame().y.to_numpy(), "regression")
    assert np.array_equal(table.X["test"], frame()[["a", "b", "c"]].to_numpy(np.float32)[rows["test"]])
    assert np.allclose(table.y["val"], frame().y.to_numpy()[rows["val"]], rtol=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.assign(a=1.0), "column 'a' is constant in the training part"),
        (lambda d: d.assign(a=1.0 + 1e-12 * np.arange(len(d))), "column 'a' is constant"),  # in float32
        (lambda d: d.assign(a=[np.nan, *d.a[1:]]), "column 'a' lacks 1 of 60 values, row 0 first"),
        (lambda d: d.assign(a="red"), "column 'a' holds text such as 'red'"),
        (lambda d: d.assign(b=["?", *d.b[1:].astype(str)]), r"column 'b' holds text such as '\?'"),
        (lambda d: d.assign(c=[np.inf, *d.c[1:]]), "row 0 of column 'c' is infinite"),
        (lambda d: d.assign(c=[1e300, *d.c[1:]]), "row 0 of column 'c' is infinite in float32"),
        (lambda d: d.assign(y=2.0), "the target has one value"),
        (lambda d: d.assign(y=[np.nan, *d.y[1:]]), "column 'y' lacks 1 of"),
        (lambda d: d.assign(y=[np.inf, *d.y[1:]]), "row 0 of the target is infinite"),
        (lambda d: d.assign(y="yes"), "column 'y' holds text"),
        (lambda d: d[:14], "8 training rows; 10 are needed"),
        (lambda d: d[:1], "1 rows cannot be split"),
        (lambda d: d[:0], "has no rows"),
        (lambda d: d[["y"]], "has no feature"),
        (lambda d: d[["a", "y"]], "has one feature; attention among features needs two"),
        (lambda d: d.assign(y=[1e200, *d.y[1:]]), "row 0 of the target is infinite in float32"),
        (lambda d: d.assign(y=[1] + [0] * 59), "60 rows cannot be split: .*least populated class"),
    ],
)
def test_what_training_could_not_use_is_refused(tmp_path: Path, change, message: str) -> None:
    with pytest.raises(TableError, match=message):
        load_table(csv(tmp_path, change(frame())))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"gone\.csv does not exist"):
        load_table(tmp_path / "gone.csv")
    with pytest.raises(TableError, match=r"'mine\.parquet' is no data set; pass california, higgs, diabetes"):
        load_table(tmp_path / "mine.parquet")
    (tmp_path / "german.csv").write_text("a;b;y\n1;2;3\n")
    with pytest.raises(TableError, match=r"german\.csv has semicolons between its columns; separate them with commas"):
        load_table(tmp_path / "german.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(TableError, match=r"empty\.csv is no readable table"):
        load_table(tmp_path / "empty.csv")
    path = csv(tmp_path, frame())
    with pytest.raises(TableError, match="no column 'z'; its columns are a, b, c, y"):
        load_table(path, target="z")
    with pytest.raises(TableError, match=r"target names the column of a \.csv"):
        load_table("diabetes", target="y")
    with pytest.raises(TableError, match="two columns called 'a'"):
        X = frame().drop(columns="y").rename(columns={"b": "a"})
        make_table("t", X, frame().y.to_numpy(), split_rows(np.zeros(60), "regression"), "regression", "")


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("1,2,3\n", "begins with numbers; its first line must name the columns"),
        (",a,y\n", r"column 1 of .* has no name; .* numbers the rows"),
        ("a,a,y\n", "two columns called 'a'"),
        ("a,y\n", "names 2 columns and has 3"),
    ],
)
def test_a_header_that_pandas_would_mend(tmp_path: Path, first: str, message: str) -> None:
    rows = "".join(f"{k},{k % 7},{k % 5}\n" for k in range(30))
    (tmp_path / "mine.csv").write_text(first + rows)
    with pytest.raises(TableError, match=message):
        load_table(tmp_path / "mine.csv")


def npz(folder: Path, **changes: np.ndarray) -> Path:
    data = frame()
    arrays = {"X": data[["a", "b", "c"]].to_numpy(), "y": (data.y > 0).to_numpy(np.int8), "src": np.arange(60) % 4}
    arrays |= {"feature_names": np.array(["a", "b", "c"])} | changes
    np.savez(folder / "mine.npz", **{name: array for name, array in arrays.items() if array is not None})
    return folder / "mine.npz"


def test_an_npz_says_which_row_is_in_which_part(tmp_path: Path) -> None:
    table = load_table(npz(tmp_path))
    X = frame()[["a", "b", "c"]].to_numpy(np.float32)
    assert np.array_equal(table.X["test"], X[0::4]) and np.array_equal(table.X["val"], X[1::4])
    assert len(table.X["train"]) == 30 and table.task == "classification"
    with pytest.raises(TableError, match="says itself which row"):
        load_table(npz(tmp_path), split=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": None}, "src"),
        ({"src": np.zeros(60)}, "no rows in the train part"),
        ({"y": np.zeros(59)}, "X must have a row for each y"),
        ({"feature_names": np.array([{}, {}, {}], dtype=object)}, "no readable .npz"),
    ],
)
def test_a_bad_npz_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(TableError, match=message):
        load_table(npz(tmp_path, **changes))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (np.array([0, 1, 60]), "outside 0 ... 59"),
        (np.array([-1, 1]), "outside 0 ... 59"),
        (np.array([0, 1, 50]), "names a row twice"),
        (np.array([0.0, 1.0]), "no list of row numbers"),
        (np.array([], dtype=int), "no list of row numbers"),
        (np.array([{}], dtype=object), "cannot be read"),
        (None, r"has no train\.npy"),
    ],
)
def test_a_bad_split_is_refused(tmp_path: Path, train: np.ndarray | None, message: str) -> None:
    np.save(tmp_path / "val.npy", np.arange(40, 50))
    np.save(tmp_path / "test.npy", np.arange(50, 60))
    if train is not None:
        np.save(tmp_path / "train.npy", train)
    with pytest.raises(TableError, match=message):
        load_table(csv(tmp_path, frame()), split=tmp_path)


def test_preparation_against_its_definition() -> None:
    """The quantile map written out with numpy: the mean of the interpolations from the left and from the right. It is
    compared as probabilities, for the ends are near 0 and 1, where the normal quantiles magnify rounding."""
    table = load_table("diabetes")
    prepared = prepare(table, seed=3)
    X = table.X["train"]
    noise = np.random.default_rng(3).standard_normal(X.shape) * (1e-3 / np.maximum(X.std(0), 1e-3))
    noisy = (X + noise).astype(np.float32).astype(np.float64)
    levels = np.linspace(0, 1, 10)  # a thirtieth of 282 rows is 9, and 10 is the least
    for part in PARTS:
        assert np.abs(prepared.X[part]).max() < 5.2  # the quantile of 1 - 1e-7
        for k in range(X.shape[1]):
            knots = np.quantile(noisy[:, k], levels)
            x = table.X[part][:, k].astype(np.float64)
            expected = (np.interp(x, knots, levels) - np.interp(-x, -knots[::-1], -levels[::-1])) / 2
            assert np.allclose(ndtr(prepared.X[part][:, k].astype(np.float64)), expected, rtol=0, atol=1e-6)
    train = table.y["train"]
    assert np.allclose(prepared.y["test"], (table.y["test"] - train.mean()) / train.std(), atol=1e-6)
    assert np.allclose(prepared.y["train"].std(), 1, atol=1e-6)


def test_preparation_looks_at_the_training_part_alone() -> None:
    data = frame()
    rows = split_rows(data.y.to_numpy(), "regression")
    moved = data.copy()
    moved.loc[np.concatenate([rows["val"], rows["test"]]), ["a", "c", "y"]] += 100.0
    one, two = (
        prepare(make_table("t", d.drop(columns="y"), d.y.to_numpy(), rows, "regression", ""), seed=0)
        for d in (data, moved)
    )
    assert np.array_equal(one.X["train"], two.X["train"]) and one.mean == two.mean and one.scale == two.scale
    assert not np.array_equal(one.X["test"], two.X["test"])


def test_scores() -> None:
    y = np.arange(60) % 2
    table = make_table("t", frame().drop(columns="y"), y, split_rows(y, "classification"), "classification", "")
    assert score(table, "test", table.y["test"]) == 1
    assert score(table, "test", 1 - table.y["test"]) == 0
    regression = load_table("diabetes")
    assert score(regression, "val", regression.y["val"] + 3) == pytest.approx(3)


def test_the_linear_baseline_is_least_squares() -> None:
    table = load_table("diabetes")
    found = baselines(table)
    design = {part: np.column_stack([np.ones(len(X)), X.astype(np.float64)]) for part, X in table.X.items()}
    weights = np.linalg.lstsq(design["train"], table.y["train"], rcond=None)[0]
    for part in ("val", "test"):
        expected = np.sqrt(np.mean((design[part] @ weights - table.y[part]) ** 2))
        assert found["linear"][part] == pytest.approx(expected, rel=1e-5)
    mean = np.sqrt(np.mean((table.y["test"] - table.y["train"].mean()) ** 2))
    assert found["boosting"]["test"] < mean


def test_baselines_on_california_are_near_the_papers(test_data: Path) -> None:
    """The paper's Table 3: 0.463 for (tuned) boosting, 0.731 for the linear model."""
    found = baselines(load_table("california", data_home=test_data / "scikit_learn_data"))
    assert found["boosting"]["test"] == pytest.approx(0.463, abs=0.02)
    assert found["linear"]["test"] == pytest.approx(0.731, abs=0.02)
