"""Acceptance length with truncated sampling on either side, as grouped dots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from spectoolkit.errors import UsageError
from spectoolkit.report import style
from spectoolkit.report.plots import AXIS_LABELS, check_rows, set_length_limits
from spectoolkit.report.text import value_text

TEMPERATURE = "sampling.temperature"
_LENGTH = ["acceptance_length", "acceptance_length_low", "acceptance_length_high"]
_WIDTH = 0.17  # between neighbours of a group, in groups
# The fill says which law the output follows, colour and marker which side is filtered.
SIDE_LOOKS = {
    "both": {"color": "#0072B2", "marker": "o"},
    "target only": {"color": "#009E73", "marker": "^"},
    "draft only": {"color": "#D55E00", "marker": "s"},
    "neither": {"color": "#555555", "marker": "D"},
}


def side_dots(ax: Axes, found: pd.DataFrame) -> Axes:
    """One group per temperature, in it a dot with interval per side; hollow where the output is not filtered.

    Args:
        ax: the axes.
        found: rows of `studies.truncation.by_side` of one filter.

    Raises:
        UsageError: a missing column, several rows of one dot, or a side that has no look.
    """
    check_rows(found, [TEMPERATURE, "side", "follows_filter", *_LENGTH], unique=[TEMPERATURE, "side"])
    if unknown := set(found["side"]) - SIDE_LOOKS.keys():
        raise UsageError(f"side: expected {', '.join(SIDE_LOOKS)}, got {', '.join(sorted(unknown))}")
    temperatures = sorted(set(found[TEMPERATURE].tolist()))
    with style.paper():
        set_length_limits(ax, found, "acceptance_length", None)
        ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        for rank, (name, look) in enumerate(SIDE_LOOKS.items()):
            rows = pd.DataFrame(found[found["side"] == name])
            groups = np.array([temperatures.index(t) for t in rows[TEMPERATURE]])
            at = groups + (rank - (len(SIDE_LOOKS) - 1) / 2) * _WIDTH
            y, low, high = pd.DataFrame(rows, columns=_LENGTH).to_numpy(dtype=float).T
            ax.vlines(at, low, high, color=look["color"], linewidth=1.2, zorder=2)
            for x, value, is_filtered in zip(at, y, rows["follows_filter"], strict=True):
                ax.plot([x], [value], **side_dot(look, bool(is_filtered)), clip_on=False, zorder=3)
        ax.set_xlim(-0.5, len(temperatures) - 0.5)
        ax.set_xticks(range(len(temperatures)), [value_text(float(t)) for t in temperatures])
        ax.grid(axis="x", visible=False)
        ax.set_xlabel(AXIS_LABELS[TEMPERATURE])
        ax.set_ylabel(AXIS_LABELS["acceptance_length"])
    return ax


def truncation_figure(found: pd.DataFrame, width_in: float | None = None) -> Figure:
    """`side_dots` in one panel per filter with one y scale, the legend at the right.

    Args:
        found: `studies.truncation.by_side`.
        width_in: of the figure; None takes a page, or less where one panel is all.

    Raises:
        UsageError: more filters than fit.
    """
    check_rows(found, ["filter", *_LENGTH], unique=[])
    filters = list(dict.fromkeys(found["filter"]))
    width_in = width_in or (style.PAGE_IN if len(filters) > 1 else style.COLUMN_IN + 0.8)
    height_in, left, gap, right, bottom, top = 2.2, 0.56, 0.12, 1.5, 0.4, 0.24
    each = (width_in - left - right - gap * (len(filters) - 1)) / len(filters)
    if each < 0.8:
        raise UsageError(f"filters: expected at most as many panels as fit {width_in} in, got {len(filters)}")
    with style.paper():
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        axes: list[Axes] = []
        for i, name in enumerate(filters):
            start = left + i * (each + gap)
            box = (start / width_in, bottom / height_in, each / width_in, (height_in - bottom - top) / height_in)
            ax = fig.add_axes(box)
            axes.append(ax)
            set_length_limits(axes[0], found, "acceptance_length", None)
            ax.set_ylim(axes[0].get_ylim())
            side_dots(ax, pd.DataFrame(found[found["filter"] == name]))
            ax.set_title(name, loc="left", pad=5)
            if i:
                ax.set_ylabel("")
                ax.tick_params(labelleft=False)
        legend = {"loc": "upper left", "frameon": False, "borderpad": 0, "handletextpad": 0.4, "alignment": "left"}
        start = (width_in - right + 0.1) / width_in
        groups = (
            ("output filtered,\nas asked for", True, ("both", "target only"), 0.95),
            ("output not filtered", False, ("draft only", "neither"), 0.55),
        )
        for title, is_filtered, names, height in groups:
            handles = [
                Line2D([], [], **side_dot(SIDE_LOOKS[name], is_filtered), label=f"filter on {name}") for name in names
            ]
            fig.legend(
                handles=handles, title=title, title_fontsize=style.SMALL_PT, bbox_to_anchor=(start, height), **legend
            )
    return fig


def side_dot(look: dict[str, str], is_filtered: bool) -> dict[str, Any]:
    """Of `SIDE_LOOKS`, filled where the output follows the law that was asked for."""
    fill = look["color"] if is_filtered else "#FFFFFF"
    return {**look, "markerfacecolor": fill, "markeredgecolor": look["color"], "linestyle": "none", "markersize": 4.6}
