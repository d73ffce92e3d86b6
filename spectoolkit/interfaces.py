"""The contracts that models, drafters and verifiers keep. Protocols, so nothing is inherited from here.

The loop (`decode`) keeps these invariants on every row b, n_b being its number of committed tokens (prompt and output):

* the target's cache holds exactly the first n_b - 1 committed tokens; the last one is fed together with the drafts;
* a proposal is scored in one forward over [last token, d_1 .. d_K], whose row i is the law of draft d_{i+1};
* after verification the cache is rolled back to the new n_b - 1 by changing lengths: nothing is recomputed.

A proposal of C chains is scored in one forward of B * C rows, copies of the B; the verdict says which chain is kept.

State is a value that the caller threads through: two states used alternately behave as one after the other. A state is
consumed by the call that takes it (its buffers may be reused), so only the returned one is used afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from spectoolkit.datatypes import DraftLaw, DraftNoise, Proposal, Uniforms, Verdict
from spectoolkit.sampling import SamplingState


class Tokenizer(Protocol):
    """Text in, token ids out."""

    stop_ids: frozenset[int]

    def encode(self, prompt: Any, chat_template: bool) -> list[int]:
        """Token ids of a `prompts.Prompt`, through the chat template or as plain text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of output ids, special tokens left out."""
        ...


class LanguageModel(Protocol):
    """An autoregressive model with a ragged cache: every row has its own length.

    Contract: `score` after `rollback` equals `score` of a fresh `prefill` on the same prefix; a row's logits do not
    depend on the other rows of the batch (up to the rounding of the device's matrix product).
    """

    name: str
    vocab_size: int
    context_length: int
    device: torch.device
    tokenizer: Tokenizer

    def prefill(self, prefixes: Sequence[Sequence[int]]) -> Any:
        """State with `prefixes` cached, one row each. A prefix may be empty."""
        ...

    def score(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """Append `tokens` [B, Q] to every row; logits [B, Q, V] of the token that follows each, and the new state.

        Rows that need fewer than Q tokens are filled up with any valid id behind their own, and rolled back afterwards.
        """
        ...

    def rollback(self, state: Any, lengths: Sequence[int]) -> Any:
        """Keep the first `lengths[b]` cached tokens of every row b; they never exceed the current ones."""
        ...

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        """The state of `rows`, in that order. A row may come several times and is copied each time.

        The given state stays usable as it was, unless `rows` are all its rows in their order.
        """
        ...

    def insert(self, state: Any, rows: Sequence[int], other: Any) -> Any:
        """`state` with its `rows` replaced by the rows of `other`, in order."""
        ...


class Part(NamedTuple):
    """Sequences of Q new tokens that go on from rows of a state, for one forward pass.

    Attributes:
        rows: [N] the row that each reads; several may read the same one.
        offsets: [N] how many tokens behind the row's end each begins; those before are in the same or an earlier part.
        tokens: [N, Q].
    """

    rows: Tensor
    offsets: Tensor
    tokens: Tensor


class PartsModel(LanguageModel, Protocol):
    """A language model that scores sequences which share the caches of rows (`scoring`)."""

    def score_parts(self, state: Any, parts: Sequence[Part], num_tokens: int) -> tuple[list[Tensor], Any]:
        """Logits [N, Q, V] of each part, one forward pass each, in order; the state, longer by `num_tokens` per row.

        A token that no part holds leaves its slot undefined: it is to be rolled back.
        """
        ...


class FeatureModel(LanguageModel, Protocol):
    """A language model whose states also keep hidden states of some of its layers, for draft heads to read."""

    feature_layers: tuple[int, ...]

    def features(self, state: Any, num_tokens: Sequence[int]) -> Tensor:
        """[B, max(num_tokens), F] of the last `num_tokens[b]` cached tokens of every row b, in order, then zeros."""
        ...


class DraftStream(Protocol):
    """Where the logits of draft tokens come from: a language model of its own, or a head on the target.

    Attributes:
        feature_layers: the target's layers whose features it reads; () for none.
    """

    vocab_size: int
    context_length: int
    device: torch.device
    feature_layers: tuple[int, ...]

    def start(self, prompts: Sequence[Sequence[int]], features: Tensor | None) -> Any:
        """State of B fresh requests; `features` as in `Drafter.start`."""
        ...

    def first(self, state: Any) -> tuple[Tensor, Any]:
        """Logits [B, 1, V'] of the first draft token of a step."""
        ...

    def next(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """Logits [B, 1, V'] behind draft tokens [B, 1], the first ones or those that follow them."""
        ...

    def commit(self, state: Any, emitted: Sequence[Sequence[int]], features: Tensor | None) -> Any:
        """Forget the drafts and take over the `emitted` tokens, as in `Drafter.commit`."""
        ...

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        """The state of `rows`, in that order. A row may come several times and is copied each time.

        The given state stays usable as it was, unless `rows` are all its rows in their order.
        """
        ...

    def insert(self, state: Any, rows: Sequence[int], other: Any) -> Any:
        """`state` with its `rows` replaced by the rows of `other`, in order."""
        ...


class UnrolledStream(DraftStream, Protocol):
    """A stream whose logits at a position depend on where the step began, computed for all step starts at once."""

    def unroll_start(self, prompts: Sequence[Sequence[int]], features: Tensor) -> Any:
        """What `unroll` begins from; `features` as in `Drafter.start`."""
        ...

    def unroll(self, past: Any, tokens: Tensor, features: Tensor, num_depths: int) -> tuple[list[Tensor], Any]:
        """Walk on by `tokens` [B, W] of given outputs, `features` [B, W, F] being those of the tokens before them.

        Returns:
            Per depth, states [B, W, D] behind these tokens for the step that began so many rows before; and `past`.
        """
        ...

    def wide_logits(self, states: Tensor) -> Tensor:
        """Logits [B, W, V] of states [B, W, D]."""
        ...


class Drafter(Protocol):
    """Proposes tokens and says which law they were drawn from.

    Contract: *the law of a proposal is the law its tokens were drawn from*. Whether position i is proposed may depend
    on earlier tokens and on row i, never on the token drawn at i: dropping a draw after seeing it biases the output.

    A drafter of the law `datatypes.Chains` says how many chains there are by an attribute `num_chains`, and is given
    noise for each of them.

    A drafter that looks at token histories in `sampling` for a reason of its own says `reads_histories = True`; without
    it they are there only where a request has a penalty.
    """

    @property
    def laws(self) -> tuple[type[DraftLaw], ...]:
        """What its proposals may carry; one of no tokens may say `PointMass` in any case."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose features it reads; () for none, and then it is given None in their place."""
        ...

    def start(self, prompts: Sequence[Sequence[int]], features: Tensor | None = None) -> Any:
        """State of B fresh requests with these committed tokens; `features` [B, L, F] of all of them but the last."""
        ...

    def propose(
        self, state: Any, sampling: SamplingState, max_tokens: Sequence[int], noise: DraftNoise
    ) -> tuple[Proposal, Any]:
        """At most `max_tokens[b]` tokens of row b (some may be 0), drawn with `noise` of K = max(max_tokens) positions.

        `sampling` holds the requests' parameters and token histories as of the start of the step. `sampling` and
        `noise` are on the target's device. So is the law to be; tokens and lengths of the proposal may be on the host.
        """
        ...

    def commit(self, state: Any, emitted: Sequence[Sequence[int]], features: Tensor | None = None) -> Any:
        """Take over `emitted`, B times up to K+1 tokens: what the step added to each row.

        `features` [B, <= K+1, F] are those of the token before each, whose law it was drawn from.
        """
        ...

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        """The state of `rows`, in that order."""
        ...

    def insert(self, state: Any, rows: Sequence[int], other: Any) -> Any:
        """`state` with its `rows` replaced by the rows of `other`, in order."""
        ...


class Verifier(Protocol):
    """Decides how much of a proposal becomes output. Pure: same arguments, same verdict.

    A lossless rule may also have `given_output(law) -> functional.conditional.GivenOutput`; then it can be replayed. So
    may a lossy one whose property `is_exact_when_greedy` is True, at temperature 0. A rule that is wrong on purpose,
    for audits to catch, says `is_negative_control = True`; so does such a drafter.

    A lossy rule that tests every position alone may say which law a position emits: `emitted_probs(target_probs,
    draft_probs)` with a draft, of rows [..., V] (q one-hot for a point mass), and `bonus_probs(target_probs)` behind a
    whole accepted proposal where that is not the target's. Then its distance from the target can be measured.

    Attributes:
        laws: the draft laws it can judge.
        is_lossless: whether the emitted tokens follow the target's law exactly, for every drafter with such a law.
        keeps_law: whether it reads the draft law, which then has to be kept from drafting to verification; a rule that
            looks at the draft tokens alone needs nothing kept, whatever they were drawn from.
    """

    @property
    def laws(self) -> tuple[type[DraftLaw], ...]: ...

    @property
    def is_lossless(self) -> bool: ...

    @property
    def keeps_law(self) -> bool: ...

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """Judge `proposal` against `target_probs` [B, K+1, V]: row i is the law at draft i, row K the bonus's.

        [B, C, K+1, V] for a proposal of chains; the verdict on them names one that begins with the accepted prefix. At
        least one token is emitted for every sequence. Rows behind a proposal's end may hold anything; on a device so
        may others, whose request is refused once the verdict is read.
        """
        ...


def reads_histories(drafter: Drafter) -> bool:
    """Whether a drafter needs the token histories of every request (see `Drafter`)."""
    return bool(getattr(drafter, "reads_histories", False))
