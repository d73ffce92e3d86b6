"""Decoded text whose every token shows how it came about, for notebooks (HTML) and terminals (plain text).

`StepRecord` holds counts; what was drafted is seen by an observer of the loop (`Drafts`) and not stored.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import SupportsIndex, overload

from torch import Tensor

from spectoolkit.datatypes import Completion, Proposal
from spectoolkit.errors import UsageError

ACCEPTED, REJECTED, CUT = "accepted", "rejected", "cut"
RECOVERED, BONUS, ALONE = "recovered", "bonus", "alone"

MEANINGS = {
    ACCEPTED: "accepted draft",
    REJECTED: "rejected draft, or one behind it",
    RECOVERED: "recovered: the target's, at the first rejection",
    BONUS: "bonus: the target's, behind a fully accepted proposal",
    ALONE: "plain: the target's, nothing was drafted",
    CUT: "accepted, but the output ended before it",
}
_MARKS = {
    ACCEPTED: ("[", "]"),
    REJECTED: ("~", "~"),
    RECOVERED: ("{", "}"),
    BONUS: ("(", ")"),
    ALONE: ("", ""),
    CUT: ("-", "-"),
}
# Elements that differ without any style too: some viewers drop styles.
_ELEMENTS = {ACCEPTED: "u", REJECTED: "s", RECOVERED: "b", BONUS: "em", ALONE: "span", CUT: "del"}

# Backgrounds let the page shine through and text keeps its colour, so that light and dark pages both work. Hues are
# Okabe & Ito's; underline, weight, slant and strike tell the kinds apart without them.
_STYLE = """<style>
.st-decoded { max-width: 62em; }
.st-decoded p { margin: .2em 0 .9em; line-height: 1.85; overflow-wrap: anywhere; }
.st-decoded .head, .st-decoded summary { font-size: 90%; opacity: .75; margin: 0; line-height: 1.4; }
.st-decoded pre { white-space: pre-wrap; font-size: 85%; opacity: .75; margin: .3em 0 .3em 1em; }
.st-decoded .step { border-left: 1px solid rgba(128, 128, 128, .65); padding-left: 2px; margin-left: 2px; }
.st-decoded :is(u, s, b, em, del) { border-radius: 2px; padding: .1em 0; text-decoration-thickness: 2px; }
.st-decoded :is(u, em) { text-underline-offset: .2em; }
.st-decoded u { background: rgba(0, 114, 178, .24); text-decoration: underline 2px #0072B2; }
.st-decoded s { opacity: .62; font-size: 90%; text-decoration: line-through 1.5px; }
.st-decoded b { background: rgba(230, 159, 0, .30); font-weight: 700; }
.st-decoded em { background: rgba(0, 158, 115, .25); font-style: italic; text-decoration: underline double #009E73; }
.st-decoded del { background: rgba(204, 121, 167, .30); text-decoration: line-through dotted 2px; }
.st-decoded i { font-style: normal; opacity: .45; }
.st-decoded .legend > * { margin-right: 1.3em; }
</style>
"""


class Drafts:
    """An observer of `decode.decode` that keeps what was drafted.

    Attributes:
        of: request id -> ids of the drafts of each of its steps, accepted or not. Of several chains the one that begins
            with most of what the step emitted, the first of equal ones.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[int, ...]]] = defaultdict(list)

    def __call__(self, request_ids: Sequence[str], target_probs: Tensor, proposal: Proposal, emitted: Tensor) -> None:
        tokens = proposal.tokens if proposal.num_chains is not None else proposal.tokens[:, None]
        for request_id, chains, kept in zip(request_ids, tokens.tolist(), emitted.tolist(), strict=True):
            followed = max(chains, key=lambda chain: _num_shared(chain, kept))
            self.of[request_id].append(tuple(token for token in followed if token >= 0))


@dataclass(frozen=True)
class Token:
    """One token as it is shown.

    Attributes:
        text: what it adds to the text; the first tokens of a character that takes several add a replacement character.
        kind: a key of `MEANINGS`.
        step: 0, 1, ... within the request.
        position: 0, 1, ... within the output; that of a rejected or cut draft is where it would have stood.
    """

    text: str
    kind: str
    step: int
    position: int


@dataclass(frozen=True, repr=False)
class DecodedText:
    """One completion, token by token.

    Attributes:
        request_id: of its request.
        prompt: as text, special tokens left out.
        tokens: in the order of the steps; drafts that were rejected or cut in front of what stands in their place.
        num_tokens: output tokens.
        num_steps: target forwards.
    """

    request_id: str
    prompt: str
    tokens: tuple[Token, ...]
    num_tokens: int
    num_steps: int

    @property
    def text(self) -> str:
        """The output alone."""
        return "".join(token.text for token in self.tokens if token.kind not in (REJECTED, CUT))

    def __str__(self) -> str:
        return f"{self._head}\n{_plain(self.tokens)}"

    def __repr__(self) -> str:
        return f"{self}\n{_plain_legend(self.tokens)}"

    def _repr_html_(self) -> str:
        return f'{_STYLE}<div class="st-decoded">{_html(self)}{_html_legend(self.tokens)}</div>'

    @property
    def _head(self) -> str:
        rate = self.num_tokens / self.num_steps
        return f"{self.request_id}: {self.num_tokens} tokens in {self.num_steps} steps, {rate:.2f} per target forward"


class DecodedTexts(tuple[DecodedText, ...]):
    """Completions, one below the other, with one legend."""

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> DecodedText: ...

    @overload
    def __getitem__(self, index: slice, /) -> DecodedTexts: ...

    def __getitem__(self, index: SupportsIndex | slice, /) -> DecodedText | DecodedTexts:
        return DecodedTexts(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def __repr__(self) -> str:
        return "\n\n".join([*map(str, self), _plain_legend(self._tokens)])

    def _repr_html_(self) -> str:
        return f'{_STYLE}<div class="st-decoded">{"".join(map(_html, self))}{_html_legend(self._tokens)}</div>'

    @property
    def _tokens(self) -> list[Token]:
        return [token for text in self for token in text.tokens]


def decoded_text(
    completion: Completion, drafts: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> DecodedText:
    """A completion with what was drafted on the way.

    Args:
        completion: as `decode.decode` gave it.
        drafts: ids drafted in each of its steps (`Drafts.of`).
        decode: token ids -> text.

    Raises:
        UsageError: `drafts` are not those of the completion's steps.
    """
    request = completion.request
    expected, got = [step.drafted for step in completion.steps], [len(ids) for ids in drafts]
    if expected != got:
        raise UsageError(f"drafts: expected those of {request.id!r}, {expected} per step, got {got}")
    tokens: list[Token] = []
    for step, drafted in zip(completion.steps, drafts, strict=True):
        before = [*request.prompt, *completion.tokens[: step.start]]
        emitted = completion.tokens[step.start : step.start + step.emitted]
        own = ALONE if step.drafted == 0 else BONUS if step.verified == step.drafted else RECOVERED
        kinds = [ACCEPTED] * step.accepted + [own] * (step.emitted - step.accepted)
        texts = _texts(before, emitted, request.stop_ids, decode)
        shown = [
            Token(text, kind, step.step, step.start + i)
            for i, (text, kind) in enumerate(zip(texts, kinds, strict=True))
        ]
        fates = [CUT if i < step.verified else REJECTED for i in range(step.accepted, step.drafted)]
        texts = _texts(before, drafted, request.stop_ids, decode)[step.accepted :]
        aside = [
            Token(text, fate, step.step, step.start + step.accepted + i)
            for i, (text, fate) in enumerate(zip(texts, fates, strict=True))
        ]
        tokens += [*shown[: step.accepted], *aside, *shown[step.accepted :]]
    return DecodedText(request.id, decode(request.prompt), tuple(tokens), len(completion.tokens), len(completion.steps))


_WINDOW = 16
"""Tokens of context that decide how the next one is written: a character's bytes, or the space in front of a word."""


def _texts(
    before: Sequence[int], tokens: Sequence[int], stop_ids: Iterable[int], decode: Callable[[Sequence[int]], str]
) -> list[str]:
    """What each of `tokens` adds to the text behind `before`; one that adds nothing is named."""
    known = list(before[-_WINDOW:])
    text, found = decode(known), []
    for token in tokens:
        known.append(token)
        longer = decode(known)
        added = longer[_num_shared(text, longer) :]
        found.append(added or ("⟨end⟩" if token in stop_ids else f"⟨{token}⟩"))
        text = longer
    return found


def _num_shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common beginning."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def _visible(text: str) -> str:
    """Whitespace as signs, and what cannot be printed as its number."""
    signs = {" ": "·", "\n": "↵", "\t": "⇥"}
    return "".join(signs.get(c, c if c.isprintable() else f"⟨U+{ord(c):04X}⟩") for c in text)


def _plain(tokens: Iterable[Token]) -> str:
    parts = []
    for (_, kind), run in groupby(tokens, key=lambda token: (token.step, token.kind)):
        opening, closing = _MARKS[kind]
        parts.append(opening + "|".join(_visible(token.text) for token in run) + closing)
    return " ".join(parts)


def _plain_legend(tokens: Iterable[Token]) -> str:
    kinds = {token.kind for token in tokens}
    return "\n".join(f"{' … '.join(_MARKS[kind]):5}  {MEANINGS[kind]}" for kind in MEANINGS if kind in kinds)


def _html(text: DecodedText) -> str:
    steps = [
        f'<span class="step">{"".join(_html_token(token) for token in run)}</span>'
        for _, run in groupby(text.tokens, key=lambda token: token.step)
    ]
    return (
        f'<div class="head">{html.escape(text._head)}</div>'
        f"<details><summary>prompt</summary><pre>{html.escape(text.prompt)}</pre></details>"
        f"<p>{''.join(steps)}</p>\n"
    )


def _html_token(token: Token) -> str:
    element = _ELEMENTS[token.kind]
    title = html.escape(f"position {token.position}, step {token.step}: {MEANINGS[token.kind]}")
    # A line may break in front of a word, and does where the output does.
    begins_word = "<wbr>" if token.text[:1].isspace() else ""
    content = "".join(f"<i>{c}</i>" if c in "·↵⇥" else html.escape(c) for c in _visible(token.text))
    if token.kind not in (REJECTED, CUT):
        content = content.replace("<i>↵</i>", "<i>↵</i><br>")
    return f'{begins_word}<{element} title="{title}">{content}</{element}>'


def _html_legend(tokens: Iterable[Token]) -> str:
    kinds = {token.kind for token in tokens}
    shown = [
        f"<span><{_ELEMENTS[kind]}>{html.escape(word)}</{_ELEMENTS[kind]}>{html.escape(colon + rest)}</span>"
        for kind, meaning in MEANINGS.items()
        if kind in kinds
        for word, colon, rest in [meaning.partition(":")]
    ]
    return f'<p class="legend">{" ".join(shown)}</p>'
