"""Accepted lengths differ inside a batch: what each way to live with that computes, and how fast it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from spectoolkit import files, metrics
from spectoolkit.chains import score_proposal
from spectoolkit.datatypes import Chains, Completion, DraftLaw, Proposal, Request, StepRecord, Uniforms, Verdict
from spectoolkit.decode import decode
from spectoolkit.errors import RunError, UsageError
from spectoolkit.functional.ragged import PAD
from spectoolkit.interfaces import Verifier
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.records import request_row
from spectoolkit.report import batched_verification as figures
from spectoolkit.report import plots, text
from spectoolkit.scoring import Scorer, score_by_length, score_expanded
from spectoolkit.studies.replay_benchmark import forget_peak, peak_mib
from spectoolkit.study import Cell, Experiment, Store

TITLE = "Accepted lengths differ inside a batch"
RUNS_IN_ONE_PROCESS = True  # times are compared within one process
SIZE, TEMPERATURE = "batch_size", "sampling.temperature"
OF_ONE_OUTPUT = "coupled"
"""The verifier whose output does not depend on where steps begin: with it every way has to emit the same tokens."""


@dataclass(frozen=True)
class Way:
    """How a batch is scored and advances.

    Attributes:
        label: what tables call it.
        score: how the forward pass is made (`decode.decode`).
        pads: whether slots without a token are computed, in rows with fewer drafts than the longest.
        waits: whether all rows advance by what the slowest accepted.
    """

    label: str
    score: Scorer
    pads: bool
    waits: bool = False


WAYS = {
    "together": Way("one forward, ragged cache", score_proposal, pads=True),
    "expanded": Way("batch expansion", score_expanded, pads=False),
    "by_length": Way("a forward per draft count", score_by_length, pads=False),
    "slowest": Way("all wait for the slowest", score_proposal, pads=True, waits=True),
}
ALONE = ("together", "expanded")
"""The ways that differ at batch size 1."""


def check(
    cells: Sequence[Cell], axes: Sequence[str], *, ways: Sequence[str], turns: int = 5, max_differing: float = 0.0
) -> None:
    """Refuse what cannot be compared, before anything is decoded.

    Raises:
        UsageError: an unknown way, no "together", no cell of batch size 1, another axis, a replayed cell, outputs that
            depend on where steps begin, several chains per step, or fewer requests than turns.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown or "together" not in ways or len(set(ways)) != len(ways):
        raise UsageError(f"study.ways: expected together and others of {', '.join(WAYS)}, got {list(ways)}")
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise UsageError(f"study.turns: expected an integer >= 1, got {turns!r}")
    if not 0 <= max_differing <= 1:
        raise UsageError(f"study.max_differing: expected a share in [0, 1], got {max_differing!r}")
    if any(cell.engine != "live" for cell in cells):
        raise UsageError("batched_verification: expected engine=live, since a replay knows no batches")
    sizes = [cell.settings[SIZE] for cell in cells]
    if 1 not in sizes or list(axes) != [SIZE]:
        raise UsageError(
            f"batched_verification: expected a grid of batch_size alone with 1 among them, got {sizes} over "
            f"{', '.join(axes) or 'nothing'}"
        )
    for cell in cells:
        name, temperature = cell.settings["verifier.name"], cell.settings[TEMPERATURE]
        if name != OF_ONE_OUTPUT and not (temperature == 0 and cell.settings["verifier.is_lossless"]):
            raise UsageError(
                f"batched_verification: expected verifier={OF_ONE_OUTPUT} (or a lossless one at temperature 0), "
                f"whose output does not depend on where steps begin, got {name} at temperature {temperature}"
            )
        if Chains in cell.pair_on(None, 0)[0].laws:
            raise UsageError(
                "batched_verification: expected a drafter of one chain per step, since the ways to score a batch are "
                f"those of one, got drafter={cell.settings['drafter.name']}"
            )
        if cell.num_requests < turns:
            raise UsageError(
                f"study.turns: expected at most as many turns as requests, which they share, got {turns} turns "
                f"and {cell.num_requests} requests (prompts.limit, samples_per_prompt)"
            )


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    ways: Sequence[str],
    turns: int = 5,
    max_differing: float = 0.0,
) -> str:
    """Decode all requests in every way and batch size, in turns over parts of them; nothing but the table is kept.

    Args:
        ways: names of `WAYS`.
        turns: parts of the requests; a part is decoded in all ways and sizes before the next, and ratios are taken
            within it.
        max_differing: share of requests whose tokens may differ from those of batch size 1: the rounding of a matrix
            product depends on its shape, and a token that two ways round differently changes the rest of its output.

    Raises:
        UsageError: a target that cannot score parts of a batch.
        RunError: more requests than that differ; the table is written.
    """
    store.check_owner(config)
    experiments = {int(cell.settings[SIZE]): cell.build() for cell in sorted(cells, key=lambda c: c.settings[SIZE])}
    if set(ways) - {"together", "slowest"}:
        check_target(next(iter(experiments.values())))
    chosen = [(size, way) for size in experiments for way in ways if size > 1 or way in ALONE]
    runs: dict[tuple[int, str], list[Run]] = {key: [] for key in chosen}
    with progress_bar(turns * len(chosen), "run") as bar:
        for key in chosen:  # first calls are slow
            decoded(experiments[key[0]], experiments[key[0]].requests[: key[0]], WAYS[key[1]], max_new_tokens=2)
        for turn in range(turns):
            for key in chosen:
                experiment = experiments[key[0]]
                runs[key].append(decoded(experiment, experiment.requests[turn::turns], WAYS[key[1]]))
                bar.update(1)
    table, notes = tabulated(runs, next(iter(experiments.values()))), provenance()
    shown = _markdown(table, config, _models(cells[0]), str(notes["device"]), turns)
    files.replace_text(store.folder / "table.csv", table.to_csv(index=False, lineterminator="\n"))
    files.replace_text(store.folder / "table.md", shown)
    plots.save(figures.batched_verification_figure(table), store.folder)
    store.write_manifest({"provenance": notes, "config": config})
    check_same_tokens(table, max_differing, f"{store.folder}/table.md")  # last: nothing else keeps what was measured
    return f"{shown}\nTable, figure and manifest are in {store.folder}"


def check_target(experiment: Experiment) -> None:
    """Refuse a target that cannot score parts of a batch. Raises `UsageError`."""
    model = getattr(experiment.target, "model", experiment.target)
    if not hasattr(model, "score_parts"):
        raise UsageError(
            f"target: expected a model with score_parts (interfaces.PartsModel), got {type(model).__name__}; "
            "study.ways=[together,slowest] needs none"
        )


@dataclass(frozen=True)
class Run:
    """What one decoding of some requests did.

    Attributes:
        completions: by request id.
        slots: positions that the target computed, prefills left out.
        placeholders: those of them that held no token.
        unused: tokens of verdicts that were not emitted, because another row accepted fewer drafts.
        peak_mib: largest resident memory of the process (NaN where the system does not tell); of the device on a GPU.
    """

    completions: Mapping[str, Completion]
    slots: int
    placeholders: int
    unused: int
    peak_mib: float

    @property
    def emitted(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions.values())

    @property
    def _steps(self) -> list[StepRecord]:
        return [step for completion in self.completions.values() for step in completion.steps]

    @property
    def tokens_per_s(self) -> float:
        """Of the time of the steps: prefills left out."""
        return self.emitted / sum(step.draft_s + step.target_s + step.verify_s for step in self._steps)

    @property
    def scoring_s(self) -> float:
        """Time of the target's forward passes, per step and row."""
        return sum(step.target_s for step in self._steps) / len(self._steps)


def decoded(experiment: Experiment, requests: Sequence[Request], way: Way, max_new_tokens: int | None = None) -> Run:
    """Decode `requests` in one way, with at most `max_new_tokens` each where given."""
    if max_new_tokens is not None:
        requests = [replace(request, max_new_tokens=max_new_tokens) for request in requests]
    slots = placeholders = 0

    def observe(request_ids: Sequence[str], target_probs: Tensor, proposal: Proposal, emitted: Tensor) -> None:
        nonlocal slots, placeholders
        tokens, rectangle = int((proposal.lengths + 1).sum()), proposal.tokens.numel() + len(request_ids)
        slots += rectangle if way.pads else tokens
        placeholders += rectangle - tokens if way.pads else 0

    verifier = WaitForSlowest(experiment.verifier) if way.waits else experiment.verifier
    device = experiment.target.device
    _forget_peak(device)
    completions = decode(
        experiment.target,
        experiment.drafter,
        verifier,
        requests,
        num_draft_tokens=experiment.num_draft_tokens,
        batch_size=experiment.batch_size,
        observe=observe,
        score=way.score,
    )
    by_id = {completion.request.id: completion for completion in completions}
    unused = sum(verifier.unused) if isinstance(verifier, WaitForSlowest) else 0
    return Run(by_id, slots, placeholders, unused, _peak_mib(device))


@dataclass(frozen=True)
class WaitForSlowest:
    """Every row advances by the least number of accepted drafts of the batch, and one token.

    In a row that accepted more, that token is its next accepted draft. The law of the output is that of the rule, where
    this judges every position alone: where a row is cut depends on the noise of the other rows.

    Attributes:
        rule: the verifier that judges.
        unused: per step, tokens of its verdicts that were not emitted.
    """

    rule: Verifier
    unused: list[int] = field(default_factory=list)

    @property
    def laws(self) -> tuple[type[DraftLaw], ...]:
        return self.rule.laws

    @property
    def is_lossless(self) -> bool:
        return self.rule.is_lossless

    @property
    def keeps_law(self) -> bool:
        return self.rule.keeps_law

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        verdict = self.rule.verify(target_probs, proposal, uniforms)
        least = verdict.num_accepted.min()
        slots = torch.arange(verdict.emitted.shape[1], device=verdict.emitted.device)
        emitted = verdict.emitted.masked_fill(slots > least, PAD)
        self.unused.append(int((verdict.num_accepted - least).sum()))
        return replace(verdict, num_accepted=least.expand_as(verdict.num_accepted), emitted=emitted)


def tabulated(runs: Mapping[tuple[int, str], Sequence[Run]], experiment: Experiment) -> pd.DataFrame:
    """One row per batch size and way, over all turns.

    `over_batch_1` and `over_together` are tokens per second over those of batch size 1, and of one forward at the same
    batch size: medians of ratios within turns, `_low` and `_high` the least and the most; `scoring_over_together` the
    same of the time of the target's forward passes per step and row. `acceptance_length` has an
    interval over prompts; `al_difference` is that minus the acceptance length of one forward at the same batch size,
    paired by prompt (0 exactly where all tokens and steps are the same). Per emitted token: `slots` computed,
    `rejected` drafts, `unused` ones, `placeholders`, and what lies behind an output's end
    (`cut`); with the token itself they sum to slots. `peak_mib`: largest over the turns. `same_tokens`: share of
    requests with the tokens of batch size 1.
    """
    rows: list[dict[str, Any]] = []
    frames = {key: _request_rows(done, experiment) for key, done in runs.items()}
    for (size, way), done in runs.items():
        base, alone = runs[size, "together"], runs[1, "together"]
        emitted, steps = sum(run.emitted for run in done), frames[size, way]["steps"].sum()
        slots, unused = sum(run.slots for run in done), sum(run.unused for run in done)
        placeholders = sum(run.placeholders for run in done)
        drafted, verified = frames[size, way]["drafted"].sum(), frames[size, way]["verified"].sum()
        row: dict[str, Any] = {SIZE: size, "way": way, "requests": len(frames[size, way]), "emitted": emitted}
        row |= _ratios("over_batch_1", done, alone, "tokens_per_s") | _ratios(
            "over_together", done, base, "tokens_per_s"
        )
        row |= _ratios("scoring_over_together", done, base, "scoring_s")
        values = metrics.resample([frames[size, way], frames[size, "together"]], "acceptance_length")
        (mine, other), (samples, others) = values.estimates, values.samples.T
        row |= metrics.with_ends("acceptance_length", metrics.difference(mine, samples))
        row |= metrics.with_ends("al_difference", metrics.difference(mine - other, samples - others))
        row |= {"steps": steps, "slots": slots / emitted, "placeholders": placeholders / emitted}
        row |= {"rejected": (drafted - verified - unused) / emitted, "unused": unused / emitted}
        row |= {"cut": (steps + verified - emitted) / emitted}
        row |= {"wasted_share": 1 - emitted / slots, "peak_mib": max(run.peak_mib for run in done)}
        row["same_tokens"] = _same(done, alone)
        rows.append(row)
    return pd.DataFrame(rows)


def check_same_tokens(table: pd.DataFrame, max_differing: float, where: str) -> None:
    """Refuse results in which more requests than `max_differing` differ from batch size 1.

    Raises:
        RunError: names the way, the batch size, and `where` the table is.
    """
    for row in table.to_dict("records"):
        if row["same_tokens"] < 1 - max_differing:
            raise RunError(
                f"batched_verification: expected equal tokens in every way, {WAYS[row['way']].label} at batch size "
                f"{row[SIZE]} has them for {row['same_tokens']:.1%} of the requests only (study.max_differing allows "
                f"{max_differing:g} to differ; in bfloat16 rounding alone makes many differ; the table: {where})"
            )


def _request_rows(done: Sequence[Run], experiment: Experiment) -> pd.DataFrame:
    completions = [completion for run in done for completion in run.completions.values()]
    return pd.DataFrame(
        request_row(
            completion,
            experiment.num_draft_tokens,
            cluster=experiment.clusters[completion.request.id],
            category=experiment.categories[completion.request.id],
        )
        for completion in sorted(completions, key=lambda completion: completion.request.id)
    )


def _ratios(name: str, done: Sequence[Run], base: Sequence[Run], of: str) -> dict[str, float]:
    over = [getattr(one, of) / getattr(other, of) for one, other in zip(done, base, strict=True)]
    return metrics.with_ends(name, (statistics.median(over), min(over), max(over)))


def _same(done: Sequence[Run], base: Sequence[Run]) -> float:
    equal = [
        completion.tokens == other.completions[name].tokens
        for one, other in zip(done, base, strict=True)
        for name, completion in one.completions.items()
    ]
    return sum(equal) / len(equal)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        forget_peak()


def _peak_mib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else peak_mib()


def _models(cell: Cell) -> str:
    names = [str(cell.settings[f"{group}.name"]).replace("_", " ") for group in ("target", "drafter", "verifier")]
    return f"target {names[0]}, {names[1]} drafts, verifier {names[2]}"


def _markdown(table: pd.DataFrame, config: Mapping[str, Any], models: str, device: str, turns: int) -> str:
    records = table.to_dict("records")
    speeds, slots = [], []
    for row in records:
        where = {"batch": str(row[SIZE]), "way": WAYS[row["way"]].label}
        is_base = row["way"] == "together"
        speeds.append(
            where
            | {
                "tokens/s over batch 1": text.with_interval(row, "over_batch_1"),
                "over one forward": text.UNDEFINED if is_base else text.with_interval(row, "over_together"),
                "scoring over one forward": text.UNDEFINED
                if is_base
                else text.with_interval(row, "scoring_over_together"),
                "acceptance length": text.with_interval(row, "acceptance_length"),
                "minus one forward": text.UNDEFINED if is_base else text.with_interval(row, "al_difference", 3, "+"),
                "same tokens": f"{row['same_tokens']:.1%}",
            }
        )
        parts = {name: text.number(row[name]) for name in ("slots", "rejected", "placeholders", "unused", "cut")}
        memory = text.UNDEFINED if math.isnan(row["peak_mib"]) else text.number(row["peak_mib"], 0)
        slots.append(where | parts | {"wasted": f"{row['wasted_share']:.0%}", "peak memory (MiB)": memory})
    head = (
        f"{device}; {models}, K = {config['num_draft_tokens']}, "
        f"T = {config['sampling']['temperature']}, {records[0]['emitted']:,} tokens of {records[0]['requests']} "
        f"requests per row. Ratios of tokens per second (of the time of the steps, prefills left out) are taken within "
        f"each of {turns} turns over parts of the requests: median, least and most (which enclose the median with "
        f"{100 * (1 - 2.0 ** (1 - turns)):.0f} % probability if turns are independent). Acceptance length: 95 % "
        "intervals over prompts, differences paired by prompt. *Same tokens*: requests whose output is that of batch "
        "size 1."
    )
    num_together = records[0]["requests"] // turns
    if num_together < max(row[SIZE] for row in records):
        head += (
            f" A turn has about {num_together} requests: larger batches are not full, and say nothing of their size."
        )
    how = (
        "Positions that the target computed per emitted token, and those that were computed for nothing: *rejected* "
        "drafts, *placeholders* in rows with fewer drafts than the longest, *unused*: not emitted because another row "
        "accepted fewer, *cut*: behind the end of an output. Peak memory is that of the process, models "
        "included."
    )
    parts = [f"# {TITLE}", head, "## Speed", text.grid(speeds), "## Positions", how, text.grid(slots)]
    return "\n\n".join(parts) + "\n"
