"""Cells to tables: `build` computes every number once, unrounded; `write` puts them on disk, `read` gets them back.

Numbers are rounded in `text` only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

import pandas as pd

from spectoolkit import files, metrics
from spectoolkit.errors import UsageError
from spectoolkit.report import html, latex, standing, text
from spectoolkit.report.cells import LOSSLESS_KEY, CellResult, axis_columns, check_shared

INTERVAL_METRICS = ("acceptance_length", "acceptance_length_request_mean")
DIFFERENCE_COLUMNS = ("baseline", "difference", "difference_low", "difference_high", "excludes_zero")


@dataclass(frozen=True, repr=False)
class Tables:
    """What `build` returns; all values unrounded. A notebook shows the main table.

    Attributes:
        axes: the axes, as given.
        overall: one row per cell: the axes (`cells.axis_columns`), `engine`, `lossless`, the metrics of
            `metrics.summarise` with `_low` and `_high` after those of `INTERVAL_METRICS` and the acceptance by
            position, `undefined`, the names of the metrics that have no value, and `standing` and `below_best`
            (`standing.standings`: which lossless cell is the best at otherwise equal settings).
        by_category: the same per cell and prompt category, `category` after the axes.
        differences: per cell that has a baseline: the axes, `engine`, `baseline`, `difference` (cell − baseline,
            acceptance_length, tokens per target forward), `difference_low`, `difference_high`, `excludes_zero`.
            Cells whose point of the other axes has no baseline cell hold NaN. Columns without rows without a baseline.
        confidence: of every interval.
        num_resamples: of every interval.
    """

    axes: tuple[str, ...]
    overall: pd.DataFrame
    by_category: pd.DataFrame
    differences: pd.DataFrame
    confidence: float
    num_resamples: int

    def query(self, condition: str) -> Tables:
        """The rows that fulfil a condition on the axes, e.g. "verifier == 'rejection'" (`DataFrame.query`).

        Raises:
            UsageError: there are none, or it is no condition on columns that `overall`, `by_category` and
                `differences` all have, as far as these have rows.
        """
        frames = {name: getattr(self, name) for name in ("overall", "by_category", "differences")}
        frames = {name: frame for name, frame in frames.items() if len(frame)}
        try:
            kept = {name: frame.query(condition) for name, frame in frames.items()}
        except (NameError, SyntaxError, KeyError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            shared = [str(c) for c in self.overall.columns if all(c in frame for frame in frames.values())]
            raise UsageError(
                f"condition: expected one on {', '.join(shared)} (in backticks where there are dots), "
                f"got {condition!r} ({error})"
            ) from error
        if not len(kept["overall"]):
            raise UsageError(f"condition: expected one that a row fulfils, got {condition!r}")
        return replace(self, **kept)

    def __repr__(self) -> str:
        return text.grid(text.main_rows(self))

    def _repr_html_(self) -> str:
        return html.table(self)


def build(
    cells: Sequence[CellResult],
    axes: Sequence[str],
    baseline: Mapping[str, object] | None = None,
    *,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Tables:
    """Tables of `cells` over `axes`; cells that differ in anything else are refused (`cells.check_shared`).

    Args:
        cells: in the order of the rows.
        axes: settings ("sampling.temperature") or groups of settings ("drafter").
        baseline: settings of the baseline cells, e.g. {"drafter.name": "argmax"}; each other cell is compared with the
            baseline cell that is equal in every axis that `baseline` does not mention.
        num_resamples: of the cluster bootstrap (`metrics.bootstrap`).
        confidence: of the intervals.
        seed: of the resamples; all cells share them.

    Raises:
        UsageError: cells that do not belong together, a cell of mixed engines or without "verifier.is_lossless", a
            baseline that no cell or more than one cell per point fits, or a pair of cells with different prompts.
    """
    check_shared(cells, axes)
    columns = {name: values for axis in axes for name, values in axis_columns(cells, axis).items()}
    columns = {name: _one_type(values) for name, values in columns.items()}
    columns["engine"] = [_engine(cell) for cell in cells]
    lossless = [_lossless(cell) for cell in cells]
    options = (num_resamples, confidence, seed)

    equal = standing.conditions(axes)
    points = [tuple(str(columns[axis][i]) for axis in equal) if lossless[i] else None for i in range(len(cells))]
    standings = standing.standings(cells, points, options)

    overall, by_category = [], []
    for i, cell in enumerate(cells):
        head = {name: values[i] for name, values in columns.items()}
        tail = {"lossless": lossless[i]}
        overall.append(head | tail | _numbers(cell.rows, options) | standings[i])
        if "category" not in cell.rows or bool(pd.isna(cell.rows["category"].to_numpy()).any()):
            raise UsageError(f"cells: expected a category for every request, one is missing in cell {i}")
        for category, rows in cell.rows.groupby("category", sort=True):
            by_category.append(head | tail | {"category": category} | _numbers(rows, options))
    differences = [] if baseline is None else _differences(cells, axes, columns, baseline, options)
    return Tables(
        axes=tuple(axes),
        overall=pd.DataFrame(_same_keys(overall)),
        by_category=pd.DataFrame(_same_keys(by_category)),
        differences=pd.DataFrame(differences, columns=[*columns, *DIFFERENCE_COLUMNS]),
        confidence=confidence,
        num_resamples=num_resamples,
    )


def write(
    tables: Tables,
    folder: Path | str,
    title: str,
    notes: Iterable[str] = (),
    *,
    caption: str | None = None,
    label: str | None = None,
) -> list[Path]:
    """table.md, table.csv, table.parquet, table.tex and differences.csv in `folder`; each replaced as a whole.

    table.csv and table.parquet are long: every column, unrounded, `scope` says "overall" or "category".
    `notes` are paragraphs for table.md; `caption` and `label` make table.tex a floating table.
    """
    folder = Path(folder)
    table = long(tables)
    return [
        files.replace_text(folder / "table.md", text.markdown(tables, title, list(notes))),
        files.replace_text(folder / "table.csv", table.to_csv(index=False, lineterminator="\n")),
        files.replace(folder / "table.parquet", lambda path: table.to_parquet(path, index=False)),
        files.replace_text(folder / "table.tex", latex.table(tables, caption=caption, label=label)),
        files.replace_text(folder / "differences.csv", tables.differences.to_csv(index=False, lineterminator="\n")),
    ]


def read(folder: Path | str, *, confidence: float = 0.95, num_resamples: int = 2000) -> Tables:
    """What `write` put into `folder`, out of table.parquet, or of table.csv where only that was kept.

    Files do not say which `confidence` and `num_resamples` they were built with: the defaults of `build` unless given.

    Raises:
        UsageError: no such tables there.
    """
    folder = Path(folder)
    parquet, csv, differences = (folder / name for name in ("table.parquet", "table.csv", "differences.csv"))
    if not parquet.exists() and not csv.exists():
        raise UsageError(f"folder: expected a study with table.csv or table.parquet, got {str(folder)!r}")
    long = pd.read_parquet(parquet) if parquet.exists() else pd.read_csv(csv)
    if missing := [name for name in ("scope", "category", "engine", "undefined") if name not in long]:
        raise UsageError(f"folder: expected the table of a grid of cells in {folder}, got one without {missing[0]}")
    for name in ("undefined", "standing"):
        if name in long:
            long[name] = long[name].astype(object).fillna("")  # CSV has nothing for an empty text
    head = [str(name) for name in long.columns[2 : list(long.columns).index("engine")]]
    overall, by_category = (
        pd.DataFrame(long[long["scope"] == scope]).reset_index(drop=True) for scope in ("overall", "category")
    )
    return Tables(
        # A group is its own column, and the settings below it follow.
        axes=tuple(name for name in head if not any(name.startswith(f"{other}.") for other in head)),
        overall=overall.drop(columns=["scope", "category"]),
        by_category=by_category.drop(columns="scope"),
        # Without differences older files hold an empty line, newer ones the names of the columns.
        differences=pd.read_csv(differences)
        if differences.exists() and differences.read_text().strip()
        else pd.DataFrame(),
        confidence=confidence,
        num_resamples=num_resamples,
    )


def long(tables: Tables) -> pd.DataFrame:
    """Every row, overall and per category, unrounded, with `scope` and `category` before its columns."""
    frames = [
        tables.overall.assign(scope="overall", category=None),
        tables.by_category.assign(scope="category", standing=standing.NOT_COMPARED),
    ]
    order = ["scope", "category", *(c for c in tables.overall.columns if c not in ("scope", "category"))]
    return pd.DataFrame([row for frame in frames for row in frame.to_dict("records")], columns=order)


def format_row(cell_row: pd.Series | Mapping[str, object]) -> str:
    """One row of `Tables.overall` as a few lines for the console."""
    return text.console(dict(cell_row))


def _numbers(rows: pd.DataFrame, options: tuple[int, float, int]) -> dict[str, object]:
    summary = metrics.summarise(rows)
    positions = [name for name in summary if name.startswith("accepted_at_")]
    intervals = metrics.bootstrap(rows, [*INTERVAL_METRICS, *positions], *options)
    numbers: dict[str, object] = {}
    for name, value in summary.items():
        numbers[name] = value
        if name in intervals:
            numbers[f"{name}_low"], numbers[f"{name}_high"] = intervals[name]
    return numbers | {"undefined": " ".join(metrics.undefined(summary))}


def _differences(
    cells: Sequence[CellResult],
    axes: Sequence[str],
    columns: Mapping[str, Sequence[object]],
    baseline: Mapping[str, object],
    options: tuple[int, float, int],
) -> list[dict[str, object]]:
    for key in baseline:
        if key not in columns:
            raise UsageError(f"baseline: expected settings among {', '.join(columns)}, got {key!r}")
    # An axis is settled by the baseline when the baseline names it or a setting below it.
    settled = [axis for axis in axes if any(key == axis or key.startswith(axis + ".") for key in baseline)]
    others = [axis for axis in axes if axis not in settled]

    def point(i: int) -> tuple[object, ...]:
        return tuple(columns[axis][i] for axis in others)

    bases: dict[tuple[object, ...], int] = {}
    for i in range(len(cells)):
        if all(_same(columns[key][i], value) for key, value in baseline.items()):
            if point(i) in bases:
                raise UsageError(f"baseline {dict(baseline)}: expected one cell per point, got two at {point(i)}")
            bases[point(i)] = i
    if not bases:
        raise UsageError(f"baseline {dict(baseline)}: expected settings of at least one cell, no cell has them")

    name = ", ".join(str(value) for value in baseline.values())
    found = []
    for i, cell in enumerate(cells):
        base = bases.get(point(i))
        if base == i:
            continue
        difference = metrics.Difference(math.nan, math.nan, math.nan)
        if base is not None:
            difference = metrics.paired_difference(cell.rows, cells[base].rows, "acceptance_length", *options)
        row = {column: values[i] for column, values in columns.items()}
        numbers = metrics.with_ends("difference", difference)
        found.append(row | {"baseline": name} | numbers | {"excludes_zero": difference.excludes_zero})
    return found


def _engine(cell: CellResult) -> str:
    engines = sorted(set(cell.rows["engine"])) if "engine" in cell.rows else []
    if len(engines) > 1:
        raise UsageError(f"cells: expected rows of one engine in a cell, got {', '.join(engines)}")
    return engines[0] if engines else str(cell.settings.get("engine", ""))


def _lossless(cell: CellResult) -> bool:
    if LOSSLESS_KEY not in cell.settings:
        raise UsageError(f"cells: expected the setting {LOSSLESS_KEY} in every cell, got {', '.join(cell.settings)}")
    return bool(cell.settings[LOSSLESS_KEY])


def _same(stored: object, wanted: object) -> bool:
    return stored == wanted or str(stored) == str(wanted)  # mixed columns are stored as text


def _one_type(values: Sequence[object]) -> list[object]:
    """Numbers stay numbers and flags stay flags; a column that mixes kinds becomes text, so that it can be stored."""
    present = [value for value in values if value is not None]
    flags = [isinstance(value, bool) for value in present]
    numbers = [isinstance(value, Real) and not flag for value, flag in zip(present, flags, strict=True)]
    if all(flags) or all(numbers):
        return list(values)
    return [None if value is None else str(value) for value in values]


def _same_keys(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Per-position columns of every K, in order, where cells differ in K; absent positions are NaN."""
    widest = max(rows, key=len, default={})
    return [{key: row.get(key, math.nan) for key in widest} for row in rows]
