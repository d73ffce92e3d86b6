"""Sampling parameters applied to one row in plain Python, as the sentence in the documentation says it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectoolkit.functional.warp import MIN_P_TOLERANCE, TOP_P_TOLERANCE


def reference_warp(
    logits: Sequence[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    ranking = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return [float(token == ranking[0]) for token in range(len(logits))]
    largest = logits[ranking[0]]
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    kept = ranking[:top_k] if top_k else ranking
    if top_p < 1:
        total, mass, size = math.fsum(weights[token] for token in kept), 0.0, 0
        while size < len(kept) and (size == 0 or mass / total < top_p - TOP_P_TOLERANCE):
            mass += weights[kept[size]]
            size += 1
        kept = kept[:size]
    kept = [token for token in kept if weights[token] >= min_p * (1 - MIN_P_TOLERANCE)]
    total = math.fsum(weights[token] for token in kept)
    chosen = set(kept)
    return [weight / total if token in chosen else 0.0 for token, weight in enumerate(weights)]
