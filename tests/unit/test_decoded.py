"""Decoded texts: every token is shown once, as what the step records say it was, and nothing breaks the page."""

import re
from html.parser import HTMLParser

import pytest

from spectoolkit import config
from spectoolkit.datatypes import Completion, Request, StepRecord
from spectoolkit.decode import decode
from spectoolkit.errors import UsageError
from spectoolkit.report.decoded import (
    ACCEPTED,
    ALONE,
    BONUS,
    CUT,
    MEANINGS,
    RECOVERED,
    REJECTED,
    DecodedTexts,
    Drafts,
    decoded_text,
)
from spectoolkit.runner import completions_of
from tests.helpers.toys import VERIFIERS, drafters, pairs, requests, toy_pair

VOCABULARY = ["The", " quick", " dog", " <b>", "\n", " end", b"\xf0\x9f", b"\x99\x82", "\t&", ""]
STOP = 9


def to_text(tokens) -> str:
    """A tokenizer of words and bytes whose stop token has no text."""
    pieces = (VOCABULARY[token] for token in tokens)
    return b"".join(p if isinstance(p, bytes) else p.encode() for p in pieces).decode(errors="replace")


def completion(tokens, *steps) -> Completion:
    """Steps as (drafted, verified, accepted, emitted)."""
    records, start = [], 0
    for i, (drafted, verified, accepted, emitted) in enumerate(steps):
        cut = accepted < verified
        records.append(StepRecord("r", i, start, drafted, verified, accepted, emitted, cut, (True,) * drafted))
        start += emitted
    request = Request("r", (0, 2), max_new_tokens=20, stop_ids=frozenset({STOP}))
    return Completion(request, tuple(tokens), "length", tuple(records), 0)


# accepted, recovered | accepted, bonus | alone | accepted the stop token, which cuts the rest
EXAMPLE = completion([1, 2, 3, 4, 5, 9], (2, 1, 1, 2), (1, 1, 1, 2), (0, 0, 0, 1), (3, 2, 1, 1))
DRAFTED = [(1, 3), (3,), (), (9, 1, 2)]


@pytest.fixture
def example():
    return decoded_text(EXAMPLE, DRAFTED, to_text)


class Page(HTMLParser):
    """Elements opened and closed, text, and titles of a piece of HTML."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.titles, self.shown, self.elements = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        if tag not in ("br", "wbr"):
            self.open.append(tag)
        self.titles += [(tag, value) for name, value in attrs if name == "title"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[:1] != ["style"]:
            self.shown.append(data)


def test_every_token_is_what_its_step_says(example):
    shown = [(token.text, token.kind, token.step, token.position) for token in example.tokens]
    assert shown == [
        (" quick", ACCEPTED, 0, 0),
        (" <b>", REJECTED, 0, 1),
        (" dog", RECOVERED, 0, 1),
        (" <b>", ACCEPTED, 1, 2),
        ("\n", BONUS, 1, 3),
        (" end", ALONE, 2, 4),
        ("⟨end⟩", ACCEPTED, 3, 5),
        (" quick", CUT, 3, 6),
        (" dog", REJECTED, 3, 7),
    ]
    assert example.prompt == "The dog"


def test_plain_text_tells_the_kinds_apart_and_explains_its_marks(example):
    assert str(example) == (
        "r: 6 tokens in 4 steps, 1.50 per target forward\n"
        "[·quick] ~·<b>~ {·dog} [·<b>] (↵) ·end [⟨end⟩] -·quick- ~·dog~"
    )
    assert all(meaning in repr(example) for meaning in MEANINGS.values())
    short = decoded_text(completion([1, 2], (1, 1, 1, 2)), [(1,)], to_text)
    assert MEANINGS[BONUS] in repr(short)
    assert MEANINGS[REJECTED] not in repr(short)


def test_html_is_well_formed_escaped_and_needs_no_style(example):
    page = Page(example._repr_html_())
    assert [(tag, title.split(":")[0]) for tag, title in page.titles][:3] == [
        ("u", "position 0, step 0"),
        ("s", "position 1, step 0"),
        ("b", "position 1, step 0"),
    ]
    kinds = {tag for tag, _ in page.titles}
    assert kinds == {"u", "s", "b", "em", "span", "del"}  # one element per kind
    assert "·<b>" in "".join(page.shown)
    assert page.elements.count("br") == 1
    assert "-·quick-" not in "".join(page.shown)
    assert all(meaning in "".join(page.shown) for meaning in MEANINGS.values())


def test_a_rejected_newline_does_not_break_the_line():
    text = decoded_text(completion([1], (1, 0, 0, 1)), [(4,)], to_text)
    page = Page(text._repr_html_())
    assert "br" not in page.elements
    assert "↵" in "".join(page.shown)


def test_a_character_of_several_tokens_appears_where_it_is_complete():
    text = decoded_text(completion([0, 6, 7, 8], (3, 3, 3, 4)), [(0, 6, 7)], to_text)
    assert [token.text for token in text.tokens] == ["The", "\N{REPLACEMENT CHARACTER}", "🙂", "\t&"]
    assert "⇥" in str(text)


def test_unprintable_characters_are_named():
    text = decoded_text(completion([0], (0, 0, 0, 1)), [()], lambda tokens: "\x07\u202e" * (len(tokens) == 3))
    assert str(text).endswith("⟨U+0007⟩⟨U+202E⟩")


def test_drafts_of_other_steps_are_refused():
    with pytest.raises(UsageError, match=r"drafts: expected those of 'r', \[2, 1, 0, 3\] per step, got \[2, 1, 0\]"):
        decoded_text(EXAMPLE, DRAFTED[:-1], to_text)


@pytest.mark.parametrize(("drafter", "verifier"), pairs(VERIFIERS))
def test_every_pair_is_shown_as_its_records_count(drafter, verifier):
    target, draft = toy_pair()
    seen = Drafts()
    asked = requests(3, max_new_tokens=9, stop_ids=frozenset({4}))
    options = {"num_draft_tokens": 3, "batch_size": 2, "observe": seen}
    judge = VERIFIERS[verifier]
    for done in decode(target, drafters(draft, target.vocab_size)[drafter], judge, asked, **options):
        text = decoded_text(done, seen.of[done.request.id], target.tokenizer.decode)
        assert text.text == target.tokenizer.decode(done.tokens)
        for step in done.steps:
            kinds = [token.kind for token in text.tokens if token.step == step.step]
            assert kinds.count(ACCEPTED) == step.accepted
            assert kinds.count(CUT) == step.verified - step.accepted
            assert kinds.count(REJECTED) == step.drafted - step.verified
            assert len(kinds) - step.drafted == step.emitted - step.accepted
            assert [t.position for t in text.tokens if t.step == step.step and t.kind not in (CUT, REJECTED)] == list(
                range(step.start, step.start + step.emitted)
            )
        accepted = [token.text for token in text.tokens if token.kind == ACCEPTED]
        drafted = [seen.of[done.request.id][step.step][: step.accepted] for step in done.steps]
        assert "".join(accepted) == "".join(map(target.tokenizer.decode, drafted))


def test_a_plan_shows_the_texts_of_its_cells_in_the_order_of_the_prompts(tmp_path):
    toy = ["target=tabular", "draft_model=tabular", "prompts.limit=3", "max_new_tokens=9", "stop_strings=[b]"]
    plan = config.plan([*toy, "engine=replay", "+grid.drafter=[argmax,none]", f"folder={tmp_path / 'never'}"])
    experiment = plan.cells[0].build()
    asked = [request.id for request in experiment.requests]
    assert [done.request.id for done in completions_of(experiment)] != asked  # they finish in another order
    texts = plan.decode(0)
    assert isinstance(texts[:2], DecodedTexts)
    assert [text.request_id for text in texts] == asked
    assert {token.kind for text in texts for token in text.tokens} > {ACCEPTED, REJECTED}
    assert {token.kind for text in plan.decode(1) for token in text.tokens} == {ALONE}
    assert repr(texts).count("per target forward") == 3
    assert len(re.findall('class="legend"', texts._repr_html_())) == 1
    assert not (tmp_path / "never").exists()
