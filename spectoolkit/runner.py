"""Computing the cells of a study that are not on disk yet: by decoding, or by one replay for all that share outputs.

Several processes may do so in one folder: what one has claimed (`claims`), another does not compute.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spectoolkit import claims, trajectories
from spectoolkit.datatypes import Completion
from spectoolkit.decode import Observer, decode
from spectoolkit.drafters import ModelDrafter, NoDrafter
from spectoolkit.errors import RunError, UsageError
from spectoolkit.provenance import begin_cell
from spectoolkit.records import expected_rows
from spectoolkit.replay import Strategy, replay
from spectoolkit.report.cells import CellResult
from spectoolkit.report.decoded import DecodedTexts, Drafts, decoded_text
from spectoolkit.study import Cell, Experiment, Store, digest
from spectoolkit.trajectories import Trajectories
from spectoolkit.verifiers import Rejection

POLL_S = 1.0
"""Between two looks at what other processes have finished."""


class Progress(Protocol):
    """Takes note of finished work, to show it."""

    def update(self, n: float = 1) -> Any: ...

    def set_description(self, desc: str) -> Any: ...


class LeftToOthers(Exception):
    """All cells that are still missing are being computed by other processes, and the store does not wait for them."""


@dataclass(frozen=True)
class Job:
    """What one process computes at a time: one live cell, or all cells that one replay gives.

    Attributes:
        key: names it, whichever of its cells are missing.
    """

    key: str
    cells: tuple[Cell, ...]


def missing_requests(cells: Sequence[Cell], store: Store) -> int:
    """How many requests are still to be decoded, sampled or replayed."""
    missing = [cell for cell in cells if not store.has(cell)]
    live = sum(cell.num_requests for cell in missing if cell.engine == "live")
    groups = _replay_groups(missing).values()
    return live + sum(group[0].num_requests * (1 + _must_sample(group[0], store)) for group in groups)


def run_cells(
    cells: Sequence[Cell], store: Store, progress: Progress, decode_cell: Callable[[Cell], object] | None = None
) -> list[CellResult]:
    """Compute the cells that are not on disk yet and return all of them.

    Args:
        progress: counts requests: decoded ones, ones sampled for a replay, and replayed ones.
        decode_cell: computes a live cell and keeps it, in the place of `run_live`.

    Raises:
        LeftToOthers: nothing is left but what other processes are computing, and `store.waits` is false.
    """
    seen: dict[str, float] = {}
    is_announced = False
    while jobs := _jobs([cell for cell in cells if not store.has(cell)]):
        if any([_run(job, store, progress, decode_cell) for job in jobs]):
            seen = {}
            continue
        if not store.waits and all(_is_worked_on(job, store, seen) for job in jobs):
            num_left = sum(len(job.cells) for job in jobs)
            raise LeftToOthers(
                f"{num_left} of {len(cells)} cells are being computed by other processes in {store.folder}; the last "
                "one to finish writes the tables"
            )
        if not is_announced:
            is_announced = _say_who_is_waited_for(jobs, store)
        time.sleep(POLL_S)
    claims.remove_dead(store.claims_folder)
    return [store.load(cell) for cell in cells]


def _run(job: Job, store: Store, progress: Progress, decode_cell: Callable[[Cell], object] | None) -> bool:
    """Compute what is missing of a job; False where another process is at it."""
    with claims.claim(store.claims_folder, job.key) as is_mine:
        if not is_mine:
            return False
        begin_cell()
        missing = [cell for cell in job.cells if not store.has(cell)]
        if missing and missing[0].engine == "replay":
            run_replay(missing, store, progress)
        for cell in missing:
            if cell.engine != "live":
                continue
            if decode_cell is None:
                run_live(cell, store, progress)
            else:
                decode_cell(cell)
    return True


def _is_worked_on(job: Job, store: Store, seen: dict[str, float]) -> bool:
    """Whether a process is certainly at it: it runs on this machine, or its heart has beaten since the first look."""
    holder = claims.holder(store.claims_folder, job.key)
    return holder is not None and (holder.is_here or holder.beat_s != seen.setdefault(job.key, holder.beat_s))


def _say_who_is_waited_for(jobs: Sequence[Job], store: Store) -> bool:
    holders = [claims.holder(store.claims_folder, job.key) for job in jobs]
    names = sorted({holder.name for holder in holders if holder is not None})
    if names:
        num_cells = sum(len(job.cells) for job in jobs)
        print(f"spectoolkit: waiting for {num_cells} cells that {'; '.join(names)} computes", file=sys.stderr)
    return bool(names)


def _jobs(cells: Sequence[Cell]) -> list[Job]:
    replays = [Job(f"replay-{key}", tuple(group)) for key, group in _replay_groups(cells).items()]
    return replays + [Job(cell.fingerprint, (cell,)) for cell in cells if cell.engine == "live"]


def run_live(cell: Cell, store: Store, progress: Progress) -> None:
    """Decode one cell and keep it."""
    progress.set_description(cell.label)
    experiment = cell.build()
    progress.update(cell.num_requests - len(experiment.requests))  # left out
    begin = time.perf_counter()
    completions: list[Completion] = []
    for completion in completions_of(experiment):
        completions.append(completion)
        progress.update(1)
    store.save_live(cell, completions, experiment, time.perf_counter() - begin)


def completions_of(experiment: Experiment, observe: Observer | None = None) -> Iterator[Completion]:
    """Decode all requests of a cell (`decode.decode`)."""
    return decode(
        experiment.target,
        experiment.drafter,
        experiment.verifier,
        experiment.requests,
        num_draft_tokens=experiment.num_draft_tokens,
        batch_size=experiment.batch_size,
        observe=observe,
    )


def decoded_texts(experiment: Experiment) -> DecodedTexts:
    """Decode all requests of a cell, in their order, and show of every token how it came about."""
    drafts = Drafts()
    completions = {completion.request.id: completion for completion in completions_of(experiment, drafts)}
    decode_tokens = experiment.target.tokenizer.decode
    ids = [request.id for request in experiment.requests]
    return DecodedTexts(decoded_text(completions[name], drafts.of[name], decode_tokens) for name in ids)


def run_replay(cells: Sequence[Cell], store: Store, progress: Progress) -> None:
    """Replay cells that differ in nothing but drafter, verifier and K, and keep them."""
    progress.set_description(f"replay of {len(cells)} cells")
    num_turns = 1 + _must_sample(cells[0], store)
    experiments = [cell.build() for cell in cells]
    progress.update(num_turns * (cells[0].num_requests - len(experiments[0].requests)))  # left out
    outputs, source = outputs_of(cells[0], experiments[0], store, progress)
    begin = time.perf_counter()
    strategies: dict[str, Strategy] = {}  # cells that differ in K only share one
    for cell, experiment in zip(cells, experiments, strict=True):
        key = _strategy_key(cell)
        largest = max(experiment.num_draft_tokens, strategies[key].num_draft_tokens if key in strategies else 0)
        strategies[key] = Strategy(experiment.drafter, experiment.verifier, largest)
    counts = replay(experiments[0].target, list(strategies.values()), outputs, progress.update)
    by_key = dict(zip(strategies, counts, strict=True))
    wall_s = time.perf_counter() - begin
    how = {
        "trajectories": source,
        "wall_s": round(wall_s / len(cells), 3),  # of the cell's share of the pass
        "prompt_changes": dict(experiments[0].prompt_changes),
    }
    for cell, experiment in zip(cells, experiments, strict=True):
        rows = expected_rows(
            by_key[_strategy_key(cell)][experiment.num_draft_tokens - 1],
            outputs,
            clusters=[experiment.clusters[request.id] for request in outputs.requests],
            categories=[experiment.categories[request.id] for request in outputs.requests],
            draft_bytes_per_token=draft_bytes_per_token(experiment),
        )
        store.save(cell, rows, how)


def draft_bytes_per_token(experiment: Experiment) -> int:
    """What is kept of the drafter's law for the verifier; a drafter without a draft model is a point mass here."""
    drafter = experiment.drafter
    if isinstance(drafter, ModelDrafter) and experiment.verifier.keeps_law:
        return drafter.bytes_per_token(experiment.target.vocab_size)
    return 0


def sample(experiment: Experiment, progress: Progress) -> Trajectories:
    """One output of the target per request, by plain decoding."""
    completions: dict[str, Completion] = {}
    for completion in decode(
        experiment.target,
        NoDrafter(),
        Rejection(),
        experiment.requests,
        num_draft_tokens=1,
        batch_size=experiment.batch_size,
    ):
        completions[completion.request.id] = completion
        progress.update(1)
    ordered = [completions[request.id] for request in experiment.requests]
    return Trajectories(
        requests=tuple(experiment.requests),
        outputs=tuple(completion.tokens for completion in ordered),
        finish_reasons=tuple(completion.finish_reason for completion in ordered),
    )


def outputs_of(cell: Cell, experiment: Experiment, store: Store, progress: Progress) -> tuple[Trajectories, str]:
    """The outputs to replay, and where they are from: a given file, the study's own, or sampled now."""
    given, path = cell.settings["trajectories"], store.trajectories_path(cell)
    expected = (experiment.requests, cell.text_identity, experiment.target.vocab_size)
    if given is not None:
        return trajectories.load(Path(given).expanduser(), *expected), f"given: {given}"
    if not store.has_trajectories(cell):
        trajectories.save(path, sample(experiment, progress), cell.text_identity)
    try:
        return trajectories.load(path, *expected), f"sampled: {path.name}"
    except UsageError as error:
        raise RunError(f"{error}; delete {path} to have them sampled again") from error


def _must_sample(cell: Cell, store: Store) -> bool:
    return cell.settings["trajectories"] is None and not store.has_trajectories(cell)


def _replay_groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The replayed cells, those together that read the same outputs."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.engine == "replay":
            key = digest({"text": cell.text_identity, "trajectories": cell.settings["trajectories"]})
            groups.setdefault(key, []).append(cell)
    return groups


def _strategy_key(cell: Cell) -> str:
    groups = ("drafter.", "verifier.", "draft_model.")
    chosen: Mapping[str, Any] = {key: value for key, value in cell.settings.items() if key.startswith(groups)}
    return json.dumps(chosen, sort_keys=True, default=str)
