"""What studies of a grid share: compute the cells, find them by their settings, write what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from spectoolkit.errors import UsageError
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.report import plots, tables
from spectoolkit.report.cells import CellResult, HasSettings, axis_columns, prompt_note
from spectoolkit.runner import missing_requests, run_cells
from spectoolkit.study import Cell, Store


def compute(cells: Sequence[Cell], store: Store, config: Mapping[str, Any]) -> list[CellResult]:
    """All cells; those that are not in the store are computed, with a progress bar.

    Raises:
        UsageError: the folder holds the tables of a study with other settings (its grid may differ).
    """
    store.check_owner(config)
    with progress_bar(missing_requests(cells, store), "request") as bar:
        return run_cells(cells, store, bar)


def write(
    store: Store,
    cells: Sequence[Cell],
    config: Mapping[str, Any],
    built: tables.Tables,
    title: str,
    figure: Figure,
    findings: Sequence[str] = (),
) -> str:
    """Tables, figure and manifest into the store's folder; returns what the console shows.

    `findings` are paragraphs that table.md shows first; where there are any, the console shows them alone, else the
    first table. What was changed in or left out of the prompts follows them.
    """
    prompts = [note] if (note := prompt_note(map(store.load, cells))) else []
    tables.write(built, store.folder, title, [*findings, *prompts])
    plots.save(figure, store.folder)
    store.write_manifest({"provenance": provenance(), "config": config, "cells": store.describe(cells)})
    shown = (
        "\n\n".join([*findings, *prompts] if findings else [])
        or (store.folder / "table.md").read_text().split("\n## Acceptance by")[0]
    )
    return f"{shown}\n\nTables, figure and manifest are in {store.folder}"


def places(points: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[tuple[Any, ...], int]:
    """Values of `keys` -> index of the one cell (its settings) that has them.

    Raises:
        UsageError: a cell without one of the settings, or two cells with the same values of all of them.
    """
    found: dict[tuple[Any, ...], int] = {}
    for i, settings in enumerate(points):
        missing = [key for key in keys if settings.get(key) is None]
        if missing:
            raise UsageError(
                f"cells: expected every cell to have the settings {', '.join(keys)}, no {missing[0]} in {i}"
            )
        point = tuple(settings[key] for key in keys)
        if point in found:
            where = ", ".join(f"{key}={value}" for key, value in zip(keys, point, strict=True))
            raise UsageError(
                f"cells: this study has no place for axes other than {', '.join(keys)}; several at {where}"
            )
        found[point] = i
    return found


def strategies(cells: Sequence[HasSettings]) -> list[str]:
    """A name per cell: its drafter, and its verifier where that is neither rejection nor named like the drafter."""
    drafters = axis_columns(cells, "drafter")["drafter"]
    verifiers = axis_columns(cells, "verifier")["verifier"]
    return [
        str(drafter) if verifier in ("rejection", drafter) else f"{drafter}, {verifier}"
        for drafter, verifier in zip(drafters, verifiers, strict=True)
    ]
