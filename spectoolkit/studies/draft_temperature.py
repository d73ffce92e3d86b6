"""Which draft temperature accepts most, for each target temperature: is the target's own the best for a weak draft?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from spectoolkit import files, metrics
from spectoolkit.errors import UsageError
from spectoolkit.report import heatmap, tables, text
from spectoolkit.report.cells import CellResult
from spectoolkit.studies.output import compute, places, write
from spectoolkit.study import Cell, Store

TARGET, DRAFT = "sampling.temperature", "drafter.constant"
TITLE = "Acceptance length over draft and target temperature"


def run(cells: Sequence[Cell], store: Store, *, axes: Sequence[str], config: Mapping[str, Any]) -> str:
    """Compute the grid, find the best draft temperature of each target temperature, draw the heat map.

    Writes best.csv (`best_draft_temperatures`) beside the usual tables.
    """
    results = compute(cells, store, config)
    built = tables.build(results, axes, {DRAFT: 0.0})
    best = best_draft_temperatures(results)
    files.replace_text(store.folder / "best.csv", best.to_csv(index=False, lineterminator="\n"))
    return write(
        store, cells, config, built, TITLE, heatmap.draft_temperature_figure(built.overall, best), findings(best)
    )


def check(cells: Sequence[Cell], axes: Sequence[str]) -> None:
    """Refuse cells that the heat map has no place for, before any is computed (`place_of`)."""
    place_of([cell.settings for cell in cells])


def place_of(points: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], int]:
    """Index of the cell of every (target temperature, draft temperature).

    Raises:
        UsageError: axes other than these two, or a target temperature without its draft temperatures 0 and its own.
    """
    found = places(points, (TARGET, DRAFT))
    for target in dict.fromkeys(target for target, _ in found):
        absent = [f"{draft:g}" for draft in (0.0, target) if (target, draft) not in found]
        if absent:
            raise UsageError(
                f"draft_temperature: expected grid.{DRAFT} to hold 0 (argmax) and every {TARGET}, "
                f"got no {' and no '.join(absent)} at {TARGET}={target:g}"
            )
    return found


def best_draft_temperatures(cells: Sequence[CellResult]) -> pd.DataFrame:
    """Per target temperature T: the draft temperature of the largest pooled acceptance length, and what others lose.

    `best` with `best_low` and `best_high` is the argmax over the draft temperatures of the grid and the percentiles
    (2.5 %, 97.5 %) of the same argmax over draws of prompts that all cells share: values of the grid. Of equal ones the
    lowest counts.

    `loss_same` and `loss_argmax`, tokens per target forward, are acceptance length at `best` minus that at draft
    temperature T and 0, with paired intervals in which `best` stays what it is on all prompts. Being the maximum of a
    noisy row, the acceptance length at `best` is a little too high, and so are the losses.
    """
    found = place_of([cell.settings for cell in cells])
    rows = []
    for target in sorted({target for target, _ in found}):
        drafts = sorted(draft for other, draft in found if other == target)
        values = metrics.resample([cells[found[target, draft]].rows for draft in drafts], "acceptance_length")
        best = int(np.argmax(values.estimates))
        defined = values.samples[np.isfinite(values.samples).all(axis=1)]
        low, high = math.nan, math.nan
        if len(defined):
            drawn = np.array(drafts)[defined.argmax(axis=1)]
            low, high = np.quantile(drawn, (0.025, 0.975), method="inverted_cdf").tolist()
        row = {TARGET: target, "best": drafts[best], "best_low": low, "best_high": high}
        others = {"same": drafts.index(target), "argmax": drafts.index(0.0)}
        for name, i in {"best": best, **others}.items():
            row[f"acceptance_length_{name}"] = float(values.estimates[i])
        for name, i in others.items():
            lost = values.samples[:, best] - values.samples[:, i]
            loss = metrics.difference(values.estimates[best] - values.estimates[i], lost)
            row |= metrics.with_ends(f"loss_{name}", loss)
        rows.append(row)
    return pd.DataFrame(rows)


def findings(best: pd.DataFrame) -> list[str]:
    """Paragraphs of table.md."""
    shown = [
        {
            "target temperature": text.value_text(row[TARGET]),
            "best draft temperature": text.with_interval(row, "best", 1),
            "AL, best": text.number(row["acceptance_length_best"], 3),
            "AL, same temperature": text.number(row["acceptance_length_same"], 3),
            "AL, argmax": text.number(row["acceptance_length_argmax"], 3),
            "lost by same temperature": text.with_interval(row, "loss_same", 3),
            "lost by argmax": text.with_interval(row, "loss_argmax", 3),
        }
        for row in best.to_dict("records")
    ]
    explanation = (
        "AL: pooled acceptance length, tokens per target forward. Lost: AL at the best draft temperature minus AL at "
        "the target's own temperature and at argmax (draft temperature 0), paired by prompt. The interval of the best "
        "draft temperature is that of the argmax over draws of prompts; the intervals of the losses hold the best one "
        "fixed, and since it was chosen as the maximum on the same prompts, losses are a little overstated."
    )
    return ["## Best draft temperature", text.grid(shown), explanation]
