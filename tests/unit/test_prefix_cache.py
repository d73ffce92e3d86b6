"""Kept prefixes change nothing but the work."""

import pytest
import torch

from spectoolkit.drafters import ModelDrafter
from spectoolkit.models.layer_skip import skip_layers
from spectoolkit.models.prefix_cache import PrefixCache
from spectoolkit.verifiers import Rejection
from tests.helpers.tiny_models import tiny_model
from tests.helpers.toys import outcome, requests, run


class Counting:
    """Counts the tokens that a model prefills."""

    def __init__(self, model):
        self.model, self.prefilled = model, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def prefill(self, prefixes):
        self.prefilled += sum(map(len, prefixes))
        return self.model.prefill(prefixes)


def test_prefixes_are_prefilled_once_and_give_the_same_logits():
    model = tiny_model()
    counting = Counting(model)
    cached = PrefixCache(counting, max_tokens=100)
    tokens = torch.tensor([[5, 6], [7, 8], [9, 4]])
    for prefixes in ([[1, 2], [3], []], [[1, 2], [4, 4, 4], [3]], [[3], [3], [1, 2]], [[8, 8], [3], [8, 8]]):
        logits, state = cached.score(cached.prefill(prefixes), tokens)
        expected, _ = model.score(model.prefill(prefixes), tokens)
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
        cached.rollback(state, [0, 0, 0])  # kept states do not share memory with handed out ones
    assert counting.prefilled == 2 + 1 + 3 + 2


def test_no_more_than_max_tokens_are_kept():
    counting = Counting(tiny_model())
    cached = PrefixCache(counting, max_tokens=4)
    for _ in range(3):
        cached.prefill([[1, 2, 3]])
        cached.prefill([[4, 5, 6]])
    assert counting.prefilled == 3 + 3 * 3


@pytest.mark.parametrize("batch_size", [1, 3])
def test_decoding_is_the_same(batch_size):
    target = tiny_model()
    draft = skip_layers(target, [1])
    asked = requests(6, vocab_size=40)
    expected = run(target, ModelDrafter(draft, 40, ratio=1.0), Rejection(), asked, batch_size=batch_size)
    cached, cached_draft = PrefixCache(target, 100), PrefixCache(draft, 100)
    for _ in range(2):
        found = run(cached, ModelDrafter(cached_draft, 40, ratio=1.0), Rejection(), asked, batch_size=batch_size)
        assert {key: outcome(one) for key, one in found.items()} == {k: outcome(one) for k, one in expected.items()}
