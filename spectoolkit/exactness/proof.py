"""Proof on toys: the law of what a drafter and a verifier emit, integrated exactly, against the target's.

Nothing is known of the rule: the drafter's and the verifier's own code runs on uniforms that note their comparisons
(`traced`), and the cube of all uniforms is cut into boxes on which the emitted tokens are constant (`boxes`). The steps
are those of `decode.decode` on the engine's own noise (`batch.draft_noise`, `batch.verify_noise`), where equal noise is
one variable: noise that comes back in a later step, or has two roles, is integrated once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from spectoolkit.batch import draft_noise, verify_noise
from spectoolkit.chains import keep_chain, proposal_probs, score_proposal
from spectoolkit.datatypes import PAD, DraftNoise, Request, SamplingParams, Uniforms
from spectoolkit.exactness.boxes import Boxes, integrate
from spectoolkit.exactness.target_law import next_probs
from spectoolkit.exactness.traced import TooManyTokensError, UntraceableError
from spectoolkit.functional.noise import request_key
from spectoolkit.functional.ragged import unpad_rows
from spectoolkit.interfaces import Drafter, LanguageModel, Verifier, reads_histories
from spectoolkit.models.tabular import blend_tabular, random_tabular
from spectoolkit.sampling import SamplingState

EXACT = 1e-12
"""Total variation up to which two laws count as equal: rounding of float64 sums over some ten thousand boxes."""

PROMPT = (0, 1, 0, 1)
PROMPT_OF_CHAINS = (0, 1, 1, 2)
"""Behind it two of three tokens are more probable under the toy target than under its draft, and a second candidate may
be accepted or not. Behind `PROMPT` one token is all that a first rejected candidate leaves, so that it does not matter
how a second one is judged."""
SETTINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.2),
)
"""Sampling parameters of the proof: plain ones, and ones that cut rows and make them depend on every earlier token."""


@dataclass(frozen=True)
class Proof:
    """What enumeration found.

    Attributes:
        one_step, two_steps: largest total variation between the emitted and the target's law, over `SETTINGS`, of the
            K + 1 tokens of a step (2 (K + 1) of two steps), the target going on where fewer are emitted; None if the
            pair cannot be enumerated.
        how: where the numbers come from, or why there are none.
    """

    one_step: float | None
    two_steps: float | None
    how: str

    @property
    def is_exact(self) -> bool:
        """Whether the emitted law is the target's."""
        return self.one_step is not None and max(self.one_step, self.two_steps or 0.0) <= EXACT


MakePair = Callable[[LanguageModel, int], tuple[Drafter, Verifier]]
"""Draft model and vocabulary size -> the drafter with this draft model, and the verifier."""


def prove(make_pair: MakePair, *, two_steps_tokens: int = 2) -> Proof:
    """Enumerate a pair on random toys: one step with three tokens, two steps with `two_steps_tokens`, K = 2.

    A pair with noise over the vocabulary that drafter and verifier share is enumerated with two tokens throughout,
    where the noise of a position is a single uniform (`traced.TracedKeys`). A step of several chains begins behind
    `PROMPT_OF_CHAINS`.
    """
    try:
        sizes = dict.fromkeys((3, two_steps_tokens))
        how = f"enumerated, V = {' and '.join(map(str, sizes))}, K = 2"
        return Proof(_distance(make_pair, 3, 1), _distance(make_pair, two_steps_tokens, 2), how)
    except TooManyTokensError:
        return Proof(_distance(make_pair, 2, 1), _distance(make_pair, 2, 2), "enumerated, V = 2, K = 2")
    except UntraceableError as error:
        return Proof(None, None, f"not enumerated: {error}")


def distances_on_toy(make_pair: MakePair, params: SamplingParams, asked: SamplingParams) -> tuple[float, float] | None:
    """How far one step with `params` emits from the target's law with these, and from the one with `asked`.

    Total variations of K + 1 tokens, K = 2, by enumeration with three tokens, or with two (see `prove`). The first is 0
    for a lossless pair whatever its draft side does; the second is 0 if what was asked for is sampled. None where the
    pair cannot be enumerated.
    """

    def found(vocab_size: int) -> tuple[float, float]:
        target = cast(LanguageModel, random_tabular(vocab_size, order=2, seed=0))
        draft = cast(LanguageModel, blend_tabular(target, weight=0.3, seed=1))
        request = Request("toy", PROMPT, 3, params)
        blocks = emitted_blocks(target, *make_pair(draft, vocab_size), request, num_draft_tokens=2, num_steps=1)
        return distance(target, request, blocks), distance(target, replace(request, params=asked), blocks)

    try:
        return found(3)
    except TooManyTokensError:
        return found(2)
    except UntraceableError:
        return None


def _distance(make_pair: MakePair, vocab_size: int, num_steps: int, num_draft_tokens: int = 2) -> float:
    target = cast(LanguageModel, random_tabular(vocab_size, order=2, seed=0))
    draft = cast(LanguageModel, blend_tabular(target, weight=0.3, seed=1))
    drafter, verifier = make_pair(draft, vocab_size)
    prompt = PROMPT_OF_CHAINS if num_steps == 1 and hasattr(drafter, "num_chains") else PROMPT
    found = []
    for params in SETTINGS:
        request = Request("toy", prompt, num_steps * (num_draft_tokens + 1), params)
        blocks = emitted_blocks(target, drafter, verifier, request, num_draft_tokens, num_steps)
        found.append(distance(target, request, blocks))
    return max(found)


def emitted_blocks(
    target: LanguageModel,
    drafter: Drafter,
    verifier: Verifier,
    request: Request,
    num_draft_tokens: int,
    num_steps: int,
) -> dict[tuple[int, ...], float]:
    """Probability of everything that `num_steps` steps may emit behind the prompt of `request`.

    Raises:
        UntraceableError: the drafter or the verifier does with its noise what cannot be followed.
    """
    longest = num_steps * (num_draft_tokens + 1)
    noise = _Noise.of(request, longest, num_draft_tokens, getattr(drafter, "num_chains", None))
    base = target.vocab_size + 1
    places = base ** torch.arange(longest)

    def program(boxes: Boxes) -> Tensor:
        emitted = _steps(boxes, noise, target, drafter, verifier, request, num_draft_tokens, num_steps)
        return ((emitted + 1) * places[: emitted.shape[1]]).sum(-1)

    masses: dict[tuple[int, ...], float] = {}
    for codes, is_whole, volumes in integrate(program):
        values, inverse = codes[is_whole].unique(return_inverse=True)
        sums = torch.zeros(len(values), dtype=torch.float64).index_add(0, inverse, volumes[is_whole])
        for code, mass in zip(values.tolist(), sums.tolist(), strict=True):
            tokens = _digits(code, base)
            masses[tokens] = masses.get(tokens, 0.0) + mass
    return masses


def _digits(code: int, base: int) -> tuple[int, ...]:
    found = []
    while code:
        code, digit = divmod(code, base)
        if digit:  # 0 is padding: between the tokens of two steps, or behind the last
            found.append(digit - 1)
    return tuple(found)


@dataclass(frozen=True)
class _Noise:
    """The engine's noise of one request for steps that begin at its position `first` or up to S - 1 behind it.

    Attributes:
        drafting, verifying: of S rows, one per start.
    """

    first: int
    drafting: DraftNoise
    verifying: Uniforms

    @staticmethod
    def of(request: Request, num_starts: int, num_draft_tokens: int, num_chains: int | None) -> _Noise:
        first = len(request.prompt)
        starts = first + torch.arange(num_starts)
        seeds, keys = torch.full_like(starts, request.seed), torch.full_like(starts, request_key(request.id))
        shape = (num_draft_tokens, num_chains)
        return _Noise(first, draft_noise(seeds, keys, starts, *shape), verify_noise(seeds, keys, starts, *shape))

    def draft(self, boxes: Boxes, starts: Tensor) -> DraftNoise:
        """Traced, of steps that begin at `starts` [B]."""
        noise, rows = self.drafting, starts - self.first
        return DraftNoise(
            boxes.uniforms(noise.uniforms[rows]), None if noise.shared is None else boxes.keys(noise.shared[rows])
        )

    def verify(self, boxes: Boxes, starts: Tensor, width: int) -> Uniforms:
        """The same for proposals of `width` positions; noise does not depend on their number."""
        noise, rows = self.verifying, starts - self.first
        return Uniforms(
            boxes.uniforms(noise.accept[rows, ..., :width]),
            boxes.uniforms(noise.emit[rows, : width + 1]),
            None if noise.shared is None else boxes.keys(noise.shared[rows, : width + 1]),
        )


def _steps(
    boxes: Boxes,
    noise: _Noise,
    target: LanguageModel,
    drafter: Drafter,
    verifier: Verifier,
    request: Request,
    num_draft_tokens: int,
    num_steps: int,
) -> Tensor:
    """Tokens that each box emits in steps of the loop of `decode.decode`, one block behind the other, padded."""
    size = len(boxes)
    sampling = _sampling(target, request, reads_histories(drafter)).repeat(size)
    target_state = target.select(target.prefill([request.prompt[:-1]]), [0] * size)
    draft_state = drafter.start([request.prompt] * size)
    last = torch.full((size, 1), request.prompt[-1])
    budget = [num_draft_tokens] * size
    blocks = []
    for _ in range(num_steps):
        starts = torch.tensor(sampling.num_tokens)
        proposal, draft_state = drafter.propose(draft_state, sampling, budget, noise.draft(boxes, starts))
        logits, target_state = score_proposal(target, target_state, last, proposal)
        target_probs = proposal_probs(sampling, logits, proposal)
        verdict = verifier.verify(target_probs, proposal, noise.verify(boxes, starts, proposal.tokens.shape[-1]))
        emitted = unpad_rows(verdict.emitted)
        sampling = sampling.commit(emitted)
        last = torch.tensor([block[-1:] or [PAD] for block in emitted])  # a broken rule may emit nothing
        chains = None if verdict.chain is None else verdict.chain.tolist()
        target_state = keep_chain(target, target_state, proposal, chains)
        target_state = target.rollback(target_state, [number - 1 for number in sampling.num_tokens])
        draft_state = drafter.commit(draft_state, emitted)
        blocks.append(verdict.emitted)
    return torch.cat(blocks, dim=1)


def _sampling(target: LanguageModel, request: Request, keeps_histories: bool) -> SamplingState:
    return SamplingState.of(
        [request.id], [request.params], [request.prompt], [()], target.vocab_size, keeps_histories=keeps_histories
    )


def distance(target: LanguageModel, request: Request, blocks: dict[tuple[int, ...], float]) -> float:
    """Total variation between the law of what is emitted, the target going on behind it, and the target's.

        sum over sequences x of |sum over blocks e that begin x of P(e) p(x | e)  -  p(x)| / 2

    x has the length of the request's output, which no block exceeds. Probability that the blocks lack counts too.
    """
    law = sequence_law(target, request, request.max_new_tokens)
    emitted = torch.zeros_like(law)
    for tokens, mass in blocks.items():
        behind = law[tokens]
        total = behind.sum()
        # What the target cannot emit goes on in any way: it is wrong as a whole.
        emitted[tokens] += mass * (behind / total if total > 0 else torch.ones_like(behind) / behind.numel())
    missing = abs(1.0 - sum(blocks.values()))
    return max(float((emitted - law).abs().sum()) / 2, missing)


def sequence_law(target: LanguageModel, request: Request, length: int) -> Tensor:
    """Probability [V, .., V] of every output of `length` tokens."""
    size = target.vocab_size
    law = torch.ones((), dtype=torch.float64)
    for depth in range(length):
        contexts: Sequence[tuple[int, ...]] = list(itertools.product(range(size), repeat=depth))
        law = law[..., None] * next_probs(target, request, contexts).reshape((size,) * (depth + 1))
    return law
