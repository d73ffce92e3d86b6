"""Argmax or random drafts: what each way to draw them accepts, keeps and claims, along one sampling parameter."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from spectoolkit import files, metrics
from spectoolkit.errors import UsageError
from spectoolkit.report import draft_sampling as figures
from spectoolkit.report import tables, text
from spectoolkit.report.cells import CellResult, HasSettings
from spectoolkit.studies.exactness import proven
from spectoolkit.studies.output import compute, places, write
from spectoolkit.study import Cell, Store

TITLE = "Acceptance length over the way drafts are drawn"
TEMPERATURE, TOP_K = "sampling.temperature", "sampling.top_k"
ARGMAX, SAME, SQUARED, ALONE = "argmax", "same temperature", "squared temperature", "temperature alone"
BEST, CONSTANT = "best constant", "constant "
FILTERS = {"top_k": 0, "top_p": 1, "min_p": 0}
"""Filters of rows, and what each is when it is off."""
ROUNDING = 1e-9
"""Tokens per forward; smaller differences are those of sums."""


@dataclass(frozen=True)
class Public:
    """Acceptance lengths that others measured on their models, per strategy and value of x.

    Attributes:
        source: where they stand.
        lengths: strategy -> x -> tokens per target forward.
        temperature: of their requests; None where it is x.
    """

    source: str
    lengths: Mapping[str, Mapping[float, float]]
    temperature: float | None = None

    def ratio(self, strategy: str, x: float, temperature: float) -> float:
        """Their acceptance length over theirs of same-temperature drafts; NaN where there is none at `temperature`."""
        if self.temperature not in (None, temperature):
            return math.nan
        mine, same = (self.lengths.get(name, {}).get(x, math.nan) for name in (strategy, SAME))
        return mine / same


PUBLIC = {
    TEMPERATURE: Public(
        "vllm-project/vllm #16899 and #20459",
        {ARGMAX: {0.0: 3.29, 0.6: 2.95, 0.7: 2.89, 0.8: 2.66}, SAME: {0.0: 3.29, 0.6: 3.30, 0.7: 3.25, 0.8: 3.11}},
    ),
    TOP_K: Public(
        "vllm-project/vllm #56724, Qwen3.5-9B, T = 1",
        {
            ARGMAX: {1: 2.92, 20: 2.39, 0: 2.10},
            ALONE: {1: 2.46, 20: 2.65, 0: 2.64},
            SAME: {1: 2.92, 20: 2.74, 0: 2.62},
        },
        temperature=1.0,
    ),
}
"""Along each axis that this study may have."""


def check(cells: Sequence[Cell], axes: Sequence[str], *, x: str = TEMPERATURE) -> None:
    """Refuse cells that this study has no row for, before any is computed.

    Raises:
        UsageError: an x other than those of `PUBLIC`, a drafter whose tokens are not drawn from a draft model, axes
            beside x, drafter and verifier, a strategy that is absent at some x, no argmax or same-temperature drafts
            under rejection, or a choice among constants with fewer than two prompts.
    """
    if x not in PUBLIC:
        raise UsageError(f"study.x: expected one of {', '.join(PUBLIC)}, got {x!r}")
    found = _places(cells, x)
    names = list(dict.fromkeys(name for _, name in found))
    for at in dict.fromkeys(at for at, _ in found):
        if absent := [name for name in names if (at, name) not in found]:
            raise UsageError(f"draft_sampling: expected every strategy at every {x}, got no {absent[0]} at {x}={at:g}")
    if missing := [name for name in (ARGMAX, SAME) if name not in names]:
        raise UsageError(
            "draft_sampling: expected drafter=argmax and drafter=same_temperature under verifier=rejection, with "
            f"which the others are compared, got {', '.join(names)} and no {missing[0]}"
        )
    num_prompts = cells[0].num_requests // int(cells[0].settings["samples_per_prompt"])
    if num_prompts < 2 and sum(name.startswith(CONSTANT) for name in names) > 1:
        raise UsageError(
            "draft_sampling: expected at least 2 prompts, since the best constant is chosen on one half of them and "
            f"measured on the other, got {num_prompts}"
        )


def run(
    cells: Sequence[Cell], store: Store, *, axes: Sequence[str], config: Mapping[str, Any], x: str = TEMPERATURE
) -> str:
    """Compute the cells and set every strategy against same-temperature drafts under rejection.

    Writes strategies.csv (`compared`) and argmax.csv (`argmax_against`) beside the usual tables.

    Args:
        x: the sampling parameter along which strategies are compared, one of `PUBLIC`.
    """
    results = compute(cells, store, config)
    built = tables.build(results, axes)
    first = {name: cells[i] for (_, name), i in reversed(_places(cells, x).items())}
    claims = dict(zip(first, (one.verdict for one in proven(list(first.values()))), strict=True))
    found, against = compared(results, x, claims), argmax_against(results, x)
    for name, frame in (("strategies", found), ("argmax", against)):
        files.replace_text(store.folder / f"{name}.csv", frame.to_csv(index=False, lineterminator="\n"))
    shown = [*_strategy_section(found, x), *_public_section(found, x), *_argmax_section(against, x)]
    return write(store, cells, config, built, TITLE, figures.draft_sampling_figure(found, x), shown)


def strategy(settings: Mapping[str, Any], *, is_squared: bool = False) -> str:
    """How drafts are drawn and judged, as a name: "argmax", "same temperature, block".

    The verifier is named unless it is rejection or the drafter's own. Drafts of `drafter=temperature` are "constant c",
    "squared temperature" where the ratio is the request's temperature T itself (draft temperature T^2), or "temperature
    alone" where the ratio is 1 and the draft rows have no filter while the target's may.

    Args:
        settings: of a cell.
        is_squared: what a ratio of 1 at T = 1 is, which the cell alone does not say (`_places`).

    Raises:
        UsageError: a drafter without a draft model, or one whose draws have no name here.
    """
    drafter, rule = str(settings["drafter.name"]), str(settings["verifier.name"])
    constant, ratio = settings.get("drafter.constant"), settings.get("drafter.ratio")
    filters = [settings.get(f"drafter.{name}") for name in FILTERS]
    name: str | None = None
    if drafter in ("same_temperature", "coupled", "top_m") and ratio == 1 and filters == [None] * 3:
        name = f"top-{settings['drafter.keep']}" if drafter == "top_m" else drafter.replace("_", " ")
    elif drafter in ("argmax", "temperature") and constant is not None and filters == [None] * 3:
        name = ARGMAX if constant == 0 else f"{CONSTANT}{constant:g}"
    elif drafter == "temperature" and (is_squared or ratio != 1) and _is_squared(settings):
        name = SQUARED
    elif drafter == "temperature" and ratio == 1 and not _is_filtered(settings):
        name = ALONE
    if name is None or settings.get("drafter.repetition_penalty") is not None:
        raise UsageError(
            "draft_sampling: expected drafts of argmax, same_temperature, coupled, top_m, or temperature (a constant; "
            "drafter.ratio equal to sampling.temperature; or ratio 1 with draft filters off) with the request's own "
            "penalties, got " + ", ".join([drafter, *(f"{k}={v!r}" for k, v in settings.items() if k in _DRAWN)])
        )
    return name if rule in ("rejection", drafter) else f"{name}, {rule}"


_DRAWN = ("drafter.ratio", "drafter.constant", "drafter.repetition_penalty", *(f"drafter.{n}" for n in FILTERS))


def _is_squared(settings: Mapping[str, Any]) -> bool:
    """Whether the draft's ratio is the request's temperature, and everything else the request's own."""
    own = [settings.get(f"drafter.{name}") for name in FILTERS]
    return own == [None] * 3 and settings.get("drafter.ratio") == settings[TEMPERATURE]


def _is_filtered(settings: Mapping[str, Any]) -> bool:
    """Whether the draft rows are cut by a filter, their own or the request's."""
    own = {name: settings.get(f"drafter.{name}") for name in FILTERS}
    requests = {name: settings.get(f"sampling.{name}", off) for name, off in FILTERS.items()}
    return {name: requests[name] if own[name] is None else own[name] for name in FILTERS} != FILTERS


def _places(cells: Sequence[HasSettings], x: str) -> dict[tuple[Any, ...], int]:
    """(value of x, strategy) -> index of its cell.

    A ratio of 1 at T = 1 is T itself if cells of the same rule have it at other temperatures, or if their rows are cut.
    """
    settings = [cell.settings for cell in cells]
    squared = {
        one["verifier.name"] for one in settings if _is_squared(one) and (one[TEMPERATURE] != 1 or _is_filtered(one))
    }
    names = [strategy(one, is_squared=one["verifier.name"] in squared) for one in settings]
    return places([{x: one[x], "strategy": name} for one, name in zip(settings, names, strict=True)], (x, "strategy"))


def _in_order(values: Sequence[float], x: str) -> list[float]:
    """From sharp to flat targets: a top-k of 0 keeps all tokens."""
    return sorted(dict.fromkeys(values), key=lambda value: math.inf if x == TOP_K and value == 0 else value)


def chosen_on_the_other_half(cells: Sequence[pd.DataFrame]) -> tuple[pd.DataFrame, tuple[int, int]]:
    """The best of several cells without the gain of having been picked: chosen and measured on different prompts.

    Every second prompt makes a half. On each half the result holds the rows of the cell with the largest pooled
    acceptance length on the other half (the first of equal ones). What is drawn from it afterwards, such as an interval
    over prompts, takes the two choices as given.

    Args:
        cells: request rows of the cells, with the same prompts.

    Returns:
        Rows of all prompts, and the indices of the cells that stand on the first and on the second half.
    """
    prompts = list(dict.fromkeys(cells[0]["cluster"]))
    halves = [set(prompts[0::2]), set(prompts[1::2])]
    parts, chosen = [], []
    for here, other in (halves, halves[::-1]):
        lengths = [_pooled(_of_prompts(rows, other)) for rows in cells]
        best = int(np.argmax(lengths))
        parts.append(_of_prompts(cells[best], here))
        chosen.append(best)
    return pd.concat(parts, ignore_index=True), (chosen[0], chosen[1])


def _of_prompts(rows: pd.DataFrame, prompts: Collection[object]) -> pd.DataFrame:
    return pd.DataFrame(rows[[cluster in prompts for cluster in rows["cluster"]]])


def _pooled(rows: pd.DataFrame) -> float:
    return metrics.summarise(rows)["acceptance_length"]


def _strategies_at(cells: Sequence[CellResult], x: str, at: float) -> dict[str, tuple[pd.DataFrame, str]]:
    """Strategy -> its request rows at one x, and which constants they are of; the constants of a rule make one row."""
    here = {name: cells[i].rows for (value, name), i in _places(cells, x).items() if value == at}
    made = {name: (rows, "") for name, rows in here.items() if not name.startswith(CONSTANT)}
    by_rule: dict[str, list[str]] = {}
    for name in here:
        if name.startswith(CONSTANT):
            by_rule.setdefault(name.partition(", ")[2], []).append(name)
    for rule, names in by_rule.items():
        rows, chosen = chosen_on_the_other_half([here[name] for name in names])
        values = dict.fromkeys(names[i].partition(", ")[0].removeprefix(CONSTANT) for i in chosen)
        made[f"{BEST}, {rule}" if rule else BEST] = (rows, " and ".join(values))
    return made


def compared(cells: Sequence[CellResult], x: str, claims: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Per value of x and strategy: what it keeps, accepts, and that over same-temperature drafts under rejection.

    `ratio` is pooled acceptance length over that of `SAME`, `difference` that minus it, both paired by prompt.
    "best constant" is the best of the constant draft temperatures by `chosen_on_the_other_half`; `constants` says
    which. `exactness` is what `claims` says of the strategy (of one of the constants for the best). `public_ratio` is
    the ratio that others measured (`PUBLIC`), at the same temperature.
    """
    rows: list[dict[str, Any]] = []
    claims = dict(claims or {})
    for name in list(claims):
        if name.startswith(CONSTANT):
            claims.setdefault(BEST + name[len(name.partition(", ")[0]) :], claims[name])
    for at in _in_order([cast(float, cell.settings[x]) for cell in cells], x):
        made = _strategies_at(cells, x, at)
        names = list(made)
        temperature = next(cast(float, cell.settings[TEMPERATURE]) for cell in cells if cell.settings[x] == at)
        values = metrics.resample([frame for frame, _ in made.values()], "acceptance_length")
        base = names.index(SAME)
        for i, name in enumerate(names):
            over = values.samples[:, i] / values.samples[:, base]
            length = metrics.difference(values.estimates[i], values.samples[:, i])
            ratio = metrics.difference(values.estimates[i] / values.estimates[base], over)
            minus = metrics.difference(
                values.estimates[i] - values.estimates[base], values.samples[:, i] - values.samples[:, base]
            )
            row: dict[str, Any] = {x: at, "strategy": name, "constants": made[name][1]}
            row |= {"exactness": claims.get(name, "")}
            row |= {"draft_bytes_per_token": metrics.summarise(made[name][0])["draft_bytes_per_token"]}
            for column, value in (("acceptance_length", length), ("ratio", ratio), ("difference", minus)):
                row |= metrics.with_ends(column, value)
            rows.append(row | {"public_ratio": PUBLIC[x].ratio(name, at, temperature)})
    return pd.DataFrame(rows)


def argmax_against(cells: Sequence[CellResult], x: str) -> pd.DataFrame:
    """Per value of x, argmax minus each kind of random draft under rejection, paired by prompt, and who is ahead.

    `ahead` is "argmax" or "random" where the interval of the difference (tokens per target forward) excludes 0, "equal"
    where all outputs give the same, else "open".
    """
    found = _places(cells, x)
    rows: list[dict[str, Any]] = []
    for other in (SAME, ALONE):
        for at in _in_order([value for value, name in found if name == other], x):
            argmax, random = (cells[found[at, name]].rows for name in (ARGMAX, other))
            difference = metrics.paired_difference(argmax, random, "acceptance_length")
            rows.append(
                {x: at, "random": other} | metrics.with_ends("difference", difference) | {"ahead": _ahead(difference)}
            )
    return pd.DataFrame(rows)


def _ahead(difference: metrics.Difference) -> str:
    if max(abs(difference.low), abs(difference.high)) < ROUNDING:
        return "equal"
    if not difference.excludes_zero:
        return "open"
    return "argmax" if difference.estimate > 0 else "random"


def crossover(against: pd.DataFrame, x: str) -> str:
    """Where argmax stops being ahead of one kind of random draft, in words that the intervals carry.

    Args:
        against: rows of `argmax_against` of one kind, in order.
        x: its axis.
    """
    shown = [(figures.value_label(row[x], x), row["ahead"]) for row in against.to_dict("records")]
    word = text.short(x)
    ahead = [i for i, (_, who) in enumerate(shown) if who == "argmax"]
    behind = [i for i, (_, who) in enumerate(shown) if who == "random"]
    if not ahead:
        start = f"behind from {word} {shown[behind[0]][0]} on" if behind else "not behind anywhere"
        return f"argmax is ahead nowhere, {start}"
    if not behind:
        return f"argmax is ahead up to {word} {shown[ahead[-1]][0]}, and behind nowhere"
    if max(ahead) > min(behind):
        where = ", ".join(shown[i][0] for i in ahead)
        return f"argmax is ahead at {word} {where}, and there is no single crossover"
    return (
        f"argmax is ahead up to {word} {shown[ahead[-1]][0]} and behind from {shown[behind[0]][0]} on: "
        "the crossover lies between"
    )


def _strategy_section(found: pd.DataFrame, x: str) -> list[str]:
    rows = []
    for name in dict.fromkeys(found["strategy"]):
        mine = pd.DataFrame(found[found["strategy"] == name]).to_dict("records")
        kept = max(row["draft_bytes_per_token"] for row in mine)
        shown = {"drafts, rule": name, "exactness": mine[0]["exactness"] or text.UNDEFINED}
        shown |= {"kept (bytes)": text.number(kept, 0)}
        rows.append(shown | {_head(row[x], x): text.with_interval(row, "ratio", 3) for row in mine})
    same = pd.DataFrame(found[found["strategy"] == SAME]).to_dict("records")
    lengths = {_head(row[x], x): text.with_interval(row, "acceptance_length") for row in same}
    rows.insert(0, dict.fromkeys(rows[0], "") | {"drafts, rule": f"{SAME}, tokens per forward"} | lengths)
    explanation = (
        f"Acceptance length over that of {SAME} drafts under rejection (whose own is the first row), paired by prompt. "
        "*Exactness*: enumerated on toys, one pair per row. *Kept*: per draft token from drafting to verification, at "
        "bf16."
    )
    meanings = {ALONE: "drafts without the request's filters", SQUARED: "drafts at T^2"}
    for name, meaning in meanings.items():
        if any(shown.partition(",")[0] == name for shown in found["strategy"]):
            explanation += f" *{name.capitalize()}*: {meaning}."
    chosen = [
        f"{_head(row[x], x)}: {row['constants']}{row['strategy'].removeprefix(BEST)}"
        for row in found.to_dict("records")
        if row["constants"]
    ]
    best = (
        f"*{BEST.capitalize()}*: of the constant draft temperatures the one with the largest acceptance length on half "
        f"of the prompts, measured on the other half, both ways. Chosen: {'; '.join(chosen)}."
    )
    return ["## Ways to draw drafts", text.grid(rows), explanation, *([best] if chosen else [])]


def _public_section(found: pd.DataFrame, x: str) -> list[str]:
    rows = [
        {
            text.short(x): figures.value_label(row[x], x),
            "drafts": row["strategy"],
            "ours": text.with_interval(row, "ratio", 3),
            "published": text.number(row["public_ratio"], 3),
        }
        for row in found.to_dict("records")
        if math.isfinite(row["public_ratio"]) and row["strategy"] != SAME
    ]
    if not rows:
        return []
    explanation = f"Ratios to {SAME} drafts, since the models differ; published: {PUBLIC[x].source}."
    return ["## Beside published figures", text.grid(rows), explanation]


def _argmax_section(against: pd.DataFrame, x: str) -> list[str]:
    rows: dict[float, dict[str, str]] = {}
    for row in against.to_dict("records"):
        shown = rows.setdefault(row[x], {text.short(x): figures.value_label(row[x], x)})
        shown[f"minus {row['random']}"] = text.with_interval(row, "difference", 3, sign="+")
        shown[f"ahead of {row['random']}"] = {"argmax": "yes", "random": "no"}.get(row["ahead"], str(row["ahead"]))
    summary = [
        f"Against {name} drafts {crossover(pd.DataFrame(against[against['random'] == name]), x)}."
        for name in dict.fromkeys(against["random"])
    ]
    explanation = (
        "Acceptance length with argmax drafts minus that with random ones under rejection, paired by prompt; *open* "
        "where the interval holds 0. Each interval stands alone."
    )
    return ["## Argmax against random drafts", text.grid(list(rows.values())), explanation, " ".join(summary)]


def _head(value: float, x: str) -> str:
    return f"{'T' if x == TEMPERATURE else 'top-k'} = {figures.value_label(value, x)}"
