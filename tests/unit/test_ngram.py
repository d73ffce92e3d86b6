"""Prompt lookup against hand-made sequences."""

import pytest
import torch

from spectoolkit.datatypes import DraftNoise
from spectoolkit.drafters import NGramDrafter
from spectoolkit.errors import UsageError


def propose(drafter, histories, limits):
    noise = DraftNoise(torch.zeros(len(histories), max(limits), dtype=torch.float64))
    proposal, _ = drafter.propose(drafter.start(histories), None, limits, noise)
    assert proposal.lengths.tolist() == [sum(token >= 0 for token in row) for row in proposal.tokens.tolist()]
    return [[token for token in row if token >= 0] for row in proposal.tokens.tolist()]


def looked_up(history, limit, **parameters):
    return propose(NGramDrafter(**parameters), [history], [limit])[0]


def test_an_unseen_last_token_gives_no_proposal():
    assert looked_up([7, 8, 9, 4, 5], 4, max_ngram=3, min_ngram=1) == []


def test_match_policy():
    history = [1, 2, 9, 1, 2, 7, 1, 2]
    assert looked_up(history, 3, max_ngram=2, min_ngram=2, match="earliest") == [9, 1, 2]
    assert looked_up(history, 3, max_ngram=2, min_ngram=2, match="latest") == [7, 1, 2]


def test_the_longest_ngram_decides_and_the_sequence_ends_the_proposal():
    assert looked_up([1, 2, 3, 4, 2, 3], 4, max_ngram=3, min_ngram=2) == [4, 2, 3]
    # "3, 1" occurred earlier than "1", and is longer.
    assert looked_up([3, 1, 5, 1, 6, 3, 1], 1, max_ngram=2, min_ngram=1) == [5]


def test_a_sequence_shorter_than_min_ngram_gives_no_proposal():
    assert looked_up([3], 4, max_ngram=3, min_ngram=2) == []


def test_an_occurrence_may_overlap_the_suffix():
    assert looked_up([1, 1, 1], 4, max_ngram=2, min_ngram=2) == [1]


def test_limits_are_per_row_and_may_be_zero():
    rows = propose(NGramDrafter(2, 1), [[1, 2, 3, 1], [1, 2, 3, 1], [5]], [2, 0, 2])
    assert rows == [[2, 3], [], []]


def test_committed_tokens_count_as_history():
    drafter = NGramDrafter(max_ngram=2, min_ngram=2)
    grown = drafter.commit(drafter.start([[1, 2], [4]]), [[9, 1, 2], [5]])
    fresh = drafter.start([[1, 2, 9, 1, 2], [4, 5]])
    assert grown == fresh


def test_rows_follow_their_requests():
    drafter = NGramDrafter(max_ngram=1, min_ngram=1)
    state = drafter.start([[1, 8, 1], [2], [3, 9, 3]])
    state = drafter.select(state, [2, 0])
    state = drafter.insert(state, [0], drafter.start([[4, 7, 4]]))
    noise = DraftNoise(torch.zeros(2, 1, dtype=torch.float64))
    proposal, _ = drafter.propose(state, None, [1, 1], noise)
    assert proposal.tokens.tolist() == [[7], [8]]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"min_ngram": 0}, "1 <= min_ngram <= max_ngram"),
        ({"min_ngram": 4}, "1 <= min_ngram <= max_ngram"),
        ({"match": "newest"}, "'latest' or 'earliest'"),
    ],
)
def test_bad_parameters(parameters, message):
    with pytest.raises(UsageError, match=message):
        NGramDrafter(**parameters)
