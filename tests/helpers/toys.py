"""Requests and runs on the tabular toy, whose laws are known exactly."""

from __future__ import annotations

from spectoolkit.datatypes import Completion, Request, SamplingParams
from spectoolkit.decode import decode
from spectoolkit.drafters import (
    ChainsDrafter,
    CoupledDrafter,
    ModelDrafter,
    NGramDrafter,
    NoDrafter,
    SuffixDrafter,
    TopMDrafter,
)
from spectoolkit.drafters.negative_controls import ArgmaxAsSampled, NoiseByPosition, TopMReportedRaw, TopPOnDraftOnly
from spectoolkit.models.tabular import TabularModel, blend_tabular, random_tabular
from spectoolkit.verifiers import (
    Block,
    Coupled,
    Lenient,
    Match,
    Mixture,
    Recursive,
    Rejection,
    Relaxed,
    Threshold,
    Typical,
)
from spectoolkit.verifiers.negative_controls import (
    AcceptedByTarget,
    BonusByArgmax,
    RecoveredFromTarget,
    RecoveredWithDraftNoise,
    RecoveredWithoutDraft,
    Reseeded,
    WholeBlock,
)

VERIFIERS = {
    "rejection": Rejection(),
    "block": Block(),
    "match": Match(),
    "coupled": Coupled(),
    "recursive": Recursive(),
    "typical": Typical(),
    "typical_medusa": Typical(recovery="medusa"),
    "relaxed": Relaxed(top_n=2, delta=0.3),
    "threshold": Threshold(),
    "threshold_loose": Threshold(threshold_single=0.4, threshold_acc=0.7),
    "lenient": Lenient(lenience=0.5),
    "lenient_at_1": Lenient(lenience=1.0),
    "mixture": Mixture(draft_weight=0.3),
    "mixture_at_0": Mixture(draft_weight=0.0),
}
WRONG_VERIFIERS = {
    "accepted_by_target": AcceptedByTarget(),
    "bonus_by_argmax": BonusByArgmax(),
    "recovered_from_target": RecoveredFromTarget(),
    "recovered_with_draft_noise": RecoveredWithDraftNoise(),
    "recovered_without_draft": RecoveredWithoutDraft(),
    "reseeded": Reseeded(),
    "whole_block": WholeBlock(),
}
LOSSLESS = {name: verifier for name, verifier in VERIFIERS.items() if verifier.is_lossless}


def toy_pair(vocab_size: int = 5, order: int = 2, seed: int = 0) -> tuple[TabularModel, TabularModel]:
    target = random_tabular(vocab_size=vocab_size, order=order, seed=seed)
    return target, blend_tabular(target, weight=0.5, seed=seed + 1)


def drafters(draft, vocab_size: int) -> dict:
    return {
        "argmax": ModelDrafter(draft, vocab_size, constant=0.0),
        "same_temperature": ModelDrafter(draft, vocab_size, ratio=1.0),
        "temperature": ModelDrafter(draft, vocab_size, ratio=0.6),
        "top_m": TopMDrafter(draft, vocab_size, ratio=1.0, keep=2),
        "coupled": CoupledDrafter(draft, vocab_size, ratio=1.0),
        "chains": ChainsDrafter(draft, vocab_size, ratio=1.0, num_chains=3),
        "distinct_chains": ChainsDrafter(draft, vocab_size, ratio=1.0, num_chains=3, with_replacement=False),
        "ngram": NGramDrafter(max_ngram=3, min_ngram=1),
        "suffix": SuffixDrafter(max_match=4, max_spec_factor=2.0, min_probability=0.3),
        "none": NoDrafter(),
    }


def wrong_drafters(draft, vocab_size: int) -> dict:
    return {
        "argmax_as_sampled": ArgmaxAsSampled(draft, vocab_size, ratio=1.0),
        "noise_by_position": NoiseByPosition(draft, vocab_size, ratio=1.0),
        "top_m_reported_raw": TopMReportedRaw(draft, vocab_size, ratio=1.0, keep=2),
        "top_p_on_draft_only": TopPOnDraftOnly(draft, vocab_size, ratio=1.0, top_p=0.7),
    }


DRAFTERS = tuple(drafters(None, 2))


def pairs(verifiers: dict) -> list[tuple[str, str]]:
    """Names of the drafters and `verifiers` that fit by their laws."""
    laws = {name: drafter.laws for name, drafter in drafters(None, 2).items()}
    return [(d, v) for d in DRAFTERS for v in sorted(verifiers) if set(laws[d]) <= set(verifiers[v].laws)]


def requests(num: int, max_new_tokens: int = 12, vocab_size: int = 5, **options) -> list[Request]:
    """Requests with prompts of different lengths and, unless given, temperatures 0.8, 0 and 1.3."""
    params = options.pop("params", [SamplingParams(temperature=t) for t in (0.8, 0.0, 1.3)])
    return [
        Request(
            id=f"r{i}",
            prompt=tuple((i + 3 * j) % vocab_size for j in range(1 + i % 4)),
            max_new_tokens=max_new_tokens + i % 3,
            params=params[i % len(params)],
            **options,
        )
        for i in range(num)
    ]


def run(target, drafter, verifier, asked, num_draft_tokens=3, batch_size=4) -> dict[str, Completion]:
    options = {"num_draft_tokens": num_draft_tokens, "batch_size": batch_size}
    return {one.request.id: one for one in decode(target, drafter, verifier, asked, **options)}


def outcome(completion: Completion) -> tuple:
    """What must not depend on the batch: tokens, end, and every step's counts."""
    steps = [(s.start, s.drafted, s.verified, s.accepted, s.emitted, s.judged_alone) for s in completion.steps]
    return completion.tokens, completion.finish_reason, steps
