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
    """Decode the cell (or take it from the store) and show its numbers."""
    with progress_bar(missing_requests(cells, store), "request") as bar:
        results = run_cells(cells, store, bar)
    store.write_manifest({"provenance": provenance(), "config": config})
    built = tables.build(results, axes)
    shown = [tables.format_row(row) for _, row in built.overall.iterrows()]
    files = [f"stored in {store.cell_path(cell)}" for cell in cells]
    return "\n".join(f"{text}\n{file}" for text, file in zip(shown, files, strict=True))
