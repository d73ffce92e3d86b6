"""The values that travel between models, drafters, verifiers and the loop: frozen, validated once.

They do nothing, but that a law says how many bytes a server keeps of it, and `Judged.again` gives a verdict after all.

Shapes are batch first: B sequences, K draft tokens, V tokens of vocabulary. Token ids are int64; `PAD` (-1) marks a
slot that holds no token and never reaches an embedding, a counter or an index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from spectoolkit.errors import UsageError
from spectoolkit.functional.ragged import PAD as PAD

LARGEST = 1e9
"""Bound of sampling parameters, so that logits stay finite in float32."""


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples; the same function of these turns target logits into p and draft logits into q.

    Order of application (`functional.warp`): penalties and bias, temperature, top-k, top-p, min-p, renormalisation.

    Attributes:
        temperature: T >= 0; 0 is the one-hot row of the argmax (lowest id on ties).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p, in (0, 1]; 1 keeps all.
        min_p: keep tokens with probability >= min_p times the largest one, in [0, 1]; 0 keeps all.
        repetition_penalty: > 0; positive logits of tokens seen in prompt or output are divided by it, negative
            ones multiplied (Keskar et al., arXiv 1909.05858, equation in section 4.1); 1 is off.
        frequency_penalty: subtracted from a logit once per occurrence of the token in the output; 0 is off.
        presence_penalty: subtracted once from the logit of every token that occurs in the output; 0 is off.
        logit_bias: token id -> value added to its logit.

    Raises:
        UsageError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def need(name: str, ok: bool, expected: str) -> None:
            if not ok:
                raise UsageError(f"sampling.{name}: expected {expected}, got {getattr(self, name)!r}")

        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            need(name, _is_number(value), f"a finite number of at most {LARGEST:g}")
        need("temperature", self.temperature >= 0, "a number >= 0 (0 is greedy)")
        need("top_k", _is_integer(self.top_k) and self.top_k >= 0, "an integer >= 0 (0 keeps all tokens)")
        need("top_p", 0 < self.top_p <= 1, "a number in (0, 1] (1 keeps all tokens)")
        need("min_p", 0 <= self.min_p <= 1, "a number in [0, 1] (0 keeps all tokens)")
        need("repetition_penalty", self.repetition_penalty > 0, "a number > 0 (1 is off)")
        need("logit_bias", isinstance(self.logit_bias, Mapping), "a mapping from token id to bias")
        for token, bias in self.logit_bias.items():
            fine = _is_integer(token) and token >= 0 and _is_number(bias)
            need("logit_bias", fine, f"token ids >= 0 with finite biases of at most {LARGEST:g}")


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to decode.

    Attributes:
        id: unique within a run; part of the noise key, so the tokens of a request depend on it and on `seed` only,
            never on the batch it runs in.
        prompt: its token ids, at least one.
        max_new_tokens: the output is cut there.
        params: its sampling parameters.
        seed: the other part of the noise key.
        stop_ids: token ids (EOS among them) that end the output; the stopping token is emitted.
        stop_strings: texts that end the output at the first token with which the decoded output contains one.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("max_new_tokens", self.max_new_tokens), ("seed", self.seed)):
            if not _is_integer(value):
                raise UsageError(f"request {self.id!r}: expected {name} as an integer of 64 bits, got {value!r}")
        if isinstance(self.stop_strings, str):
            raise UsageError(f"request {self.id!r}: expected several stop strings, got one text {self.stop_strings!r}")
        if not self.prompt:
            raise UsageError(f"request {self.id!r}: expected a prompt of at least one token, got none")
        if self.max_new_tokens < 1:
            raise UsageError(f"request {self.id!r}: expected max_new_tokens >= 1, got {self.max_new_tokens}")
        if any(not text for text in self.stop_strings):
            raise UsageError(f"request {self.id!r}: expected non-empty stop strings, got {self.stop_strings!r}")


@dataclass(frozen=True, slots=True)
class PointMass:
    """Draft law of a deterministic drafter: each token was drawn from the one-hot row of itself. Nothing is kept."""

    def bytes_per_token(self, vocab_size: int, dtype_bytes: int = 2) -> int:
        """Bytes a server keeps per draft token between drafting and verification: 0."""
        return 0


@dataclass(frozen=True, slots=True)
class Dense:
    """Draft law whose token i of row b was drawn from `probs[b, i]`; the whole row is kept.

    Attributes:
        probs: [B, K, V], float32 or wider, rows sum to 1; rows past a proposal's length are ignored.
    """

    probs: Tensor

    def bytes_per_token(self, vocab_size: int, dtype_bytes: int = 2) -> int:
        """Bytes a server keeps per draft token between drafting and verification: V numbers of `dtype_bytes`."""
        return vocab_size * dtype_bytes


@dataclass(frozen=True, slots=True)
class TopM:
    """Draft law whose token i of row b was drawn from m ids alone: `ids[b, i, j]` with `probs[b, i, j]`.

    Attributes:
        ids: [B, K, m], different ids in each row.
        probs: [B, K, m], float32 or wider, rows sum to 1; rows past a proposal's length are ignored.
    """

    ids: Tensor
    probs: Tensor

    def bytes_per_token(self, vocab_size: int, dtype_bytes: int = 2) -> int:
        """Bytes a server keeps per draft token: m ids of 32 bits and m numbers of `dtype_bytes`."""
        return self.ids.shape[-1] * (4 + dtype_bytes)


@dataclass(frozen=True, slots=True)
class SharedNoise:
    """Draft law whose token is argmax(log q + G) with the position's shared noise G, which a verifier can have too.

    Nothing is kept: G is a function of seed, request and position (`functional.noise.position_keys`).
    """

    def bytes_per_token(self, vocab_size: int, dtype_bytes: int = 2) -> int:
        """Bytes a server keeps per draft token between drafting and verification: 0."""
        return 0


@dataclass(frozen=True, slots=True)
class Chains:
    """Draft law of C chains of tokens behind the same prefix: token i of chain c was drawn from `probs[b, c, i]`.

    With replacement the chains are independent. Without, their first tokens differ: with q the first row, which all
    chains of a sequence share, they were drawn one after the other from what is left of it,

        x_c ~ norm(q without x_1 .. x_{c-1})

    and a chain for which nothing is left does not exist: it holds `PAD` alone. The first one always exists.

    Attributes:
        probs: [B, C, K, V], float32 or wider, rows sum to 1; rows past a proposal's length, or of a chain that does not
            exist, are ignored.
        with_replacement: whether the chains are independent.
    """

    probs: Tensor
    with_replacement: bool

    def bytes_per_token(self, vocab_size: int, dtype_bytes: int = 2) -> int:
        """Bytes a server keeps per draft position: C rows of V numbers of `dtype_bytes` (one at the first position)."""
        return self.probs.shape[1] * vocab_size * dtype_bytes


SampledLaw = Dense | TopM | SharedNoise
"""Laws whose fields have a part for every token of one chain."""

DraftLaw = PointMass | SampledLaw | Chains


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft tokens of one step, with the law they were *drawn from*.

    Attributes:
        tokens: [B, K] ids, `PAD` from `lengths[b]` on; [B, C, K] of the law `Chains`.
        lengths: [B], 0 <= lengths <= K; a drafter may propose nothing. All chains of a sequence have the same. Other
            proposals may share the tensor, so it is not to be written to.
        law: what the tokens were drawn from; never absent.
        faults: as `tokens`, bool, where no distribution follows from the row that a token was to be drawn from, for the
            loop to refuse; None where the drafter has refused them itself.
    """

    tokens: Tensor
    lengths: Tensor
    law: DraftLaw
    faults: Tensor | None = None

    @property
    def num_chains(self) -> int | None:
        """C, or None where the tokens have no axis of chains."""
        return self.tokens.shape[1] if self.tokens.ndim == 3 else None


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """The randomness of one proposal.

    Attributes:
        uniforms: [B, K] float64 in [0, 1), one per draft token; [B, C, K] for a drafter of C chains.
        shared: [B, K] int64, a key per position for noise over the whole vocabulary (`functional.draw.gumbel_max`).
            It depends on seed, request and position only: the verifier of the step gets the same, and so does a later
            step for the same position. None where nobody asks for it.
    """

    uniforms: Tensor
    shared: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Uniforms:
    """The randomness of one verification: numbers in [0, 1), and the keys of the noise that is shared with the drafter.

    Attributes:
        accept: [B, K] float64, one per draft token; [B, C, K] where there are C chains.
        emit: [B, K+1] float64, one per position at which a target token may be drawn.
        shared: [B, K+1] int64, as in `DraftNoise`; None where nobody asks for it.
    """

    accept: Tensor
    emit: Tensor
    shared: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier decided for one step.

    Attributes:
        num_accepted: [B], length of the accepted prefix of the proposal, 0 <= num_accepted <= lengths.
        emitted: [B, K+1] ids: accepted prefix, then the recovered or bonus token if the rule emits one, then `PAD`. At
            least one token of every row, or the loop would not end.
        judged_alone: [B, K] bool, whether each draft token passes its own test whatever happened before it;
            False past a proposal's length. Feeds the unmasked acceptance rate only.
        chain: [B], a chain that begins with the accepted prefix; None where the proposal has no chains.
    """

    num_accepted: Tensor
    emitted: Tensor
    judged_alone: Tensor
    chain: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict, and what is not known yet on the host.

    Attributes:
        verdict: to be used unless there is a fault.
        target_probs: [B, K+1, V] the target's rows, [B, C, K+1, V] of chains; None where none were made.
        faults: [B, n], [B, C, n] of chains, nonzero where column i <= length says that a row gives no distribution, or
            that a contract was broken; None: there is none.
        again: to be called where there is one: raises the error, or gives the verdict after all.
    """

    verdict: Verdict
    target_probs: Tensor | None
    faults: Tensor | None
    again: Callable[[], Verdict]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One target forward pass of one request, as plain numbers.

    Attributes:
        request_id: the request.
        step: 0, 1, ... within the request.
        start: output tokens emitted before the step.
        drafted: tokens in the proposal, of one chain where it has several.
        verified: length of the prefix the verifier accepted.
        accepted: accepted tokens that were emitted: `verified` unless the output ended inside the block.
        emitted: tokens the step added to the output.
        truncated: whether EOS, a stop string or max_new_tokens cut the block.
        judged_alone: per draft token, whether it passes its own test.
        draft_s, target_s, verify_s: the row's share (1/B) of the wall time of the batch's step: proposing, the target's
            forward, everything else. Prefills are in none of them.
    """

    request_id: str
    step: int
    start: int
    drafted: int
    verified: int
    accepted: int
    emitted: int
    truncated: bool
    judged_alone: tuple[bool, ...]
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    Attributes:
        request: as given.
        tokens: output ids, the stopping token included.
        finish_reason: "stop_id", "stop_string" or "length".
        steps: its step records, in order.
        draft_bytes_per_token: what is kept of its draft law per draft token, in bytes at bf16 (the largest over its
            steps); 0 for a verifier that does not read the law.
    """

    request: Request
    tokens: tuple[int, ...]
    finish_reason: str
    steps: tuple[StepRecord, ...]
    draft_bytes_per_token: int
