"""Expected speed-up over acceptance rate and cost of drafting, with what was measured drawn in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from spectoolkit.errors import UsageError
from spectoolkit.functional.theory import expected_speedup, implied_rate
from spectoolkit.report import style
from spectoolkit.report.labels import text_width_pt, wrapped
from spectoolkit.report.plots import check_rows, label_of

K = "num_draft_tokens"
LEVELS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_POINT = ["strategy", K, "rate", "rate_low", "rate_high", "cost", "cost_low", "cost_high"]
_INK, _SLOWER = "#8A8A8A", "#EFEFEF"
_LINES = "expected\nspeed-up"
_GRID = 161  # points per axis
_LABEL_PT = 90.0  # longer names are broken: three panels fit beside them on a page


def measured_points(found: pd.DataFrame) -> pd.DataFrame:
    """What `speedup_contours` draws, from acceptance lengths with intervals and costs.

    `rate` is the constant acceptance rate that gives the measured acceptance length (`theory.implied_rate`), so that a
    point lies on the contour of AL / (K c + 1) whatever the rates at single positions are; likewise its interval.

    Args:
        found: `strategy`, `num_draft_tokens`, `acceptance_length` with `_low` and `_high` where there are any, and
            `cost` with `cost_low` and `cost_high` where there are any.

    Raises:
        UsageError: a missing column.
    """
    check_rows(found, ["strategy", K, "acceptance_length", "cost"], unique=[])
    rows = []
    for row in found.to_dict("records"):
        k = int(row[K])
        rates = {
            f"rate{end}": implied_rate(float(row.get(f"acceptance_length{end}", np.nan)), k)
            for end in ("", "_low", "_high")
        }
        costs = {f"cost{end}": float(row.get(f"cost{end}", np.nan)) for end in ("_low", "_high")}
        rows.append({"strategy": row["strategy"], K: k, "cost": float(row["cost"])} | rates | costs)
    return pd.DataFrame(rows, columns=_POINT)


def speedup_contours(
    ax: Axes,
    num_draft_tokens: int,
    points: pd.DataFrame | None = None,
    *,
    looks: dict[Any, dict[str, Any]] | None = None,
) -> Axes:
    """Lines of equal expected speed-up (1 - a^(K+1)) / ((1 - a)(K c + 1)) over a and c (`theory.expected_speedup`).

    The region in which drafting is slower than plain decoding is grey. The formula takes scoring K + 1 tokens to cost
    as much as a forward over one.

    Args:
        ax: the axes, of final size.
        num_draft_tokens: K.
        points: rows of `measured_points` of this K, drawn with their intervals.
        looks: `style.line_styles` of the strategies of a whole figure.

    Raises:
        UsageError: a missing column, several rows of one strategy, or points of another K.
    """
    points = pd.DataFrame(columns=_POINT) if points is None else points
    check_rows(points, _POINT, unique=["strategy"])
    if others := sorted({int(k) for k in points[K]} - {num_draft_tokens}):
        raise UsageError(f"points: expected points of K = {num_draft_tokens}, got K = {others[0]}")
    columns = points[["cost", "cost_high"]].to_numpy(dtype=float)
    limit = _ceiling(float(np.nanmax(columns)) if np.isfinite(columns).any() else 0.0)
    rate, cost = np.linspace(0, 1, _GRID), np.linspace(0, limit, _GRID)
    values = np.array([[expected_speedup(a, num_draft_tokens, c) for a in rate] for c in cost])
    looks = style.line_styles(points["strategy"]) if looks is None else looks
    with style.paper():
        ax.grid(False)
        ax.set_xlim(0, 1)
        ax.set_ylim(0, limit)
        ax.contourf(rate, cost, values, levels=[0, 1], colors=[_SLOWER], zorder=0)
        levels = [level for level in LEVELS if values.min() < level < values.max()]
        widths = [1.3 if level == 1 else 0.6 for level in levels]
        ax.contour(rate, cost, values, levels=levels, colors=_INK, linewidths=widths, zorder=1)
        _name_levels(ax, levels, rate, cost, values)
        for row in points.to_dict("records"):
            look = _marker(looks[row["strategy"]])
            bar = {"color": look["color"], "linewidth": 1.1, "zorder": 4}
            ax.hlines([row["cost"]], [row["rate_low"]], [row["rate_high"]], **bar)
            ax.vlines([row["rate"]], [row["cost_low"]], [row["cost_high"]], **bar)
            ax.plot([row["rate"]], [row["cost"]], clip_on=False, zorder=5, **look)
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        ax.set_xlabel("acceptance rate a")
        ax.set_ylabel("draft cost c\n(draft token / target forward)")
    return ax


def contours_figure(points: pd.DataFrame, panel: str | None = None, width_in: float | None = None) -> Figure:
    """`speedup_contours` in one panel per value of `panel`, the strategies named at the right.

    Args:
        points: `measured_points`, with the column `panel`.
        panel: column of panels, each of one K, whose values are their titles; None draws one.
        width_in: of the figure; None takes a page, or a column where one panel is all.

    Raises:
        UsageError: a missing column, several K in a panel, or more panels than fit.
    """
    check_rows(points, [*_POINT, *([panel] if panel else [])], unique=[])
    values = list(dict.fromkeys(points[panel])) if panel else [None]
    width_in = width_in or (style.PAGE_IN if len(values) > 1 else style.COLUMN_IN + 1.4)
    looks = style.line_styles(points["strategy"])
    with style.paper():
        labels = {name: wrapped(label_of(name), _LABEL_PT, style.SMALL_PT) for name in looks}
        lines = ["expected", *(line for label in labels.values() for line in label)]
        right = max(text_width_pt(line, style.SMALL_PT) for line in lines) / 72 + 0.44
    height_in, left, gap, bottom, top = 2.4, 0.66, 0.46, 0.42, 0.24
    each = (width_in - left - right - gap * (len(values) - 1)) / len(values)
    if each < 1.2:
        raise UsageError(f"panels: expected at most as many as fit {width_in} in, got {len(values)}")
    with style.paper():
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        for i, value in enumerate(values):
            rows = points if panel is None else pd.DataFrame(points[points[panel] == value])
            ks = sorted({int(k) for k in rows[K]})
            if len(ks) != 1:
                raise UsageError(f"points: expected one K in a panel, got {', '.join(map(str, ks))}")
            start = left + i * (each + gap)
            ax = fig.add_axes(
                (start / width_in, bottom / height_in, each / width_in, (height_in - bottom - top) / height_in)
            )
            speedup_contours(ax, ks[0], rows, looks=looks)
            title = f"expected speed-up, K = {ks[0]}"
            ax.set_title(title if panel is None else f"{label_of(value)}, K = {ks[0]}", loc="left", pad=5)
            if i:
                ax.set_ylabel("")
        handles = [Line2D([], [], **_marker(look), label="\n".join(labels[name])) for name, look in looks.items()]
        handles.append(Line2D([], [], color=_INK, linewidth=0.8, label=_LINES))
        fig.legend(
            handles=handles, loc="upper left", bbox_to_anchor=((width_in - right + 0.06) / width_in, 0.93),
            frameon=False, borderpad=0, handletextpad=0.3, handlelength=1.6,
        )  # fmt: skip
    return fig


def _ceiling(cost: float) -> float:
    """The upper end of the cost axis: a round number that leaves the names of the levels above what was measured."""
    return next((limit for limit in (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 2.0, 5.0) if cost <= 0.84 * limit), 1.3 * cost)


def _marker(look: Mapping[str, Any]) -> dict[str, Any]:
    """A point of the map: hollow ones are white inside, so that no line runs through them."""
    face = "#FFFFFF" if look["markerfacecolor"] == "none" else look["markerfacecolor"]
    return {**look, "linestyle": "none", "markerfacecolor": face}


def _name_levels(ax: Axes, levels: Sequence[float], rate: np.ndarray, cost: np.ndarray, values: np.ndarray) -> None:
    """The level on each line near the upper edge, else near the right one, as far as they keep apart; 1 comes first."""
    top, right = 0.93, 0.955
    upper, side = values[int(top * (len(cost) - 1))], values[:, int(right * (len(rate) - 1))]
    placed: list[np.ndarray] = []
    for level in sorted(levels, key=lambda level: (level != 1, level)):
        at = (float(np.interp(level, upper, rate, np.nan, np.nan)), top * cost[-1])
        if not at[0] <= 0.97:
            at = (right, float(np.interp(level, side[::-1], cost[::-1], np.nan, np.nan)))
        if not np.isfinite(at).all() or at[1] < 0.02 * cost[-1] or at[0] < 0.03:
            continue
        where = ax.transData.transform(at) * 72 / ax.figure.dpi
        if any(abs(where[0] - x) < 20 and abs(where[1] - y) < 10 for x, y in placed):
            continue
        placed.append(where)
        ax.text(
            *at, f"{level:g}×", fontsize=style.SMALL_PT, color="#555555", ha="center", va="center", zorder=3,
            fontweight="bold" if level == 1 else "normal",
            bbox={"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip
