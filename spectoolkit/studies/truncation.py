"""Truncated sampling (top-k, top-p, min-p) on both sides, on one of them, or on none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from spectoolkit import files, metrics
from spectoolkit.errors import UsageError
from spectoolkit.report import tables, text
from spectoolkit.report import truncation as figures
from spectoolkit.report.cells import CellResult
from spectoolkit.studies.output import compute, places, write
from spectoolkit.study import Cell, Store

TITLE = "Acceptance length with truncated sampling on either side"
TEMPERATURE = "sampling.temperature"
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SIDES = ("both", "target only", "draft only", "neither")


def run(cells: Sequence[Cell], store: Store, *, axes: Sequence[str], config: Mapping[str, Any]) -> str:
    """Compute the cells and say for each which law its output follows. Writes sides.csv (`by_side`).

    Raises:
        UsageError: as for `side`, before anything is computed, or cells that vary something else.
    """
    for cell in cells:
        side(cell.settings)
    results = compute(cells, store, config)
    built = tables.build(results, axes)
    found = by_side(results)
    files.replace_text(store.folder / "sides.csv", found.to_csv(index=False, lineterminator="\n"))
    return write(store, cells, config, built, TITLE, figures.truncation_figure(found), findings(found))


def side(settings: Mapping[str, Any]) -> tuple[str, str]:
    """The filter of a cell ("top-p = 0.9", "" for none) and which sides have it (one of `SIDES`).

    A draft filter that is absent or null is the request's own, that of the target.

    Raises:
        UsageError: different filters on the two sides.
    """
    target = {name: settings.get(f"sampling.{name}", off) for name, off in OFF.items()}
    draft = {name: settings.get(f"drafter.{name}") for name in OFF}
    draft = {name: target[name] if value is None else value for name, value in draft.items()}
    on_target, on_draft = _name(target), _name(draft)
    if on_target and on_draft and on_target != on_draft:
        raise UsageError(
            f"truncation: expected the same filter on both sides, or on one alone, got {on_target} of the target and "
            f"{on_draft} of the draft"
        )
    which = SIDES[
        {(True, True): 0, (True, False): 1, (False, True): 2, (False, False): 3}[bool(on_target), bool(on_draft)]
    ]
    return on_target or on_draft, which


def _name(filters: Mapping[str, Any]) -> str:
    on = [f"{name.replace('_', '-')} = {value:g}" for name, value in filters.items() if value != OFF[name]]
    return ", ".join(on)


def by_side(cells: Sequence[CellResult]) -> pd.DataFrame:
    """Per filter, temperature and side: which law the output follows, and the pooled acceptance length.

    A cell without any filter stands under every filter as "neither". Under a lossless verifier the output follows the
    law that the *target's* row has: `follows_filter` says whether that is the filtered one, which is what a request
    that asks for the filter must get. `difference` is acceptance length minus that of the same target law drafted from
    its own kind of row ("target only" minus "both", "draft only" minus "neither"), paired by prompt: what a filter on
    one side alone costs. NaN on those rows themselves, or where there is no such cell.
    """
    sides = [side(cell.settings) for cell in cells]
    filters = list(dict.fromkeys(name for name, _ in sides if name)) or [""]
    temperatures = [cell.settings[TEMPERATURE] for cell in cells]
    points = [{TEMPERATURE: t, "filter": n or "none", "side": s} for t, (n, s) in zip(temperatures, sides, strict=True)]
    found = places(points, (TEMPERATURE, "filter", "side"))
    rows: list[dict[str, Any]] = []
    for name in filters:
        for temperature in dict.fromkeys(temperatures):
            here = {s: found.get((temperature, "none" if s == "neither" else name, s)) for s in SIDES}
            for which, i in here.items():
                if i is None:
                    continue
                length = metrics.summarise(cells[i].rows)["acceptance_length"]
                span = metrics.bootstrap(cells[i].rows, ["acceptance_length"])["acceptance_length"]
                base = here.get({"target only": "both", "draft only": "neither"}.get(which, ""))
                difference = metrics.Difference(math.nan, math.nan, math.nan)
                if base is not None:
                    difference = metrics.paired_difference(cells[i].rows, cells[base].rows, "acceptance_length")
                row = {"filter": name or "none", TEMPERATURE: temperature, "side": which}
                row |= {"follows_filter": which in ("both", "target only"), "acceptance_length": length}
                row |= {"acceptance_length_low": span.low, "acceptance_length_high": span.high}
                names = ("difference", "difference_low", "difference_high")
                rows.append(row | dict(zip(names, difference, strict=True)))
    return pd.DataFrame(rows)


def findings(found: pd.DataFrame) -> list[str]:
    """Paragraphs of table.md."""
    shown = [
        {
            "filter": row["filter"],
            "temperature": text.value_text(row[TEMPERATURE]),
            "filtered": row["side"],
            "output follows": "the filtered target" if row["follows_filter"] else "the unfiltered target",
            "what a request for the filter must get": text.value_text(bool(row["follows_filter"])),
            "acceptance length": text.with_interval(row, "acceptance_length"),
            "minus matched rows": text.with_interval(row, "difference", sign="+"),
        }
        for row in found.to_dict("records")
    ]
    explanation = (
        "All rows are lossless for the law of their target row. Only *both* and *target only* sample what a request "
        "gets that asks for the filter; *draft only* and *neither* sample the unfiltered target, so their acceptance "
        "length is no alternative to the others'. *Minus matched rows*: against drafts that are filtered like the "
        "target (*target only* minus *both*, *draft only* minus *neither*), paired by prompt."
    )
    return ["## Which side is filtered", text.grid(shown), explanation]
