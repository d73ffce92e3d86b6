"""The figures that a grid of cells allows, whatever study it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from spectoolkit.errors import UsageError
from spectoolkit.report import contours, heatmap, histogram, plots, style
from spectoolkit.report.cells import CellResult, axis_columns
from spectoolkit.report.standing import STRATEGY
from spectoolkit.report.tables import Tables
from spectoolkit.report.text import short, value_text

MAX_LINES, MAX_PANELS = 8, 3
_ABSCISSAE = ("sampling.temperature", "num_draft_tokens")


@dataclass(frozen=True)
class Drawn:
    """What `figures` returns.

    Attributes:
        figures: file name -> figure.
        remarks: one line per figure that was left out, or that does not show everything, saying why.
    """

    figures: Mapping[str, Figure]
    remarks: Sequence[str]


def figures(cells: Sequence[CellResult], built: Tables, steps: Mapping[int, Path]) -> Drawn:
    """Sweep, acceptance by position, steps by their tokens, heat map and speed-up contours, as far as the axes allow.

    Args:
        cells: of the table.
        built: `tables.build` of them.
        steps: index of a cell -> file of its step records; cells decoded live have them.
    """
    grid = _Grid.of(cells, built)
    makers: dict[str, Callable[[_Grid, list[str]], Figure | None]] = {
        "sweep": _sweep,
        "positions": _positions,
        "heatmap": _heat_map,
        "histogram": lambda g, remarks: _histogram(g, steps, remarks),
        "contours": _contours,
    }
    found: dict[str, Figure] = {}
    remarks: list[str] = []
    for name, make in makers.items():
        said: list[str] = []
        try:
            made = make(grid, said)
        except UsageError as error:
            made, said = None, [f"not drawn, {error}"]
        remarks += [f"{name}: {remark}" for remark in said]
        if made is not None:
            found[name] = made
    return Drawn(found, remarks)


@dataclass(frozen=True)
class _Grid:
    """Cells and their table with the column `strategy`: everything that a row differs in, but the abscissa."""

    cells: Sequence[CellResult]
    overall: pd.DataFrame
    x: str | None
    axes: Sequence[str]

    @staticmethod
    def of(cells: Sequence[CellResult], built: Tables) -> _Grid:
        numeric = [
            axis for axis in built.axes if axis.split(".")[0] not in STRATEGY and _is_numeric(built.overall, axis)
        ]
        x = next((axis for axis in (*_ABSCISSAE, *numeric) if axis in numeric), None)
        overall = built.overall.assign(strategy=_strategies(cells, [axis for axis in built.axes if axis != x]))
        return _Grid(cells, overall, x, built.axes)

    def some(self, remarks: list[str]) -> list[float]:
        """Values of x to show in panels: all of them, or the first, the middle and the last."""
        values = sorted(set(self.overall[self.x])) if self.x else []
        if len(values) <= MAX_PANELS:
            return values
        kept = [values[0], values[len(values) // 2], values[-1]]
        shown = ", ".join(f"{value:g}" for value in kept)
        remarks.append(f"shows {self.x} = {shown} of {len(values)} values; choose others with rows=")
        return kept


def _sweep(grid: _Grid, remarks: list[str]) -> Figure | None:
    if grid.x is None:
        return None
    panel, line = _panel_and_line(grid)
    _few(grid.overall, panel, line)
    return plots.sweep_figure(grid.overall, panel=panel, x=grid.x, line=line)


def _positions(grid: _Grid, remarks: list[str]) -> Figure:
    rows = grid.overall
    _few(rows, None, "strategy")
    if grid.x is None:
        return plots.positions_figure(rows, panel=None, line="strategy", width_in=style.COLUMN_IN + 1.2)
    rows = pd.DataFrame(rows[rows[grid.x].isin(grid.some(remarks))])
    return plots.positions_figure(rows, panel=grid.x, line="strategy")


def _heat_map(grid: _Grid, remarks: list[str]) -> Figure | None:
    if not {heatmap.TARGET, heatmap.DRAFT} <= set(grid.overall) or len(_values(grid.overall, heatmap.DRAFT)) < 3:
        return None
    rows = pd.DataFrame(grid.overall[grid.overall[heatmap.DRAFT].notna()])
    return heatmap.heat_map_figure(rows)


def _histogram(grid: _Grid, steps: Mapping[int, Path], remarks: list[str]) -> Figure:
    wanted = grid.some(remarks)
    chosen = [i for i in range(len(grid.cells)) if grid.x is None or grid.overall[grid.x].iloc[i] in wanted]
    is_emitted = all(i in steps for i in chosen)
    if not is_emitted:
        remarks.append(
            "counts accepted draft tokens, since some cells have no step records, such as replayed ones; "
            "emitted tokens need those of all cells"
        )
    _few(grid.overall, None, "strategy")
    frames = []
    for i in chosen:
        found = histogram.distribution(grid.cells[i].rows, pd.read_parquet(steps[i]) if is_emitted else None)
        at = {} if grid.x is None else {"x": float(grid.overall[grid.x].iloc[i])}
        frames.append(found.assign(strategy=grid.overall["strategy"].iloc[i], **at))
    names = {"sampling.temperature": "T = ", "num_draft_tokens": "K = "}
    found, row = pd.concat(frames, ignore_index=True), None if grid.x is None else "x"
    try:
        return histogram.histogram_figure(found, row=row, row_name=names.get(grid.x or "", f"{grid.x} = "))
    except UsageError as error:  # too many strategies: the cells are of one unit
        raise UsageError(f"{error}; choose some with rows=") from error


def _contours(grid: _Grid, remarks: list[str]) -> Figure | None:
    """Costs are those of the run: time per draft token over that of the target's forward over K + 1 tokens."""
    found: list[dict[Any, Any]] = []
    absent: dict[str, list[str]] = {}
    for cell, row in zip(grid.cells, grid.overall.to_dict("records"), strict=True):
        sums = {
            name: float(cell.rows[name].to_numpy(dtype=float).sum())
            for name in ("draft_s", "drafted", "target_s", "steps")
        }
        if all(np.isfinite(value) and value > 0 for value in sums.values()):
            cost = sums["draft_s"] / sums["drafted"] / (sums["target_s"] / sums["steps"])
            k = max(cell.rows["num_draft_tokens"].tolist())
            found.append({**row, "num_draft_tokens": k, "cost": cost})
        else:
            is_live = np.isfinite(sums["draft_s"]) and np.isfinite(sums["target_s"])
            why = (
                "only cells decoded live say what drafting costs" if not is_live
                else "nothing was drafted" if not sums["drafted"]
                else "no time was measured"
            )  # fmt: skip
            absent.setdefault(why, []).append(str(row["strategy"]))
    if not found:
        remarks.append(f"not drawn: {'; '.join(absent)}")
        return None
    remarks += [f"{', '.join(dict.fromkeys(names))} left out: {why}" for why, names in absent.items()]
    table = pd.DataFrame(found)
    panel = None
    if grid.x is not None and len(_values(table, grid.x)) > 1:
        panel = "panel"
        wanted = [value for value in grid.some(remarks) if value in set(table[grid.x])]
        table = pd.DataFrame(table[table[grid.x].isin(wanted)])
    _few(table, None, "strategy")
    points = contours.measured_points(table)
    if panel:
        points[panel] = [f"{short(str(grid.x))} = {value:g}" for value in table[grid.x]]
    remarks.append("c is the time of a draft token over that of the run's own target forwards, each over K + 1 tokens")
    return contours.contours_figure(points, panel)


def _panel_and_line(grid: _Grid) -> tuple[str | None, str]:
    """A panel per verifier where each has several lines and nothing but drafters are left for these."""
    others = {axis for axis in grid.axes if axis != grid.x}
    if others == {"drafter", "verifier"}:
        verifiers = grid.overall["verifier"].tolist()
        lines = {
            name: _values(pd.DataFrame(grid.overall[[v == name for v in verifiers]]), "drafter") for name in verifiers
        }
        if 1 < len(lines) <= MAX_PANELS and min(map(len, lines.values())) > 1:
            return "verifier", "drafter"
    return None, "strategy"


def _few(rows: pd.DataFrame, panel: str | None, line: str) -> None:
    pairs = set(zip(rows[panel or line].tolist(), rows[line].tolist(), strict=True))
    counts = Counter(value if panel else None for value, _ in pairs)
    count = max(counts.values(), default=0)
    if count > MAX_LINES:
        raise UsageError(
            f"rows: expected at most {MAX_LINES} strategies in a panel, got {count}; choose some with rows="
        )


def _strategies(cells: Sequence[CellResult], axes: Sequence[str]) -> list[str]:
    """A name per cell: drafter, verifier where they differ (unless named like the drafter), and what else differs."""
    columns = {axis: axis_columns(cells, axis)[axis] for axis in axes}
    names = []
    for i in range(len(cells)):
        values = {axis: value_text(column[i]) for axis, column in columns.items()}
        parts = [values.pop("drafter")] if "drafter" in values else []
        verifier = values.pop("verifier", None)
        if verifier is not None and verifier not in parts:
            parts.append(verifier)
        parts += [f"{axis.rpartition('.')[2].replace('_', ' ')} {value}" for axis, value in values.items()]
        names.append(", ".join(parts) or str(cells[i].settings.get("drafter.name", "all")))
    return names


def _is_numeric(overall: pd.DataFrame, axis: str) -> bool:
    values = _values(overall, axis)
    numbers = [isinstance(value, Real) and not isinstance(value, bool) for value in values]
    return len(values) > 1 and all(numbers)


def _values(rows: pd.DataFrame, column: str) -> list[Any]:
    """The distinct values of a column that are there."""
    return list(dict.fromkeys(value for value in rows[column].tolist() if not pd.isna(value)))
