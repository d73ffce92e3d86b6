"""Acceptance length against distance from the target."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spectoolkit.report import style
from spectoolkit.report.plots import check_rows

RIVAL = "lower temperature"
_COLUMNS = ["temperature", "drafter", "rule", "kl", "acceptance_length"]


def frontier(ax: Axes, found: pd.DataFrame, rules: list[str]) -> Axes:
    """One line per rule over KL per token, of one temperature and drafter; the lossless point lies at 0.

    Args:
        ax: the axes.
        found: rows of `studies.lossy_frontier`.
        rules: all rules of the figure, so that a rule looks the same in every panel.
    """
    check_rows(found, _COLUMNS, unique=[])
    looks = style.line_styles(rules)
    for rule in rules:
        rows = pd.DataFrame(found[found["rule"] == rule]).sort_values(by=["kl"])
        look = dict(looks[rule])
        if rule == RIVAL:
            look |= {"color": "#333333", "markeredgecolor": "#333333", "markerfacecolor": "#333333", "zorder": 2}
        ax.plot(rows["kl"], rows["acceptance_length"], label=rule, clip_on=False, **look)
    ax.set_xlim(left=0)
    return ax


def frontier_figure(table: pd.DataFrame, width_in: float = style.PAGE_IN) -> Figure:
    """`frontier` for every drafter (rows) and the four highest temperatures (columns), one legend below."""
    check_rows(table, _COLUMNS, unique=[])
    rules = [RIVAL, *(rule for rule in dict.fromkeys(table["rule"]) if rule != RIVAL)]
    drafters = list(dict.fromkeys(table["drafter"]))
    temperatures = sorted(set(table["temperature"]))[-4:]
    with style.paper():
        figure = Figure(figsize=(width_in, 1.75 * len(drafters) + 0.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(drafters), len(temperatures), squeeze=False, sharey="row")
        for i, drafter in enumerate(drafters):
            for j, temperature in enumerate(temperatures):
                part = pd.DataFrame(table[(table["drafter"] == drafter) & (table["temperature"] == temperature)])
                ax = frontier(axes[i][j], part, rules)
                if i == 0:
                    ax.set_title(f"T = {temperature:g}", loc="left")
                if i == len(drafters) - 1:
                    ax.set_xlabel("KL per token (nats)")
                if j == 0:
                    ax.set_ylabel(f"Acceptance length\n({str(drafter).replace('_', ' ')})")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(rules), frameon=False)
    return figure
