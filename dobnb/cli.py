"""The command line: ``dobnb check | models | fetch | measure | merge | show | compare | train | book``.

Each command imports what it needs when it runs, so that ``dobnb book html`` loads no torch.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dobnb import __version__
from dobnb.errors import DobnbError, one_line

if TYPE_CHECKING:
    import pandas as pd


def _check(arguments: argparse.Namespace) -> int:
    from dobnb.check import read_matrix, verdict
    from dobnb.stochastic import MatrixError

    A = read_matrix(arguments.file, arguments.array)
    if A.ndim > 2:
        batch = f"{arguments.file}: shape {A.shape} is a batch of matrices; save one of them, or use check_equality"
        raise MatrixError(batch)
    try:
        holds, words = verdict(A, arguments.alpha)
    except MatrixError as error:
        counted = " (indices count from 0)" if str(error).startswith(("row", "entry")) else ""
        raise MatrixError(f"{arguments.file}: {error}{counted}") from None
    print(words)
    return 0 if holds else 3


def _models(arguments: argparse.Namespace) -> int:
    from dobnb.models import MODELS, is_cached

    rows = [("name", "layers", "heads", "tokens", "weights", "source")]
    for card in MODELS.values():
        where = "cached" if is_cached(card.name) else "not fetched" if card.embedded else "hub, not cached"
        rows.append((card.name, str(card.layers), str(card.heads), str(card.tokens), where, card.source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    from dobnb import weights

    for name in arguments.names or weights.EMBEDDED:
        print(f"{name}: {weights.fetch(name)}", flush=True)
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    from dobnb import untrained
    from dobnb.inputs import read_inputs
    from dobnb.measurement import MeasurementError, prepare
    from dobnb.runs import check_folder, run

    out, draws = arguments.out, arguments.untrained
    if draws and (arguments.matrices or arguments.shard != (1, 1)):
        raise MeasurementError("--untrained takes neither --shard nor --matrices; leave them out")
    (untrained.check_folder if draws else check_folder)(out)
    inputs = read_inputs(
        arguments.inputs, arguments.name, arguments.n,
        size=arguments.size, length=arguments.length, revision=arguments.revision, untrained=draws is not None,
    )  # fmt: skip
    for name, why in inputs.left_out:
        _say(one_line(f"left out: {name}: {why}"))
    if draws:
        record = untrained.measure_untrained(
            arguments.name, inputs, draws, out, batch_size=arguments.batch_size, device=arguments.device,
            revision=arguments.revision, scheduler=arguments.scheduler, progress=_progress(), tell=_say,
        )  # fmt: skip
        found = f"{draws} untrained draws of {arguments.name} on {record['n']} inputs"
        print(f"{found}: {out / untrained.FILE}; `dobnb show {out}` prints it")
        return 0
    job = prepare(
        arguments.name, inputs, batch_size=arguments.batch_size, device=arguments.device, revision=arguments.revision,
        load_on="cpu" if arguments.scheduler else None,
    )  # fmt: skip
    found = run(
        job, out, shard=arguments.shard, scheduler=arguments.scheduler, matrices=arguments.matrices,
        progress=_progress(), tell=_say,
    )  # fmt: skip
    if found is not None:
        print(f"{arguments.name} on {found.n[0]} inputs: {out / 'result.json'}; `dobnb show {out}` prints it")
    return 0


def _say(line: str) -> None:
    """A line for people, beside what a command prints."""
    print(line, file=sys.stderr, flush=True)


def _progress() -> Callable[[int, int], None]:
    """On a terminal a bar with rate and time left; elsewhere a line at the first batch, the last, and every minute."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        bars: list[tqdm] = []

        def move(done: int, n: int) -> None:
            if not bars:
                bars.append(tqdm(total=n, unit=" inputs", smoothing=0.1))
                bars[0].n = bars[0].initial = done
                bars[0].refresh()
            bars[0].update(done - bars[0].n)
            if done == n:
                bars[0].close()

        return move

    begun: list[tuple[float, int]] = []  # the first call, whose inputs were not timed
    last = float("-inf")

    def line(done: int, n: int) -> None:
        nonlocal last
        now = time.monotonic()
        begun[:] = begun or [(now, done)]
        seconds, inputs = now - begun[0][0], done - begun[0][1]
        if done < n and now - last < 60:
            return
        last = now
        rate = inputs / seconds if seconds else 0.0
        timed = f", {rate:.3g} a second, {(n - done) / rate:.0f} s left" if rate else ""
        _say(f"{done}/{n} inputs{timed}")

    return line


def _merge(arguments: argparse.Namespace) -> int:
    from dobnb.runs import merge

    found = merge(arguments.folders, arguments.out, matrices=arguments.matrices)
    out = arguments.out
    print(f"{found.n[0]} inputs out of {len(arguments.folders)} folders: {out / 'result.json'}; `dobnb show {out}`")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from dobnb.measurement import Measurement, MeasurementError, failures, table
    from dobnb.training import EVALUATION, read_evaluation
    from dobnb.untrained import FILE, null_table, read_null

    nulls, trained, found = [], [], []
    for path in arguments.files:
        path = next((path / name for name in (FILE, EVALUATION) if (path / name).exists()), path)
        if path.is_dir() and not (path / "result.json").exists() and [*path.glob("seed_*"), *path.glob("*/seed_*")]:
            raise MeasurementError(f"{path} holds a run that has not ended; give its command again")
        names = _fields(path)
        if "runs" in names:
            trained.append((path, read_evaluation(path)))
        elif "untrained" in names:
            nulls.append(read_null(path))
        else:
            found.append(Measurement.load(path))
    if nulls:
        print("Untrained, % of inputs and layers, mean and deviation over draws")
        print(null_table(nulls).to_string())
    for path, record in trained:
        print(f"{path.parent.name if path.name == EVALUATION else path.stem}, trained beside untrained, % of inputs")
        print(_beside_untrained(record).to_string())
    if found:
        print("As the paper's Table 1")
        print(table(found).to_string())
        print("\nInputs that fail, as the paper's Table 4")
        print(failures(found).to_string())
    return 0


def _fields(path: Path) -> set[str]:
    """The names at the top of a JSON file; none where it is not readable, which its reader then says."""
    try:
        return set(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, TypeError):
        return set()


def _beside_untrained(record: Mapping[str, Any]) -> pd.DataFrame:
    from dobnb import ft_transformer, small_vit

    return (ft_transformer if "table" in record else small_vit).against_null(record)


def _compare(arguments: argparse.Namespace) -> int:
    from dobnb.measurement import Measurement, flips

    found = flips(Measurement.load(arguments.first), Measurement.load(arguments.second))
    print("Verdicts that differ, by layer")
    print(found.to_string())
    return 0


def _train_ft_transformer(arguments: argparse.Namespace) -> int:
    import torch

    from dobnb.ft_transformer import check_blocks, evaluate, train
    from dobnb.tables import baselines, load_table
    from dobnb.training import EVALUATION, check_seed, save_evaluation

    check_blocks(arguments.blocks)
    for seed in arguments.seeds:
        check_seed(seed)
    table = load_table(arguments.data, data_home=arguments.data_home, split=arguments.split, target=arguments.target)
    sizes = ", ".join(f"{len(rows)} {part}" for part, rows in table.y.items())
    print(f"{table.name}: {len(table.features)} features, {table.task}, rows: {sizes}", flush=True)
    for name, found in baselines(table).items():
        print(f"{name}: test {table.metric} {found['test']:.4f}", flush=True)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for seed in dict.fromkeys(arguments.seeds):
        record = train(
            table, arguments.blocks, seed, arguments.out / f"seed_{seed}", batch_size=arguments.batch_size,
            max_epochs=arguments.max_epochs, precision=arguments.precision,
            report=lambda line, seed=seed: print(f"seed {seed}  {line}", flush=True),
        )  # fmt: skip
        reached = record["metrics"]["test"]
        print(f"seed {seed}  test {table.metric} {reached:.4f} (epoch {record['best_epoch']})", flush=True)
    if arguments.blocks == 1:
        print("no attention is measured: the only block queries cls alone")
        return 0
    out = arguments.out / EVALUATION
    save_evaluation(evaluate(table, arguments.out, list(dict.fromkeys(arguments.seeds)), arguments.untrained), out)
    print(f"attention of trained and untrained models: {out}; `dobnb show {arguments.out}` prints it")
    return 0


def _train_vit(arguments: argparse.Namespace) -> int:
    import torch

    from dobnb.small_vit import evaluate, train
    from dobnb.training import EVALUATION, check_seed, save_evaluation

    for seed in arguments.seeds:
        check_seed(seed)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    seeds, objectives = (list(dict.fromkeys(given)) for given in (arguments.seeds, arguments.objective))
    for objective in objectives:
        for seed in seeds:
            name = f"{objective}, seed {seed}"
            record = train(
                objective, seed, arguments.out / objective / f"seed_{seed}", epochs=arguments.epochs,
                report=lambda line, name=name: print(f"{name}  {line}", flush=True),
            )  # fmt: skip
            print(f"{name}  test {record['metric']} {record['test']:.4f}", flush=True)
    out = arguments.out / EVALUATION
    save_evaluation(evaluate(arguments.out, seeds, objectives, arguments.untrained, report=_say), out)
    print(f"attention of trained and untrained models: {out}; `dobnb show {arguments.out}` prints it")
    return 0


def _book(arguments: argparse.Namespace) -> int:
    from dobnb import book

    root = Path.cwd()
    if arguments.step is None:
        book.book(root)
    elif arguments.step == "html":
        book.html(root)
    elif arguments.step == "pdf":
        book.pdf(root)
    elif arguments.step == "run":
        overrides = {name: _literal(value) for name, value in arguments.parameters}
        book.run(root, arguments.profile, arguments.only, overrides)
    else:
        findings = book.check(root)
        for finding in findings:
            print(finding, file=sys.stderr)
        errors = sum(finding.level == "error" for finding in findings)
        print(f"{len(book.chapters(root))} chapters: {errors} errors, {len(findings) - errors} warnings")
        if errors:
            print("where they differ, the text is the source: edit it there, then `make run`", file=sys.stderr)
        return 1 if errors else 0
    return 0


def _literal(value: str) -> Any:
    """A parameter's value as Python reads it (``3``, ``0.5``, ``[1, 2]``); what is no literal is a string."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number of at least 1")
    return int(value)


def _shard(value: str) -> tuple[int, int]:
    k, slash, m = value.partition("/")
    if not (slash and k.isdecimal() and m.isdecimal() and 1 <= int(k) <= int(m)):
        raise argparse.ArgumentTypeError(f"{value!r} is not K/M, with K from 1 to M")
    return int(k), int(m)


def _alpha(value: str) -> Fraction:
    from dobnb.check import parse_fraction

    try:
        alpha = parse_fraction(value)
    except ValueError:
        alpha = Fraction(0)
    if not 0 < alpha < 1:
        raise argparse.ArgumentTypeError(f"{value[:40]!r} is not a number strictly between 0 and 1")
    return alpha


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = argparse.ArgumentParser(prog="dobnb", description="When is the Dobrushin bound on attention rollout tight?")
    top.add_argument("--version", action="version", version=f"dobnb {__version__}")
    commands = top.add_subparsers(required=True, metavar="command")

    check = commands.add_parser(
        "check",
        help="is the bound tight for a matrix of your own?",
        description="Exit code 0 where the layerwise bound is tight, 3 where it is not, 2 on bad input.",
    )
    check.add_argument(
        "file", type=Path, metavar="FILE",
        help="one row-stochastic matrix: .npy, .npz, or .csv (numbers or fractions like 1/3, no header)",
    )  # fmt: skip
    check.add_argument("--alpha", type=_alpha, default=Fraction(1, 2), help="residual's weight (default: %(default)s)")
    check.add_argument("--array", metavar="NAME", help="which array of an .npz that holds several")
    check.set_defaults(command=_check)

    models = commands.add_parser("models", help="list the models that can be measured")
    models.set_defaults(command=_models)

    fetch = commands.add_parser("fetch", help="download embedded weights into the cache, and verify them")
    fetch.add_argument("names", nargs="*", metavar="NAME", help="default: all embedded weights")
    fetch.set_defaults(command=_fetch)

    measure = commands.add_parser(
        "measure",
        help="count how often a model's attention satisfies the condition",
        description="Interrupted, by whatever, the same command goes on where it was.",
    )
    measure.add_argument(
        "name", metavar="NAME", help="a model that `dobnb models` lists, hf:ORG/NAME, timm:NAME, or a folder"
    )
    measure.add_argument(
        "--inputs", default="embedded", metavar="SOURCE",
        help="a folder of images, a text file, imagenette, wikitext-2, random (word pieces), or embedded (default)",
    )  # fmt: skip
    measure.add_argument("--n", type=_count, help="number of inputs (default: all there are; 32 embedded ones)")
    measure.add_argument("--size", type=_count, help="side of the images in pixels (default: the model's own)")
    measure.add_argument("--length", type=_count, help="word pieces a text (default: 126)")
    measure.add_argument(
        "--untrained", type=_count, metavar="K",
        help="measure K draws of the architecture with random weights instead; the paper's models need no hub for it",
    )  # fmt: skip
    measure.add_argument("--batch-size", type=_count, default=16, help="inputs at a time (default: %(default)s)")
    measure.add_argument("--device", default="cpu", help="where torch computes (default: %(default)s)")
    measure.add_argument("--revision", help="branch, tag or commit of a hub model (default: the hub's)")
    measure.add_argument("--shard", type=_shard, default=(1, 1), metavar="K/M", help="measure part K of M alone")
    measure.add_argument("--scheduler", metavar="tcp://HOST:PORT", help="spread blocks over a Dask cluster")
    measure.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where result.json goes: runs/NAME")
    measure.set_defaults(command=_measure)

    merge = commands.add_parser("merge", help="put the shards of a run together")
    merge.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="the --out of a shard")
    merge.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where result.json goes")
    merge.set_defaults(command=_merge)
    for command in (measure, merge):
        command.add_argument("--matrices", action="store_true", help="keep the averaged matrices (at most 50 MB)")

    show = commands.add_parser("show", help="print what `dobnb measure` or `dobnb train` found, as tables")
    show.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a result, or the folder it is in")
    show.set_defaults(command=_show)

    compare = commands.add_parser("compare", help="count the verdicts that differ between two runs on the same inputs")
    compare.add_argument("first", type=Path, metavar="FILE", help="result.json, or the folder it is in")
    compare.add_argument("second", type=Path, metavar="FILE")
    compare.set_defaults(command=_compare)

    goes_on = "Interrupted or killed, the same command goes on where it was, to the same weights."
    train = commands.add_parser("train", help="train a model, and measure its attention", description=goes_on)
    trained = train.add_subparsers(required=True, metavar="MODEL")
    table = trained.add_parser("ft-transformer", help="FT-Transformer on a table", description=goes_on)
    table.add_argument(
        "--data", required=True, metavar="NAME|FILE", help="california, higgs, diabetes, or a .csv or .npz file"
    )
    table.add_argument("--data-home", type=Path, metavar="FOLDER", help="where scikit-learn keeps its downloads")
    table.add_argument("--split", type=Path, metavar="FOLDER", help="row numbers: train.npy, val.npy, test.npy")
    table.add_argument(
        "--target", metavar="COLUMN", help="of a .csv (default: the last); 0 and 1 are two classes, else regression"
    )
    table.add_argument("--blocks", type=_count, default=3, help="1 to 6 (default: %(default)s)")
    table.add_argument("--batch-size", type=_count, help="rows an update (default: 256; 512 for higgs)")
    table.add_argument("--max-epochs", type=_count, help="stop after so many at the latest")
    table.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="(default: %(default)s)")
    table.set_defaults(command=_train_ft_transformer)
    vit = trained.add_parser("vit", help="a small vision transformer on digits", description=goes_on)
    vit.add_argument(
        "--objective", choices=["labels", "masked"], nargs="+", default=["labels", "masked"],
        help="name the digit, or reconstruct hidden patches (default: one after the other)",
    )  # fmt: skip
    vit.add_argument("--epochs", type=_count, default=60, help="(default: %(default)s)")
    vit.set_defaults(command=_train_vit)
    for one in (table, vit):
        one.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="one run each (default: 0)")
        one.add_argument("--untrained", type=_count, default=20, help="models of the null (default: %(default)s)")
        one.add_argument("--threads", type=_count, help="of torch (default: its own choice)")
        one.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="one folder a seed goes there")

    afresh = "Without a step: execute every chapter afresh into _build/, and render."
    book = commands.add_parser("book", help="execute and render the book", description=afresh)
    book.set_defaults(command=_book, step=None)
    steps = book.add_subparsers(dest="step", metavar="step")
    run = steps.add_parser("run", help="execute the chapters that changed, into book/ (profile `book`) or runs/")
    run.add_argument("--profile", default="book", help="named parameters of the chapters (default: %(default)s)")
    run.add_argument("--only", metavar="NN", help="chapters whose name starts so")
    run.add_argument(
        "-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
        help="override one parameter; the notebook then goes to runs/",
    )  # fmt: skip
    steps.add_parser("html", help="render the committed notebooks, without executing them")
    steps.add_parser("pdf", help="print the committed notebooks as one PDF, with Chromium")
    steps.add_parser("check", help="compare the notebooks with their text; exit 1 if they differ")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit code 0; 1 where a check of the book found errors; 2 a mistake or a failure; 3 where a
    matrix's bound is not tight; 130 interrupted; 141 nobody reads what it prints."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except BrokenPipeError:  # the reader, `head` for instance, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (DobnbError, OSError) as error:
        print(f"dobnb: error: {one_line(str(error))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"dobnb: error: {error}; install the extras: pip install -e '.[book,test]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        _say("\ndobnb: interrupted; nothing half-written is left behind; run the same command again")
        return 130
