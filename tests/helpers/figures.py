"""Figures from made-up numbers, and how two drawings are compared.

`python -m tests.helpers.figures` writes the reference images in tests/images anew; look at them before they are kept.

What is compared is what stands inside the axes, each put to a fixed place and without letters: these, and what is laid
out by their widths, differ between versions of FreeType, and other tests look at them. `distance` is the mean absolute
difference in grey levels (0 to 255) of the tile in which it is largest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread, imsave
from matplotlib.text import Text

from spectoolkit.report import contours, frontier, heatmap, histogram, plots

IMAGES = Path(__file__).parents[1] / "images"
TOLERANCE = 5.0
_DPI, _TILE = 80, 8
DRAFTERS = {"argmax": (2.9, 0.9), "same_temperature": (2.9, 0.3), "ngram": (1.8, 0.4)}


def sweep_rows() -> pd.DataFrame:
    """Acceptance over temperature with intervals, as `Tables.overall` has it."""
    rows = []
    for verifier, lossy in (("rejection", 0.0), ("typical", 0.5)):
        for drafter, (top, loss) in DRAFTERS.items():
            for t in (0.0, 0.6, 0.7, 0.8, 1.0):
                length = top - (loss - lossy) * t
                row = {"sampling.temperature": t, "drafter.name": drafter, "verifier.name": verifier}
                row |= {"lossless": lossy == 0, "acceptance_length": length}
                row |= {"acceptance_length_low": length - 0.1, "acceptance_length_high": length + 0.12}
                for i in range(1, 5):
                    share = ((length - 1) / 4 + 0.25) ** i
                    row |= {f"accepted_at_{i}": share, f"accepted_at_{i}_low": 0.93 * share}
                    row |= {f"accepted_at_{i}_high": min(1.06 * share, 1)}
                rows.append(row)
    return pd.DataFrame(rows)


def frontier_rows() -> pd.DataFrame:
    rows = []
    for drafter in ("argmax", "same_temperature"):
        for t in (0.7, 1.0):
            for rule, slope in (("lower temperature", 0.9), ("typical", 1.4), ("lenient", 3.0), ("mixture", 0.6)):
                for i, kl in enumerate((0.0, 0.08, 0.2) if rule == "lower temperature" else (0.05, 0.2, 0.4)):
                    length = 1.5 + slope * kl / t
                    row = {"temperature": t, "drafter": drafter, "rule": rule, "kl": kl, "acceptance_length": length}
                    row |= {"acceptance_length_low": length - 0.2 - 0.05 * i, "acceptance_length_high": length + 0.25}
                    rows.append(row | {"kl_low": 0.9 * kl, "kl_high": 1.1 * kl})
    return pd.DataFrame(rows)


def heat_rows() -> pd.DataFrame:
    grid = [(t, d) for t in (0.6, 0.8, 1.0) for d in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    return pd.DataFrame([
        {"sampling.temperature": t, "drafter.constant": d, "acceptance_length": 3 - (d - t) ** 2 - 0.3 * t}
        for t, d in grid
    ])  # fmt: skip


def histogram_rows() -> pd.DataFrame:
    rows = []
    for t in (0.7, 1.0):
        for drafter, (top, loss) in DRAFTERS.items():
            rate = (top - loss * t - 1) / 4 + 0.2
            shares = [rate**i * (1 - rate) for i in range(4)] + [rate**4]
            for i, share in enumerate(shares):
                row = {"strategy": drafter, "T": t, "count": i + 1, "share": share, "unit": histogram.EMITTED}
                rows.append(row | {"share_low": 0.85 * share, "share_high": 1.12 * share})
    return pd.DataFrame(rows)


def contour_points() -> pd.DataFrame:
    rows = []
    for size, scale in ((1, 1.0), (8, 1.6)):
        for i, (drafter, (top, loss)) in enumerate(DRAFTERS.items()):
            length = top - loss
            row = {
                "strategy": drafter,
                "num_draft_tokens": 4,
                "acceptance_length": length,
                "batch": f"batch size {size}",
            }
            row |= {"acceptance_length_low": length - 0.15, "acceptance_length_high": length + 0.15}
            cost = 0.15 * scale / (1 + 4 * (i == 2))
            rows.append(row | {"cost": cost, "cost_low": 0.9 * cost, "cost_high": 1.15 * cost})
    found = pd.DataFrame(rows)
    return contours.measured_points(found).assign(batch=found["batch"])


FIGURES: dict[str, Callable[[], Figure]] = {
    "sweep": lambda: plots.sweep_figure(sweep_rows()),
    "positions": lambda: plots.positions_figure(
        sweep_rows().query("`verifier.name` == 'rejection' and `sampling.temperature` in [0.7, 1.0]")
    ),
    "heatmap": lambda: heatmap.heat_map_figure(heat_rows()),
    "frontier": lambda: frontier.frontier_figure(frontier_rows()),
    "histogram": lambda: histogram.histogram_figure(histogram_rows(), row="T", row_name="T = "),
    "contours": lambda: contours.contours_figure(contour_points(), "batch"),
}


def drawing(fig: Figure) -> np.ndarray:
    """[height, width, 3] grey levels of the axes of a figure, two to a row, without letters."""
    for artist in [*fig.findobj(Text), *fig.legends]:
        artist.set_visible(False)
    num_rows = (len(fig.axes) + 1) // 2
    fig.set_size_inches(5, 1.75 * num_rows)
    for i, ax in enumerate(fig.axes):
        ax.set_position((0.05 + 0.5 * (i % 2), 1 - (i // 2 + 0.9) / num_rows, 0.4, 0.8 / num_rows))
    fig.set_dpi(_DPI)
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(float)


def reference(name: str) -> np.ndarray:
    return imread(IMAGES / f"{name}.png")[..., :3].astype(float) * 255


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Of two drawings of one size; infinite for two sizes."""
    if one.shape != other.shape:
        return float("inf")
    difference = np.abs(one - other).mean(axis=2)
    height, width = (n - n % _TILE for n in difference.shape)
    tiles = difference[:height, :width].reshape(height // _TILE, _TILE, width // _TILE, _TILE)
    return float(tiles.mean(axis=(1, 3)).max())


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, make in FIGURES.items():
        imsave(IMAGES / f"{name}.png", drawing(make()).astype(np.uint8), pil_kwargs={"optimize": True})
