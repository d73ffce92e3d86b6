"""Curves of a draft head's training."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spectoolkit.report import style


def curves(ax: Axes, log: pd.DataFrame, prefix: str, ylabel: str, legend: bool) -> Axes:
    """One line per depth of the columns `prefix`_1, `prefix`_2, .. over the column `step`; gaps are bridged.

    Args:
        ax: the axes.
        log: rows of `training.loop.train`.
        prefix: "loss" or "overlap".
        legend: whether the depths are named.
    """
    names = sorted(name for name in log.columns if name.startswith(f"{prefix}_"))
    looks = style.line_styles(names)
    for name in names:
        known = log[log[name].notna()]
        look = dict(looks[name])
        if len(known) > 30:
            look |= {"marker": "none"}
        ax.plot(known["step"], known[name], label=f"depth {name.split('_')[-1]}", **look)
    ax.set_xlabel("Training step")
    ax.set_ylabel(ylabel)
    if legend:
        ax.legend(frameon=False)
    return ax


def training_figure(log: pd.DataFrame, temperature: float, width_in: float = style.PAGE_IN) -> Figure:
    """Training loss at the left, acceptance on held-out prompts at the right, one line per depth."""
    with style.paper():
        figure = Figure(figsize=(width_in, 2.3), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        curves(left, log, "loss", "Cross-entropy (nats)", legend=False)
        curves(right, log, "overlap", f"Held-out Σ min(p, q), T = {temperature:g}", legend=True)
        right.set_ylim(bottom=0)
    return figure
