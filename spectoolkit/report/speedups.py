"""Acceptance length over the number of draft tokens, and the speed-up it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spectoolkit.errors import UsageError
from spectoolkit.report import style
from spectoolkit.report.plots import acceptance_length_sweep, check_rows, label_of, set_length_limits

K = "num_draft_tokens"
_SPEEDUP = ["strategy", "cost_ratio", "draft_cost", K, "speedup", "speedup_low", "speedup_high", "is_best"]


def speedup_over_length(ax: Axes, found: pd.DataFrame, looks: Mapping[object, Mapping[str, Any]] | None = None) -> Axes:
    """Expected speed-up over K at one cost ratio, one line per strategy; a ring marks the best K of each.

    Args:
        ax: the axes, of final size.
        found: rows of `studies.draft_length.expected_speedups` of one cost ratio.
        looks: as for `plots.acceptance_length_sweep`.

    Raises:
        UsageError: a missing column, or several rows of a strategy and K.
    """
    check_rows(found, _SPEEDUP, unique=["strategy", K])
    looks = style.line_styles(found["strategy"]) if looks is None else looks
    acceptance_length_sweep(ax, found, x=K, line="strategy", metric="speedup", looks=looks, label_ends=False)
    for row in pd.DataFrame(found[found["is_best"]]).to_dict("records"):
        colour = looks[row["strategy"]]["color"]
        ring = {"marker": "o", "markersize": 9.5, "markerfacecolor": "none", "markeredgewidth": 1.1}
        ax.plot([row[K]], [row["speedup"]], color=colour, clip_on=False, zorder=4, **ring)
    return ax


def draft_length_figure(overall: pd.DataFrame, found: pd.DataFrame, width_in: float = style.PAGE_IN) -> Figure:
    """Acceptance length over K at the left, `speedup_over_length` for each cost ratio beside it, one legend above.

    Args:
        overall: `Tables.overall` with a column `strategy`, one row per strategy and K.
        found: `studies.draft_length.expected_speedups`.
        width_in: of the figure.
    """
    check_rows(overall, ["strategy", K, "acceptance_length"], unique=["strategy", K])
    looks = style.line_styles(overall["strategy"])
    ratios = list(dict.fromkeys(found["cost_ratio"]))
    height_in, left, bottom, top, wide_gap, gap, right = 2.35, 0.58, 0.42, 0.46, 0.68, 0.12, 0.12
    each = (width_in - left - wide_gap - right - gap * (len(ratios) - 1)) / (len(ratios) + 1)
    if each < 0.6:
        raise UsageError(
            f"cost ratios: expected at most as many as fit {width_in} in beside each other, got {len(ratios)}"
        )
    with style.paper():
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        starts = [left, *(left + each + wide_gap + i * (each + gap) for i in range(len(ratios)))]
        box = (bottom / height_in, each / width_in, (height_in - bottom - top) / height_in)
        lengths, *axes = (fig.add_axes((start / width_in, *box)) for start in starts)
        acceptance_length_sweep(lengths, overall, x=K, line="strategy", looks=looks, label_ends=False)
        lengths.set_title("acceptance length", loc="left", pad=4)
        set_length_limits(axes[0], found, "speedup", {"plain decoding": 1.0})
        for i, (ax, ratio) in enumerate(zip(axes, ratios, strict=True)):
            ax.set_ylim(axes[0].get_ylim())
            speedup_over_length(ax, pd.DataFrame(found[found["cost_ratio"] == ratio]), looks)
            ax.axhline(1.0, color="#777777", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1.5)
            ax.set_title(f"speed-up, c = {ratio:g}", loc="left", pad=4)
            if i:
                ax.set_ylabel("")
                ax.tick_params(labelleft=False)
        free = set(found["strategy"]) - set(found.loc[found["draft_cost"] > 0, "strategy"])
        texts = {name: label_of(name) + (" (c = 0)" if name in free and any(ratios) else "") for name in looks}
        handles = [Line2D([], [], **look, label=texts[name]) for name, look in looks.items()]
        ring = {"marker": "o", "markersize": 8, "markerfacecolor": "none", "linestyle": "none", "color": "#555555"}
        handles.append(Line2D([], [], **ring, label="best K"))
        fig.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0.03, 1.0), ncols=len(handles), frameon=False,
            columnspacing=1.2, handlelength=2.4, borderpad=0.2,
        )  # fmt: skip
    return fig
