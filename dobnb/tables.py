"""Tables of numbers, split and prepared as the authors of FT-Transformer did; and the baselines beside it.

Sources: Gorishniy et al., *Revisiting deep learning models for tabular data*, NeurIPS 2021, and its published code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import QuantileTransformer, StandardScaler

from dobnb import provenance
from dobnb.errors import DobnbError

PARTS = ("train", "val", "test")
NOISE = 1e-3
"""Of the noise under the quantiles, as the reference has it."""
NAMED = ("california", "higgs", "diabetes")
"""Data sets that are fetched by name; diabetes ships with scikit-learn."""
HIGGS = 23512
"""The OpenML number of the 98 050 rows of Higgs."""
FEWEST = 10
"""Training rows that the quantiles need."""

Task = Literal["regression", "classification"]


class TableError(DobnbError, ValueError):
    """A table or its split cannot be used; the message names the column or the row."""


@dataclass(frozen=True)
class Table:
    """Numbers in three parts, ``train``, ``val`` and ``test``."""

    name: str
    """What it is, for people; never a path."""
    task: Task
    """``classification`` has two classes, 0 and 1."""
    features: tuple[str, ...]
    X: Mapping[str, np.ndarray]
    """By part: float32, shape (rows, features), finite, no column constant in ``train``."""
    y: Mapping[str, np.ndarray]
    """By part: float64, shape (rows,), finite; more than one value in ``train``."""
    split: str
    """How the rows were divided, for people."""
    digest: str
    """sha256 of the names and of every number, by part."""

    @property
    def metric(self) -> str:
        """``RMSE``, in the target's units, or ``accuracy``, in [0, 1]."""
        return "RMSE" if self.task == "regression" else "accuracy"


@dataclass(frozen=True)
class Prepared:
    """A table as the model reads it; see :func:`prepare`."""

    X: Mapping[str, np.ndarray]
    """By part: float32, shape (rows, features): each feature close to a standard normal on ``train``."""
    y: Mapping[str, np.ndarray]
    """By part: float32, shape (rows,): standardised, or 0 and 1."""
    mean: float
    """Of the training target, its units; 0 for classification."""
    scale: float
    """Standard deviation of the training target, its units; 1 for classification."""


def load_table(
    data: str | Path,
    *,
    data_home: str | Path | None = None,
    split: str | Path | None = None,
    target: str | None = None,
) -> Table:
    """A data set by name, or a file of one's own.

    - ``california``: 20 640 districts, 8 features, median house value in 100 000 dollars; scikit-learn downloads it.
    - ``higgs``: 98 050 rows of OpenML 23512, 28 features; scikit-learn downloads it. The one row with missing values is
      dropped, as the reference does.
    - ``diabetes``: 442 patients, 10 features; ships with scikit-learn.
    - a ``.csv`` with a header and numbers. The target is the column `target`, else the last. A target of exactly 0 and
      1 is two classes, any other is regression.
    - an ``.npz`` with the arrays ``X``, ``y``, ``feature_names`` and ``src``, which names the part of each row: 0 test,
      1 validation, anything else training.

    :param data_home: where scikit-learn keeps what it downloads; by default its own folder.
    :param split: a folder with ``train.npy``, ``val.npy`` and ``test.npy``, the row numbers of each part. Without one,
        :func:`split_rows` draws one; for California it draws the reference's: 13 209, 3 303 and 4 128 rows.
    :raises TableError: no such data, file, column or split; missing values, text, infinities, a constant column or
        target in the training part, too few rows; data that scikit-learn cannot fetch.
    """
    file = Path(data)
    if target is not None and file.suffix.lower() != ".csv":
        raise TableError(f"target names the column of a .csv; {file.name} has one target only")
    if str(data) in NAMED:
        name, X, y = str(data), *_named(str(data), data_home)
    elif file.suffix.lower() == ".csv":
        name, X, y = file.stem, *_csv(file, target)
    elif file.suffix.lower() == ".npz":
        if split is not None:
            raise TableError(f"{file.name} says itself which row is in which part; leave the split out")
        return _npz(file)
    else:
        raise TableError(f"{file.name!r} is no data set; pass {', '.join(NAMED)}, a .csv or an .npz file")
    task = _task(y)
    if split is None:
        rows, how = split_rows(y, task), "a fifth for testing, a fifth of the rest for validation"
    else:
        rows, how = read_split(split, len(y)), "row numbers given"
    return make_table(name, X, y, rows, task, how)


def make_table(
    name: str, X: pd.DataFrame, y: np.ndarray, rows: Mapping[str, np.ndarray], task: Task, how: str
) -> Table:
    """Divide a table into its parts, and refuse what training could not use.

    :param X: one column a feature, numbers.
    :param y: shape (rows,).
    :param rows: row numbers by part.
    :param how: the rule behind `rows`, for people.
    :raises TableError: see :func:`load_table`.
    """
    features = tuple(str(column) for column in X.columns)
    if not features:
        raise TableError(f"{name} has no feature; a table needs two beside its target")
    if len(features) == 1:
        raise TableError(f"{name} has one feature; attention among features needs two")
    if len(set(features)) < len(features):
        twice = next(feature for feature in features if features.count(feature) > 1)
        raise TableError(f"{name} has two columns called {twice!r}; rename one")
    values = np.empty(X.shape, dtype=np.float32)
    for k, feature in enumerate(features):
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
            values[:, k] = _numbers(X.iloc[:, k], feature, name)
        if not np.isfinite(values[:, k]).all():
            row = int(np.flatnonzero(~np.isfinite(values[:, k]))[0])
            raise TableError(f"{name}: row {row} of column {feature!r} is infinite in float32; rescale or drop it")
    target = _numbers(pd.Series(y), "target", name).astype(np.float64)
    with np.errstate(over="ignore"):
        finite = np.isfinite(target.astype(np.float32))
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise TableError(f"{name}: row {row} of the target is infinite in float32; rescale the target or drop the row")
    parts_X = {part: values[rows[part]] for part in PARTS}
    parts_y = {part: target[rows[part]] for part in PARTS}
    if len(parts_y["train"]) < FEWEST:
        raise TableError(f"{name} has {len(parts_y['train'])} training rows; {FEWEST} are needed at least")
    for k, feature in enumerate(features):
        if (parts_X["train"][:, k] == parts_X["train"][0, k]).all():
            raise TableError(f"{name}: column {feature!r} is constant in the training part; drop it")
    if (parts_y["train"] == parts_y["train"][0]).all():
        raise TableError(f"{name}: the target has one value in the training part; there is nothing to learn")
    head = json.dumps([name, task, features]).encode()
    digest = provenance.digest(head, *(a.tobytes() for part in PARTS for a in (parts_X[part], parts_y[part])))
    return Table(name, task, features, parts_X, parts_y, how, digest)


def _numbers(column: pd.Series, name: str, table: str) -> np.ndarray:
    """The values of a column, none missing."""
    if not pd.api.types.is_numeric_dtype(column) or pd.api.types.is_complex_dtype(column):
        example = next((value for value in column if isinstance(value, str)), column.iloc[0])
        raise TableError(f"{table}: column {name!r} holds text such as {str(example)[:20]!r}; encode or drop it")
    missing = column.isna().to_numpy()
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        lacks = f"column {name!r} lacks {missing.sum()} of {len(missing)} values, row {row} first, counted from 0"
        raise TableError(f"{table}: {lacks}; fill or drop these rows")
    return column.to_numpy()


def _task(y: np.ndarray) -> Task:
    return "classification" if set(np.unique(y)) == {0, 1} else "regression"


def split_rows(y: np.ndarray, task: Task) -> dict[str, np.ndarray]:
    """Row numbers by part: a fifth for testing, a fifth of the rest for validation, the rest for training.

    The first draw has seed 0 and the second seed 1, and two classes are stratified. For California these are the rows
    of the reference's published split, in its order.

    :param y: the target, shape (rows,).
    :raises TableError: too few rows, or a class too rare to stand in every part.
    """
    rows = np.arange(len(y))
    try:
        stratify = y if task == "classification" else None
        rest, test = train_test_split(rows, test_size=0.2, random_state=0, stratify=stratify)
        stratify = y[rest] if task == "classification" else None
        train, val = train_test_split(rest, test_size=0.2, random_state=1, stratify=stratify)
    except ValueError as error:
        raise TableError(f"{len(y)} rows cannot be split: {error}") from None
    return {"train": train, "val": val, "test": test}


def read_split(folder: str | Path, n: int) -> dict[str, np.ndarray]:
    """Row numbers by part from ``train.npy``, ``val.npy`` and ``test.npy``.

    :param n: rows of the table.
    :raises TableError: a file that is missing, unreadable or holds no integers; a row outside 0 ... n - 1, or in two
        places; an empty part.
    """
    rows = {}
    for part in PARTS:
        path = Path(folder) / f"{part}.npy"
        try:
            found = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            raise TableError(f"the split has no {path.name}; it needs train.npy, val.npy and test.npy") from None
        except (OSError, ValueError, EOFError) as error:
            raise TableError(f"{path.name} cannot be read: {error}") from None
        if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu" or not len(found):
            raise TableError(f"{path.name} holds no list of row numbers; save one-dimensional integers")
        if found.min() < 0 or found.max() >= n:
            raise TableError(f"{path.name} names a row outside 0 ... {n - 1}; the split belongs to another table")
        rows[part] = found
    together = np.concatenate(list(rows.values()))
    if len(np.unique(together)) < len(together):
        raise TableError("the split names a row twice; every row belongs to one part at most")
    return rows


def prepare(table: Table, seed: int) -> Prepared:
    """Bring features to a normal distribution by their quantiles, and standardise the target, as the reference does.

    The quantiles (a thirtieth of the training rows, at least 10 and at most 1000) are those of the training part with a
    little noise, which breaks ties: of standard deviation ``1e-3 / max(std, 1e-3)``, drawn with `seed`. The rows that
    are then transformed have no noise.
    """
    X = table.X["train"].copy()
    X += NOISE / np.maximum(X.std(axis=0), NOISE) * np.random.default_rng(seed).standard_normal(X.shape)
    quantiles = max(min(len(X) // 30, 1000), 10)
    normal = QuantileTransformer(
        output_distribution="normal", n_quantiles=quantiles, subsample=10**9, random_state=seed
    ).fit(X)
    mean, scale = 0.0, 1.0
    if table.task == "regression":
        mean, scale = float(table.y["train"].mean()), float(table.y["train"].std())
    return Prepared(
        {part: normal.transform(table.X[part]).astype(np.float32) for part in PARTS},
        {part: ((table.y[part] - mean) / scale).astype(np.float32) for part in PARTS},
        mean,
        scale,
    )


def score(table: Table, part: str, prediction: np.ndarray) -> float:
    """The metric of predictions for a part's rows.

    :param prediction: in the target's units, or for classification above 0.5 for class 1; shape (rows,).
    :return: root mean squared error in the target's units, or the share of right classes.
    """
    y = table.y[part]
    if table.task == "classification":
        return float(((prediction > 0.5) == (y == 1)).mean())
    return float(np.sqrt(np.mean((prediction.astype(np.float64) - y) ** 2)))


def baselines(table: Table, seed: int = 0) -> dict[str, dict[str, float]]:
    """The metric on ``val`` and ``test`` of gradient boosting and of a linear or logistic model, on the same parts.

    Both are scikit-learn's with its default settings, fitted on the training part; nothing is tuned. The linear model
    reads standardised features.
    """
    models: dict[str, Callable[[], Any]]
    if table.task == "regression":
        models = {
            "boosting": lambda: HistGradientBoostingRegressor(random_state=seed),
            "linear": lambda: make_pipeline(StandardScaler(), LinearRegression()),
        }
    else:
        models = {
            "boosting": lambda: HistGradientBoostingClassifier(random_state=seed),
            "linear": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        }
    found = {}
    for name, make in models.items():
        model = make().fit(table.X["train"], table.y["train"])
        found[name] = {part: score(table, part, model.predict(table.X[part])) for part in ("val", "test")}
    return found


# Where the rows come from -------------------------------------------------------------------------------------------


def _named(name: str, data_home: str | Path | None) -> tuple[pd.DataFrame, np.ndarray]:
    home = None if data_home is None else str(data_home)
    try:
        if name == "diabetes":
            bunch = datasets.load_diabetes(as_frame=True, scaled=False)
        elif name == "california":
            bunch = datasets.fetch_california_housing(data_home=home, as_frame=True)
        else:
            bunch = datasets.fetch_openml(data_id=HIGGS, data_home=home, as_frame=True, parser="auto")
    except Exception as error:  # what scikit-learn raises on a failed download has no common class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TableError(
            f"{name} cannot be fetched: {reason}; connect, or name the folder that holds it (data_home, --data-home)"
        ) from error
    X, y = bunch.data, bunch.target
    if name == "higgs":
        whole = X.notna().all(axis=1).to_numpy()
        X, y = X[whole], y[whole].astype(np.int64)
    return X, y.to_numpy()


def _csv(path: Path, target: str | None) -> tuple[pd.DataFrame, np.ndarray]:
    try:
        frame = pd.read_csv(path)
    except FileNotFoundError:
        raise TableError(f"{path.name} does not exist") from None
    except (OSError, ValueError) as error:  # pandas' parser errors are ValueErrors
        raise TableError(f"{path.name} is no readable table: {' '.join(str(error).split())}") from None
    if frame.empty:
        raise TableError(f"{path.name} has no rows")
    if frame.shape[1] == 1 and ";" in str(frame.columns[0]):
        raise TableError(f"{path.name} has semicolons between its columns; separate them with commas")
    _check_header(path)
    target = str(frame.columns[-1]) if target is None else target
    if target not in frame:
        raise TableError(f"{path.name} has no column {target!r}; its columns are {', '.join(map(str, frame.columns))}")
    return frame.drop(columns=target), _numbers(frame[target], target, path.stem)


def _check_header(path: Path) -> None:
    """Refuse what pandas would mend in silence: names that are missing or given twice, or no header at all."""
    names = [str(name) for name in pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]]
    if all(_is_number(name) for name in names):
        raise TableError(f"{path.name} begins with numbers; its first line must name the columns")
    for k, name in enumerate(names, 1):
        if not name.strip():
            raise TableError(f"column {k} of {path.name} has no name; name it, or drop it if it numbers the rows")
        if names.count(name) > 1:
            raise TableError(f"{path.name} has two columns called {name!r}; rename one")
    width = pd.read_csv(path, header=None, skiprows=1, nrows=1).shape[1]
    if width != len(names):  # pandas would take the first of more columns for an index
        raise TableError(f"{path.name} names {len(names)} columns and has {width}; name every one")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _npz(path: Path) -> Table:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            X, y, names, src = (arrays[key] for key in ("X", "y", "feature_names", "src"))
    except FileNotFoundError:
        raise TableError(f"{path.name} does not exist") from None
    except KeyError as error:
        raise TableError(f"{path.name}: {error.args[0]}; it needs X, y, feature_names and src") from None
    except (OSError, ValueError, EOFError) as error:
        raise TableError(f"{path.name} is no readable .npz file: {error}") from None
    if X.ndim != 2 or y.shape != (len(X),) or src.shape != (len(X),) or names.shape != (X.shape[1],):
        raise TableError(f"{path.name}: X must have a row for each y and src, and a column for each feature name")
    rows = {"train": np.flatnonzero(src > 1), "val": np.flatnonzero(src == 1), "test": np.flatnonzero(src == 0)}
    for part, found in rows.items():
        if not len(found):
            raise TableError(f"{path.name} has no rows in the {part} part; see src")
    frame = pd.DataFrame(X, columns=[str(name) for name in names])
    return make_table(path.stem, frame, y, rows, _task(y), "parts given with the rows")
