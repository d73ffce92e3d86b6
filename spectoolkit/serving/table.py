"""A served engine's figures as tables, alone and beside the cells of a study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from spectoolkit import files
from spectoolkit.report import text
from spectoolkit.serving.counts import MIN_READINGS, Figure, Served
from spectoolkit.serving.source import Source
from spectoolkit.serving.study import Predicted

_DIGITS = 3


def markdown(served: Served, figures: Sequence[Figure], source: Source, cells: Sequence[Predicted], study: str) -> str:
    """The whole of table.md, which is also what the console shows."""
    parts = [f"# Acceptance as served: {served.engine}", _provenance(served, source)]
    parts += [text.grid([_row(figure) for figure in figures]), _intervals(served, figures), *served.notes]
    parts.append(_definitions(figures))
    if cells:
        parts += [f"## Beside {study}", _beside_text(cells)]
        by_position = [figure for figure in figures if _is_position(figure)]
        others = {f.definition.label: f for f in figures if f not in by_position}
        parts.append(text.grid(_beside(served, others, cells)))
        if by_position:
            parts.append(f"{_group(by_position[0])}, by position i:")
            parts.append(text.grid(_beside(served, {str(i): f for i, f in enumerate(by_position, 1)}, cells)))
    return "\n\n".join(part for part in parts if part) + "\n"


def write(
    folder: str, shown: str, served: Served, figures: Sequence[Figure], source: Source, cells: Sequence[Predicted]
) -> list[Path]:
    """table.md and table.csv in `folder`; the CSV has a row per figure and side, unrounded."""
    rows = long(served, figures, source, cells).to_csv(index=False, lineterminator="\n")
    return [
        files.replace_text(Path(folder) / "table.md", shown),
        files.replace_text(Path(folder) / "table.csv", rows),
    ]


def long(served: Served, figures: Sequence[Figure], source: Source, cells: Sequence[Predicted]) -> pd.DataFrame:
    """One row per figure as served, then one per cell and figure with `difference` = served - predicted.

    `value_low`, `value_high`: interval over readings; `rounding_low`, `rounding_high`: between which rounding leaves
    the value; `numerator`, `denominator`: sums behind it (of rounded ratios: their weights).
    """
    first, last = _span(served)
    origin = {"source": source.path.name, "sha256": source.sha256, "num_lines": source.num_lines, "first": first}
    rows: list[dict[str, Any]] = []
    for figure in figures:
        head = {"side": "served", "figure": figure.definition.key, "label": figure.definition.label}
        numbers = {"value": figure.value, "value_low": figure.interval.low, "value_high": figure.interval.high}
        numbers |= {"rounding_low": figure.low, "rounding_high": figure.high, "obtained": figure.obtained}
        numbers |= {"numerator": figure.numerator, "denominator": figure.denominator, "readings": figure.num_readings}
        words = {"definition": figure.definition.words, "ours": figure.definition.ours}
        rows.append(head | numbers | words | {"engine": served.engine} | origin | {"last": last})
    for cell in cells:
        for figure in figures:
            value = figure.definition.predicted(cell.numbers)
            row = {"side": "predicted", "figure": figure.definition.key, "value": value}
            rows.append(row | {"difference": figure.value - value} | {f"cell {k}": v for k, v in cell.where.items()})
    return pd.DataFrame(rows)


def _row(figure: Figure) -> dict[str, str]:
    numbers = {
        "value": figure.value,
        "value_low": figure.interval.low,
        "value_high": figure.interval.high,
    }
    half = (figure.high - figure.low) / 2
    return {
        "figure": figure.definition.label,
        "served": text.with_interval(numbers, "value", _DIGITS),
        "obtained": figure.obtained,
        "rounding": f"±{half:.1g}" if half > 1e-12 else "none",
        "ours": figure.definition.ours,
    }


def _provenance(served: Served, source: Source) -> str:
    first, last = _span(served)
    span = f", {first} to {last}" if first else ""
    k = f" At most {served.num_draft_tokens} draft tokens per step (K)." if served.num_draft_tokens else ""
    return (
        f"{source.path.name} (sha256 {source.sha256}), {source.num_lines:,} lines; {len(served.readings):,} "
        f"{served.unit}{span}.{k}"
    )


def _span(served: Served) -> tuple[str | None, str | None]:
    times = [reading.time for reading in served.readings if reading.time]
    return (times[0], times[-1]) if times else (None, None)


def _intervals(served: Served, figures: Sequence[Figure]) -> str:
    kinds = []
    if any(not math.isnan(figure.interval.low) for figure in figures):
        dependent = "" if served.unit in ("requests", "runs") else (
            " A request reaches over several of them, so that they are dependent and the interval is rather too narrow."
        )  # fmt: skip
        kinds.append(
            f"Brackets are 95 % intervals, a percentile bootstrap over {served.unit} (too narrow with fewer than about "
            f"20): how much they vary, not how far other traffic would lie.{dependent}"
        )
    else:
        kinds.append(f"No intervals: they need at least {MIN_READINGS} {served.unit}.")
    if any(figure.obtained == "rounded ratios" for figure in figures):
        kinds.append(
            "*Rounded ratios* were logged without all counts behind them: ± is how far rounding leaves the value open."
        )
    return " ".join(kinds)


def _definitions(figures: Sequence[Figure]) -> str:
    lines = {}
    for figure in figures:
        lines[_group(figure)] = f"{figure.definition.words}. Ours: {figure.definition.ours}."
    return "\n".join(f"- *{label}*: {words}" for label, words in lines.items())


def _beside_text(cells: Sequence[Predicted]) -> str:
    cut = (
        " Replayed cells count no draft behind the end of an output, which most engines do: their lengths and rates "
        "are slightly lower for that reason."
        if any(cell.is_cut for cell in cells)
        else ""
    )
    return (
        "Every column has the engine's definition on both sides; in brackets, served minus predicted. The difference "
        f"has no interval: the prompts are not the same ones. Rates by position end with the output in every cell.{cut}"
    )


def _beside(served: Served, figures: Mapping[str, Figure], cells: Sequence[Predicted]) -> list[dict[str, str]]:
    """The served row above those of the cells; `figures` by the heading of their column."""
    head = {name: "" if i else served.engine for i, name in enumerate(cells[0].where)}
    rows = [head | {name: text.number(figure.value, _DIGITS) for name, figure in figures.items()}]
    for cell in cells:
        compared = {name: _compared(figure, cell.numbers) for name, figure in figures.items()}
        rows.append(dict(cell.where) | compared)
    return rows


def _is_position(figure: Figure) -> bool:
    return figure.definition.key.startswith("position_")


def _group(figure: Figure) -> str:
    """The figure's name, one for all positions."""
    label = figure.definition.label
    return label.rpartition(", ")[0] if _is_position(figure) else label


def _compared(figure: Figure, row: Mapping[str, float]) -> str:
    value = figure.definition.predicted(row)
    if math.isnan(value) or math.isnan(figure.value):
        return text.number(value, _DIGITS)
    return f"{value:.{_DIGITS}f} ({figure.value - value:+.{_DIGITS}f})"
