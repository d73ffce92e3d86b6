"""Suffix decoding against hand-made sequences and against scanning the sequence."""

import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from spectoolkit.datatypes import DraftNoise
from spectoolkit.drafters import SuffixDrafter
from spectoolkit.drafters.suffix_automaton import SuffixAutomaton
from spectoolkit.errors import UsageError

PHRASES = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=4)
SEQUENCES = PHRASES.flatmap(lambda phrases: st.lists(st.sampled_from(phrases), max_size=20)).map(
    lambda chosen: [token for phrase in chosen for token in phrase]
)
PARAMETERS = st.fixed_dictionaries(
    {
        "max_match": st.integers(1, 6),
        "max_spec_factor": st.sampled_from([0.3, 0.5, 1.0, 1.5, 4.0]),
        "min_probability": st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0]),
    }
)


def proposed(drafter, state, limits):
    noise = DraftNoise(torch.zeros(len(limits), max(limits, default=0), dtype=torch.float64))
    proposal, _ = drafter.propose(state, None, limits, noise)
    rows = [[token for token in row if token >= 0] for row in proposal.tokens.tolist()]
    assert proposal.lengths.tolist() == [len(row) for row in rows]
    return rows


def drafted(sequence, limit, **parameters):
    drafter = SuffixDrafter(**parameters)
    return proposed(drafter, drafter.start([sequence]), [limit])[0]


def followers(sequence, string):
    """The tokens that followed `string`, in order."""
    size = len(string)
    return [sequence[i + size] for i in range(len(sequence) - size) if sequence[i : i + size] == string]


def by_scanning(sequence, limit, max_match, max_spec_factor, min_probability):
    matches = (m for m in range(min(max_match, len(sequence)), 0, -1) if followers(sequence, sequence[-m:]))
    match = next(matches, 0)
    context, drafts, probability = sequence[len(sequence) - match :], [], Fraction(1)
    while match and len(drafts) < min(limit, int(match * max_spec_factor)):
        seen = followers(sequence, context)
        if not seen:
            break
        last_first = seen[::-1]
        token = max(seen, key=lambda t: (last_first.count(t), -last_first.index(t)))
        probability *= Fraction(seen.count(token), len(seen))
        if probability < min_probability - 1e-9:
            break
        drafts.append(token)
        context = [*context, token]
    return drafts


@given(SEQUENCES, st.integers(0, 8), PARAMETERS)
@example([0] * 40, 8, {"max_match": 6, "max_spec_factor": 4.0, "min_probability": 0.0})
@example([1, 0, 0, 1, 0, 0], 8, {"max_match": 1, "max_spec_factor": 4.0, "min_probability": 1.0})
@example([0, 1] * 20, 8, {"max_match": 3, "max_spec_factor": 4.0, "min_probability": 1.0})
def test_it_drafts_what_scanning_the_sequence_finds(sequence, limit, parameters):
    assert drafted(sequence, limit, **parameters) == by_scanning(sequence, limit, **parameters)


@given(SEQUENCES, st.lists(st.integers(0, 4), max_size=15), PARAMETERS)
def test_committed_tokens_count_as_the_prompt_does(sequence, cuts, parameters):
    """Grown step by step and with proposals in between, the state equals that of the whole sequence at once."""
    drafter, end = SuffixDrafter(**parameters), 0
    state = drafter.start([[], [3]])
    for size in [*cuts, len(sequence)]:
        new, end = sequence[end : end + size], end + size
        proposed(drafter, state, [3, 0])
        state = drafter.commit(state, [new, []])
    assert state == drafter.start([sequence, [3]])


@given(SEQUENCES, PARAMETERS)
def test_a_smaller_budget_only_cuts_the_proposal(sequence, parameters):
    longest = drafted(sequence, 20, **parameters)
    assert all(drafted(sequence, limit, **parameters) == longest[:limit] for limit in range(20))


def test_nothing_is_drafted_without_a_repeated_token():
    assert drafted([], 4) == []
    assert drafted([5], 4) == []
    assert drafted([5, 6, 7], 4) == []


def test_the_most_frequent_continuation_wins_and_of_equals_the_last():
    assert drafted([1, 7, 1, 8, 1, 7, 1, 9, 1], 1) == [7]
    assert drafted([1, 7, 1, 8, 1], 1) == [8]
    assert drafted([1, 8, 1, 7, 1, 7, 1, 8, 1], 1, max_match=1) == [8]


def test_the_longest_suffix_decides_up_to_max_match():
    sequence = [3, 1, 5, 1, 6, 1, 6, 3, 1]
    assert drafted(sequence, 1, max_match=2) == [5]
    assert drafted(sequence, 1, max_match=1) == [6]


def test_counts_belong_to_the_whole_path():
    # Behind 2 comes 9 twice and 4 once, but behind "1, 2" only 4.
    sequence = [1, 2, 4, 5, 2, 9, 0, 2, 9, 0, 1]
    assert drafted(sequence, 3, max_spec_factor=3.0) == [2, 4, 5]


def test_the_path_ends_before_its_probability_is_too_low():
    # Behind 1 comes 2 in half the cases, behind "1, 2" comes 3 in half of those.
    sequence = [1, 2, 4, 1, 5, 1, 2, 3, 1, 6, 1]
    for min_probability, expected in ((0.51, []), (0.5, [2]), (0.26, [2]), (0.25, [2, 3, 1]), (0.0, [2, 3, 1])):
        assert drafted(sequence, 3, max_match=1, max_spec_factor=3.0, min_probability=min_probability) == expected


def test_drafts_per_matched_token():
    sequence = [*range(10), *range(5)]
    for factor, number in ((0.1, 0), (0.2, 1), (0.6, 3), (1.0, 5), (1.5, 7), (50.0, 10)):
        # A factor of 50 would go on to the end of what is known.
        assert drafted(sequence, 40, max_spec_factor=factor) == [*range(5, 10), *range(5)][:number]


def test_only_what_is_looked_up_counts_as_matched():
    assert drafted([*range(10), *range(5)], 40, max_match=3) == [5, 6, 7]


def test_whole_drafts_are_not_lost_to_rounding():
    assert int(100 * 0.29) == 28
    assert len(drafted([*range(200), *range(100)], 40, max_match=100, max_spec_factor=0.29)) == 29


def test_limits_are_per_row_and_may_be_zero():
    drafter = SuffixDrafter(max_spec_factor=4.0)
    state = drafter.start([[1, 2, 3, 1], [1, 2, 3, 1], [5], []])
    assert proposed(drafter, state, [2, 0, 2, 2]) == [[2, 3], [], [], []]
    assert proposed(drafter, state, [0, 0, 0, 0]) == [[], [], [], []]
    assert proposed(drafter, [], []) == []


def test_rows_follow_their_requests():
    drafter = SuffixDrafter()
    state = drafter.start([[1, 8, 1], [2], [3, 9, 3]])
    state = drafter.select(state, [2, 0])
    state = drafter.insert(state, [0], drafter.start([[4, 7, 4]]))
    assert proposed(drafter, state, [1, 1]) == [[7], [8]]
    state = drafter.commit(state, [[7], [8, 1]])
    assert proposed(drafter, state, [4, 4]) == [[4, 7], [8, 1]]


@pytest.mark.parametrize("period", [1, 2, 7, 10_000])
def test_a_token_costs_the_same_in_a_sequence_of_any_length(period):
    """Lines run per token, by the interpreter's own count: the last of 4000 tokens take no more than early ones."""
    tokens = [i % period for i in range(4000)]
    sequence = SuffixAutomaton(max_context=8)

    def lines_of(part):
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for token in part:
                sequence.append(token)
        finally:
            sys.settrace(before)
        return count

    lines = [lines_of(tokens[i : i + 400]) for i in range(0, 4000, 400)]
    assert lines[-1] <= 1.05 * lines[1]
    assert len(sequence.nodes) <= 2 * len(tokens)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_match": 0}, r"drafter\.max_match: expected an integer >= 1, got 0"),
        ({"max_spec_factor": 0.0}, r"drafter\.max_spec_factor: expected a finite number > 0, got 0\.0"),
        ({"max_spec_factor": float("inf")}, r"drafter\.max_spec_factor"),
        ({"min_probability": -0.1}, r"drafter\.min_probability: expected a number in \[0, 1\], got -0\.1"),
        ({"min_probability": float("nan")}, r"drafter\.min_probability"),
        ({"min_probability": 1.5}, r"drafter\.min_probability"),
    ],
)
def test_bad_parameters(parameters, message):
    with pytest.raises(UsageError, match=message):
        SuffixDrafter(**parameters)
