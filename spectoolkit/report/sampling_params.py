"""Acceptance by the side that has the sampling parameters: small multiples of grouped dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from spectoolkit.errors import UsageError
from spectoolkit.report import style
from spectoolkit.report.labels import wrapped
from spectoolkit.report.plots import check_rows, set_length_limits
from spectoolkit.report.truncation import SIDE_LOOKS, side_dot

METRIC_LABELS = {
    "acceptance_rate_unmasked": "acceptance rate,\nunmasked",
    "acceptance_rate": "acceptance rate,\nprefix",
    "system_efficiency": "system efficiency",
}
_WIDTH = 0.19  # between neighbours of a group, in groups
_LEFT_IN, _RIGHT_IN, _GAP_IN = 0.66, 1.42, 0.14  # beside the columns, and between them


def side_panel(ax: Axes, found: pd.DataFrame, metric: str) -> Axes:
    """One group per K, in it a dot with interval per side; hollow where the output is not what was asked for.

    Args:
        ax: the axes.
        found: rows of `studies.sampling_params.by_side` of one question.
        metric: a column with `_low` and `_high` beside it.

    Raises:
        UsageError: a missing column, or several rows of one dot.
    """
    columns = [metric, f"{metric}_low", f"{metric}_high"]
    check_rows(found, ["num_draft_tokens", "side", "samples_asked", *columns], unique=["num_draft_tokens", "side"])
    groups = sorted(set(found["num_draft_tokens"].tolist()))
    present = [side for side in SIDE_LOOKS if side in set(found["side"])]
    with style.paper():
        set_length_limits(ax, found, metric, None)
        ax.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        for row in found.to_dict("records"):
            look = SIDE_LOOKS[str(row["side"])]
            x = groups.index(row["num_draft_tokens"]) + (present.index(row["side"]) - (len(present) - 1) / 2) * _WIDTH
            ax.vlines([x], [row[columns[1]]], [row[columns[2]]], color=look["color"], linewidth=1.2, zorder=2)
            ax.plot([x], [row[metric]], **side_dot(look, bool(row["samples_asked"])), clip_on=False, zorder=3)
        ax.set_xlim(-0.5, len(groups) - 0.5)
        ax.set_xticks(range(len(groups)), [str(k) for k in groups])
        ax.grid(axis="x", visible=False)
        ax.set_ylabel(METRIC_LABELS.get(metric, metric))
    return ax


def column_widths(ks: Mapping[str, Sequence[int]], width_in: float = style.PAGE_IN) -> np.ndarray:
    """Inches of every question's column, in proportion to its groups of dots.

    Args:
        ks: question -> its K, one group each.
        width_in: of the figure.

    Raises:
        UsageError: more questions and K than fit.
    """
    # A lone group needs room for its heading.
    shares = np.array([max(len(values), 1.6) for values in ks.values()])
    widths = (width_in - _LEFT_IN - _RIGHT_IN - _GAP_IN * (len(ks) - 1)) * shares / shares.sum()
    if (widths / shares).min() < 0.42:
        given = "; ".join(f"{name} at K = {', '.join(map(str, values))}" for name, values in ks.items())
        raise UsageError(f"study.questions and their K: expected at most as many as fit {width_in} in, got {given}")
    return widths


def sampling_params_figure(found: pd.DataFrame, width_in: float = style.PAGE_IN) -> Figure:
    """`side_panel` in one row per metric of `METRIC_LABELS` and one column per question; a row has one y scale.

    Args:
        found: `studies.sampling_params.by_side`.
        width_in: of the figure.

    Raises:
        UsageError: as `column_widths`.
    """
    check_rows(found, ["question", "num_draft_tokens"], unique=[])
    questions = list(dict.fromkeys(found["question"]))
    points = {(row["question"], row["num_draft_tokens"]) for row in found.to_dict("records")}
    ks = {question: sorted(k for name, k in points if name == question) for question in questions}
    widths = column_widths(ks, width_in)
    left, right, gap = _LEFT_IN, _RIGHT_IN, _GAP_IN
    row_in, row_gap, bottom = 1.12, 0.14, 0.4
    with style.paper():
        heads = ["\n".join(wrapped(q, 72 * w - 2, style.FONT_PT)) for q, w in zip(questions, widths, strict=True)]
        top = 0.1 + 0.13 * max(head.count("\n") + 1 for head in heads)
        num_rows = len(METRIC_LABELS)
        height_in = bottom + top + num_rows * row_in + (num_rows - 1) * row_gap
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        for r, metric in enumerate(METRIC_LABELS):
            base = bottom + (num_rows - 1 - r) * (row_in + row_gap)
            limits = None
            for c, question in enumerate(questions):
                start = left + widths[:c].sum() + gap * c
                box = (start / width_in, base / height_in, widths[c] / width_in, row_in / height_in)
                ax = fig.add_axes(box)
                if limits is None:
                    set_length_limits(ax, found, metric, None)
                    limits = ax.get_ylim()
                ax.set_ylim(limits)
                side_panel(ax, pd.DataFrame(found[found["question"] == question]), metric)
                if c:
                    ax.set_ylabel("")
                    ax.tick_params(labelleft=False)
                if r == 0:
                    ax.set_title(heads[c], loc="left", pad=4, linespacing=1.05)
                if r < num_rows - 1:
                    ax.tick_params(labelbottom=False)
                elif c == 0:
                    ax.set_xlabel("draft tokens per step, K")
        start = (width_in - right + 0.1) / width_in
        legend = {"loc": "upper left", "frameon": False, "borderpad": 0, "handletextpad": 0.4, "alignment": "left"}
        keys = (("samples what\nwas asked for", True, ("both", "target only"), 0.92),
                ("samples another law", False, ("draft only", "neither"), 0.7))  # fmt: skip
        for title, is_asked, sides, height in keys:
            handles = [Line2D([], [], **side_dot(SIDE_LOOKS[side], is_asked), label=f"on {side}") for side in sides]
            fig.legend(
                handles=handles, title=title, title_fontsize=style.SMALL_PT, bbox_to_anchor=(start, height), **legend
            )
    return fig
