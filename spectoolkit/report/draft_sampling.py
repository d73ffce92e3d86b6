"""What ways to draw drafts accept, along one sampling parameter of the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spectoolkit.report import style
from spectoolkit.report.plots import AXIS_LABELS, acceptance_length_sweep, check_rows, panels
from spectoolkit.report.text import value_text

TEMPERATURE, TOP_K = "sampling.temperature", "sampling.top_k"
BASE = "same temperature"
RATIO, LENGTH, PUBLIC = "ratio", "acceptance_length", "public_ratio"
LABELS = AXIS_LABELS | {RATIO: f"acceptance length over that\nof {BASE} drafts", TOP_K: "top-k of the target"}


def value_label(value: float, x: str) -> str:
    """A value of the axis as text: a top-k of 0 is "all"."""
    return "all" if x == TOP_K and value == 0 else value_text(float(value))


def strategy_lines(ax: Axes, found: pd.DataFrame, x: str, metric: str, looks: dict[Any, dict[str, Any]]) -> Axes:
    """`metric` along x with intervals, one line per strategy, labelled at its end; published ratios as diamonds.

    Temperatures stand where they are, values of a top-k one beside the other in the order of the rows.

    Args:
        ax: the axes, of final size.
        found: rows of `studies.draft_sampling.compared`, those of one panel.
        x: column of the abscissa.
        metric: `RATIO`, with 1 drawn across, or `LENGTH`.
        looks: of every strategy.
    """
    check_rows(found, [x, "strategy", metric, f"{metric}_low", f"{metric}_high", PUBLIC], unique=[x, "strategy"])
    values = list(dict.fromkeys(found[x].tolist()))
    found = found.assign(place=[value if x == TEMPERATURE else values.index(value) for value in found[x].tolist()])
    found["label"] = [_label(name) for name in found["strategy"]]
    reference = {BASE: 1.0} if metric == RATIO else None
    columns = [metric, f"{metric}_low", f"{metric}_high"]
    shown = pd.DataFrame(found, columns=columns).to_numpy(dtype=float).ravel()
    if metric == RATIO:
        shown = np.concatenate([shown, found[PUBLIC].to_numpy(dtype=float), [1.0]])
    low, high = np.nanmin(shown), np.nanmax(shown)
    pad = 0.06 * (high - low) or 0.1
    ax.set_ylim(low - pad, high + pad)
    named: dict[object, Mapping[str, Any]] = {_label(name): look for name, look in looks.items()}
    with style.paper():
        acceptance_length_sweep(ax, found, x="place", line="label", metric=metric, reference=reference, looks=named)
        if metric == RATIO:
            for name in dict.fromkeys(found["strategy"].tolist()):
                mine = pd.DataFrame(found[found["strategy"] == name])
                at, published = pd.DataFrame(mine, columns=["place", PUBLIC]).to_numpy(dtype=float).T
                is_known = np.isfinite(published)
                look: dict[str, Any] = {"color": looks[name]["color"], "marker": "D", "markerfacecolor": "#FFFFFF"}
                look |= {"markersize": 4.4, "linestyle": (0, (1, 1.6)), "linewidth": 0.8, "zorder": 6}
                ax.plot(at[is_known], published[is_known], **look)
        if x != TEMPERATURE:
            ax.set_xticks(range(len(values)), [value_label(value, x) for value in values])
        ax.set_xlabel(LABELS[x])
        ax.set_ylabel(LABELS[metric])
    return ax


def draft_sampling_figure(found: pd.DataFrame, x: str, width_in: float = style.PAGE_IN) -> Figure:
    """Along the temperature: ratios of what keeps nothing, and of what keeps draft rows or a part of them.

    Along a top-k: acceptance lengths, and ratios. Of block verification same-temperature drafts alone are shown.

    Args:
        found: `studies.draft_sampling.compared`.
        x: column of the abscissa.
        width_in: of the figure.
    """
    names = [n for n in dict.fromkeys(found["strategy"].tolist()) if not n.endswith(", block") or n == f"{BASE}, block"]
    by_row = zip(found["strategy"].tolist(), found["draft_bytes_per_token"].tolist(), strict=True)
    kept = {name for name, num_bytes in by_row if num_bytes}
    others = [name for name in names if name != BASE]
    if x == TEMPERATURE:
        parts = [
            ("nothing kept of the draft law", RATIO, [name for name in others if name not in kept]),
            ("rows kept, or a part of them", RATIO, [name for name in others if name in kept]),
        ]
    else:
        parts = [("acceptance length", LENGTH, names), ("over that of same-temperature drafts", RATIO, others)]
    parts = [part for part in parts if part[2]]
    looks = style.line_styles([*others, BASE])
    with style.paper():
        labels = [_label(name) for name in names] + [BASE]
        fig, axes = panels(len(parts), labels, top=0.24, width_in=width_in, height_in=2.5, gap=0.42)
        for i, (ax, (title, metric, members)) in enumerate(zip(axes, parts, strict=True)):
            rows = pd.DataFrame(found[[name in members for name in found["strategy"]]])
            strategy_lines(ax, rows, x, metric, looks)
            has_public = metric == RATIO and np.isfinite(rows[PUBLIC].to_numpy(dtype=float)).any()
            ax.set_title(title + (";  ◇ published" if has_public else ""), loc="left", pad=5)
            if i:
                ax.set_ylabel("")
    return fig


def _label(strategy: str) -> str:
    """What stands in the figure: "block" and "match" are rules for same-temperature drafts there."""
    return strategy.removeprefix(f"{BASE}, ")
