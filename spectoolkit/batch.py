"""The host's side of a batch in the decoding loop: which requests run, what they emitted, when they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spectoolkit.datatypes import Completion, DraftNoise, Proposal, Request, StepRecord, Uniforms, Verdict
from spectoolkit.functional.noise import (
    Role,
    chain_uniforms,
    position_keys,
    request_key,
    request_states,
    step_noise,
    uniforms,
)
from spectoolkit.functional.ragged import pad_rows
from spectoolkit.interfaces import LanguageModel
from spectoolkit.sampling import SamplingState


@dataclass
class Row:
    """The progress of one request."""

    request: Request
    output: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    finish_reason: str | None = None
    draft_bytes_per_token: int = 0

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.output)

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            self.request, tuple(self.output), self.finish_reason, tuple(self.steps), self.draft_bytes_per_token
        )


class Batch:
    """At most `batch_size` running requests, and those that wait for a place.

    `num_chains` is that of the drafter (`interfaces.Drafter`).

    Attributes:
        rows: the running requests, in the order of the models' rows.
        sampling: their sampling parameters and histories.
        last_tokens: [B, 1], the last committed token of each.
        draft_budget: [B], how many tokens may be drafted: K, and one less than may still be emitted.

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
        self.rows = [Row(self._waiting.popleft()) for _ in range(min(batch_size, len(requests)))]
        self._rows_changed()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [row.request.prompt for row in self.rows]

    def draft_noise(self) -> DraftNoise:
        """Noise of K positions, K the largest draft budget of the batch."""
        width = min(self._num_draft_tokens, max(row.remaining for row in self.rows) - 1)
        if self._num_chains is not None:
            return draft_noise(self._seeds, self._request_keys, self.sampling.num_tokens, width, self._num_chains)
        self._step_noise = step_noise(self._request_states, self.sampling.num_tokens, width + 1)
        found, keys = self._step_noise
        return DraftNoise(found[:, Role.DRAFT, :width], keys[:, :width])

    def verify_noise(self, proposal: Proposal) -> Uniforms:
        """The noise that judges `proposal`, whose own was `draft_noise`."""
        width = proposal.tokens.shape[-1]
        is_wider = self._num_chains is None and self._step_noise[1].shape[1] <= width  # padded further than asked for
        if self._num_chains is not None or is_wider:
            return verify_noise(self._seeds, self._request_keys, self.sampling.num_tokens, width, self._num_chains)
        found, keys = self._step_noise
        return Uniforms(found[:, Role.ACCEPT, :width], found[:, Role.EMIT, : width + 1], keys[:, : width + 1])

    def commit(self, proposal: Proposal, verdict: Verdict, keeps_law: bool) -> Tensor:
        """Take over a verdict: cut every block where its request ends, and record the step.

        `keeps_law` is that of the verifier.

        Returns:
            [B, <= K+1] what each row emitted, padded. The one copy from device to host of a step happens here;
            several chains take one more (`chains.keep_chain`).
        """
        width = proposal.tokens.shape[-1]
        counts = torch.stack([proposal.lengths, verdict.num_accepted], dim=1)
        decided = torch.cat([counts, verdict.emitted, verdict.judged_alone.long()], dim=1).tolist()
        draft_bytes = proposal.law.bytes_per_token(self._target.vocab_size) if keeps_law else 0
        emitted: list[list[int]] = []
        for row, (drafted, verified, *rest) in zip(self.rows, decided, strict=True):
            block = [token for token in rest[: width + 1] if token >= 0]
            kept, row.finish_reason = cut(row.request, row.output, block, self._target.tokenizer.decode)
            row.steps.append(
                StepRecord(
                    request_id=row.request.id,
                    step=len(row.steps),
                    start=len(row.output),
                    drafted=drafted,
                    verified=verified,
                    accepted=min(verified, len(kept)),
                    emitted=len(kept),
                    truncated=len(kept) < len(block),
                    judged_alone=tuple(bool(flag) for flag in rest[width + 1 :][:drafted]),
                )
            )
            row.output += kept
            row.draft_bytes_per_token = max(row.draft_bytes_per_token, draft_bytes)
            emitted.append(kept)
        committed = pad_rows(emitted, self._target.device)
        self.sampling = self.sampling.commit(committed)
        self.last_tokens = torch.tensor([[row.output[-1]] for row in self.rows], device=self._target.device)
        self.draft_budget = self._draft_budget()
        return committed

    def record_times(self, draft_s: float, target_s: float, verify_s: float) -> None:
        """Share the wall time of the step that was just committed among its rows."""
        share = {"draft_s": draft_s, "target_s": target_s, "verify_s": verify_s}
        share = {name: seconds / len(self.rows) for name, seconds in share.items()}
        for row in self.rows:
            row.steps[-1] = replace(row.steps[-1], **share)

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
        last = [(output or prompt)[-1] for output, prompt in zip(outputs, self.prompts, strict=True)]
        self.last_tokens = torch.tensor(last, device=device)[:, None]
        self.draft_budget = self._draft_budget()

    def _draft_budget(self) -> Tensor:
        budget = [min(self._num_draft_tokens, row.remaining - 1) for row in self.rows]
        return torch.tensor(budget, device=self._target.device)


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
