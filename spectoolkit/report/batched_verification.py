"""Ways to verify a batch: speed over batch size, and what was computed for every token emitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spectoolkit.report import style
from spectoolkit.report.labels import label_line_ends
from spectoolkit.report.plots import check_rows, panels

NAMES = {
    "together": "one forward",
    "expanded": "batch expansion",
    "by_length": "forward per length",
    "slowest": "wait for the slowest",
}


def over_batch_size(ax: Axes, table: pd.DataFrame, metric: str, *, label: str, reference: float | None = None) -> Axes:
    """One line per way against batch size, on a logarithmic axis, with a bar from `_low` to `_high` where there is one.

    Args:
        ax: the axes, of final size.
        table: rows of `studies.batched_verification.tabulated`.
        metric: its column.
        label: of the y axis.
        reference: a horizontal line.
    """
    check_rows(table, ["batch_size", "way", metric], unique=["batch_size", "way"])
    looks: dict[Any, Any] = style.line_styles(NAMES)
    sizes = sorted(set(table["batch_size"].tolist()))
    ends, end_looks = {}, {}
    has_bars = f"{metric}_low" in table
    shown = [metric, f"{metric}_low", f"{metric}_high"] if has_bars else [metric]
    values = table[shown].to_numpy(dtype=float)
    span = np.nanmax(values) - np.nanmin(values) or 1.0
    with style.paper():
        ax.set_xscale("log", base=2)
        ax.set_xlim(sizes[0] * 0.85, sizes[-1] * 1.15)
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
        ax.set_ylim(np.nanmin(values) - 0.06 * span, np.nanmax(values) + 0.06 * span)
        present = [way for way in NAMES if way in set(table["way"])]
        for rank, way in enumerate(present):
            rows = pd.DataFrame(table[table["way"] == way]).sort_values("batch_size")
            at = rows["batch_size"].to_numpy(dtype=float) * 2 ** ((rank - (len(present) - 1) / 2) * 0.05)
            if has_bars:
                ax.vlines(at, rows[shown[1]], rows[shown[2]], color=looks[way]["color"], linewidth=0.9, zorder=2)
            y = rows[metric].to_numpy(dtype=float)
            ax.plot(at, y, zorder=3 + 0.01 * rank, clip_on=False, **looks[way])
            ends[NAMES[way]], end_looks[NAMES[way]] = (float(at[-1]), float(y[-1])), looks[way]
        if reference is not None:
            ax.axhline(reference, color="#777777", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1.5)
        ax.set_xlabel("requests decoded together")
        ax.set_ylabel(label)
        return label_line_ends(ax, ends, end_looks, style.SMALL_PT)


def batched_verification_figure(table: pd.DataFrame, width_in: float = style.PAGE_IN) -> Figure:
    """Speed over batch 1, and the share of computed positions that gave no token, over batch size."""
    with style.paper():
        fig, axes = panels(2, list(NAMES.values()), top=0.1, width_in=width_in, height_in=2.1, gap=0.62)
        over_batch_size(axes[0], table, "over_batch_1", label="tokens per second\n(over one forward at batch 1)")
        over_batch_size(axes[1], table, "wasted_share", label="positions computed\nfor nothing (share)")
    return fig
