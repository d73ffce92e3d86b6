"""Prompts that are too long: refused, left out or cut, to the token and between words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectoolkit.errors import UsageError
from spectoolkit.prompt_length import LengthRule, cut, fit
from spectoolkit.prompts import Message, Prompt

WORDS = "one two three four five six"


def encode(prompt):
    """A token per word, and two of a chat template per message."""
    if prompt.messages is None:
        return [0] * len(prompt.text.split())
    return [0] * sum(2 + len(message.content.split()) for message in prompt.messages)


def bytes_of(prompt):
    return list(prompt.text.encode())


def text(words, identifier="a"):
    return Prompt(identifier, "c", text=words)


def test_error_refuses_what_exceeds_the_limit_and_leaves_the_context_to_those_who_decode():
    assert fit([text(WORDS)], encode, LengthRule(6), room=1) == (text(WORDS),)
    assert fit([text(WORDS)], encode, LengthRule(), room=1) == (text(WORDS),)
    with pytest.raises(
        UsageError, match=r"prompt 'a': expected at most 5 tokens \(prompts.max_tokens\), got 6; .*skip"
    ):
        fit([text(WORDS)], encode, LengthRule(5), room=100)


def test_skip_leaves_out_and_counts():
    prompts = [text(WORDS), text("one two", "b")]
    fitting = fit(prompts, encode, LengthRule(None, "skip"), room=5)
    assert fitting == (prompts[1],)
    assert fitting.changes == {"prompts left out (longer than 5 tokens)": 1}
    assert fit(prompts, encode, LengthRule(None, "skip"), room=6).changes == {}
    with pytest.raises(UsageError, match="expected at least one that fits into 1 tokens, all 2 are longer"):
        fit(prompts, encode, LengthRule(1, "skip"), room=5)
    with pytest.raises(UsageError, match="max_new_tokens: expected room for a prompt"):
        fit(prompts, encode, LengthRule(1, "skip"), room=0)


@pytest.mark.parametrize(
    ("too_long", "kept", "which"), [("keep_head", "one two three", "first"), ("keep_tail", "four five six", "last")]
)
def test_the_end_that_is_named_is_kept(too_long, kept, which):
    for rule, room in ((LengthRule(3, too_long), 100), (LengthRule(None, too_long), 3), (LengthRule(9, too_long), 3)):
        fitting = fit([text(WORDS), text("one", "b")], encode, rule, room)
        assert fitting == (text(kept), text("one", "b"))
        assert fitting.changes == {f"prompts cut to the {which} part that fits 3 tokens": 1}


def test_of_a_conversation_the_longest_message_is_cut():
    messages = (
        Message("system", "be brief"),
        Message("user", WORDS),
        Message("assistant", "six"),
        Message("user", "so"),
    )
    prompt = Prompt("a", "c", messages=messages)  # 8 tokens of the template, 10 words
    for keeps_head, kept in ((True, "one two"), (False, "five six")):
        shorter = cut(prompt, encode, 14, keeps_head=keeps_head)
        assert [message.content for message in shorter.messages] == ["be brief", kept, "six", "so"]
        assert [message.role for message in shorter.messages] == [message.role for message in messages]
    assert cut(prompt, encode, 12, keeps_head=True) is None
    fitting = fit([prompt, text("one", "b")], encode, LengthRule(12, "keep_head"), 100)
    assert fitting == (text("one", "b"),)
    assert fitting.changes == {"prompts left out (longer than 12 tokens, also when cut)": 1}


def test_a_conversation_that_has_not_begun_cannot_be_cut():
    assert cut(Prompt("a", "c", messages=()), lambda prompt: [0, 0], 1, keeps_head=True) is None


def test_the_cut_is_between_words_where_a_space_is_near():
    assert cut(text("one two three"), bytes_of, 10, keeps_head=True).text == "one two"
    assert cut(text("one two three"), bytes_of, 10, keeps_head=False).text == "two three"
    assert cut(text("one two three"), bytes_of, 7, keeps_head=True).text == "one two"
    assert cut(text("  one two"), bytes_of, 6, keeps_head=True).text == "  one"
    assert cut(text("a" * 9), bytes_of, 4, keeps_head=True).text == "aaaa"
    assert cut(text("b " + "a" * 90), bytes_of, 80, keeps_head=True).text == "b " + "a" * 78


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), st.integers(1, 12), st.booleans()
)
def test_what_is_kept_is_a_piece_of_the_text_that_fits_and_no_word_more_would(words, most, keeps_head):
    def pieces(prompt):
        return prompt.text.split()

    shorter = cut(text(words), pieces, most, keeps_head=keeps_head)
    assert (words.startswith if keeps_head else words.endswith)(shorter.text)
    whole, kept = words.split(), shorter.text.split()
    assert len(kept) == min(most, len(whole)) or any(len(word) > 40 for word in whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), r"prompts.max_tokens: expected an integer >= 1, or null .*, got 0"),
        ((True,), r"prompts.max_tokens: expected an integer >= 1"),
        ((2.5,), r"prompts.max_tokens: expected an integer >= 1"),
        ((None, "cut"), "prompts.too_long: expected one of error, skip, keep_head, keep_tail, got 'cut'"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        LengthRule(*arguments)
