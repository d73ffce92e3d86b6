"""One cell, printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.report import tables
from spectoolkit.runner import missing_requests, run_cells
from spectoolkit.study import Cell, Store


def run(cells: Sequence[Cell], store: Store, *, axes: Sequence[str], config: Mapping[str, Any]) -> str:
    """Compute the cell (or take it from the store), and show its numbers."""
    stored = [store.has(cell) for cell in cells]
    with progress_bar(missing_requests(cells, store), "request") as bar:
        results = run_cells(cells, store, bar)
    store.write_manifest({"provenance": provenance(), "config": config, "cells": store.describe(cells)})
    built = tables.build(results, axes)
    shown: list[str] = []
    for cell, result, was_stored, (_, row) in zip(cells, results, stored, built.overall.iterrows(), strict=True):
        when = result.rows.attrs.get("written", "unknown")
        how = f"computed {when} and taken from" if was_stored else "stored in"
        shown.append(f"{_title(cell)}\n{tables.format_row(row)}\n  {how} {store.cell_path(cell)}")
    return "\n".join(shown)


def _title(cell: Cell) -> str:
    """What the cell is, in a line."""
    names = [("drafter.name", ""), ("verifier.name", " + "), ("sampling.temperature", ", temperature ")]
    names += [("num_draft_tokens", ", K = "), ("target.name", ", target "), ("draft_model.name", ", draft model ")]
    return "".join(f"{before}{cell.settings[key]}" for key, before in [*names, ("seed", ", seed ")])
