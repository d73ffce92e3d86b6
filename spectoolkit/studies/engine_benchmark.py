"""How close decoding loops come to their forwards: this package's, transformers' assisted generation's and flashspec's.

Everything is measured in turn within one process on one machine; the seconds in the table are only there to show what
its ratios were made of.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pandas as pd
import torch

from spectoolkit.datatypes import Request, SamplingParams
from spectoolkit.errors import UsageError
from spectoolkit.files import replace_text
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.studies import engines
from spectoolkit.studies.engines import Engine
from spectoolkit.studies.recorded_calls import now
from spectoolkit.study import Cell, Experiment, Store

RUNS_IN_ONE_PROCESS = True  # times are compared within one process

AXES = ("batch_size", "drafter", "verifier")

COLUMNS = {
    engines.ASSISTED: "over_transformers",
    engines.ASSISTED_DEFAULTS: "over_transformers_defaults",
    engines.FLASHSPEC: "over_flashspec",
}
"""Of the loop's tokens per second over another engine's."""


@dataclass(frozen=True)
class Row:
    """A row of the table: one engine at one batch size.

    Attributes:
        settings: drafter and verifier.
        batch_size: sequences that it decodes together.
        device, vocab_size: of the target.
    """

    settings: Mapping[str, Any]
    engine: Engine
    batch_size: int
    device: torch.device
    vocab_size: int


def check(cells: Sequence[Cell], axes: Sequence[str], **parameters: Any) -> None:
    """Refuse what cannot be compared, before a model is loaded.

    Raises:
        UsageError: a number below 1, axes that the table does not show, or settings that not all engines have: stop
            strings, or sampling parameters beside the temperature.
    """
    if unknown := sorted(set(axes) - set(AXES)):
        raise UsageError(f"grid: expected axes of engine_benchmark among {', '.join(AXES)}, got {', '.join(unknown)}")
    for name, value in parameters.items():
        if value is not None and value < 1:
            raise UsageError(f"study.{name}: expected an integer >= 1, got {value!r}")
    names = [field.name for field in fields(SamplingParams)]
    for cell in cells:
        given = {name: cell.settings[f"sampling.{name}"] for name in names if f"sampling.{name}" in cell.settings}
        params = SamplingParams(**{**given, "logit_bias": given.get("logit_bias") or {}})
        if params != SamplingParams(temperature=params.temperature):
            raise UsageError(
                "sampling: expected nothing but a temperature, which is what all engines that engine_benchmark "
                f"compares have, got {params}"
            )
        if cell.settings["stop_strings"]:
            raise UsageError(
                "stop_strings: expected none, since not all engines that engine_benchmark compares have them, got "
                f"{cell.settings['stop_strings']}"
            )


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    repetitions: int = 3,
    requests_per_row: int | None = None,
    compared_requests: int | None = None,
) -> str:
    """Measure the loop at every batch size and the other engines beside it, in turn, `repetitions` times.

    Args:
        requests_per_row: of a batch's rows, how many requests each decodes on average: large and small batches then
            take equally long; None is all requests at every batch size.
        compared_requests: how many requests the engines are given that decode one at a time; None is all of them.

    Raises:
        UsageError: a cell without a draft model, or models that are not those of transformers.
        RunError: an engine's output is not what was asked for.
    """
    tables: list[pd.DataFrame] = []
    missing = engines.flashspec_missing()
    with progress_bar(len(cells) * repetitions, "run") as bar:
        for group in _groups(cells):
            rows = rows_of(group, requests_per_row, compared_requests, with_flashspec=missing is None)
            for row in rows:  # first calls are slow
                engines.check_outputs(row.engine, row.engine.run(), row.vocab_size)
            runs: list[list[dict[str, float]]] = []
            for _ in range(repetitions):
                runs.append(with_ratios(rows, [measured(row) for row in rows]))
                bar.update(len(group))
            tables.append(summary(rows, runs))
    table = pd.concat(tables, ignore_index=True)
    notes = provenance()
    versions = {"transformers": notes["packages"]["transformers"], "flashspec": missing or engines.flashspec_version()}
    text = _markdown(table, config, str(notes["device"]), repetitions, versions)
    replace_text(store.folder / "table.csv", table.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "table.md", text)
    store.write_manifest({"provenance": notes, "engines": versions, "config": config})
    return f"{text}\nTable and manifest are in {store.folder}"


def rows_of(
    cells: Sequence[Cell], requests_per_row: int | None, compared_requests: int | None, *, with_flashspec: bool
) -> list[Row]:
    """What is measured of cells that differ in their batch size alone: the loop at each, and every other engine once.

    Raises:
        UsageError: see `check_models`.
    """
    experiments = [cell.build() for cell in cells]
    settings = {"drafter": cells[0].settings["drafter.name"], "verifier": cells[0].settings["verifier.name"]}
    check_models(experiments[0])
    target = experiments[0].target
    few = spread(experiments[0].requests, compared_requests)
    others = [engines.assisted_generation(experiments[0], few, fixed_length=fixed) for fixed in (True, False)]
    others += [engines.flashspec(experiments[0], few)] if with_flashspec else []
    sized = []
    for experiment in experiments:
        wanted = None if requests_per_row is None else requests_per_row * experiment.batch_size
        sized.append((engines.loop(replace(experiment, requests=spread(experiment.requests, wanted))), experiment))
    found = [(engine, experiment.batch_size) for engine, experiment in sized] + [(engine, 1) for engine in others]
    return [Row(settings, engine, size, target.device, target.vocab_size) for engine, size in found]


def check_models(experiment: Experiment) -> None:
    """Refuse models that other engines cannot take.

    Raises:
        UsageError: no draft model, or models that are not those of transformers.
    """
    models = (experiment.target, getattr(experiment.drafter, "draft_model", None))
    if not all(hasattr(model, "hf_model") for model in models):
        raise UsageError(
            "engine_benchmark: expected a target and a draft model of transformers (to compare with its assisted "
            f"generation), got {[getattr(model, 'name', None) for model in models]}"
        )


def spread(requests: Sequence[Request], number: int | None) -> Sequence[Request]:
    """`number` of the requests, evenly spaced, since neighbours may be samples of one prompt; None is all of them."""
    if number is None or number >= len(requests):
        return requests
    return [requests[i * len(requests) // number] for i in range(number)]


def measured(row: Row) -> dict[str, float]:
    """One run of an engine, the same with its model calls recorded, and these calls alone.

    Raises:
        RunError: outputs that cannot be.
    """
    with undisturbed():
        begin = now(row.device)
        outputs = row.engine.run()
        wall_s = now(row.device) - begin
    with undisturbed():
        begin = now(row.device)
        again, steps, recording = row.engine.record()
        recorded_s = now(row.device) - begin
    engines.check_outputs(row.engine, outputs, row.vocab_size)
    inside_s = recording.spans.seconds()
    with undisturbed():
        floor_s = recording.repeat()
    emitted = sum(map(len, outputs))
    return {
        "tokens_per_s": emitted / wall_s,
        "acceptance_length": sum(map(len, again)) / steps,
        "over_floor": wall_s / floor_s,
        "forward_share": inside_s / recorded_s,
        "over_forwards": recorded_s / inside_s,
        "repeated": float(outputs == again),
    }


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run without the garbage collector, which would come at any time and for whatever was left before."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def with_ratios(rows: Sequence[Row], one: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """One repetition's measurements, those of the loop with its tokens per second over each other engine's."""
    names = [row.engine.name for row in rows]
    rates = {COLUMNS[name]: found["tokens_per_s"] for name, found in zip(names, one, strict=True) if name in COLUMNS}
    return [
        {**found, **({} if name in COLUMNS else {key: found["tokens_per_s"] / rate for key, rate in rates.items()})}
        for name, found in zip(names, one, strict=True)
    ]


def summary(rows: Sequence[Row], runs: Sequence[Sequence[Mapping[str, float]]]) -> pd.DataFrame:
    """Per row, the median of every measurement over the repetitions, and its smallest and largest value."""
    made = []
    for index, row in enumerate(rows):
        entry: dict[str, Any] = {**row.settings, "engine": row.engine.name, "batch_size": row.batch_size}
        entry["requests"] = len(row.engine.requests)
        for name in runs[0][index]:
            values = [one[index][name] for one in runs]
            entry |= {name: statistics.mean(values)} if name == "repeated" else median_and_range(name, values)
        made.append(entry)
    return pd.DataFrame(made)


def median_and_range(name: str, values: Sequence[float]) -> dict[str, float]:
    """Columns `name`, `name_min` and `name_max`: the median of a measurement over the repetitions, and its range."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def shown_range(row: Mapping[Any, Any], name: str, digits: int) -> str:
    """These columns of a row as text."""
    return f"{row[name]:.{digits}f} ({row[f'{name}_min']:.{digits}f} to {row[f'{name}_max']:.{digits}f})"


def _groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that differ in their batch size alone."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        key = repr(sorted((name, value) for name, value in cell.settings.items() if name != "batch_size"))
        groups.setdefault(key, []).append(cell)
    return list(groups.values())


def _markdown(
    table: pd.DataFrame, config: Mapping[str, Any], device: str, repetitions: int, versions: Mapping[str, Any]
) -> str:
    lines = [
        "# Engine benchmark",
        "",
        f"Medians of {repetitions} repetition{'s' * (repetitions > 1)} on {device}, smallest and largest value in "
        f"brackets; K = {config['num_draft_tokens']}, T = {config['sampling']['temperature']}, "
        f"{config['max_new_tokens']} tokens per request. In every repetition all rows are measured in turn. "
        "Ratios compare within one repetition; seconds "
        f"depend on the machine and its other load. transformers {versions['transformers']}; flashspec: "
        f"{versions['flashspec']}.",
        "",
        "| drafter | verifier | engine | batch | requests | time over floor | time over that inside forwards | "
        "acceptance length | tokens/s |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows = table.to_dict("records")
    for row in rows:
        lines.append(
            f"| {row['drafter']} | {row['verifier']} | {row['engine']} | {row['batch_size']} | {row['requests']} | "
            f"{shown_range(row, 'over_floor', 3)} | {shown_range(row, 'over_forwards', 3)} | "
            f"{row['acceptance_length']:.2f} | {shown_range(row, 'tokens_per_s', 1)} |"
        )
    names = [name for name, column in COLUMNS.items() if column in table]
    lines += [
        "",
        "Tokens per second of spectoolkit over those of the engines that decode one request at a time:",
        "",
        "| drafter | verifier | batch | " + " | ".join(f"over {name}" for name in names) + " |",
        "|---|---|---:|" + "---:|" * len(names),
    ]
    for row in rows:
        if row["engine"] not in COLUMNS:
            ratios = " | ".join(shown_range(row, COLUMNS[name], 2) for name in names)
            lines.append(f"| {row['drafter']} | {row['verifier']} | {row['batch_size']} | {ratios} |")
    lines += ["", _EXPLANATION]
    if min(table["repeated"]) < 1:
        lines += ["", _NOT_REPEATED]
    return "\n".join(lines) + "\n"


_EXPLANATION = """\
*time over floor*: the wall time of a run over that of its model calls made once more with nothing between them: equal
models, tokens, shapes and caches, forward passes as well as what is cut off, joined to or picked from the caches.
These calls are noted in a second run with the same noise; the run that is timed has nothing noted. *time over that
inside forwards*: the wall time of that second run over the time inside its forward passes (`prefill` and `score` of
the models here, `forward` of the models elsewhere): by the clock, and on a GPU by events in its queue, for which
nothing is waited. Its inverse is `forward_share` in the CSV file. It takes a forward pass to be as slow as it was in
the loop, and leaves out what the floor holds of the caches. *acceptance length*: tokens per step in which the target
scores drafts.

*transformers*: `generate` with `assistant_model`, the same pair, prompts, temperature for target and draft, and K
drafts at every step; *its defaults* draft as many as it decides. *flashspec*: its path for one sequence with a model
drafter, the same temperature for target and draft, so that its rejection (Leviathan et al.) keeps the target's law as
the others do, and K drafts at every step, also where fewer are left to emit. It works on log-probabilities in float32
and draws from torch's generator. Its prompt lookup is off, since it is no part of the pair, and so are its CUDA
graphs. Both decode one request at a time with torch's own attention. Every output is checked to have the length and
the tokens that were asked for, which says nothing of its law."""

_NOT_REPEATED = (
    "In some repetitions an engine's second run gave other tokens than the one that was timed (`repeated` in the CSV "
    "file is the share in which it did not), so that their model calls differ a little."
)
