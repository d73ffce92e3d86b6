"""What is an acceptance rate? The same records under every public definition, and where strategies change places."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from spectoolkit import files, metrics
from spectoolkit.errors import UsageError
from spectoolkit.report import accounting as figures
from spectoolkit.report import tables, text
from spectoolkit.report.cells import CellResult, HasSettings
from spectoolkit.studies.output import compute, strategies, write
from spectoolkit.study import Cell, Store

TITLE = "Acceptance under every public definition"
NUM_DRAFT_TOKENS = "num_draft_tokens"
AXES = ("drafter", "verifier", NUM_DRAFT_TOKENS)

DEFINITIONS = {
    "acceptance_length": "length, pooled",
    "acceptance_length_request_mean": "length, mean over requests",
    "acceptance_length_nominal": "length, nominal",
    "acceptance_length_proposing": "length, steps with a proposal",
    "acceptance_rate": "rate of drafts, prefix",
    "acceptance_rate_unmasked": "rate of drafts, unmasked",
    "acceptance_rate_slots": "rate of K slots",
    "system_efficiency": "system efficiency",
}
"""Metric -> its name in tables and figures; the rates at single positions follow (`definitions`)."""

FORMULAS = (
    "*length, pooled*: Σ emitted / Σ steps; *mean over requests*: of emitted / steps; *nominal*: 1 + Σ verified / "
    "Σ steps, blind to where an output ends; *steps with a proposal*: the other steps, one token each, left out. *Rate "
    "of drafts, prefix*: Σ accepted / Σ drafted; *unmasked*: every draft judged alone, so that [1, 0, 1] counts 2; *of "
    "K slots*: Σ accepted / Σ K per step, so that what was not proposed counts as rejected. *System efficiency*: "
    "Σ emitted / Σ (K + 1). *Position i, joint*: at least i accepted / steps; *conditional*: / steps that drafted i, "
    "accepted i − 1 and were not cut before."
)

CHOICES = (
    ("drafts behind a rejection counted", "acceptance_rate_unmasked", "acceptance_rate"),
    ("tokens behind the end counted", "acceptance_length_nominal", "acceptance_length"),
    ("steps without a proposal left out", "acceptance_length_proposing", "acceptance_length"),
    ("slots without a draft left out", "acceptance_rate", "acceptance_rate_slots"),
    ("requests weighted equally", "acceptance_length_request_mean", "acceptance_length"),
)
"""One choice each: what is done, the metric that does it, the one that does not."""


def check(cells: Sequence[Cell], axes: Sequence[str], *, confidence: float = 0.95) -> None:
    """Refuse cells whose records some definition could not be read from, before any is computed.

    Raises:
        UsageError: a confidence outside (0, 1), an axis other than `AXES`, fewer than two strategies, a replayed cell,
            a cell that drafts nothing or whose output is not of the target's law, or more than the figure has room for.
    """
    if not 0 < confidence < 1:
        raise UsageError(f"study.confidence: expected a number in (0, 1), got {confidence!r}")
    if odd := [axis for axis in axes if axis not in AXES]:
        raise UsageError(
            f"accounting: expected strategies that differ in {', '.join(AXES)} alone, not in {', '.join(odd)}"
        )
    if len(cells) < 2:
        raise UsageError(f"accounting: expected at least two strategies to rank, got {len(cells)}")
    for cell in cells:
        if cell.engine != "live":
            raise UsageError(
                "accounting: expected engine=live, since a replay knows neither what drafts behind a rejection would "
                f"have done nor what was accepted behind the end of an output; {cell.label} is replayed"
            )
        if cell.settings["drafter.name"] == "none":
            raise UsageError("accounting: expected strategies that draft, got drafter=none, which has no acceptance")
        if not cell.settings["verifier.is_lossless"]:
            raise UsageError(
                "accounting: expected lossless rules, since acceptance is ranked at one law of the output, got "
                f"drafter={cell.settings['drafter.name']}, verifier={cell.settings['verifier.name']}"
            )
    figures.check_room(strategy_names(cells), list(definitions(_largest(cells)).values()))


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    confidence: float = 0.95,
) -> str:
    """Compute the cells, rank them by every definition, and find the pairs that change places.

    Writes definitions.csv (`by_definition`), orders.csv (`orders`), flips.csv (`flips`) and choices.csv (`choices`)
    beside the usual tables.
    """
    results = compute(cells, store, config)
    names = strategy_names(results)
    found, pairs = by_definition(results, names, confidence), orders(results, names, confidence)
    flipped, moved = flips(pairs), choices(results, names, confidence)
    for name, frame in (("definitions", found), ("orders", pairs), ("flips", flipped), ("choices", moved)):
        files.replace_text(store.folder / f"{name}.csv", frame.to_csv(index=False, lineterminator="\n"))
    built = tables.build(results, axes, confidence=confidence)
    shown = findings(found, pairs, flipped, moved, confidence)
    figure = figures.accounting_figure(found, pairs, confidence=confidence)
    return write(store, cells, config, built, TITLE, figure, shown)


def strategy_names(cells: Sequence[HasSettings]) -> list[str]:
    """`output.strategies`, and K where it is not that of most cells (of the largest K, where several are)."""
    counts = [int(str(cell.settings[NUM_DRAFT_TOKENS])) for cell in cells]
    usual = max(Counter(counts).items(), key=lambda item: (item[1], item[0]))[0]
    named = zip(strategies(cells), counts, strict=True)
    return [name if k == usual else f"{name}, K = {k}" for name, k in named]


def definitions(num_draft_tokens: int) -> dict[str, str]:
    """Metric -> name of every definition, for K = `num_draft_tokens`."""
    positions = range(1, num_draft_tokens + 1)
    at = {f"accepted_at_{i}": f"position {i}, joint" for i in positions}
    return DEFINITIONS | at | {f"accepted_at_{i}_conditional": f"position {i}, conditional" for i in positions}


def by_definition(cells: Sequence[CellResult], names: Sequence[str], confidence: float = 0.95) -> pd.DataFrame:
    """Per definition and strategy: the value with its interval, and its rank (1 is the largest).

    NaN, without a rank, where a strategy has no such value: a position beyond its K, or nothing to divide by.
    """
    rows: list[dict[str, Any]] = []
    for metric, label in definitions(_largest(cells)).items():
        estimates, samples = _resampled(cells, metric)
        order = [int(i) for i in np.argsort(-estimates, kind="stable") if np.isfinite(estimates[i])]
        ranks = {i: float(rank) for rank, i in enumerate(order, 1)}
        for i, name in enumerate(names):
            low, high = metrics.interval(samples[:, i], confidence)
            row = {"metric": metric, "definition": label, "strategy": name, "value": estimates[i]}
            rows.append(row | {"value_low": low, "value_high": high, "rank": ranks.get(i, math.nan)})
    return pd.DataFrame(rows)


def orders(cells: Sequence[CellResult], names: Sequence[str], confidence: float = 0.95) -> pd.DataFrame:
    """Per definition and pair of strategies: value of `one` minus value of `other`, paired by prompt.

    `excludes_zero` says whether the definition decides which of the two is ahead.
    """
    rows: list[dict[str, Any]] = []
    for metric, label in definitions(_largest(cells)).items():
        estimates, samples = _resampled(cells, metric)
        for i, j in itertools.combinations(range(len(cells)), 2):
            found = metrics.difference(float(estimates[i] - estimates[j]), samples[:, i] - samples[:, j], confidence)
            row = {"metric": metric, "definition": label, "one": names[i], "other": names[j]}
            row |= metrics.with_ends("difference", found)
            rows.append(row | {"excludes_zero": found.excludes_zero})
    return pd.DataFrame(rows)


def flips(pairs: pd.DataFrame) -> pd.DataFrame:
    """Pairs of strategies of which each is ahead by some definition, both with an interval that excludes zero.

    Columns: `one`, `other`, `one_ahead`, `other_ahead` and `undecided`, the definitions of each kind, joined by "; ".
    """
    columns = ["one", "other", "one_ahead", "other_ahead", "undecided"]
    kinds: dict[tuple[str, str], tuple[list[str], list[str], list[str]]] = {}
    for row in pairs.to_dict("records"):
        ahead, behind, undecided = kinds.setdefault((str(row["one"]), str(row["other"])), ([], [], []))
        kind = undecided if not row["excludes_zero"] else ahead if row["difference"] > 0 else behind
        kind.append(str(row["definition"]))
    rows = [[*pair, *("; ".join(kind) for kind in found)] for pair, found in kinds.items() if found[0] and found[1]]
    return pd.DataFrame(rows, columns=pd.Index(columns))


def choices(cells: Sequence[CellResult], names: Sequence[str], confidence: float = 0.95) -> pd.DataFrame:
    """Per strategy and choice of `CHOICES`: by how much it moves the number, over the same draws of prompts."""
    rows: list[dict[str, Any]] = []
    for choice, metric, without in CHOICES:
        (estimates, samples), (base, base_samples) = _resampled(cells, metric), _resampled(cells, without)
        for i, name in enumerate(names):
            found = metrics.difference(float(estimates[i] - base[i]), samples[:, i] - base_samples[:, i], confidence)
            row = {"choice": choice, "metric": metric, "without": without, "strategy": name, "value": base[i]}
            row |= metrics.with_ends("difference", found)
            rows.append(row | {"excludes_zero": found.excludes_zero})
    return pd.DataFrame(rows)


def _resampled(cells: Sequence[CellResult], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Estimates [cells] and samples [R, cells] of a metric; NaN for the cells that do not have it."""
    has = [i for i, cell in enumerate(cells) if metric in metrics.summarise(cell.rows)]
    found = metrics.resample([cells[i].rows for i in has], metric)
    estimates, samples = np.full(len(cells), np.nan), np.full((len(found.samples), len(cells)), np.nan)
    estimates[has], samples[:, has] = found.estimates, found.samples
    samples[:, np.isnan(estimates)] = np.nan
    return estimates, samples


def _largest(cells: Sequence[HasSettings]) -> int:
    return max(int(str(cell.settings[NUM_DRAFT_TOKENS])) for cell in cells)


def findings(
    found: pd.DataFrame, pairs: pd.DataFrame, flipped: pd.DataFrame, moved: pd.DataFrame, confidence: float
) -> list[str]:
    """Paragraphs of table.md."""
    shown = ["## Which strategies change places", _verdict(pairs, flipped)]
    if len(flipped):
        heads = {"one": "strategy", "other": "against", "one_ahead": "ahead by", "other_ahead": "behind by"}
        shown.append(text.grid([{head: row[name] for name, head in heads.items()} for row in _records(flipped)]))
    chance = (
        f"An order counts where the {100 * confidence:g} % interval of the difference, paired by prompt, excludes "
        "zero. Each interval stands alone: of two strategies that are equal by a definition, about one pair in "
        f"{1 / (1 - confidence):.0f} is put in some order by chance, so a change of places that rests on a single "
        "definition is weaker than one that several agree on."
    )
    shown += [chance, "## Order by definition", text.grid(_rankings(found, pairs))]
    shown.append("Largest value first; > where the order of neighbours is decided, ≈ where it is not.")
    shown += ["## Values by definition", FORMULAS, text.grid(_values(found))]
    shown += ["## What one choice moves", _moves_text(moved), text.grid(_moves(moved))]
    return shown


def _records(frame: pd.DataFrame) -> list[dict[str, str]]:
    return [{str(key): str(value) for key, value in row.items()} for row in frame.to_dict("records")]


def _verdict(pairs: pd.DataFrame, flipped: pd.DataFrame) -> str:
    rows = pairs.to_dict("records")
    num_pairs = len({(row["one"], row["other"]) for row in rows})
    num_decided = len({(row["one"], row["other"]) for row in rows if row["excludes_zero"]})
    num_definitions = len({row["definition"] for row in rows})
    if not len(flipped):
        return (
            f"No pair of strategies changes places: of {_pairs(num_pairs)}, {num_decided} {_of(num_decided, 'have')} "
            f"an order, and none of them has both orders under {num_definitions} definitions."
        )
    usual = (DEFINITIONS["acceptance_length"], DEFINITIONS["acceptance_rate"])
    num_reversed = _reversed(*(_signs(rows, name) for name in usual))
    num_ordered, num_open = num_decided - len(flipped), num_pairs - num_decided
    return (
        f"{len(flipped)} of {_pairs(num_pairs)} of strategies {_of(len(flipped), 'change')} places with the "
        f"definition: each of the two is ahead by one of {num_definitions} definitions and behind by another, and both "
        f"differences exclude zero. {_pairs(num_ordered)} {_of(num_ordered, 'have')} one order wherever the "
        f"definitions give any, {num_open} {_of(num_open, 'have')} none. Between the two usual figures ({usual[0]}; "
        f"{usual[1]}) {_pairs(num_reversed)} {_of(num_reversed, 'change')} places."
    )


def _pairs(count: int) -> str:
    return f"{count} pair" if count == 1 else f"{count} pairs"


def _of(count: int, verb: str) -> str:
    """A verb ("change") of so many subjects."""
    if count != 1:
        return verb
    return "has" if verb == "have" else f"{verb}s"


def _signs(rows: Sequence[Mapping[Any, Any]], definition: str) -> dict[tuple[str, str], bool]:
    """Pairs that a definition puts in an order -> whether the first one is ahead."""
    decided = (row for row in rows if row["definition"] == definition and row["excludes_zero"])
    return {(str(row["one"]), str(row["other"])): row["difference"] > 0 for row in decided}


def _reversed(one: Mapping[tuple[str, str], bool], other: Mapping[tuple[str, str], bool]) -> int:
    """Pairs that two definitions put in opposite orders."""
    return sum(is_ahead != other[pair] for pair, is_ahead in one.items() if pair in other)


def ranking(found: pd.DataFrame, pairs: pd.DataFrame, definition: str) -> list[tuple[str, bool]]:
    """Strategies of a definition, largest first, each with whether its order to the next one is decided."""
    ranked = [row for row in found.to_dict("records") if row["definition"] == definition and row["rank"] > 0]
    decided = {frozenset(pair) for pair in _signs(pairs.to_dict("records"), definition)}
    names = [str(row["strategy"]) for row in sorted(ranked, key=lambda row: float(row["rank"]))]
    after = [frozenset(pair) in decided for pair in itertools.pairwise(names)]
    return list(zip(names, [*after, True][: len(names)], strict=True))  # none, where no strategy has a value


def _rankings(found: pd.DataFrame, pairs: pd.DataFrame) -> list[dict[str, str]]:
    rows = []
    for definition in dict.fromkeys(found["definition"]):
        order = ranking(found, pairs, definition)
        parts = [f"{name} {'>' if is_decided else '≈'}" for name, is_decided in order]
        rows.append({"definition": str(definition), "order": " ".join(parts).removesuffix(" >") or text.UNDEFINED})
    return rows


def _values(found: pd.DataFrame) -> list[dict[str, str]]:
    rows: dict[str, dict[str, str]] = {}
    for row in found.to_dict("records"):
        shown = rows.setdefault(str(row["definition"]), {"definition": str(row["definition"])})
        shown[str(row["strategy"])] = text.with_interval(row, "value")
    return list(rows.values())


def _moves(moved: pd.DataFrame) -> list[dict[str, str]]:
    rows: dict[str, dict[str, str]] = {}
    for row in moved.to_dict("records"):
        shown = rows.setdefault(str(row["strategy"]), {"strategy": str(row["strategy"])})
        shown[str(row["choice"])] = text.with_interval(row, "difference", 3, sign="+")
    return list(rows.values())


def _moves_text(moved: pd.DataFrame) -> str:
    sentences = []
    rows = moved.to_dict("records")
    for choice in dict.fromkeys(row["choice"] for row in rows):
        group = [row for row in rows if row["choice"] == choice]
        values = [float(row["difference"]) for row in group if row["excludes_zero"]]
        if not values:
            sentences.append(f"*{choice}*: no strategy's number moves by more than its interval.")
            continue
        span = f"{min(values):+.3f}" if len(values) == 1 else f"{min(values):+.3f} to {max(values):+.3f}"
        sentences.append(f"*{choice}*: {span}, for {len(values)} of {len(group)} strategies.")
    return "Difference that one choice makes to the same records, where its interval excludes zero. " + " ".join(
        sentences
    )
