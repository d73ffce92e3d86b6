"""Labels at the ends of lines, kept apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.textpath import TextPath

_PAD_PT = 7.0  # from the last data point to the label: room for the leader


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The nearest positions (least squares) with at least `gap` between neighbours, in the order of `positions`.

    Kept within [low, high] where that many gaps fit; otherwise they keep their gaps and stick out evenly at both ends.
    """
    if not positions:
        return []
    order = np.argsort(positions, kind="stable")
    steps = gap * np.arange(len(order))
    # With p_k = z_k + k·gap the constraint is that z does not decrease: pool adjacent violators.
    pools: list[list[float]] = []
    for value in np.asarray(positions, dtype=float)[order] - steps:
        pools.append([value])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    flat = np.concatenate([np.full(len(pool), np.mean(pool)) for pool in pools])
    room = high - low - steps[-1]
    flat = np.clip(flat, low, low + room) if room >= 0 else np.full(len(flat), low + room / 2)
    result = np.empty(len(order))
    result[order] = flat + steps
    return result.tolist()


def text_width_pt(text: str, size_pt: float) -> float:
    """Width of `text` in points at the current font family, without drawing it."""
    return float(TextPath((0, 0), text, size=size_pt).get_extents().width) if text.strip() else 0.0


def wrapped(text: str, width_pt: float, size_pt: float) -> list[str]:
    """`text` in lines of at most this width where its words allow; "K = 2" is one word."""
    lines: list[str] = []
    for word in text.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}").split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width_pt(longer, size_pt) <= width_pt:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def label_line_ends(
    ax: Axes,
    ends: Mapping[str, tuple[float, float]],
    looks: Mapping[str, Mapping[str, Any]],
    size_pt: float,
) -> Axes:
    """Write each label to the right of `ax` at the height of its line's end, moved as little as keeps labels apart.

    Heights depend on the limits and the size of `ax`: set both first. A label that had to move gets a leader line.

    Args:
        ax: the axes.
        ends: label -> (x, y) of its line's last point, in data units.
        looks: label -> keyword arguments of its line (`style.line_styles`); the colour is used.
        size_pt: font size.
    """
    if not ends:
        return ax
    points_per_pixel = 72.0 / ax.figure.dpi
    box = ax.get_window_extent()
    pixels = ax.transData.transform(np.array(list(ends.values()), dtype=float)) * points_per_pixel
    low, high = box.y0 * points_per_pixel, box.y1 * points_per_pixel
    heights = spread([float(y) for _, y in pixels], gap=1.22 * size_pt, low=low, high=high)
    right = max(box.x1 * points_per_pixel, float(pixels[:, 0].max()))
    for (label, end), (x_pt, y_pt), height in zip(ends.items(), pixels, heights, strict=True):
        colour = looks[label]["color"]
        moved = abs(height - y_pt) > 0.75
        leader = {
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.5,
            "shrinkA": 0.5,
            "shrinkB": 3.5,
            "relpos": (0.0, 0.5),
        }
        ax.annotate(
            label,
            xy=end,
            xytext=(right - x_pt + _PAD_PT, height - y_pt),
            textcoords="offset points",
            arrowprops=leader if moved else None,
            fontsize=size_pt,
            color=colour,
            va="center",
            ha="left",
            annotation_clip=False,
        )
    return ax
