"""Ranks of strategies by every definition of acceptance, as lines that cross where the ranking depends on it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spectoolkit.errors import UsageError
from spectoolkit.report import style
from spectoolkit.report.labels import text_width_pt, wrapped
from spectoolkit.report.plots import check_rows, label_of

_ROW_IN = 0.2
_MOST_IN = 200  # a picture of 300 dpi has at most 2^16 pixels
_GAP = 0.5  # between groups of definitions, in rows
_TIE: dict[str, Any] = {"color": "#C4C4C4", "linewidth": 5.5, "solid_capstyle": "round"}


def rank_chart(ax: Axes, found: pd.DataFrame, pairs: pd.DataFrame) -> Axes:
    """One row per definition, the largest value leftmost; one line per strategy, through its rank in every row.

    A grey bar joins neighbours of a row whose order is not decided. A line breaks where its strategy has no value.

    Args:
        ax: the axes.
        found: `studies.accounting.by_definition`.
        pairs: `studies.accounting.orders`.

    Raises:
        UsageError: a missing column, or several rows of one dot.
    """
    check_rows(found, ["definition", "strategy", "rank"], unique=["definition", "strategy"])
    check_rows(pairs, ["definition", "one", "other", "excludes_zero"], unique=["definition", "one", "other"])
    names, rows = list(dict.fromkeys(found["strategy"])), list(dict.fromkeys(found["definition"]))
    decided = {
        (row["definition"], frozenset((row["one"], row["other"])))
        for row in pairs.to_dict("records")
        if row["excludes_zero"]
    }
    rank = {(row["definition"], row["strategy"]): float(row["rank"]) for row in found.to_dict("records")}
    heights = row_heights(rows)
    with style.paper():
        looks = style.line_styles(names)
        for y, definition in zip(heights, rows, strict=True):
            here = sorted((rank[definition, name], name) for name in names if np.isfinite(rank[definition, name]))
            for (left, one), (right, other) in itertools.pairwise(here):
                if (definition, frozenset((one, other))) not in decided:
                    ax.plot([left, right], [y, y], zorder=1.5, **_TIE)
        for name in names:
            x = np.array([rank[definition, name] for definition in rows])
            ax.plot(x, heights, clip_on=False, zorder=3, **looks[name])
        ax.set_xlim(0.6, len(names) + 0.4)
        ax.set_ylim(heights[-1] + 0.5, -0.5)
        ax.set_yticks(heights, rows)
        ax.set_xticks(range(1, len(names) + 1))
        ax.tick_params(length=0)
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
        ax.grid(axis="x", visible=False)
        ax.set_xlabel("rank (1: the largest value)")
    return ax


def accounting_figure(
    found: pd.DataFrame, pairs: pd.DataFrame, width_in: float = style.PAGE_IN, *, confidence: float = 0.95
) -> Figure:
    """`rank_chart` with the strategies' names where their lines begin and end.

    Args:
        found, pairs: as for `rank_chart`.
        width_in: of the figure.
        confidence: of the intervals behind the grey bars.

    Raises:
        UsageError: as `check_room`.
    """
    check_rows(found, ["definition", "strategy", "rank"], unique=["definition", "strategy"])
    names, rows = list(dict.fromkeys(found["strategy"])), list(dict.fromkeys(found["definition"]))
    shown, left, right = check_room(names, rows, width_in)
    with style.paper():
        names_in = 1.2 * style.SMALL_PT / 72 * max(len(label) for label in shown.values()) + 0.13
        top, bottom, middle = names_in, names_in + 0.36, _ROW_IN * (row_heights(rows)[-1] + 1)
        height_in = top + bottom + middle
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        box = (left / width_in, bottom / height_in, 1 - (left + right) / width_in, middle / height_in)
        ax = rank_chart(fig.add_axes(box), found, pairs)
        looks = style.line_styles(names)
        for at, is_top in ((0, True), (-1, False)):
            for name, (x, y) in _ends(found, rows, at).items():
                _name(ax, "\n".join(shown[name]), x, y, is_top, looks[name]["color"])
        ax.tick_params(axis="x", pad=72 * names_in - 4)  # below the names at the lower ends
        tie = Line2D([], [], **_TIE, label=f"order not decided ({100 * confidence:g} %)")
        fig.legend(
            handles=[tie], loc="lower left", bbox_to_anchor=(0.0, 0.0), frameon=False, borderpad=0.3, handlelength=1.6
        )
    return fig


def check_room(
    names: Sequence[str], rows: Sequence[str], width_in: float = style.PAGE_IN
) -> tuple[dict[str, list[str]], float, float]:
    """The lines of the strategies' names as they stand beside each other, and the margins left and right (inches).

    Args:
        names: of the strategies.
        rows: names of the definitions.
        width_in: of the figure.

    Raises:
        UsageError: more strategies, or longer names, than fit the width; more definitions than a picture may be high.
    """
    if _ROW_IN * row_heights(rows)[-1] > _MOST_IN:
        raise UsageError(
            f"num_draft_tokens: expected K of which two definitions per position fit {_MOST_IN} in, got {len(rows)} "
            "definitions"
        )
    with style.paper():
        left, right = max(text_width_pt(row, style.SMALL_PT) for row in rows) / 72 + 0.16, 0.12
        each_pt = 72 * (width_in - left - right) / (len(names) - 0.2)
        shown = {name: wrapped(label_of(name), each_pt - 5, style.SMALL_PT) for name in names}
        widths = {name: max(text_width_pt(line, style.SMALL_PT) for line in label) for name, label in shown.items()}
    if widths and max(widths.values()) > each_pt - 2:
        raise UsageError(
            f"strategies: expected at most as many as fit {width_in} in beside each other, got {len(names)} (the "
            f"widest name: {max(widths, key=lambda name: widths[name])})"
        )
    return shown, left, right


def row_heights(rows: Sequence[str]) -> list[float]:
    """Where the rows of definitions stand, from 0 downwards, with a gap between kinds of them."""
    kinds = [f"position {row.rpartition(' ')[2]}" if row.startswith("position") else row.split(",")[0] for row in rows]
    kinds = ["rate" if kind.startswith(("rate", "system")) else kind for kind in kinds]
    gaps = np.cumsum([0, *(one != other for one, other in itertools.pairwise(kinds))])
    return [float(i + _GAP * gap) for i, gap in enumerate(gaps)]


def _ends(found: pd.DataFrame, rows: Sequence[str], at: int) -> dict[str, tuple[float, float]]:
    """Where the line of each strategy that has a rank in the first (0) or last (-1) row begins or ends."""
    y = row_heights(rows)[at]
    here = [row for row in found.to_dict("records") if row["definition"] == rows[at] and row["rank"] > 0]
    return {str(row["strategy"]): (float(row["rank"]), y) for row in here}


def _name(ax: Axes, text: str, x: float, y: float, is_top: bool, colour: str) -> None:
    """A strategy's name beyond the end of its line."""
    ax.annotate(
        text, (x, y), xytext=(0, 7 if is_top else -7), textcoords="offset points", ha="center",
        va="bottom" if is_top else "top", color=colour, fontsize=style.SMALL_PT, linespacing=1.05,
        annotation_clip=False,
    )  # fmt: skip
