"""How many tokens to draft: acceptance length and expected speed-up over K, for several costs of drafting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from spectoolkit import files, metrics
from spectoolkit.errors import UsageError
from spectoolkit.functional.theory import speedup
from spectoolkit.report import speedups, tables, text
from spectoolkit.report.cells import CellResult
from spectoolkit.studies.output import compute, places, strategies, write
from spectoolkit.study import Cell, Store

TITLE = "Acceptance length and expected speed-up over the number of draft tokens"
K = "num_draft_tokens"


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    cost_ratios: Sequence[float] = (0.05, 0.1, 0.2),
) -> str:
    """Compute the grid, then what each K is worth at each cost of drafting. Writes speedup.csv (`expected_speedups`).

    Args:
        cost_ratios: c, time of one draft token over that of one target forward; a drafter without a draft model costs
            nothing.

    Raises:
        UsageError: a cost ratio that is not a number >= 0.
    """
    if not cost_ratios or not all(math.isfinite(c) and c >= 0 for c in cost_ratios):
        raise UsageError(f"study.cost_ratios: expected numbers >= 0, got {list(cost_ratios)!r}")
    results = compute(cells, store, config)
    built = tables.build(results, axes)
    is_free = [not any(key.startswith("draft_model.") for key in cell.identity) for cell in cells]
    found = expected_speedups(results, is_free, cost_ratios)
    files.replace_text(store.folder / "speedup.csv", found.to_csv(index=False, lineterminator="\n"))
    overall = built.overall.assign(strategy=strategies(results))
    return write(store, cells, config, built, TITLE, speedups.draft_length_figure(overall, found), findings(found))


def expected_speedups(
    cells: Sequence[CellResult], is_free: Sequence[bool], cost_ratios: Sequence[float]
) -> pd.DataFrame:
    """AL / (1 + c K) of every strategy, cost ratio and K (`functional.theory.speedup`).

    The intervals are those of AL: costs are taken as exact. `is_best` marks the K of the largest speed-up within the
    grid (of equal ones the smallest); `best_low` and `best_high` are the percentiles (2.5 %, 97.5 %) of that K over
    draws of prompts.

    Args:
        cells: one per strategy and K.
        is_free: per cell, whether its drafts cost nothing (c = 0).
        cost_ratios: c.

    Raises:
        UsageError: several cells of one strategy and K.
    """
    names = strategies(cells)
    found = places(
        [{"strategy": name, K: cell.settings[K]} for name, cell in zip(names, cells, strict=True)], ("strategy", K)
    )
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        lengths = sorted(k for other, k in found if other == name)
        members = [found[name, k] for k in lengths]
        values = metrics.resample([cells[i].rows for i in members], "acceptance_length")
        for ratio in cost_ratios:
            costs = [0.0 if is_free[i] else float(ratio) for i in members]
            scale = np.array([speedup(1.0, k, cost) for k, cost in zip(lengths, costs, strict=True)])
            estimates, samples = values.estimates * scale, values.samples * scale
            best = int(np.argmax(estimates))
            defined = samples[np.isfinite(samples).all(axis=1)]
            low, high = math.nan, math.nan
            if len(defined):
                drawn = np.array(lengths)[defined.argmax(axis=1)]
                low, high = np.quantile(drawn, (0.025, 0.975), method="inverted_cdf").tolist()
            for i, k in enumerate(lengths):
                span = metrics.interval(samples[:, i])
                row = {"strategy": name, "cost_ratio": float(ratio), "draft_cost": costs[i], K: k}
                row |= {"speedup": float(estimates[i]), "speedup_low": span.low, "speedup_high": span.high}
                rows.append(row | {"is_best": i == best, "best_low": low, "best_high": high})
    return pd.DataFrame(rows)


def findings(found: pd.DataFrame) -> list[str]:
    """Paragraphs of table.md."""
    shown: dict[str, dict[str, str]] = {}
    for row in pd.DataFrame(found[found["is_best"]]).to_dict("records"):
        best = {"best": row[K], "best_low": row["best_low"], "best_high": row["best_high"]}
        line = shown.setdefault(row["strategy"], {"strategy": row["strategy"]})
        line[f"best K at c = {row['cost_ratio']:g}"] = text.with_interval(best, "best", 0)
        line[f"speed-up at c = {row['cost_ratio']:g}"] = text.with_interval(row, "speedup")
    explanation = (
        f"Speed-up: AL / (1 + c K) over plain decoding, K up to {found[K].max()}, c the time of one draft token over "
        "that of one target forward, a target forward taken to cost the same for one token and for K + 1 (Leviathan et "
        "al., arXiv 2211.17192, theorem 3.8, with the measured AL). A drafter without a draft model is taken to cost "
        "nothing: c = 0 in every column. Costs are exact in the intervals; a best K that is the largest of the grid "
        "may lie beyond it."
    )
    return ["## Best number of draft tokens", text.grid(list(shown.values())), explanation]
