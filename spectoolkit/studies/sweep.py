"""A grid of cells as one table and one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectoolkit.errors import UsageError
from spectoolkit.report import plots, tables
from spectoolkit.studies.output import compute, write
from spectoolkit.study import Cell, Store


def check(
    cells: Sequence[Cell],
    axes: Sequence[str],
    *,
    title: str,
    x: str,
    line: str,
    panel: str | None = None,
    baseline: Mapping[str, Any] | None = None,
) -> None:
    """Refuse axes that the figure or the differences do not know what to do with, before a cell is computed.

    Raises:
        UsageError: an x, line or panel that is no axis, an axis that is none of them and varies, a baseline that no
            cell fits.
    """
    known = [name for name in (x, line, panel) if name is not None]
    for name in known:
        if name not in axes:
            raise UsageError(f"study: expected x, line and panel among the axes {', '.join(axes)}, got {name!r}")
    if extra := [axis for axis in axes if axis not in known]:
        raise UsageError(f"study: the figure has no place for the axes {', '.join(extra)}; it shows {', '.join(known)}")
    for key, value in (baseline or {}).items():
        if not any(str(cell.settings.get(key)) == str(value) for cell in cells):
            raise UsageError(
                f"study.baseline: expected settings of at least one cell, none has {key}={value!r}; "
                "say study.baseline=null for a study without differences"
            )


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
    built = tables.build(compute(cells, store, config), axes, baseline)
    figure = plots.sweep_figure(built.overall, panel=panel, x=x, line=line)
    return write(store, cells, config, built, title, figure)
