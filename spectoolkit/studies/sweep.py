"""A grid of cells as one table and one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectoolkit.report import plots, tables
from spectoolkit.studies.output import compute, write
from spectoolkit.study import Cell, Store


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    title: str,
    x: str,
    line: str,
    panel: str | None = None,
    baseline: Mapping[str, Any] | None = None,
) -> str:
    """Decode what is missing, then write the tables and the figure into the store's folder.

    Args:
        title: of the table.
        x, line, panel: axes of the figure: abscissa, one line per value, one panel per value.
        baseline: the cells that differences are taken against, e.g. {"drafter": "argmax"}.
    """
    built = tables.build(compute(cells, store), axes, baseline)
    figure = plots.sweep_figure(built.overall, panel=panel, x=x, line=line)
    return write(store, cells, config, built, title, figure)
