"""Request rows and cells of a made-up but plausible study, for tests and for looking at figures."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spectoolkit.datatypes import Completion, Request, StepRecord
from spectoolkit.records import request_row
from spectoolkit.report.cells import CellResult

CATEGORIES = ("code", "chat", "maths")


def step(
    drafted: int,
    verified: int,
    *,
    emitted: int | None = None,
    accepted: int | None = None,
    judged_alone: tuple[bool, ...] | None = None,
    truncated: bool = False,
    seconds: float = 0.0,
    request_id: str = "r",
) -> StepRecord:
    """A step record; by default an uncut one whose drafts pass alone exactly up to the accepted prefix."""
    return StepRecord(
        request_id=request_id,
        step=0,
        start=0,
        drafted=drafted,
        verified=verified,
        accepted=verified if accepted is None else accepted,
        emitted=verified + 1 if emitted is None else emitted,
        truncated=truncated,
        judged_alone=tuple(i < verified for i in range(drafted)) if judged_alone is None else judged_alone,
        draft_s=0.2 * seconds,
        target_s=0.7 * seconds,
        verify_s=0.1 * seconds,
    )


def row(
    steps: list[StepRecord],
    num_draft_tokens: int,
    *,
    cluster: str = "p0",
    category: str = "code",
    stored_bytes: int = 0,
) -> dict[str, object]:
    """The request row of `steps`."""
    tokens = tuple(range(int(sum(s.emitted for s in steps))))
    request = Request(id="r", prompt=(1, 2, 3), max_new_tokens=max(len(tokens), 1))
    completion = Completion(request, tokens, "length", tuple(steps), stored_bytes)
    return request_row(completion, num_draft_tokens, cluster=cluster, category=category)


def simulate(
    acceptance: float,
    *,
    num_clusters: int = 24,
    requests_per_cluster: int = 2,
    tokens: int = 64,
    num_draft_tokens: int = 4,
    proposes: float = 1.0,
    stored_bytes: int = 0,
    seed: int = 0,
    difficulty: float = 0.18,
) -> pd.DataFrame:
    """Rows of requests whose drafts are accepted independently with a probability that varies by prompt.

    The prompts' difficulties depend on their number only, so two simulations are correlated as two drafters on the same
    prompts are.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for prompt in range(num_clusters):
        ease = np.random.default_rng(prompt).normal(0, difficulty)
        chance = float(np.clip(acceptance + ease * acceptance * (1 - acceptance) * 4, 0.02, 0.995))
        for _ in range(requests_per_cluster):
            steps, left = [], tokens
            while left > 0:
                drafted = num_draft_tokens if generator.random() < proposes else 0
                alone = tuple(bool(u < chance) for u in generator.random(drafted))
                verified = next((i for i, passed in enumerate(alone) if not passed), drafted)
                emitted = min(verified + 1, left)
                steps.append(
                    step(
                        drafted,
                        verified,
                        emitted=emitted,
                        accepted=min(verified, emitted),
                        judged_alone=alone,
                        truncated=emitted < verified + 1,
                        seconds=0.02 * float(generator.uniform(0.8, 1.2)),
                    )
                )
                left -= emitted
            category = CATEGORIES[prompt % len(CATEGORIES)]
            rows.append(
                row(steps, num_draft_tokens, cluster=f"p{prompt:03}", category=category, stored_bytes=stored_bytes)
            )
    return pd.DataFrame(rows)


def cells(
    temperatures: tuple[float, ...] = (0.0, 0.6, 0.7, 0.8, 1.0),
    drafters: tuple[str, ...] = ("argmax", "same_temperature", "ngram"),
    verifiers: tuple[str, ...] = ("rejection", "typical"),
    *,
    num_clusters: int = 24,
    tokens: int = 64,
) -> list[CellResult]:
    """A grid as a study makes it; at temperature 0 `same_temperature` is `argmax`, so their rows are the same."""
    found = []
    for v, verifier in enumerate(verifiers):
        for d, drafter in enumerate(drafters):
            for t in temperatures:
                lossy = 0.04 + 0.06 * t if verifier == "typical" else 0.0
                falls = {"argmax": 0.16, "same_temperature": 0.07, "ngram": 0.14}[drafter]
                base = {"argmax": 0.74, "same_temperature": 0.74, "ngram": 0.62}[drafter]
                is_argmax = drafter == "argmax" or (drafter == "same_temperature" and t == 0)
                rows = simulate(
                    base - falls * t + lossy,
                    num_clusters=num_clusters,
                    tokens=tokens,
                    proposes=0.45 if drafter == "ngram" else 1.0,
                    stored_bytes=2 * 49_152 if drafter == "same_temperature" else 0,
                    seed=1000 * v + 100 * (0 if is_argmax else d) + round(10 * t),
                )
                settings = {
                    "target.name": "smollm2",
                    "num_draft_tokens": 4,
                    "drafter.name": drafter,
                    "verifier.name": verifier,
                    "verifier.is_lossless": verifier == "rejection",
                    "sampling.temperature": t,
                }
                found.append(CellResult(settings, rows))
    return found
