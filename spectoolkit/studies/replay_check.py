"""The same cells live and by replay, side by side: is the replay what decoding scatters around?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from spectoolkit import metrics
from spectoolkit.errors import UsageError
from spectoolkit.files import replace_text
from spectoolkit.models.tabular import TabularModel
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.records import expected_rows
from spectoolkit.replay import Strategy
from spectoolkit.replay import replay as replay_outputs
from spectoolkit.report.cells import CellResult
from spectoolkit.runner import missing_requests, run_cells
from spectoolkit.sampling import SamplingState
from spectoolkit.study import Cell, Experiment, Store
from spectoolkit.trajectories import Trajectories

METRIC = "acceptance_length"
NORMAL_95 = 1.959964
MOST_OUTPUTS = 20_000
"""Outputs of one request that are enumerated at most for the exact value on a toy."""


def check(cells: Sequence[Cell], axes: Sequence[str]) -> None:
    """Refuse live cells without a replayed twin.

    Raises:
        UsageError: names one.
    """
    keys = {_key(cell) for cell in cells}
    for cell in cells:
        if cell.engine == "live" and _key(cell, engine="replay") not in keys:
            raise UsageError(f"replay_check: expected every cell live and replayed, {cell.label} is only live")


def run(cells: Sequence[Cell], store: Store, *, axes: Sequence[str], config: Mapping[str, Any]) -> str:
    """Compare live cells with two replays: of their own outputs, and of outputs that were sampled separately.

    The first difference holds nothing but the randomness of drafting and verification, and is the sharp test. The
    second holds that of the text, too. Standard errors come from the 95 % cluster bootstrap intervals, paired by
    prompt. On a toy small enough the exact value is enumerated over all outputs.
    """
    with progress_bar(missing_requests(cells, store), "request") as bar:
        results = run_cells(cells, store, bar)
    by_key = {_key(cell): (cell, result) for cell, result in zip(cells, results, strict=True)}
    rows: list[dict[str, Any]] = []
    live_cells = [cell for cell in cells if cell.engine == "live"]
    with progress_bar(len(live_cells), "check") as bar:
        for cell in live_cells:
            twin = by_key[_key(cell, engine="replay")]
            rows.append(_compare(cell, by_key[_key(cell)][1], twin[1], axes))
            bar.update(1)
    table = pd.DataFrame(rows)
    text = _markdown(table, config)
    replace_text(store.folder / "table.csv", table.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "table.md", text)
    store.write_manifest({"provenance": provenance(), "config": config, "cells": store.describe(cells)})
    return f"{text}\nTable and manifest are in {store.folder}"


def _key(cell: Cell, engine: str | None = None) -> str:
    settings = {**cell.settings, "engine": engine or cell.engine}
    return repr(sorted((key, str(value)) for key, value in settings.items()))


def _compare(cell: Cell, live: CellResult, separate: CellResult, axes: Sequence[str]) -> dict[str, Any]:
    experiment = cell.build()
    outputs = Trajectories(
        requests=tuple(experiment.requests),
        outputs=tuple(tuple(int(token) for token in tokens) for tokens in live.rows["tokens"]),
        finish_reasons=tuple(live.rows["finish_reason"]),
    )
    own = _replayed(experiment, outputs)
    columns = {axis: cell.settings.get(axis, cell.settings.get(f"{axis}.name")) for axis in axes if axis != "engine"}
    found: dict[str, Any] = {**columns, "live": _value(live.rows)}
    for name, rows in (("own", own), ("separate", separate.rows)):
        difference = metrics.paired_difference(live.rows, rows, METRIC)
        error = (difference.high - difference.low) / (2 * NORMAL_95)
        found |= {name: _value(rows), f"{name}_difference": difference.estimate, f"{name}_error": error}
        found[f"{name}_z"] = _z(difference.estimate, error)
    widths = [metrics.bootstrap(rows, [METRIC])[METRIC] for rows in (live.rows, separate.rows)]
    errors = [(interval.high - interval.low) / (2 * NORMAL_95) for interval in widths]
    found |= {"live_error": errors[0], "replay_error": errors[1]}
    found["exact"] = exact_acceptance_length(experiment)
    found["agrees"] = all(abs(found[f"{name}_z"]) <= 3 for name in ("own", "separate"))
    return found


def _z(difference: float, error: float) -> float:
    """Without any error only rounding may differ: float32 rows."""
    if error > 1e-6:
        return difference / error
    return 0.0 if abs(difference) < 1e-4 else math.inf


def _replayed(experiment: Experiment, outputs: Trajectories) -> pd.DataFrame:
    strategy = Strategy(experiment.drafter, experiment.verifier, experiment.num_draft_tokens)
    counts = replay_outputs(experiment.target, [strategy], outputs)[0][-1]
    return expected_rows(
        counts,
        outputs,
        clusters=[experiment.clusters[request.id] for request in outputs.requests],
        categories=[experiment.categories[request.id] for request in outputs.requests],
        draft_bytes_per_token=0,
    )


def _value(rows: pd.DataFrame) -> float:
    return float(metrics.summarise(rows)[METRIC])


def exact_acceptance_length(experiment: Experiment) -> float:
    """Expected tokens over expected steps, over all outputs of all requests; NaN unless that is a small toy."""
    target = experiment.target
    size, longest = target.vocab_size, max(request.max_new_tokens for request in experiment.requests)
    is_toy = isinstance(getattr(target, "_model", target), TabularModel)
    if not is_toy or size**longest > MOST_OUTPUTS or any(request.stop_ids for request in experiment.requests):
        return math.nan
    tokens, steps = 0.0, 0.0
    for request in experiment.requests:
        outputs = list(itertools.product(range(size), repeat=request.max_new_tokens))
        weights = _probabilities(target, request, torch.tensor(outputs))
        possible = weights.nonzero()[:, 0].tolist()
        asked = tuple(replace(request, id=f"{request.id}#{i}") for i in possible)
        every = Trajectories(asked, tuple(outputs[i] for i in possible), ("length",) * len(possible))
        strategy = Strategy(experiment.drafter, experiment.verifier, experiment.num_draft_tokens)
        counts = replay_outputs(target, [strategy], every)[0][-1]
        tokens += request.max_new_tokens
        steps += float(weights[possible] @ counts.steps[:, 0])
    return tokens / steps


def _probabilities(target: Any, request: Any, outputs: torch.Tensor) -> torch.Tensor:
    """[R] of `outputs` [R, N], all for one request."""
    num = len(outputs)
    before = torch.full((num, 1), request.prompt[-1])
    state = target.prefill([request.prompt[:-1]] * num)
    logits, _ = target.score(state, torch.cat([before, outputs[:, :-1]], dim=1))
    sampling = SamplingState.of(
        [request.id] * num, [request.params] * num, [request.prompt] * num, [()] * num, target.vocab_size
    )
    probs = sampling.probs(logits, outputs[:, :-1], "target")
    return probs.gather(-1, outputs[..., None])[..., 0].double().prod(-1)


def _markdown(table: pd.DataFrame, config: Mapping[str, Any]) -> str:
    labels = [name for name in table.columns[: list(table.columns).index("live")]]
    has_exact = bool(table["exact"].notna().any())
    head = [*labels, "live", "replay, own text", "difference ± s.e.", "z"]
    head += ["replay, other text", "difference ± s.e.", "z", "s.e. live / replay", *(["exact"] * has_exact), "agrees"]
    lines = ["# Live against replay", "", f"Acceptance length (pooled), K = {config['num_draft_tokens']}.", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in table.to_dict("records"):
        cells = [str(row[name]) for name in labels] + [f"{row['live']:.3f}"]
        for name in ("own", "separate"):
            cells += [f"{row[name]:.3f}", f"{row[f'{name}_difference']:+.3f} ± {row[f'{name}_error']:.3f}"]
            cells.append(f"{row[f'{name}_z']:+.1f}")
        ratio = row["live_error"] / row["replay_error"] if row["replay_error"] > 0 else math.nan
        cells.append(f"{ratio:.2f}")
        cells += [f"{row['exact']:.4f}"] * has_exact + ["yes" if row["agrees"] else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    worst = max(table["own_z"].abs().max(), table["separate_z"].abs().max())
    verdict = "agree" if bool(table["agrees"].to_numpy().all()) else "DISAGREE"
    lines += ["", f"Live and replay {verdict}: the largest |z| of {2 * len(table)} is {worst:.2f} (bound 3)."]
    return "\n".join(lines) + "\n"
