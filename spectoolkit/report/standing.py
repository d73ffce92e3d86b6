"""Which strategies are ahead: the best lossless one among comparable cells, and those that cannot be told from it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from spectoolkit import metrics
from spectoolkit.report.cells import CellResult

METRIC = "acceptance_length"
BEST, TIED, BEHIND, NOT_COMPARED = "best", "tied", "behind", ""
STRATEGY = ("drafter", "verifier", "draft_model")
"""Groups of settings that are a choice; cells that differ in anything else (temperature, K) are never compared."""


def conditions(axes: Sequence[str]) -> list[str]:
    """The axes in which compared cells are equal."""
    return [axis for axis in axes if axis.split(".")[0] not in STRATEGY]


def standings(
    cells: Sequence[CellResult], points: Sequence[Hashable | None], options: tuple[int, float, int]
) -> list[dict[str, Any]]:
    """Per cell its standing among those of its point, and how far it is behind the best of them.

    The best of a point has the largest pooled acceptance length. Another one is tied if the interval of the difference
    from the best, paired by prompt (`metrics.resample`), does not exclude 0, else behind. Each interval stands alone,
    and the best was chosen on the same prompts. Cells that hold other prompts, or have no other cell at their point,
    are not compared.

    Args:
        cells: of a table.
        points: where each cell is compared; None for one that is not, such as a lossy one.
        options: number of resamples, confidence and seed of `metrics.bootstrap`.

    Returns:
        `standing`, and `below_best` with `_low` and `_high`: acceptance length minus that of the best.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (cell, point) in enumerate(zip(cells, points, strict=True)):
        if point is not None and len(cell.rows):
            groups.setdefault((point, frozenset(cell.rows["cluster"])), []).append(i)
    found = [_row(NOT_COMPARED, metrics.Difference(*[np.nan] * 3)) for _ in cells]
    num_resamples, confidence, seed = options
    for members in groups.values():
        if len(members) < 2:
            continue
        values = metrics.resample([cells[i].rows for i in members], METRIC, num_resamples, seed)
        if np.isnan(values.estimates).all():
            continue
        best = int(np.nanargmax(values.estimates))
        for rank, i in enumerate(members):
            less = metrics.difference(
                values.estimates[rank] - values.estimates[best], values.samples[:, rank] - values.samples[:, best],
                confidence,
            )  # fmt: skip
            if np.isnan(less.estimate):
                continue
            standing = BEST if less.estimate >= -1e-12 else BEHIND if less.excludes_zero else TIED
            found[i] = _row(standing, less)
    return found


def rule(axes: Mapping[str, str], confidence: float, num_resamples: int, bold: str = "Bold") -> str:
    """The rule in words. `axes`: conditions (`conditions`) -> how a reader calls them."""
    equal = f" at equal {' and '.join(axes.values())}" if axes else ""
    return (
        f"{bold}: the largest pooled acceptance length (AL) of the lossless rows{equal}. †: tied with it: the "
        f"{100 * confidence:g} % interval of the difference in AL, paired by prompt ({num_resamples:,} resamples), "
        "does not exclude 0. Each interval stands alone, and the best was chosen on the same prompts. Lossy rows are "
        "not compared."
    )


def _row(standing: str, less: metrics.Difference) -> dict[str, Any]:
    return {"standing": standing} | metrics.with_ends("below_best", [float(value) for value in less])
