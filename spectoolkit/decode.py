"""Speculative decoding: propose, score, verify, commit.

Leviathan et al., arXiv 2211.17192, Algorithm 1, and Chen et al., arXiv 2302.01318, Algorithm 2, over a batch whose rows
accept different numbers of tokens and come and go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from spectoolkit.batch import Batch
from spectoolkit.chains import keep_chain, on_device, score_proposal
from spectoolkit.datatypes import Completion, Proposal, Request
from spectoolkit.drafters.stream import check_features
from spectoolkit.errors import UsageError
from spectoolkit.functional.acceptance import take
from spectoolkit.functional.ragged import pad_rows
from spectoolkit.interfaces import Drafter, FeatureModel, LanguageModel, Verifier, reads_histories
from spectoolkit.kernels.judge import Judge
from spectoolkit.kernels.switch import parse_switch
from spectoolkit.laps import Laps
from spectoolkit.scoring import Scorer

Observer = Callable[[Sequence[str], Tensor, Proposal, Tensor], None]
"""Called with request ids, target_probs [B, K+1, V] (of several chains: those of the one that the verdict names), the
proposal, and what was emitted [B, <= K+1], padded."""


@torch.inference_mode()
def decode(
    target: LanguageModel,
    drafter: Drafter,
    verifier: Verifier,
    requests: Sequence[Request],
    *,
    num_draft_tokens: int,
    batch_size: int,
    observe: Observer | None = None,
    score: Scorer = score_proposal,
) -> Iterator[Completion]:
    """Decode `requests`, at most `batch_size` at a time; completions come in the order in which they finish.

    A step drafts at most K = `num_draft_tokens` tokens per row, and one less than the row may still emit. A row that
    finishes leaves at once, the next waiting request takes its place, and nothing is computed twice. `observe` sees
    every step before it is over. `score` says how the target's forward pass is made (`scoring`).

    Raises:
        UsageError: what `check_requests` refuses, before the first forward.
        InvalidLogitsError: a model returned a row from which no distribution follows.
        ContractError: a drafter or a verifier broke its contract (`interfaces`).
    """
    check_requests(target, drafter, verifier, requests, num_draft_tokens, batch_size)
    batch = Batch(
        target,
        requests,
        num_draft_tokens,
        batch_size,
        num_chains=getattr(drafter, "num_chains", None),
        keeps_histories=reads_histories(drafter),
    )
    judge = Judge(verifier, target.device, keeps_rows=observe is not None)
    target_state, draft_state = _start(target, drafter, batch.prompts)
    while batch.rows:
        laps = Laps(target.device)
        laps.mark()
        proposal, draft_state = drafter.propose(draft_state, batch.sampling, batch.max_tokens, batch.draft_noise())
        proposal = on_device(proposal, target.device)
        if target.device.type == "cpu":  # elsewhere this would wait for the device: `commit` learns of it
            batch.check_proposal(proposal)
        laps.mark()

        logits, target_state = score(target, target_state, batch.last_tokens, proposal)
        laps.mark()

        judged = judge(batch.sampling, logits, proposal, batch.verify_noise(proposal))
        emitted, chains = batch.commit(proposal, judged, verifier.keeps_law)
        if observe is not None:
            rows, chain = judged.target_probs, judged.verdict.chain
            assert rows is not None  # kept on request
            rows = rows if chain is None else take(rows, chain)
            observe(batch.sampling.request_ids, rows, proposal, pad_rows(emitted, target.device))
        target_state = keep_chain(target, target_state, proposal, chains)
        target_state = target.rollback(target_state, [number - 1 for number in batch.sampling.num_tokens])
        features = _features(target, drafter, target_state, list(map(len, emitted)))
        draft_state = drafter.commit(draft_state, emitted, features)
        laps.mark()
        batch.record_laps(laps)

        completions, taken, joined, staying = batch.turn_over()
        if joined:
            new_target_state, new_draft_state = _start(target, drafter, [request.prompt for request in joined])
            target_state = target.insert(target_state, taken, new_target_state)
            draft_state = drafter.insert(draft_state, taken, new_draft_state)
        if staying:
            target_state, draft_state = target.select(target_state, staying), drafter.select(draft_state, staying)
        yield from completions


def _start(target: LanguageModel, drafter: Drafter, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Target state, which lacks each prompt's last token, and draft state of fresh requests."""
    target_state = target.prefill([prompt[:-1] for prompt in prompts])
    num_cached = [len(prompt) - 1 for prompt in prompts]
    return target_state, drafter.start(prompts, _features(target, drafter, target_state, num_cached))


def _features(target: LanguageModel, drafter: Drafter, state: Any, num_tokens: Sequence[int]) -> Tensor | None:
    """The features that the drafter reads of the last `num_tokens[b]` cached tokens, if it reads any."""
    return cast(FeatureModel, target).features(state, num_tokens) if drafter.feature_layers else None


def check_requests(
    target: LanguageModel,
    drafter: Drafter,
    verifier: Verifier,
    requests: Sequence[Request],
    num_draft_tokens: int,
    batch_size: int,
) -> None:
    """Refuse what cannot be decoded.

    Raises:
        UsageError: K < 1, batch_size < 1, no or duplicate requests, a request that does not fit into the target's
            context or vocabulary, a draft law that the verifier cannot judge, or a value of SPECTOOLKIT_KERNELS that
            there is not.
    """
    parse_switch()
    if num_draft_tokens < 1:
        raise UsageError(f"num_draft_tokens: expected an integer >= 1, got {num_draft_tokens}")
    if batch_size < 1:
        raise UsageError(f"batch_size: expected an integer >= 1, got {batch_size}")
    if not requests:
        raise UsageError("requests: expected at least one, got none (is the prompt set empty?)")
    check_pair(drafter, verifier)
    check_features(target, drafter)
    for request_id, count in Counter(request.id for request in requests).items():
        if count > 1:
            raise UsageError(f"requests: expected unique ids, got {request_id!r} {count} times")
    draft_model = getattr(drafter, "draft_model", None)
    models = [("target", target)] + ([("draft model", draft_model)] if draft_model is not None else [])
    for request in requests:
        needed = len(request.prompt) + request.max_new_tokens
        for role, model in models:
            if needed > model.context_length:
                raise UsageError(
                    f"request {request.id!r}: expected prompt and output to fit into the {model.context_length} tokens "
                    f"of the context of the {role} {model.name}, got {len(request.prompt)} prompt tokens and "
                    f"max_new_tokens {request.max_new_tokens}; prompts.too_long=skip, keep_head or keep_tail with "
                    "prompts.max_tokens=... leaves long prompts out or cuts them"
                )
        if any(token >= target.vocab_size for token in request.params.logit_bias):
            raise UsageError(
                f"request {request.id!r}: expected logit_bias of token ids below {target.vocab_size}, "
                f"got {max(request.params.logit_bias)}"
            )
        if not all(0 <= token < target.vocab_size for token in request.prompt):
            raise UsageError(
                f"request {request.id!r}: expected prompt token ids from 0 to {target.vocab_size - 1}, "
                f"got {min(request.prompt)} to {max(request.prompt)}"
            )


def check_pair(drafter: Drafter, verifier: Verifier) -> None:
    """Refuse a draft law that the verifier cannot judge.

    Raises:
        UsageError: names both sides and the laws that would fit.
    """
    unfit = [law.__name__ for law in drafter.laws if law not in verifier.laws]
    if unfit:
        raise UsageError(
            f"{type(drafter).__name__} with {type(verifier).__name__}: the verifier judges drafts of the laws "
            f"{[law.__name__ for law in verifier.laws]}, the drafter's are {unfit}"
        )
