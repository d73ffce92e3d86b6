"""What to emit at the first rejection: what it accepts, how fast it is, and whether the output stays the target's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from spectoolkit import files, metrics
from spectoolkit.errors import RunError, UsageError
from spectoolkit.exactness.audit import Finding
from spectoolkit.prompts import spread
from spectoolkit.report import recovered_token as figures
from spectoolkit.report import tables, text
from spectoolkit.report.cells import CellResult, HasSettings
from spectoolkit.studies.exactness import proven
from spectoolkit.studies.output import compute, write
from spectoolkit.studies.speed import by_turns
from spectoolkit.study import Cell, Experiment, Store

TITLE = "What to emit at the first rejection"
TEMPERATURE = "sampling.temperature"
RECOVERED = {
    "rejection": "the residual (p - q)+",
    "block": "the block's residual",
    "match": "the target's own sample",
    "wrong/recovered_from_target": "a sample of p",
    "wrong/recovered_without_draft": "p without the draft",
    "typical, sample": "a sample of p",
    "typical, argmax": "the argmax of p",
    "typical, medusa": "the argmax of p, behind accepted drafts too",
    "typical, first_only": "nothing, but at position 0",
}
"""Rule -> the token at the first rejected position."""
PUBLIC_SOURCE = "vllm-project/vllm #8562: typical acceptance, K = 2, 7B with a 68M draft, batch 1"
PUBLIC_RATIO = 110 / 89
"""Tokens per second with the target's token at the first rejection over those with nothing, on other models."""


def check(
    cells: Sequence[Cell],
    axes: Sequence[str],
    *,
    timed_prompts: int = 5,
    timed_batch_size: int = 1,
    repetitions: int = 6,
) -> None:
    """Refuse cells that cannot be compared, before any is computed.

    Raises:
        UsageError: counts below 1, a replayed cell, one that drafts nothing, what `bases` refuses, or no two cells of
            which one is compared with the other.
    """
    counts = {"timed_prompts": timed_prompts, "timed_batch_size": timed_batch_size, "repetitions": repetitions}
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"study.{name}: expected an integer >= 1, got {value}")
    if any(cell.engine != "live" for cell in cells):
        raise UsageError("recovered_token: expected engine=live, since most of these rules change the text")
    if any(cell.settings["drafter.name"] == "none" for cell in cells):
        raise UsageError("recovered_token: expected strategies that draft, got drafter=none, which has no rejections")
    if all(i == j for i, j in enumerate(bases(cells))):
        raise UsageError(
            "recovered_token: expected a rule beside the one that it is compared with, got "
            f"{'; '.join(rule(cell.settings) for cell in cells)} alone (cases=[...])"
        )


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    timed_prompts: int = 5,
    timed_batch_size: int = 1,
    repetitions: int = 6,
) -> str:
    """Decode what is missing, enumerate every rule on toys, and time by turns what differs in speed alone.

    Timed, every time anew, are typical acceptance and what runs at temperature 0. Writes recovered.csv (`compared`)
    beside the usual tables.

    Args:
        timed_prompts: prompts that are decoded in every turn, spread over the categories.
        timed_batch_size: requests that are decoded together in a turn.
        repetitions: turns.

    Raises:
        RunError: exact rules that emit different tokens at temperature 0.
    """
    results = compute(cells, store, config)
    check_same_tokens(results)
    built = tables.build(results, axes)
    # Of two tokens typical acceptance rejects none here, and behind one step the target goes on either way.
    findings, base = proven(cells, two_steps_tokens=3), bases(cells)
    timed = [i for i, cell in enumerate(cells) if _is_timed(cell.settings)]
    chosen = [_part(cells[i].build(), timed_prompts, timed_batch_size) for i in timed]
    turns = by_turns(chosen, repetitions) if timed else []
    times = {i: [turn[j] for turn in turns] for j, i in enumerate(timed)}
    found = compared(results, base, findings, times)
    files.replace_text(store.folder / "recovered.csv", found.to_csv(index=False, lineterminator="\n"))
    how = (len(chosen[0].requests), timed_batch_size, repetitions) if timed else None
    shown = _sections(found, config, how)
    return write(store, cells, config, built, TITLE, figures.recovered_token_figure(found, PUBLIC_RATIO), shown)


def rule(settings: Mapping[str, Any]) -> str:
    """The verifier of a cell, with what typical acceptance recovers."""
    name = str(settings["verifier.name"])
    return f"{name}, {settings['verifier.recovery']}" if name == "typical" else name


def bases(cells: Sequence[HasSettings]) -> list[int]:
    """Per cell, the index of the one that it is compared with: its own for those that others are compared with.

    Typical acceptance is compared with its variant that emits nothing (recovery=first_only), of the same temperature,
    drafter and thresholds; every other rule with rejection at the same temperature, of the same drafter if it is there.

    Raises:
        UsageError: a rule that is not in `RECOVERED`, or none or several to compare with.
    """
    found = []
    for cell in cells:
        mine = cell.settings
        if rule(mine) not in RECOVERED:
            raise UsageError(f"recovered_token: expected rules among {'; '.join(RECOVERED)}, got {rule(mine)}")
        if mine["verifier.name"] == "typical":
            wanted, equal = "typical, first_only", (TEMPERATURE, "drafter.name", "verifier.epsilon", "verifier.delta")
        else:
            wanted, equal = "rejection", (TEMPERATURE,)
        fitting = [
            i
            for i, other in enumerate(cells)
            if rule(other.settings) == wanted and all(other.settings[key] == mine[key] for key in equal)
        ]
        with_same = [i for i in fitting if cells[i].settings["drafter.name"] == mine["drafter.name"]]
        fitting = with_same or fitting
        if len(fitting) != 1:
            where = ", ".join(f"{key}={mine[key]}" for key in equal)
            raise UsageError(
                f"recovered_token: expected one cell of {wanted} at {where} to compare {rule(mine)} with, "
                f"got {len(fitting)}"
            )
        found.append(fitting[0])
    return found


def _is_timed(settings: Mapping[str, Any]) -> bool:
    return settings["verifier.name"] == "typical" or settings[TEMPERATURE] == 0


def _part(experiment: Experiment, num_prompts: int, batch_size: int) -> Experiment:
    """The same with fewer requests, spread over the categories."""
    requests = experiment.requests
    places = spread([experiment.categories[request.id] for request in requests], num_prompts)
    return replace(experiment, requests=[requests[i] for i in places], batch_size=batch_size)


def check_same_tokens(cells: Sequence[CellResult]) -> None:
    """Lossless rules at temperature 0 have one output per request, whatever is drafted and recovered.

    Raises:
        RunError: names the request and the two cells.
    """
    greedy = [c for c in cells if c.settings[TEMPERATURE] == 0 and c.settings["verifier.is_lossless"]]
    for other in greedy[1:]:
        columns = (greedy[0].rows["request_id"], greedy[0].rows["tokens"], other.rows["tokens"])
        for request_id, one, two in zip(*(column.tolist() for column in columns), strict=True):
            if list(one) != list(two):
                raise RunError(
                    f"recovered_token: expected equal tokens at temperature 0, request {request_id!r} differs "
                    f"between {_name(greedy[0].settings)} and {_name(other.settings)}"
                )


def _name(settings: Mapping[str, Any]) -> str:
    return f"{rule(settings)} of {str(settings['drafter.name']).replace('_', ' ')} drafts"


def compared(
    cells: Sequence[CellResult],
    base: Sequence[int],
    findings: Sequence[Finding],
    times: Mapping[int, Sequence[Mapping[str, float]]],
) -> pd.DataFrame:
    """One row per cell: what it emits, the exactness verdict, acceptance length, and length and speed over its base's.

    `length_ratio` is pooled acceptance length over that of the base and `difference` that minus it, with intervals
    paired by prompt; NaN on bases. `speed_ratio` (tokens per second) and `step_ratio` (seconds per step and row) are
    medians of ratios within turns, `_low` and `_high` the least and the most: of n independent turns they enclose the
    median ratio with probability 1 - 2^(1 - n). `verify_share` is the verifier's share of the time of the steps: more
    cannot be saved there. NaN where nothing was timed.

    Args:
        cells: the study's.
        base: index of the cell that each is compared with (`bases`).
        findings: of the same cells.
        times: index of a timed cell -> what was measured of it, turn by turn (`speed.by_turns`).
    """
    rows: list[dict[str, Any]] = []
    for i, (cell, j, finding) in enumerate(zip(cells, base, findings, strict=True)):
        values = metrics.resample([cell.rows, cells[j].rows], "acceptance_length")
        (mine, other), (samples, others) = values.estimates, values.samples.T
        row: dict[str, Any] = {TEMPERATURE: cell.settings[TEMPERATURE], "drafter": cell.settings["drafter.name"]}
        row |= {"rule": rule(cell.settings), "recovered": RECOVERED[rule(cell.settings)], "claim": finding.claim}
        row |= {"exactness": finding.verdict, "one_step": finding.proof.one_step, "two_steps": finding.proof.two_steps}
        row |= {"emitted": metrics.summarise(cell.rows)["emitted"], "base": "" if i == j else _name(cells[j].settings)}
        row |= metrics.with_ends("acceptance_length", metrics.difference(mine, samples))
        none = metrics.Difference(math.nan, math.nan, math.nan)
        row |= metrics.with_ends("difference", none if i == j else metrics.difference(mine - other, samples - others))
        row |= metrics.with_ends("length_ratio", none if i == j else metrics.difference(mine / other, samples / others))
        for name, of in (("speed_ratio", "tokens_per_s"), ("step_ratio", "step_s")):
            turns = [a[of] / b[of] for a, b in zip(times.get(i, ()), times.get(j, ()), strict=True)] if i != j else []
            row |= metrics.with_ends(name, (statistics.median(turns), min(turns), max(turns)) if turns else none)
        shares = [turn["verify_share"] for turn in times.get(i, ())]
        rows.append(row | {"verify_share": statistics.median(shares) if shares else math.nan})
    return pd.DataFrame(rows)


def _sections(found: pd.DataFrame, config: Mapping[str, Any], timed: tuple[int, int, int] | None) -> list[str]:
    """Paragraphs of table.md."""
    records = found.to_dict("records")
    rules = [
        {
            "T": text.value_text(float(row[TEMPERATURE])),
            "drafts": str(row["drafter"]).replace("_", " "),
            "rule": row["rule"].partition(",")[0],
            "emits at the first rejection": row["recovered"],
            "exactness": row["exactness"],
            "TV": figures.distance_text(row),
            "acceptance length": text.with_interval(row, "acceptance_length"),
            "minus its base": text.with_interval(row, "difference", 3, sign="+"),
        }
        for row in records
    ]
    parts = ["## The token at the first rejection", text.grid(rules), _rules_text(config)]
    if timed is None:
        return parts
    speeds = [
        {
            "T": text.value_text(float(row[TEMPERATURE])),
            "rule": f"{row['rule'].partition(',')[0]}, {row['drafter'].replace('_', ' ')} drafts",
            "emits": row["recovered"],
            "tokens/s over its base": text.with_interval(row, "speed_ratio", 3),
            "time per step": text.with_interval(row, "step_ratio", 3),
            "acceptance length, all prompts": text.with_interval(row, "length_ratio", 3),
            "verification (share of a step)": text.number(row["verify_share"], 3),
            "faster": _faster(row),
        }
        for row in records
        if not math.isnan(row["verify_share"])
    ]
    return [*parts, "## Speed", text.grid(speeds), _speed_text(timed)]


def _rules_text(config: Mapping[str, Any]) -> str:
    return (
        f"K = {config['num_draft_tokens']}, decoded. *Base*: of typical acceptance the variant that emits nothing, of "
        "other rules rejection at the same temperature; differences are paired by prompt. *Exactness* and *TV*, total "
        "variation of what is emitted from the target's law after two steps: enumerated on toys of three tokens (of "
        "two where drafter and verifier share noise). At temperature 0 all lossless rows emitted the same tokens, "
        "request by request."
    )


def _speed_text(timed: tuple[int, int, int]) -> str:
    num_requests, batch_size, repetitions = timed
    chance = 100 * (1 - 2.0 ** (1 - repetitions))
    return (
        f"Ratios to the base within each of {repetitions} turns over {num_requests} requests, batch {batch_size}: "
        f"median, least and most (which enclose the median ratio with {chance:.0f} % probability if turns are "
        "independent); acceptance length is that of all prompts, with its interval over prompts. *Faster*: open where "
        f"1 lies between the least and the most. Published: {PUBLIC_RATIO:.2f} ({PUBLIC_SOURCE})."
    )


def _faster(row: Mapping[str, Any]) -> str:
    low, high = row["speed_ratio_low"], row["speed_ratio_high"]
    if math.isnan(low):
        return text.UNDEFINED
    return "yes" if low > 1 else "no, slower" if high < 1 else "open"
