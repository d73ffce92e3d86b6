"""A grid of cells as one table and one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.report import plots, tables
from spectoolkit.runner import missing_requests, run_cells
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
    with progress_bar(missing_requests(cells, store), "request") as bar:
        results = run_cells(cells, store, bar)
    built = tables.build(results, axes, baseline)
    tables.write(built, store.folder, title)
    plots.save(plots.sweep_figure(built.overall, panel=panel, x=x, line=line), store.folder)
    store.write_manifest({"provenance": provenance(), "config": config, "cells": store.describe(cells)})
    return f"{(store.folder / 'table.md').read_text()}\nTables, figure and manifest are in {store.folder}"
