"""Prompts composed from a grammar, as many as training needs; none of them is a prompt of another set."""

from __future__ import annotations

import importlib.resources
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from spectoolkit.errors import UsageError
from spectoolkit.prompts import Message, Prompt

_SLOT = re.compile(r"\{([a-z_]+)(?::(\d+)-(\d+))?(?:\.\d+)?\}")
_MOST = 100_000


def load_composed(limit: int, seed: int = 0) -> tuple[Prompt, ...]:
    """Different chat prompts, drawn from the package's grammar; the first ones of a larger set are the smaller set.

    A template is drawn first (a kind of task, then one of its phrasings), then its slots: `{city}` is a word or another
    template, `{n:2-9}` a number, and `{city.2}` is drawn apart from `{city}`.

    Args:
        limit: how many, at most 100,000.
        seed: another one gives other prompts.

    Raises:
        UsageError: a number outside its range.
    """
    if not 1 <= limit <= _MOST:
        raise UsageError(f"prompts.limit: expected an integer from 1 to {_MOST}, got {limit!r}")
    found: dict[tuple[Message, ...], Prompt] = {}
    for category, messages in _stream(random.Random(seed)):
        if messages not in found:
            found[messages] = Prompt(f"composed-{seed}-{len(found):05d}", category, messages=messages)
        if len(found) == limit:
            return tuple(found.values())
    raise AssertionError("the stream of prompts does not end")


def _stream(rng: random.Random) -> Iterator[tuple[str, tuple[Message, ...]]]:
    grammar = json.loads(
        importlib.resources.files("spectoolkit").joinpath("data/prompt_grammar.json").read_text("utf-8")
    )
    words, prompts, conversations = grammar["words"], grammar["prompts"], grammar["conversations"]
    categories = [*prompts, "multi_turn"]
    while True:
        category = rng.choice(categories)
        drawn: dict[str, str] = {}  # of the whole prompt, so that a later turn can come back to a word
        if category == "multi_turn":
            turns = [_expand(template, words, rng, drawn) for template in rng.choice(conversations)]
        else:
            turns = [_expand(rng.choice(prompts[category]), words, rng, drawn)]
        roles = ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
        yield category, tuple(Message(role, text) for role, text in zip(roles, turns, strict=True))


def _expand(template: str, words: Mapping[str, Sequence[str]], rng: random.Random, drawn: dict[str, str]) -> str:
    """`template` with its slots filled; what a slot was filled with is kept in `drawn`."""

    def fill(match: re.Match[str]) -> str:
        name, low, high = match.groups()
        if low is not None:
            return str(rng.randint(int(low), int(high)))
        slot = match.group()
        if slot not in drawn:
            others = {text for key, text in drawn.items() if key.startswith("{" + name)}
            text = _expand(rng.choice(words[name]), words, rng, {})
            for _ in range(7):
                if text not in others:
                    break
                text = _expand(rng.choice(words[name]), words, rng, {})
            drawn[slot] = text
        return drawn[slot]

    return _SLOT.sub(fill, template)
