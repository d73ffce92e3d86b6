"""Prompts that are too long: refused, left out, or cut to what fits, and counted."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from spectoolkit.errors import UsageError
from spectoolkit.prompts import Prompt, PromptSet

TOO_LONG = ("error", "skip", "keep_head", "keep_tail")

Encode = Callable[[Prompt], list[int]]


@dataclass(frozen=True)
class LengthRule:
    """How long a prompt may be, and what is done with a longer one.

    Attributes:
        max_tokens: tokens of a prompt, those of the chat template included; None for what the target's context leaves
            beside the output.
        too_long: "error", "skip" (left out), or "keep_head" and "keep_tail": of its longest text (the raw text, or the
            content of one message) that end is kept which is named, as much of it as fits.

    Raises `UsageError` for anything else.
    """

    max_tokens: int | None = None
    too_long: str = "error"

    def __post_init__(self) -> None:
        is_count = isinstance(self.max_tokens, int) and not isinstance(self.max_tokens, bool) and self.max_tokens >= 1
        if self.max_tokens is not None and not is_count:
            raise UsageError(
                "prompts.max_tokens: expected an integer >= 1, or null for what the target's context leaves, "
                f"got {self.max_tokens!r}"
            )
        if self.too_long not in TOO_LONG:
            raise UsageError(f"prompts.too_long: expected one of {', '.join(TOO_LONG)}, got {self.too_long!r}")


def fit(prompts: Iterable[Prompt], encode: Encode, rule: LengthRule, room: int) -> PromptSet:
    """The prompts whose tokens (`encode`) are at most min(rule.max_tokens, room), by the rule; `changes` count.

    With "error", prompts that only exceed `room` are let through: whoever decodes them says so with all it knows.

    Args:
        room: tokens of the target's context that the output leaves.

    Raises:
        UsageError: a longer prompt where that is an error, no room at all, or no prompt that is left.
    """
    if rule.too_long == "error":
        kept = PromptSet(prompts)
        if rule.max_tokens is None:
            return kept
        for prompt in kept:
            if (num_tokens := len(encode(prompt))) > rule.max_tokens:
                raise UsageError(
                    f"prompt {prompt.id!r}: expected at most {rule.max_tokens} tokens (prompts.max_tokens), got "
                    f"{num_tokens}; prompts.too_long=skip leaves such prompts out, keep_head and keep_tail cut them"
                )
        return kept
    most = room if rule.max_tokens is None else min(rule.max_tokens, room)
    if most < 1:
        raise UsageError(f"max_new_tokens: expected room for a prompt in the target's context, got {room} tokens of it")
    found: list[Prompt] = []
    num_cut = num_skipped = 0
    for prompt in prompts:
        fitting = prompt
        if len(encode(prompt)) > most:
            keeps_head = rule.too_long == "keep_head"
            fitting = None if rule.too_long == "skip" else cut(prompt, encode, most, keeps_head=keeps_head)
            num_cut += fitting is not None
        if fitting is None:
            num_skipped += 1
        else:
            found.append(fitting)
    if not found:
        raise UsageError(f"prompts: expected at least one that fits into {most} tokens, all {num_skipped} are longer")
    end = "first" if rule.too_long == "keep_head" else "last"
    left = f"prompts left out (longer than {most} tokens{'' if rule.too_long == 'skip' else ', also when cut'})"
    return PromptSet.of(found, {f"prompts cut to the {end} part that fits {most} tokens": num_cut, left: num_skipped})


def cut(prompt: Prompt, encode: Encode, most: int, *, keeps_head: bool) -> Prompt | None:
    """`prompt` with the longest beginning (or end) of its longest text with which it has at most `most` tokens.

    All other texts and the chat template stay whole. The cut is between words where there is a space within 40
    characters. None if nothing of the text can stay.
    """
    text = _longest(prompt)

    def piece(size: int) -> str:
        return text[:size].rstrip() if keeps_head else text[len(text) - size :].lstrip()

    def num_tokens(size: int) -> int:
        return len(encode(_with(prompt, text, piece(size)))) if piece(size) else 0

    size = bisect_right(range(1, len(text) + 1), most, key=num_tokens)
    while size and num_tokens(size) > most:  # a longer piece may have fewer tokens
        size -= 1
    kept = piece(size)
    beyond = text[len(kept) :] if keeps_head else text[: len(text) - len(kept)]
    if re.match(r"\w", beyond) if keeps_head else re.search(r"\w$", beyond):
        whole_words = re.sub(r"\s+\S{1,40}$" if keeps_head else r"^\S{1,40}\s+", "", kept)
        if whole_words and len(encode(_with(prompt, text, whole_words))) <= most:
            kept = whole_words
    return _with(prompt, text, kept) if kept else None


def _longest(prompt: Prompt) -> str:
    texts = [prompt.text or ""] if prompt.messages is None else [message.content for message in prompt.messages]
    return max(texts, key=len, default="")


def _with(prompt: Prompt, text: str, shorter: str) -> Prompt:
    """`prompt` with the first occurrence of a text that is `text` replaced."""
    if prompt.messages is None:
        return replace(prompt, text=shorter)
    place = [message.content for message in prompt.messages].index(text)
    messages = list(prompt.messages)
    messages[place] = replace(messages[place], content=shorter)
    return replace(prompt, messages=tuple(messages))
