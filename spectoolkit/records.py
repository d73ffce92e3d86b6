"""From step records to the per-request rows that a study stores: sums only, ratios come later (`metrics`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from spectoolkit.datatypes import Completion, StepRecord
from spectoolkit.errors import RunError
from spectoolkit.functional.renewal import ExpectedCounts
from spectoolkit.trajectories import Trajectories

SUM_COLUMNS = (
    "steps",  # target forwards
    "proposing_steps",  # steps with at least one draft token
    "drafted",  # draft tokens
    "verified",  # accepted prefix lengths, as the verifier gave them
    "accepted",  # accepted tokens that were emitted
    "emitted",  # output tokens
    "judged_alone",  # draft tokens that pass their own test whatever happened before them
    "truncated",  # steps whose block was cut by EOS, a stop string or max_new_tokens
)
POSITION_COLUMNS = (
    "drafted_at",  # [K] steps with at least i draft tokens, i = 1..K
    "accepted_at",  # [K] steps with at least i accepted and emitted tokens
    "reached_at",  # [K] steps with at least i drafted, i-1 accepted, and not cut before position i
)
TIME_COLUMNS = ("draft_s", "target_s", "verify_s")


def request_row(completion: Completion, num_draft_tokens: int, *, cluster: str, category: str) -> dict[str, Any]:
    """One request as a row: identity, sums over its steps, per-position sums, times.

    `cluster` is the prompt that the request came from: requests of one cluster are dependent, so intervals resample
    clusters. K = `num_draft_tokens` is the length of the per-position columns.
    """
    steps = completion.steps

    def at(predicate: Any) -> list[float]:
        return [float(sum(predicate(s, i) for s in steps)) for i in range(1, num_draft_tokens + 1)]

    return {
        "request_id": completion.request.id,
        "cluster": cluster,
        "category": category,
        "engine": "live",
        "num_draft_tokens": num_draft_tokens,
        "prompt_tokens": len(completion.request.prompt),
        "finish_reason": completion.finish_reason,
        "draft_bytes_per_token": completion.draft_bytes_per_token,
        "steps": float(len(steps)),
        "proposing_steps": float(sum(s.drafted > 0 for s in steps)),
        **{name: float(sum(getattr(s, name) for s in steps)) for name in SUM_COLUMNS[2:6]},
        "judged_alone": float(sum(sum(s.judged_alone) for s in steps)),
        "truncated": float(sum(s.truncated for s in steps)),
        "drafted_at": at(lambda s, i: s.drafted >= i),
        "accepted_at": at(lambda s, i: s.accepted >= i),
        "reached_at": at(_reached),
        **{name: float(sum(getattr(s, name) for s in steps)) for name in TIME_COLUMNS},
        "tokens": list(completion.tokens),
    }


def expected_rows(
    counts: ExpectedCounts,
    trajectories: Trajectories,
    *,
    clusters: Sequence[str],
    categories: Sequence[str],
    draft_bytes_per_token: int,
) -> pd.DataFrame:
    """One row per request as above, with expected values in the place of sums.

    Undefined (NaN) where the output does not tell: what a step accepts behind the end of the output (`verified`, where
    a stop ended it), what a position behind a rejection would have done alone, and times.

    Raises:
        RunError: counts that are not numbers.
    """
    rows: list[dict[str, Any]] = []
    if bool(counts.steps.isnan().any()):
        unknown = [trajectories.requests[i].id for i in counts.steps[:, 0].isnan().nonzero()[:, 0].tolist()]
        raise RunError(f"replay: expected a number of steps for every request, got none for {', '.join(unknown[:5])}")
    for i, (request, output, reason) in enumerate(
        zip(trajectories.requests, trajectories.outputs, trajectories.finish_reasons, strict=True)
    ):
        accepted = float(counts.accepted[i, 0])
        rows.append(
            {
                "request_id": request.id,
                "cluster": clusters[i],
                "category": categories[i],
                "engine": "replay",
                "num_draft_tokens": counts.drafted_at.shape[-1],
                "prompt_tokens": len(request.prompt),
                "finish_reason": reason,
                "draft_bytes_per_token": draft_bytes_per_token,
                "steps": float(counts.steps[i, 0]),
                "proposing_steps": float(counts.proposing_steps[i, 0]),
                "drafted": float(counts.drafted[i, 0]),
                "verified": accepted if reason == "length" else math.nan,
                "accepted": accepted,
                "emitted": float(len(output)),
                "judged_alone": math.nan,
                "truncated": float(counts.truncated[i, 0]),
                **{name: getattr(counts, name)[i, 0].tolist() for name in POSITION_COLUMNS},
                **dict.fromkeys(TIME_COLUMNS, math.nan),
                "tokens": list(output),
            }
        )
    return pd.DataFrame(rows)


def _reached(step: StepRecord, i: int) -> bool:
    return step.drafted >= i and step.accepted >= i - 1 and not (step.truncated and step.emitted < i)


def step_frame(completions: Sequence[Completion]) -> pd.DataFrame:
    """Every step record of `completions`, one row each."""
    rows: list[Mapping[str, Any]] = []
    for completion in completions:
        for s in completion.steps:
            row = {name: getattr(s, name) for name in StepRecord.__slots__}
            rows.append({**row, "judged_alone": list(s.judged_alone)})
    return pd.DataFrame(rows, columns=list(StepRecord.__slots__))
