"""Proof on toys: the law of what a drafter and a verifier emit, integrated exactly, against the target's.

Nothing is known of the rule: the drafter's and the verifier's own code runs on uniforms that note their comparisons
(`traced`), and the cube of all uniforms is cut into boxes on which the emitted tokens are constant (`boxes`). The steps
are those of `decode.decode` on the engine's own noise (`batch.draft_noise`, `batch.verify_noise`), where equal noise is
one variable: noise that comes back in a later step, or has two roles, is integrated once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from spectoolkit.batch import draft_noise, verify_noise
from spectoolkit.datatypes import DraftNoise, Request, SamplingParams, Uniforms
from spectoolkit.exactness.boxes import Boxes, integrate
from spectoolkit.exactness.target_law import next_probs
from spectoolkit.exactness.traced import TooManyTokensError, UntraceableError
from spectoolkit.functional.acceptance import take
from spectoolkit.functional.noise import request_key
from spectoolkit.functional.ragged import row_lengths
from spectoolkit.interfaces import Drafter, LanguageModel, Verifier, reads_histories
from spectoolkit.models.tabular import blend_tabular, random_tabular
from spectoolkit.sampling import SamplingState

EXACT = 1e-12
"""Total variation up to which two laws count as equal: rounding of float64 sums over some ten thousand boxes."""

PROMPT = (0, 1, 0, 1)
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


def prove(make_pair: MakePair) -> Proof:
    """Enumerate a pair on random toys: one step with three tokens, two steps with two, K = 2.

    A pair with noise over the vocabulary that drafter and verifier share is enumerated with two tokens throughout,
    where the noise of a position is a single uniform (`traced.TracedKeys`).
    """
    try:
        return Proof(_distance(make_pair, 3, 1), _distance(make_pair, 2, 2), "enumerated, V = 3 and 2, K = 2")
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
        return distance(target, request, blocks), distance(target, dataclasses.replace(request, params=asked), blocks)

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
    found = []
    for params in SETTINGS:
        request = Request("toy", PROMPT, num_steps * (num_draft_tokens + 1), params)
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
    base = target.vocab_size + 1
    places = base ** torch.arange(longest)

    def program(boxes: Boxes) -> Tensor:
        emitted = _steps(boxes, target, drafter, verifier, request, num_draft_tokens, num_steps)
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


def _steps(
    boxes: Boxes,
    target: LanguageModel,
    drafter: Drafter,
    verifier: Verifier,
    request: Request,
    num_draft_tokens: int,
    num_steps: int,
) -> Tensor:
    """Tokens that each box emits in steps of the loop of `decode.decode`, one block behind the other, padded."""
    size = len(boxes)
    seeds, keys = torch.full((size,), request.seed), torch.full((size,), request_key(request.id))
    sampling = _repeated(_sampling(target, request, reads_histories(drafter)), size)
    target_state = target.select(target.prefill([request.prompt[:-1]]), [0] * size)
    draft_state = drafter.start([request.prompt] * size)
    last = torch.full((size, 1), request.prompt[-1])
    budget = torch.full((size,), num_draft_tokens)
    blocks = []
    for _ in range(num_steps):
        noise = draft_noise(seeds, keys, sampling.num_tokens, num_draft_tokens)
        proposal, draft_state = drafter.propose(draft_state, sampling, budget, _draft_traced(boxes, noise))
        tokens = torch.cat([last, proposal.tokens.clamp(min=0)], dim=1)
        logits, target_state = target.score(target_state, tokens)
        target_probs = sampling.probs(logits, proposal.tokens, "target")
        noise = verify_noise(seeds, keys, sampling.num_tokens, proposal.tokens.shape[1])
        emitted = verifier.verify(target_probs, proposal, _verify_traced(boxes, noise)).emitted
        sampling = sampling.commit(emitted)
        last = take(emitted, row_lengths(emitted) - 1)[:, None]
        target_state = target.rollback(target_state, sampling.num_tokens - 1)
        draft_state = drafter.commit(draft_state, emitted)
        blocks.append(emitted)
    return torch.cat(blocks, dim=1)


def _draft_traced(boxes: Boxes, noise: DraftNoise) -> DraftNoise:
    return DraftNoise(boxes.uniforms(noise.uniforms), None if noise.shared is None else boxes.keys(noise.shared))


def _verify_traced(boxes: Boxes, noise: Uniforms) -> Uniforms:
    shared = None if noise.shared is None else boxes.keys(noise.shared)
    return Uniforms(boxes.uniforms(noise.accept), boxes.uniforms(noise.emit), shared)


def _sampling(target: LanguageModel, request: Request, keeps_histories: bool) -> SamplingState:
    return SamplingState.of(
        [request.id], [request.params], [request.prompt], [()], target.vocab_size, keeps_histories=keeps_histories
    )


def _repeated(state: Any, size: int) -> Any:
    """The state of one request as that of `size` equal ones."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = value.expand(size, *value.shape[1:])
        elif isinstance(value, tuple):
            changed[field.name] = value * size
        elif dataclasses.is_dataclass(value):
            changed[field.name] = _repeated(value, size)
    return dataclasses.replace(state, **changed)


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
