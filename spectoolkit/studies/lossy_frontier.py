"""What lossy rules buy and what they cost: acceptance length against the distance of what is emitted from the target.

The honest rival of a lossy rule is the target itself at a lower temperature under a lossless rule: it, too, accepts
more and samples something else than was asked for. A rule is worth having where it accepts more at the same distance.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from spectoolkit import metrics
from spectoolkit.datatypes import Completion, Dense, PointMass, Proposal, SharedNoise, TopM
from spectoolkit.errors import UsageError
from spectoolkit.files import replace_text
from spectoolkit.functional.acceptance import sparse_row
from spectoolkit.functional.emission import divergences
from spectoolkit.functional.ragged import row_lengths
from spectoolkit.interfaces import Verifier
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.records import request_row
from spectoolkit.report import plots
from spectoolkit.report.cells import CellResult, HasSettings, prompt_note
from spectoolkit.report.frontier import frontier_figure
from spectoolkit.runner import completions_of, run_cells
from spectoolkit.study import Cell, Experiment, Store

TEMPERATURE = "sampling.temperature"
UNFILTERED = {
    "sampling.top_k": 0,
    "sampling.top_p": 1.0,
    "sampling.min_p": 0.0,
    "sampling.repetition_penalty": 1.0,
    "sampling.frequency_penalty": 0.0,
    "sampling.presence_penalty": 0.0,
}


@dataclass
class DistanceMeter:
    """Watches a run (`decode.Observer`) and sums, per request, how far what is emitted is from the target.

    At every position that was emitted the rule's own law e is computed from the rows, and compared with the target's at
    each of `references`, temperatures T_r: p_r ~ p^(T / T_r), p being the row at the run's temperature T.

    Attributes:
        verifier: the rule; a lossless one emits p.
        temperature: T > 0.
        sums: request id -> [tokens, then TV and KL in nats for every reference].
    """

    verifier: Verifier
    temperature: float
    references: Sequence[float]
    sums: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, request_ids: Sequence[str], target_probs: Tensor, proposal: Proposal, emitted: Tensor) -> None:
        places = (torch.arange(emitted.shape[1], device=emitted.device) < row_lengths(emitted)[:, None]).nonzero()
        target = target_probs[places[:, 0], places[:, 1]]
        law = self._law(target, proposal, places)
        found = [torch.ones(len(places), dtype=torch.float64, device=target.device)]
        for reference in self.references:
            found += divergences(law, at_temperature(target, self.temperature, reference))
        by_place = torch.stack(found, -1)
        rows = torch.zeros(len(request_ids), by_place.shape[1], dtype=torch.float64, device=target.device)
        rows.index_add_(0, places[:, 0], by_place)
        for request_id, sums in zip(request_ids, rows.cpu(), strict=True):
            self.sums[request_id] = self.sums.get(request_id, 0) + sums

    def _law(self, target: Tensor, proposal: Proposal, places: Tensor) -> Tensor:
        """e [M, V] at `places` [M, 2] (row, position)."""
        if self.verifier.is_lossless:
            return target
        rows, positions = places.unbind(-1)
        is_drafted = positions < proposal.lengths[rows]
        bonus = getattr(self.verifier, "bonus_probs", None)
        law = target.clone() if bonus is None else bonus(target).clone()
        if is_drafted.any():
            at = (rows[is_drafted], positions[is_drafted])
            draft = _draft_rows(proposal, at, target.shape[-1], target.dtype)
            law[is_drafted] = self.verifier.emitted_probs(target[is_drafted], draft)  # type: ignore[attr-defined]
        return law


def at_temperature(probs: Tensor, temperature: float, reference: float) -> Tensor:
    """Rows [M, V] sampled at one temperature as they are at another one: p^(T / T_r), normalised."""
    if temperature == reference:
        return probs
    return torch.softmax(probs.to(torch.float64).log() * (temperature / reference), dim=-1)


def check(cells: Sequence[Cell], axes: Sequence[str], **parameters: Any) -> None:
    """Refuse cells whose distance cannot be computed, or that have nothing to be compared with.

    Raises:
        UsageError: T = 0, filters or penalties, replayed cells, a lossy rule that does not say what it emits, a drafter
            that does not say q, or a temperature without a lossless cell for one of its drafters.
    """
    for cell in cells:
        drafter, verifier = cell.pair_on(None, 0)
        if not verifier.is_lossless and not hasattr(verifier, "emitted_probs"):
            raise UsageError(
                "lossy_frontier: expected rules that say which law they emit (emitted_probs), got "
                f"{type(verifier).__name__}"
            )
        if not verifier.is_lossless and SharedNoise in drafter.laws:
            raise UsageError(f"lossy_frontier: expected drafts of a law that says q, got {type(drafter).__name__}")
        if cell.settings.get("verifier.recovery") == "first_only":
            raise UsageError(
                "lossy_frontier: expected a rule that emits a token at every position it reaches, got "
                "verifier.recovery=first_only"
            )
        if cell.engine != "live":
            raise UsageError("lossy_frontier: expected engine=live, since a lossy rule changes the text")
        if cell.settings[TEMPERATURE] == 0 or any(cell.settings[k] != off for k, off in UNFILTERED.items()):
            raise UsageError(
                "lossy_frontier: expected sampling.temperature > 0 without filters and penalties, so that a row at one "
                "temperature gives it at every other"
            )
    points = {_point(cell) for cell in cells}
    if missing := sorted(points - {_point(cell) for cell in cells if cell.settings["verifier.is_lossless"]}):
        raise UsageError(
            f"lossy_frontier: expected a lossless cell for every drafter and temperature, none at {missing}"
        )


def _point(cell: Cell) -> tuple[str, float]:
    return str(cell.settings["drafter.name"]), float(cell.settings[TEMPERATURE])


def run(cells: Sequence[Cell], store: Store, *, axes: Sequence[str], config: Mapping[str, Any]) -> str:
    """Decode what is missing, and set acceptance length against distance at every temperature."""
    temperatures = sorted({float(cell.settings[TEMPERATURE]) for cell in cells})
    with progress_bar(sum(cell.num_requests for cell in cells if not store.has(cell)), "request") as bar:

        def decode_cell(cell: Cell) -> None:
            bar.set_description(cell.label)
            _decode(cell, _asked(cell, temperatures), store, bar.update)

        results = run_cells(cells, store, bar, decode_cell)
    table = table_of(results, temperatures)
    note = prompt_note(results)
    text = _markdown(table, config) + (f"\n{note}\n" if note else "")
    replace_text(store.folder / "table.csv", table.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "table.md", text)
    plots.save(frontier_figure(table), store.folder)
    store.write_manifest({"provenance": provenance(), "config": config, "cells": store.describe(cells)})
    return f"{text}\nTables, figure and manifest are in {store.folder}"


def _asked(cell: HasSettings, temperatures: Sequence[float]) -> list[float]:
    """Temperatures asked for that a cell is a row of: its own, and for the target itself also the higher ones."""
    own = float(str(cell.settings[TEMPERATURE]))
    return [t for t in temperatures if t == own or (cell.settings["verifier.is_lossless"] and own < t)]


def _decode(cell: Cell, temperatures: Sequence[float], store: Store, progress: Any) -> None:
    experiment = cell.build()
    meter = DistanceMeter(experiment.verifier, float(cell.settings[TEMPERATURE]), temperatures)
    begin = time.perf_counter()
    done: dict[str, Completion] = {}
    for completion in completions_of(experiment, observe=meter):
        done[completion.request.id] = completion
        progress(1)
    names = ["distance_tokens", *(f"{kind}_{t:g}" for t in temperatures for kind in ("tv", "kl"))]
    rows = [
        _row(experiment, done[r.id]) | dict(zip(names, meter.sums[r.id].tolist(), strict=True))
        for r in experiment.requests
    ]
    how = {"wall_s": round(time.perf_counter() - begin, 3), "prompt_changes": dict(experiment.prompt_changes)}
    store.save(cell, pd.DataFrame(rows), how)


def _row(experiment: Experiment, completion: Completion) -> dict[str, Any]:
    request_id = completion.request.id
    return request_row(
        completion,
        experiment.num_draft_tokens,
        cluster=experiment.clusters[request_id],
        category=experiment.categories[request_id],
    )


def table_of(cells: Sequence[CellResult], temperatures: Sequence[float]) -> pd.DataFrame:
    """One row per strategy and temperature asked for; lossless cells at lower temperatures stand among them.

    Columns: `temperature` asked for, `drafter`, `rule`, `setting`, `sampled_at` (differs for the rival), acceptance
    length, TV and KL per token, and `gain`: acceptance length less that of the rival at equal KL, between the rival's
    points linearly, NaN beyond them. Intervals are over prompts, those of `gain` paired.
    """
    rows: list[dict[str, Any]] = []
    found: list[_Samples] = []
    for temperature in temperatures:
        for cell in cells:
            frame = cell.rows
            if temperature not in _asked(cell, temperatures):
                continue
            own = float(str(cell.settings[TEMPERATURE]))
            is_rival = bool(cell.settings["verifier.is_lossless"])
            row: dict[str, Any] = {
                "temperature": temperature,
                "drafter": cell.settings["drafter.name"],
                "rule": "lower temperature" if is_rival else cell.settings["verifier.name"],
                "setting": f"T = {own:g}" if is_rival else _setting(cell),
                "sampled_at": own,
            }
            by = {"acceptance_length": _resampled(frame, "emitted", "steps")}
            by |= {kind: _resampled(frame, f"{kind}_{temperature:g}", "distance_tokens") for kind in ("tv", "kl")}
            for name, values in by.items():
                row |= _columns(name, values)
            rows.append(row)
            found.append(_Samples(by["kl"], by["acceptance_length"]))
    points = [(row["temperature"], row["drafter"]) for row in rows]
    for row, mine, point in zip(rows, found, points, strict=True):
        rival = [
            other
            for other, its, at in zip(found, rows, points, strict=True)
            if at == point and its["rule"] == "lower temperature"
        ]
        nothing = np.full_like(mine.kl, np.nan)
        row |= _columns("gain", nothing if row["rule"] == "lower temperature" else _gain(mine, rival))
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class _Samples:
    """KL and acceptance length [1 + R] of a cell: the estimate, then its values over the draws of prompts."""

    kl: np.ndarray
    acceptance_length: np.ndarray


def _resampled(frame: pd.DataFrame, numerator: str, denominator: str) -> np.ndarray:
    """[1 + R] of a ratio of sums; equal prompts give equal draws."""
    sums = (frame[numerator].tolist(), frame[denominator].tolist(), frame["cluster"].tolist())
    estimate, samples = metrics.resample_ratio(*sums)
    return np.concatenate([[estimate], samples])


def _columns(name: str, values: np.ndarray) -> dict[str, float]:
    """The estimate with its 95 % interval; none where a share of the draws that would move it is undefined."""
    low, high = metrics.interval(values[1:])
    if np.isnan(values[1:]).mean() > UNDEFINED_SHARE:
        low, high = np.nan, np.nan
    return {name: float(values[0]), f"{name}_low": low, f"{name}_high": high}


UNDEFINED_SHARE = 0.025
"""Of the resamples; where more of them lie beyond the rival's points, the gain has no interval."""


def _gain(mine: _Samples, rival: Sequence[_Samples]) -> np.ndarray:
    """[1 + R] acceptance length less that of the rival at the same KL; NaN beyond the rival's points."""
    kls, lengths = (np.stack([getattr(one, name) for one in rival], 1) for name in ("kl", "acceptance_length"))
    order = np.argsort(kls, axis=1, kind="stable")
    kls, lengths = (np.take_along_axis(values, order, 1) for values in (kls, lengths))
    equal = [np.interp(at, x, y, np.nan, np.nan) for at, x, y in zip(mine.kl, kls, lengths, strict=True)]
    return mine.acceptance_length - np.array(equal)


def _setting(cell: HasSettings) -> str:
    """The rule's own parameters in words."""
    hidden = ("verifier.name", "verifier._target_", "verifier.is_lossless")
    given = {
        k.removeprefix("verifier."): v
        for k, v in cell.settings.items()
        if k.startswith("verifier.") and k not in hidden
    }
    return ", ".join(f"{name} = {value}" for name, value in given.items())


def _draft_rows(proposal: Proposal, at: tuple[Tensor, Tensor], vocab_size: int, dtype: torch.dtype) -> Tensor:
    """q [M, V] at some places; the one-hot row of the draft for a point mass."""
    match proposal.law:
        case PointMass():
            tokens = proposal.tokens[at][:, None]
            return torch.zeros(len(tokens), vocab_size, dtype=dtype, device=tokens.device).scatter_(-1, tokens, 1.0)
        case Dense(probs):
            return probs[at][..., :vocab_size].to(dtype)
        case TopM(ids, probs):
            return sparse_row(ids[at], probs[at], vocab_size).to(dtype)
        case law:
            raise UsageError(f"lossy_frontier: expected drafts of a law that says q, got {type(law).__name__}")


def _markdown(table: pd.DataFrame, config: Mapping[str, Any]) -> str:
    lines = [
        f"# {config['name']}",
        "",
        f"Acceptance length (AL, K = {config['num_draft_tokens']}, decoded live) against the distance of what is "
        "emitted from the target at the temperature asked for: mean per emitted token of the total variation (TV) and "
        "of KL(emitted, target) in nats, computed from the rows, 95 % intervals over prompts. *Lower temperature* is "
        "the target itself, sampled without bias at a lower temperature. *Gain* is AL less that of lower temperature "
        "at equal KL (where that range is covered), paired by prompt: negative means that turning the temperature down "
        "would buy more.",
        "",
        "| T | drafter | rule | setting | AL | TV | KL | gain |",
        "|---:|---|---|---|---|---|---|---|",
    ]
    by_name = table.sort_values(["temperature", "drafter", "rule", "kl"], kind="stable")
    for row in by_name.to_dict("records"):
        shown = [
            f"{row[name]:.{digits}f} [{row[f'{name}_low']:.{digits}f}, {row[f'{name}_high']:.{digits}f}]"
            for name, digits in (("acceptance_length", 2), ("tv", 3), ("kl", 3))
        ]
        gain = "" if np.isnan(row["gain"]) else f"{row['gain']:+.2f}"
        if not np.isnan(row["gain_low"]):
            gain += f" [{row['gain_low']:+.2f}, {row['gain_high']:+.2f}]"
        lines.append(
            f"| {row['temperature']:g} | {row['drafter']} | {row['rule']} | {row['setting']} | {' | '.join(shown)} | "
            f"{gain} |"
        )
    return "\n".join(lines) + "\n"
