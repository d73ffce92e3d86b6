"""Rules by what they emit at the first rejection: acceptance length with the exactness verdict, and speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spectoolkit.report import style
from spectoolkit.report.labels import text_width_pt
from spectoolkit.report.plots import check_rows
from spectoolkit.report.text import UNDEFINED, number, value_text

TEMPERATURE = "sampling.temperature"
_LENGTH = ("acceptance_length", "acceptance_length_low", "acceptance_length_high")
_SPEED = ("speed_ratio", "speed_ratio_low", "speed_ratio_high")
_EXACT, _OFF, _PUBLIC = "#0072B2", "#D55E00", "#333333"


def distance_text(row: Mapping[str, Any]) -> str:
    """Total variation after two steps; "0" for what rounding leaves of an exact rule."""
    value = row["two_steps"]
    if value is None or np.isnan(value):
        return UNDEFINED
    return "0" if value <= 1e-12 else number(value, 3)


def dots(ax: Axes, found: pd.DataFrame, at: np.ndarray, columns: tuple[str, str, str]) -> Axes:
    """One dot with interval per row, filled where the rule is exact.

    Args:
        ax: the axes.
        found: rows of `studies.recovered_token.compared`.
        at: [rows] heights.
        columns: value, low and high.
    """
    check_rows(found, ["exactness", *columns], unique=[])
    values = pd.DataFrame(found, columns=list(columns)).to_numpy(dtype=float)
    with style.paper():
        for height, (value, low, high), exactness in zip(at, values, found["exactness"].tolist(), strict=True):
            exact = exactness == "proven"
            colour = _EXACT if exact else _OFF
            look: dict[str, Any] = {
                "color": colour,
                "marker": "o" if exact else "s",
                "markerfacecolor": colour if exact else "#FFFFFF",
            }
            ax.hlines(height, low, high, color=colour, linewidth=1.2, zorder=2)
            ax.plot([value], [height], markersize=4.6, linestyle="none", clip_on=False, zorder=3, **look)
        ax.grid(axis="y", visible=False)
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    return ax


def recovered_token_figure(found: pd.DataFrame, public_ratio: float, width_in: float = style.PAGE_IN) -> Figure:
    """Acceptance length per rule, the verdict beside it, and to the right tokens per second over the rule's base.

    Args:
        found: `studies.recovered_token.compared`.
        public_ratio: what others measured of typical acceptance, the target's token over nothing.
        width_in: of the figure.
    """
    columns = [TEMPERATURE, "drafter", "rule", "recovered", "exactness", "two_steps", "base", "verify_share"]
    check_rows(found, [*columns, *_LENGTH, *_SPEED], unique=[])
    names = [_row_label(row) for row in found.to_dict("records")]
    temperatures = found[TEMPERATURE].tolist()
    groups = list(dict.fromkeys(temperatures))
    order = [groups.index(temperature) for temperature in temperatures]
    at = -np.arange(len(found), dtype=float) - 0.9 * np.array(order)  # a heading above each temperature
    with style.paper():
        left = max(text_width_pt(name, style.SMALL_PT) for name in names) / 72 + 0.16
        verdicts = [_verdict(row) for row in found.to_dict("records")]
        middle = max(text_width_pt(verdict, style.SMALL_PT) for verdict in verdicts) / 72 + 0.2
        right, bottom, top = 0.12, 0.44, 0.26
        height_in = bottom + top + 0.175 * (float(-at.min()) + 1.6)
        each = (width_in - left - middle - right) / 2
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        inner = (height_in - bottom - top) / height_in
        lengths = fig.add_axes((left / width_in, bottom / height_in, each / width_in, inner))
        speeds = fig.add_axes(((left + each + middle) / width_in, bottom / height_in, each / width_in, inner))
        for ax, columns in ((lengths, _LENGTH), (speeds, _SPEED)):
            dots(ax, found, at, columns)
            ax.set_ylim(at.min() - 0.6, 1.0)
            ax.set_yticks(at, names if ax is lengths else [""] * len(names))
            ax.tick_params(axis="y", length=0)
        for temperature in groups:
            first = float(at[temperatures.index(temperature)])
            word = f"temperature {value_text(float(temperature))}"
            lengths.annotate(
                word, (0, first + 0.85), xycoords=("axes fraction", "data"), xytext=(-4, 0), va="center", ha="right",
                textcoords="offset points", fontsize=style.SMALL_PT, fontweight="bold", annotation_clip=False,
            )  # fmt: skip
        for height, verdict, exactness in zip(at, verdicts, found["exactness"].tolist(), strict=True):
            lengths.annotate(
                verdict, (1, height), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
                va="center", fontsize=style.SMALL_PT, color=_EXACT if exactness == "proven" else _OFF,
            )  # fmt: skip
        lengths.set_xlabel("acceptance length (tokens per target forward)")
        lengths.set_title("● proven exact   □ not exact (total variation)", loc="left", pad=4)
        speeds.axvline(1, color=_PUBLIC, linewidth=0.6, zorder=1)
        speeds.set_xlabel("tokens per second over its base")
        speeds.set_title("◇ published", loc="left", pad=4)
        for height, rule in zip(at, found["rule"].tolist(), strict=True):
            if rule in ("typical, sample", "typical, argmax"):
                look: dict[str, Any] = {"marker": "D", "markersize": 4.6, "markerfacecolor": "#FFFFFF"}
                speeds.plot([public_ratio], [height], color=_PUBLIC, **look)
        for height, base, share in zip(at, found["base"].tolist(), found["verify_share"].tolist(), strict=True):
            if not base and np.isfinite(share):
                speeds.annotate(
                    "base", (1, height), xytext=(3, 0), textcoords="offset points", va="center",
                    fontsize=style.SMALL_PT, color=_PUBLIC,
                )  # fmt: skip
    return fig


def _row_label(row: Mapping[str, Any]) -> str:
    name = row["rule"].partition(",")[0].removeprefix("wrong/").replace("_", " ")
    if name.startswith("recovered"):
        name = "rejection"
    return f"{name}: {row['recovered']}" + (" (argmax drafts)" if row["drafter"] == "argmax" else "")


def _verdict(row: Mapping[str, Any]) -> str:
    if row["exactness"] == "proven":
        return "proven"
    return f"{row['exactness'].partition(':')[0]}, {distance_text(row)}"
