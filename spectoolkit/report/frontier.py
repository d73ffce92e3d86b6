"""Acceptance length against distance from the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spectoolkit.errors import UsageError
from spectoolkit.report import style
from spectoolkit.report.plots import check_rows, legend_above

RIVAL = "lower temperature"
_COLUMNS = ["temperature", "drafter", "rule", "kl", "acceptance_length"]


def rule_looks(rules: Sequence[str]) -> dict[str, dict[str, Any]]:
    """One look per rule; the unbiased rival is dark, whatever stands beside it."""
    looks: dict[Any, dict[str, Any]] = style.line_styles([RIVAL, *(rule for rule in rules if rule != RIVAL)])
    dark = dict.fromkeys(("color", "markeredgecolor", "markerfacecolor"), style.INK)
    return {rule: look | (dark if rule == RIVAL else {}) for rule, look in looks.items()}


def frontier(ax: Axes, found: pd.DataFrame, looks: Mapping[str, Mapping[str, Any]] | None = None) -> Axes:
    """One line per rule over KL per token, of one temperature and drafter; the lossless point lies at 0.

    Intervals are bars, in both directions, where the table has them.

    Args:
        ax: the axes.
        found: rows of `studies.lossy_frontier`, one per rule and setting.
        looks: `rule_looks` of a whole figure, so that a rule looks the same in every panel.

    Raises:
        UsageError: a missing column, or a rule without a look.
    """
    check_rows(found, _COLUMNS, unique=[])
    rules = list(dict.fromkeys(found["rule"]))
    looks = rule_looks(rules) if looks is None else looks
    if unknown := [rule for rule in rules if rule not in looks]:
        raise UsageError(f"looks: expected one for every rule, none for {', '.join(unknown)}")
    with style.paper():
        for rank, rule in enumerate(looks):
            rows = pd.DataFrame(found[found["rule"] == rule]).sort_values(by=["kl"])
            rank = 2 if rule == RIVAL else 3 + 0.01 * rank
            bars = {"color": looks[rule]["color"], "linewidth": 0.8, "alpha": 0.55, "zorder": rank - 0.5}
            if "acceptance_length_low" in rows:
                ax.vlines(rows["kl"], rows["acceptance_length_low"], rows["acceptance_length_high"], **bars)
            if "kl_low" in rows:
                ax.hlines(rows["acceptance_length"], rows["kl_low"], rows["kl_high"], **bars)
            look = {"linewidth": 1.0, "zorder": rank, **looks[rule]}
            ax.plot(rows["kl"], rows["acceptance_length"], label=rule, clip_on=False, **look)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        ax.set_xlabel("KL per token (nats)")
        ax.set_ylabel("acceptance length\n(tokens per target forward)")
    return ax


def frontier_figure(table: pd.DataFrame, width_in: float = style.PAGE_IN) -> Figure:
    """`frontier` for every drafter (rows) and the four highest temperatures (columns), one legend above.

    Lines end in the middle of the panels and beside each other, so a legend names them.

    Raises:
        UsageError: a missing column.
    """
    check_rows(table, _COLUMNS, unique=[])
    looks = rule_looks(list(dict.fromkeys(table["rule"])))
    drafters = list(dict.fromkeys(table["drafter"]))
    temperatures = sorted(set(table["temperature"]))[-4:]
    legend = legend_above(looks, width_in)
    left, right, gap, bottom, each_in, row_gap, top = 0.62, 0.1, 0.16, 0.42, 1.45, 0.24, 0.24 + legend.height_in
    each = (width_in - left - right - gap * (len(temperatures) - 1)) / len(temperatures)
    height_in = bottom + top + each_in * len(drafters) + row_gap * (len(drafters) - 1)
    with style.paper():
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        for i, drafter in enumerate(drafters):
            base = bottom + (len(drafters) - 1 - i) * (each_in + row_gap)
            row = pd.DataFrame(table[(table["drafter"] == drafter) & table["temperature"].isin(temperatures)])
            ends = [name for name in row if str(name) in (_COLUMNS[-1], f"{_COLUMNS[-1]}_low", f"{_COLUMNS[-1]}_high")]
            low, high = (float(f(row[ends].to_numpy(dtype=float))) for f in (np.nanmin, np.nanmax))
            for j, temperature in enumerate(temperatures):
                start = left + j * (each + gap)
                ax = fig.add_axes((start / width_in, base / height_in, each / width_in, each_in / height_in))
                ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
                frontier(ax, pd.DataFrame(row[row["temperature"] == temperature]), looks)
                ax.set_xlabel("KL per token (nats)" if i == len(drafters) - 1 else "")
                ax.set_ylabel(f"acceptance length\n({str(drafter).replace('_', ' ')} drafts)" if j == 0 else "")
                ax.tick_params(labelleft=j == 0)
                if i == 0:
                    ax.set_title(f"T = {temperature:g}", loc="left", pad=4)
        legend.draw(fig)
    return fig
