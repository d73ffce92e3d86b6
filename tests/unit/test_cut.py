"""Where a block ends inside: stop ids, stop strings, the length limit."""

import pytest

from spectoolkit.batch import cut
from spectoolkit.datatypes import Request

EOS = 0


def text(tokens):
    return "".join(chr(ord("a") + token) for token in tokens)


def request(**options):
    return Request(id="r", prompt=(1,), **{"max_new_tokens": 100, "stop_ids": frozenset({EOS}), **options})


def test_a_block_without_an_end_stays_whole():
    assert cut(request(), [1, 2], [3, 4], text) == ([3, 4], None)


def test_stop_id_inside_the_block_is_emitted_and_ends_it():
    assert cut(request(), [], [1, 2, EOS, 4, 5, 6], text) == ([1, 2, EOS], "stop_id")


def test_length_limit():
    assert cut(request(max_new_tokens=5), [1, 1, 1], [2, 3, 4], text) == ([2, 3], "length")
    assert cut(request(max_new_tokens=5), [1, 1, 1], [2, 3], text) == ([2, 3], "length")


def test_stop_id_at_the_length_limit_counts_as_stop_id():
    assert cut(request(max_new_tokens=2), [1], [EOS, 3], text) == ([EOS], "stop_id")


def test_stop_string_may_begin_in_an_earlier_block():
    # "cde" is completed by the second token of the block.
    assert cut(request(stop_strings=("cde",)), [1, 2], [3, 4, 5, 6], text) == ([3, 4], "stop_string")


def test_the_first_end_wins():
    one = request(stop_strings=("f",), max_new_tokens=4)
    assert cut(one, [], [1, EOS, 5], text) == ([1, EOS], "stop_id")
    assert cut(one, [], [1, 5, EOS], text) == ([1, 5], "stop_string")


def test_a_stop_string_that_the_output_does_not_contain():
    assert cut(request(stop_strings=("xyz",)), [], [1, 2], text) == ([1, 2], None)


@pytest.mark.parametrize("bad", [{"prompt": ()}, {"max_new_tokens": 0}, {"stop_strings": ("",)}])
def test_requests_that_make_no_sense(bad):
    from spectoolkit.errors import UsageError

    with pytest.raises(UsageError, match="request 'r'"):
        Request(**{"id": "r", "prompt": (1,), "max_new_tokens": 1, **bad})
