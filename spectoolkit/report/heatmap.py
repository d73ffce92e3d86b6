"""Acceptance length over two settings as a heat map, and what is lost against the best of each row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from spectoolkit.report import style
from spectoolkit.report.labels import text_width_pt
from spectoolkit.report.plots import AXIS_LABELS, check_rows
from spectoolkit.report.text import number, short, value_text

TARGET, DRAFT = "sampling.temperature", "drafter.constant"
ARGMAX_GAP = 0.35  # columns between argmax, a point mass, and the draft temperatures above 0
_MAP = ListedColormap(colormaps["Blues"](np.linspace(0.0, 0.8, 256)))  # one hue, light to dark: the same in grey
_INK, _PAPER, _FRAME = "#222222", "#FFFFFF", "#D55E00"


def heat_map(
    ax: Axes,
    overall: pd.DataFrame,
    best: pd.DataFrame | None = None,
    *,
    metric: str = "acceptance_length",
) -> Axes:
    """`metric` over draft temperature (columns) and target temperature (rows), one cell per row of `overall`.

    Values stand in the cells where they fit. Columns are equally wide, in order; argmax (0) stands apart at the left
    edge. A dashed stroke stands in the cells where both temperatures are equal.

    Args:
        ax: the axes, of final size.
        overall: rows of `Tables.overall`.
        best: per target temperature `best`, `best_low` and `best_high`: the best cell is framed, and a bar below its
            number spans the interval.
        metric: a column of `overall`.

    Raises:
        UsageError: a missing column, or several rows of one cell.
    """
    check_rows(overall, [TARGET, DRAFT, metric], unique=[TARGET, DRAFT])
    targets = sorted(set(overall[TARGET].tolist()))
    drafts = sorted(set(overall[DRAFT].tolist()))
    values = np.full((len(targets), len(drafts)), np.nan)
    for row in overall.to_dict("records"):
        values[targets.index(row[TARGET]), drafts.index(row[DRAFT])] = row[metric]
    at = [j - ARGMAX_GAP * (draft == 0) for j, draft in enumerate(drafts)]
    with style.paper():
        ax.grid(False)
        for side in ax.spines.values():
            side.set_visible(False)
        ax.tick_params(length=0)
        ax.set_xlim(at[0] - 0.5, at[-1] + 0.5)
        ax.set_ylim(-0.5, len(targets) - 0.5)
        finite = values[np.isfinite(values)]
        low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
        colours = ScalarMappable(Normalize(low, high if high > low else low + 1), _MAP)
        width_pt = ax.get_window_extent().width * 72 / ax.figure.dpi / (at[-1] - at[0] + 1)
        fits = text_width_pt(number(high), style.SMALL_PT) + 1 <= width_pt
        for (i, j), value in np.ndenumerate(values):
            colour = tuple(np.ravel(colours.to_rgba(value))) if np.isfinite(value) else (1.0, 1.0, 1.0, 1.0)
            ax.add_patch(Rectangle((at[j] - 0.5, i - 0.5), 1, 1, facecolor=colour, edgecolor=_PAPER, linewidth=0.6))
            if fits:
                ink = _INK if _luminance(colour) > 0.2 else _PAPER
                ax.text(at[j], i, number(value), fontsize=style.SMALL_PT, color=ink, ha="center", va="center", zorder=5)
        if not fits:
            ax.figure.colorbar(colours, ax=ax, label=AXIS_LABELS.get(metric, short(metric)))
        _equal_temperatures(ax, targets, drafts, at)
        if best is not None:
            _best(ax, best, targets, drafts, at)
        ax.set_xticks(at, ["argmax" if draft == 0 else value_text(float(draft)) for draft in drafts])
        ax.set_yticks(range(len(targets)), [value_text(float(target)) for target in targets])
        ax.set_xlabel(AXIS_LABELS[DRAFT])
        ax.set_ylabel("target temperature")
    return ax


def heat_map_figure(overall: pd.DataFrame, width_in: float = style.PAGE_IN) -> Figure:
    """`heat_map` alone, where the best draft temperature is not asked for.

    Args:
        overall: `Tables.overall`, one row per target and draft temperature.
        width_in: of the figure.
    """
    height_in, left, right, bottom, top = 0.95 + 0.34 * len(set(overall[TARGET].tolist())), 0.48, 0.14, 0.44, 0.28
    with style.paper():
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        inner = ((width_in - left - right) / width_in, (height_in - bottom - top) / height_in)
        ax = heat_map(fig.add_axes((left / width_in, bottom / height_in, *inner)), overall)
        words = "acceptance length (tokens per target forward);  - - equal temperatures"
        ax.set_title(words, loc="left", fontsize=style.SMALL_PT, pad=5)
    return fig


def loss_dots(ax: Axes, best: pd.DataFrame) -> Axes:
    """Loss of argmax and of same-temperature drafting against the best draft temperature, rows as in `heat_map`.

    Args:
        ax: the axes.
        best: `studies.draft_temperature.best_draft_temperatures`.
    """
    names = {"argmax": "argmax", "same": "same temperature"}
    check_rows(best, [TARGET, *(f"loss_{name}{end}" for name in names for end in ("", "_low", "_high"))], [TARGET])
    best = best.sort_values(TARGET)
    with style.paper():
        looks: dict[object, dict[str, Any]] = style.line_styles(names)
        for (name, label), aside in zip(names.items(), (0.14, -0.14), strict=True):
            columns = best[[f"loss_{name}{end}" for end in ("", "_low", "_high")]].to_numpy(dtype=float)
            rows = np.arange(len(best)) + aside
            ax.hlines(rows, columns[:, 1], columns[:, 2], color=looks[name]["color"], linewidth=1.2)
            look = looks[name] | {"linestyle": "none", "markersize": 3.8}
            ax.plot(columns[:, 0], rows, label=label, **look, clip_on=False, zorder=3)
        ax.axvline(0, color=_INK, linewidth=0.6, zorder=1)
        ax.set_ylim(-0.5, len(best) - 0.5)
        ax.set_yticks(range(len(best)), [value_text(float(target)) for target in best[TARGET]])
        ax.grid(axis="y", visible=False)
        ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        ax.set_xlabel("lost against the best\n(tokens per forward)")
    return ax


def draft_temperature_figure(overall: pd.DataFrame, best: pd.DataFrame, width_in: float = style.PAGE_IN) -> Figure:
    """`heat_map` with `loss_dots` to its right, rows aligned.

    Args:
        overall: `Tables.overall`, one row per target and draft temperature.
        best: `studies.draft_temperature.best_draft_temperatures`.
        width_in: of the figure.
    """
    height_in = 0.95 + 0.34 * len(best)
    left, right, bottom, top, gap, second = 0.48, 0.14, 0.52, 0.28, 0.16, 1.14
    with style.paper():
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        inner = (height_in - bottom - top) / height_in
        first = width_in - left - right - gap - second
        heat = fig.add_axes((left / width_in, bottom / height_in, first / width_in, inner))
        losses = fig.add_axes(((left + first + gap) / width_in, bottom / height_in, second / width_in, inner))
        heat_map(heat, overall, best)
        heat.set_title(
            "acceptance length (tokens per target forward);  □ best, bar: its 95 % interval;  - - equal temperatures",
            loc="left",
            fontsize=style.SMALL_PT,
            pad=5,
        )
        loss_dots(losses, best)
        losses.tick_params(labelleft=False)
        losses.legend(
            loc="lower right",
            bbox_to_anchor=(1.04, 0.99),
            frameon=False,
            borderpad=0,
            handletextpad=0.1,
            labelspacing=0.1,
        )
    return fig


def _equal_temperatures(ax: Axes, targets: list[float], drafts: list[float], at: list[float]) -> None:
    """A dashed stroke above the number where draft = target, also between two columns."""
    inside = [(i, float(np.interp(t, drafts, at))) for i, t in enumerate(targets) if drafts[0] <= t <= drafts[-1]]
    for i, x in inside:
        for colour, width, dashes in ((_PAPER, 2.4, "solid"), (_INK, 1.1, (0, (2.2, 1.1)))):
            ax.plot([x - 0.3, x + 0.3], [i + 0.3] * 2, color=colour, linewidth=width, linestyle=dashes, zorder=7)


def _best(ax: Axes, best: pd.DataFrame, targets: list[float], drafts: list[float], at: list[float]) -> None:
    check_rows(best, [TARGET, "best", "best_low", "best_high"], unique=[TARGET])
    for row in best.to_dict("records"):
        i, j = targets.index(row[TARGET]), drafts.index(row["best"])
        frame = Rectangle((at[j] - 0.46, i - 0.46), 0.92, 0.92, facecolor="none", edgecolor=_FRAME, linewidth=1.5)
        ax.add_patch(frame)
        frame.set_zorder(6)
        if np.isfinite(row["best_low"]):
            span = np.interp([row["best_low"], row["best_high"]], drafts, at)
            for colour, width in ((_PAPER, 3.2), (_FRAME, 1.5)):
                ax.plot(span, [i - 0.33] * 2, color=colour, linewidth=width, zorder=6, marker="|", markersize=3.5)


def _luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance of an sRGB colour (WCAG 2.1): above about 0.2, dark ink has the better contrast."""
    red, green, blue = (((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in colour[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
