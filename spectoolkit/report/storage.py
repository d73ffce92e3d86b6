"""Acceptance length against the bytes that are kept per draft token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from spectoolkit.errors import UsageError
from spectoolkit.report import style
from spectoolkit.report.labels import label_line_ends, spread, text_width_pt
from spectoolkit.report.plots import AXIS_LABELS, check_rows, label_of, set_length_limits

TEMPERATURE, BYTES = "sampling.temperature", "draft_bytes_per_token"
_LENGTH = ("acceptance_length", "acceptance_length_low", "acceptance_length_high")
KEPT = ("nothing", "part", "whole row")
_LINEAR_TO = 10.0  # bytes up to which the axis is linear, so that 0 has a place


def length_over_bytes(ax: Axes, found: pd.DataFrame, upper: str | None = None) -> Axes:
    """Acceptance length against bytes per draft token at one temperature, one labelled dot with interval per strategy.

    The x axis is linear up to 10 bytes and logarithmic beyond. Looks say what is kept of the draft law (`kept`:
    nothing, a part, the whole row); strategies that keep a part are joined by a line.

    Args:
        ax: the axes, of final size.
        found: rows of `studies.storage.recovered` of one temperature.
        upper: a strategy whose acceptance length is drawn across as the reference.

    Raises:
        UsageError: a missing column, or several rows of one strategy.
    """
    check_rows(found, ["strategy", "label", "kept", BYTES, *_LENGTH], unique=["strategy"])
    with style.paper():
        looks: dict[Any, dict[str, Any]] = style.line_styles(KEPT)
        largest = max(found[BYTES].tolist())
        ax.set_xscale("symlog", linthresh=_LINEAR_TO, linscale=1.35, subs=[])
        ax.set_xlim(-1.6, max(largest, 2 * _LINEAR_TO) * 2.2)
        set_length_limits(ax, found, _LENGTH[0], None)
        dots: dict[str, dict[str, tuple[float, float]]] = {kept: {} for kept in KEPT}
        for kept, look in looks.items():
            rows = pd.DataFrame(found[found["kept"] == kept]).sort_values(by=[BYTES])
            x, y, low, high = pd.DataFrame(rows, columns=[BYTES, *_LENGTH]).to_numpy(dtype=float).T
            look: dict[str, Any] = look | ({} if kept == "part" else {"linestyle": "none"})
            ax.vlines(x, low, high, color=look["color"], linewidth=1.0, zorder=2)
            ax.plot(x, y, clip_on=False, zorder=3, **look)
            dots[kept] = dict(zip(map(label_of, rows["label"]), zip(x, y, strict=True), strict=True))
            if kept == "part":
                _label_below(ax, list(dots[kept]), x, np.fmin(y, low), str(look["color"]))
        if upper is not None:
            reference = found.loc[found["strategy"] == upper, _LENGTH[0]]
            for value in reference:
                ax.axhline(value, color="#777777", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1.5)
        _label_zeros(ax, [(label, y) for label, (_, y) in dots["nothing"].items()], looks["nothing"]["color"])
        ax.xaxis.set_major_locator(FixedLocator([0, *(10.0**i for i in range(1, 7) if 10.0**i <= largest * 2)]))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes_text(value)))
        ax.set_xlabel("kept per draft token (bytes)")
        ax.set_ylabel(AXIS_LABELS[_LENGTH[0]])
        whole = dots["whole row"]
        return label_line_ends(ax, whole, dict.fromkeys(whole, looks["whole row"]), style.SMALL_PT)


def storage_figure(found: pd.DataFrame, upper: str | None = None, width_in: float = style.PAGE_IN) -> Figure:
    """`length_over_bytes` in one panel per temperature, each with a scale of its own.

    Args:
        found: `studies.storage.recovered`.
        upper: as for `length_over_bytes`.
        width_in: of the figure.
    """
    check_rows(found, [TEMPERATURE, "label", "kept", BYTES], unique=[])
    temperatures = list(dict.fromkeys(found[TEMPERATURE]))
    with style.paper():
        at_end = [label_of(label) for label in found.loc[found["kept"] == "whole row", "label"]]
        room = max((text_width_pt(label, style.SMALL_PT) for label in at_end), default=0.0) / 72 + 0.2
        height_in, left, gap, bottom, top = 2.4, 0.66, 0.36, 0.4, 0.24
        each = (width_in - left - room * len(temperatures) - gap * (len(temperatures) - 1)) / len(temperatures)
        if each < 1.2:
            raise UsageError(
                f"temperatures: expected at most as many panels as fit {width_in} in, got {len(temperatures)}"
            )
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        for i, temperature in enumerate(temperatures):
            start = left + i * (each + room + gap)
            box = (start / width_in, bottom / height_in, each / width_in, (height_in - bottom - top) / height_in)
            ax = length_over_bytes(fig.add_axes(box), pd.DataFrame(found[found[TEMPERATURE] == temperature]), upper)
            ax.set_title(f"temperature {temperature:g}", loc="left", pad=5)
            if i:
                ax.set_ylabel("")
    return fig


def _label_below(ax: Axes, labels: list[str], x: np.ndarray, bottoms: np.ndarray, colour: str) -> None:
    """Labels below the intervals; "m = " stands once, and strategies that keep equally much share a place."""
    shown: dict[float, list[str]] = {}
    for i, (label, at) in enumerate(zip(labels, x, strict=True)):
        shown.setdefault(float(at), []).append(label.removeprefix("m = ") if i else label)
    for at, words in shown.items():
        ax.annotate(
            ", ".join(words), (at, float(bottoms[x == at].min())), xytext=(0, -3), textcoords="offset points",
            ha="center", va="top", color=colour, fontsize=style.SMALL_PT,
        )  # fmt: skip


def _label_zeros(ax: Axes, zeros: list[tuple[str, float]], colour: str) -> None:
    """Labels to the right of the dots at 0 bytes, kept apart."""
    scale = 72 / ax.figure.dpi
    heights = [float(ax.transData.transform((0, y))[1]) * scale for _, y in zeros]
    box = ax.get_window_extent()
    free = spread(heights, 1.2 * style.SMALL_PT, box.y0 * scale + 4, box.y1 * scale - 4)
    for (label, y), height, moved in zip(zeros, heights, free, strict=True):
        ax.annotate(
            label, (0, y), xytext=(6, moved - height), textcoords="offset points", ha="left", va="center",
            color=colour, fontsize=style.SMALL_PT, zorder=5,
        )  # fmt: skip


def _bytes_text(value: float) -> str:
    return f"{value / 1000:g} k" if value >= 1000 else f"{value:g}"
