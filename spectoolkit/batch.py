"""The host's side of a batch in the decoding loop: which requests run, what they emitted, when they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from spectoolkit.datatypes import Completion, DraftNoise, Judged, Proposal, Request, StepRecord, Uniforms
from spectoolkit.errors import ContractError
from spectoolkit.functional.noise import Role, chain_uniforms, position_keys, request_key, request_states, uniforms
from spectoolkit.functional.noise_ahead import NoiseAhead, StepNoise
from spectoolkit.functional.ragged import ints
from spectoolkit.interfaces import LanguageModel
from spectoolkit.laps import Laps
from spectoolkit.sampling import SamplingState


@dataclass
class Row:
    """The progress of one request."""

    request: Request
    output: list[int] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    laps: list[tuple[Laps, int]] = field(default_factory=list)
    finish_reason: str | None = None
    draft_bytes_per_token: int = 0

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.output)

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        records = tuple(
            StepRecord(
                request_id=self.request.id,
                step=number,
                start=step.start,
                drafted=step.drafted,
                verified=step.verified,
                accepted=min(step.verified, step.emitted),
                emitted=step.emitted,
                truncated=step.truncated,
                judged_alone=tuple(map(bool, step.judged_alone)),
                draft_s=laps.seconds[0] / num_rows,
                target_s=laps.seconds[1] / num_rows,
                verify_s=laps.seconds[2] / num_rows,
            )
            for number, (step, (laps, num_rows)) in enumerate(zip(self.steps, self.laps, strict=True))
        )
        return Completion(self.request, tuple(self.output), self.finish_reason, records, self.draft_bytes_per_token)


class _Step(NamedTuple):
    """What a `StepRecord` is made of, but for the times."""

    start: int
    drafted: int
    verified: int
    emitted: int
    truncated: bool
    judged_alone: list[int]


class Batch:
    """At most `batch_size` running requests, and those that wait for a place.

    `num_chains` is that of the drafter (`interfaces.Drafter`).

    Attributes:
        rows: the running requests, in the order of the models' rows.
        sampling: their sampling parameters and histories.
        last_tokens: [B, 1], the last committed token of each, on the target's device.
        max_tokens: how many tokens may be drafted in each row: K, and one less than may still be emitted.

    `keeps_histories` has `sampling` count tokens where no request asks for it (`Penalties.of`).
    """

    def __init__(
        self,
        target: LanguageModel,
        requests: Sequence[Request],
        num_draft_tokens: int,
        batch_size: int,
        *,
        num_chains: int | None = None,
        keeps_histories: bool = False,
    ) -> None:
        self._target = target
        self._keeps_histories = keeps_histories
        self._num_draft_tokens = num_draft_tokens
        self._num_chains = num_chains
        self._waiting = deque(requests)
        self._step_noise: StepNoise | None = None  # of one chain, between its drafting and its verification
        self.rows = [Row(self._waiting.popleft()) for _ in range(min(batch_size, len(requests)))]
        self._rows_changed()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [row.request.prompt for row in self.rows]

    def draft_noise(self) -> DraftNoise:
        """Noise of K positions, K the largest draft budget of the batch."""
        width = max(self.max_tokens)
        if self._num_chains is not None:
            return draft_noise(self._seeds, self._request_keys, self._starts(), width, self._num_chains)
        starts = self.sampling.num_tokens
        noise = None if self._ahead is None else self._ahead.at(starts)
        if noise is None:
            self._ahead = NoiseAhead.of(self._request_states, starts, self._num_draft_tokens)
            noise = self._ahead.at(starts)
            assert noise is not None
        self._step_noise = noise
        noise = noise.cut(width)
        return DraftNoise(noise.draft, noise.keys[:, :width])

    def verify_noise(self, proposal: Proposal) -> Uniforms:
        """The noise that judges `proposal`, whose own was `draft_noise`."""
        width = proposal.tokens.shape[-1]
        # A drafter may pad further than it was asked for.
        if self._step_noise is None or width > self._num_draft_tokens:
            return verify_noise(self._seeds, self._request_keys, self._starts(), width, self._num_chains)
        noise = self._step_noise.cut(width)
        return Uniforms(noise.accept, noise.emit, noise.keys)

    def _starts(self) -> Tensor:
        return ints(self.sampling.num_tokens, self._seeds.device)

    def commit(self, proposal: Proposal, judged: Judged, keeps_law: bool) -> tuple[list[list[int]], list[int] | None]:
        """Take over a verdict: cut every block where its request ends, and record the step.

        `keeps_law` is that of the verifier.

        Returns:
            What each row emitted, up to K+1 tokens; and the chain of each that the verdict names, if it names any. The
            one copy from device to host of a step happens here.

        Raises:
            InvalidLogitsError, ContractError: what `proposal` or `judged` says was wrong on the device.
            ContractError: a proposal or a verdict that cannot be (`_check_lengths`, `_check_block`).
        """
        decided = _on_host(proposal, judged)
        if any(row.has_fault for row in decided):
            self.refuse_drafts(proposal)
            judged = replace(judged, verdict=judged.again(), faults=None)
            decided = _on_host(proposal, judged)
        self._check_lengths(proposal, [row.drafted for row in decided])
        draft_bytes = proposal.law.bytes_per_token(self._target.vocab_size) if keeps_law else 0
        emitted: list[list[int]] = []
        for row, (drafted, verified, tokens, judged_alone, _, _) in zip(self.rows, decided, strict=True):
            block = [token for token in tokens if token >= 0]
            _check_block(row.request.id, drafted, verified, block, self._target.vocab_size)
            kept, row.finish_reason = cut(row.request, row.output, block, self._target.tokenizer.decode)
            row.steps.append(
                _Step(len(row.output), drafted, verified, len(kept), len(kept) < len(block), judged_alone[:drafted])
            )
            row.output += kept
            row.draft_bytes_per_token = max(row.draft_bytes_per_token, draft_bytes)
            emitted.append(kept)
        self.sampling = self.sampling.commit(emitted)
        self._advanced()
        chains = [row.chain for row in decided if row.chain is not None]
        return emitted, chains or None

    def check_proposal(self, proposal: Proposal) -> None:
        """Refuse a proposal before anything is made of it; this waits for the device.

        Raises:
            ContractError: more drafts than there may be.
            InvalidLogitsError: as `refuse_drafts`.
        """
        self._check_lengths(proposal, proposal.lengths.tolist())
        self.refuse_drafts(proposal)

    def _check_lengths(self, proposal: Proposal, lengths: Sequence[int]) -> None:
        width = proposal.tokens.shape[-1]
        for row, length, budget in zip(self.rows, lengths, self.max_tokens, strict=True):
            if not 0 <= length <= min(budget, width):
                raise ContractError(
                    f"proposal.lengths: expected 0 to {min(budget, width)} drafts of request {row.request.id!r} "
                    f"(max_tokens is {budget}, {width} tokens came), got {length}"
                )

    def refuse_drafts(self, proposal: Proposal) -> None:
        """Raise for a draft row from which no distribution follows; this waits for the device.

        Raises:
            InvalidLogitsError: names the request and the position.
        """
        if proposal.faults is not None:
            sampling = self.sampling.repeat(proposal.num_chains or 1)
            sampling.refuse(proposal.faults.flatten(0, -2), proposal.tokens.flatten(0, -2)[:, :-1], "draft")

    def record_laps(self, laps: Laps) -> None:
        """The times of the step that was just committed, which its rows share."""
        for row in self.rows:
            row.laps.append((laps, len(self.rows)))

    def turn_over(self) -> tuple[list[Completion], list[int], list[Request], list[int] | None]:
        """Let finished rows leave and waiting requests take their places.

        Returns:
            The completions; the rows that were taken over, with the requests that took them; and, where more rows
            finished than requests wait, the rows that stay (None: all).
        """
        finished = [i for i, row in enumerate(self.rows) if row.finish_reason is not None]
        if not finished:
            return [], [], [], None
        completions = [self.rows[i].completion() for i in finished]
        taken = finished[: len(self._waiting)]
        for i in taken:
            self.rows[i] = Row(self._waiting.popleft())
        staying = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        joined = [self.rows[i].request for i in taken]
        all_stay = len(staying) == len(self.rows)
        self.rows = [self.rows[i] for i in staying]
        if self.rows:
            self._rows_changed()
        return completions, taken, joined, None if all_stay else staying

    def _rows_changed(self) -> None:
        device = self._target.device
        requests = [row.request for row in self.rows]
        outputs = [row.output for row in self.rows]
        ids, params = [r.id for r in requests], [r.params for r in requests]
        self.sampling = SamplingState.of(
            ids, params, self.prompts, outputs, self._target.vocab_size, device, keeps_histories=self._keeps_histories
        )
        self._seeds = torch.tensor([r.seed for r in requests], device=device)
        self._request_keys = torch.tensor([request_key(r.id) for r in requests], device=device)
        self._request_states = request_states(self._seeds, self._request_keys)
        self._ahead: NoiseAhead | None = None
        self._advanced()

    def _advanced(self) -> None:
        self.last_tokens = ints([[(row.output or row.request.prompt)[-1]] for row in self.rows], self._target.device)
        self.max_tokens = [min(self._num_draft_tokens, row.remaining - 1) for row in self.rows]


class _Decided(NamedTuple):
    """A row's part of a step, on the host."""

    drafted: int
    verified: int
    tokens: list[int]
    judged_alone: list[int]
    has_fault: bool
    chain: int | None


def _check_block(request_id: str, drafted: int, verified: int, block: Sequence[int], vocab_size: int) -> None:
    """Refuse a verdict of which the loop could make nothing, or a wrong record."""
    if not 0 <= verified <= drafted:
        raise ContractError(
            f"verdict.num_accepted: expected 0 to {drafted} for request {request_id!r}, which is what was drafted, got "
            f"{verified}"
        )
    if not 1 <= len(block) <= drafted + 1:
        raise ContractError(
            f"verdict.emitted: expected 1 to {drafted + 1} tokens of request {request_id!r}, for which {drafted} were "
            f"drafted, got {len(block)}"
        )
    if max(block) >= vocab_size:
        raise ContractError(
            f"verdict.emitted: expected ids below {vocab_size} for request {request_id!r}, got {max(block)}"
        )


def _on_host(proposal: Proposal, judged: Judged) -> list[_Decided]:
    """What was decided, in one copy from a device."""
    verdict = judged.verdict
    chosen = verdict.num_accepted[:, None]
    if verdict.chain is not None:
        chosen = torch.stack([verdict.num_accepted, verdict.chain], dim=1)
    parts = [proposal.lengths[:, None], chosen, verdict.emitted, verdict.judged_alone]
    found = [faults for faults in (judged.faults, proposal.faults) if faults is not None]
    parts += [faults.any(1) if faults.ndim == 3 else faults for faults in found]
    if proposal.lengths.device.type == "cpu":
        by_part = [part.tolist() for part in parts]
    else:
        by_part = [part.tolist() for part in torch.cat(parts, dim=1).cpu().split([p.shape[1] for p in parts], dim=1)]
    decided = []
    for (drafted,), (verified, *chain), tokens, judged_alone, *faults in zip(*by_part, strict=True):
        # Behind a proposal's end there is one more row of the target, and nothing else that belongs to a token.
        # That of the draft there is as filling, with a distribution.
        has_fault = any(any(of_row[: drafted + 1]) for of_row in faults)
        decided.append(_Decided(drafted, verified, tokens, judged_alone, has_fault, chain[0] if chain else None))
    return decided


def draft_noise(
    seeds: Tensor, request_keys: Tensor, starts: Tensor, num_draft_tokens: int, num_chains: int | None = None
) -> DraftNoise:
    """The noise of a proposal of K tokens per row, for steps that begin at the positions `starts` [B]."""
    key = (seeds, request_keys, starts)
    return DraftNoise(_per_draft(*key, num_draft_tokens, Role.DRAFT, num_chains), position_keys(*key, num_draft_tokens))


def verify_noise(
    seeds: Tensor, request_keys: Tensor, starts: Tensor, num_draft_tokens: int, num_chains: int | None = None
) -> Uniforms:
    """The noise that judges a proposal of K tokens per row, for steps that begin at the positions `starts` [B]."""
    key = (seeds, request_keys, starts)
    return Uniforms(
        _per_draft(*key, num_draft_tokens, Role.ACCEPT, num_chains),
        uniforms(*key, num_draft_tokens + 1, Role.EMIT),
        position_keys(*key, num_draft_tokens + 1),
    )


def _per_draft(
    seeds: Tensor, request_keys: Tensor, starts: Tensor, num_draft_tokens: int, role: Role, num_chains: int | None
) -> Tensor:
    """A uniform per draft token: [B, K], or [B, C, K] of chains."""
    if num_chains is None:
        return uniforms(seeds, request_keys, starts, num_draft_tokens, role)
    return chain_uniforms(seeds, request_keys, starts, num_draft_tokens, role, num_chains)


def cut(
    request: Request, output: Sequence[int], block: Sequence[int], decode_text: Callable[[Sequence[int]], str]
) -> tuple[list[int], str | None]:
    """The part of `block` that `request` still emits after `output`, and why it ends there (None: it goes on).

    The first of these ends the output: a stop id (emitted), a stop string (the token that completes it is emitted),
    max_new_tokens.
    """
    block = list(block[: request.max_new_tokens - len(output)])
    ends: list[tuple[int, str]] = []
    if len(output) + len(block) == request.max_new_tokens:
        ends.append((len(block), "length"))
    ends += [(i + 1, "stop_id") for i, token in enumerate(block) if token in request.stop_ids][:1]
    if request.stop_strings and _contains(request, decode_text([*output, *block])):
        prefixes = (i + 1 for i in range(len(block)) if _contains(request, decode_text([*output, *block[: i + 1]])))
        ends += [(next(prefixes), "stop_string")]
    if not ends:
        return block, None
    length, reason = min(ends, key=lambda end: (end[0], end[1] == "length"))
    return block[:length], reason


def _contains(request: Request, text: str) -> bool:
    return any(stop in text for stop in request.stop_strings)
