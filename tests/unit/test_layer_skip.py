from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from spectoolkit.errors import UsageError
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.layer_skip import decoder_layers, layer_skip_search, self_draft, skip_layers
from spectoolkit.models.tabular import random_tabular
from tests.helpers.tiny_models import FAMILIES, tiny_model


class _PassThrough(nn.Module):
    """Stands in for a decoder layer and does nothing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Some models ask the layer for it.
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden_states


def storage(model: CausalLM) -> set[int]:
    tensors = itertools.chain(model.hf_model.parameters(), model.hf_model.buffers())
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_model_whose_skipped_layers_do_nothing(family: str) -> None:
    target = tiny_model(family, layers=5)
    draft = skip_layers(target, [3, 1])
    hollow = copy.deepcopy(target.hf_model)
    layers = decoder_layers(hollow)
    for index in (1, 3):
        layers[index] = _PassThrough(layers[index])
    tokens = torch.tensor([[3, 14, 15, 9, 2, 6, 5, 35, 8, 9]])
    with torch.no_grad():
        expected = hollow(input_ids=tokens, use_cache=False).logits
    logits, state = draft.score(draft.prefill([[3, 14, 15]]), tokens[:, 3:])
    torch.testing.assert_close(logits, expected[:, 3:], rtol=1e-5, atol=1e-5)
    assert len(state.layers) == 3
    assert storage(draft) <= storage(target)
    assert len(decoder_layers(target.hf_model)) == target.hf_model.config.num_hidden_layers == 5


def test_tied_embeddings_stay_tied() -> None:
    draft = skip_layers(tiny_model("gpt2"), [0])
    head = draft.hf_model.get_output_embeddings()
    assert head.weight is draft.hf_model.get_input_embeddings().weight


def test_target_and_draft_do_not_meet() -> None:
    target = tiny_model()
    draft = skip_layers(target, [1])
    before, _ = target.score(target.prefill([[1, 2, 3]]), torch.tensor([[4]]))
    draft.score(draft.prefill([[9, 9]]), torch.tensor([[9]]))
    after, _ = target.score(target.prefill([[1, 2, 3]]), torch.tensor([[4]]))
    assert torch.equal(before, after)
    assert draft.name == "tiny llama without layers [1]"
    assert draft.tokenizer is target.tokenizer


def test_no_layer_left_out_is_the_target() -> None:
    target = tiny_model()
    tokens = torch.tensor([[4, 5]])
    expected, _ = target.score(target.prefill([[1]]), tokens)
    draft = skip_layers(target, [])
    assert torch.equal(draft.score(draft.prefill([[1]]), tokens)[0], expected)
    assert self_draft(target) is target


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([1, 1], r"skipped_layers: expected each layer at most once, got \[1, 1\]"),
        ([3], r"skipped_layers: expected numbers from 0 to 2, got \[3\]"),
        ([-1], r"skipped_layers: expected numbers from 0 to 2, got \[-1\]"),
        ([0.5], r"skipped_layers: expected numbers from 0 to 2"),
        ([True], r"skipped_layers: expected numbers from 0 to 2"),
        ([0, 1, 2], "skipped_layers: expected fewer than all 3 layers"),
    ],
)
def test_unusable_layers(layers: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        skip_layers(tiny_model(), layers)


def test_only_transformers_models_have_layers() -> None:
    with pytest.raises(UsageError, match="expected a transformers target to skip layers of, got TabularModel"):
        skip_layers(random_tabular(), [1])  # pyright: ignore[reportArgumentType]


SEQUENCES = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [27, 18, 28, 18], [1, 2, 3]]
COUNTED = [[False] * 4 + [True] * 6, [False, True, True, True], [False] * 3]


def plain_overlap(target: CausalLM, skipped: list[int], temperature: float) -> float:
    """The mean of sum_x min(p, q), by whole forward passes of a model without the layers."""
    draft = skip_layers(target, skipped)
    values = []
    for tokens, counted in zip(SEQUENCES, COUNTED, strict=True):
        probs = [
            torch.softmax(model.score(model.prefill([[]]), torch.tensor([tokens]))[0][0] / temperature, -1)
            for model in (target, draft)
        ]
        overlap = torch.minimum(*probs).sum(-1)
        values += [overlap[place - 1].item() for place, flag in enumerate(counted) if flag]
    return sum(values) / len(values)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "gpt_neox", "opt"])
def test_search_equals_trying_every_layer(family: str) -> None:
    target = tiny_model(family, layers=4)
    calls: list[tuple[int, int]] = []
    found = layer_skip_search(target, SEQUENCES, COUNTED, 0.7, 3, lambda done, total: calls.append((done, total)))
    skipped: list[int] = []
    for layers, overlap in found:
        tried = {layer: plain_overlap(target, [*skipped, layer], 0.7) for layer in range(4) if layer not in skipped}
        best = max(tried, key=lambda layer: tried[layer])
        skipped.append(best)
        assert layers == tuple(skipped)
        assert overlap == pytest.approx(tried[best], abs=1e-9)
    assert calls == [(done, 9) for done in range(1, 10)]


def test_search_finds_layers_that_do_nothing() -> None:
    target = tiny_model("llama", layers=5)
    for index in (3, 1):
        layer = decoder_layers(target.hf_model)[index]
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            nn.init.zeros_(module.weight)
    found = layer_skip_search(target, SEQUENCES, COUNTED, 1.0, 3)
    assert [layers for layers, _ in found[:2]] == [(1,), (1, 3)]
    assert [overlap for _, overlap in found[:2]] == pytest.approx([1, 1])
    assert found[2][1] < 0.999


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SEQUENCES, COUNTED, 0.0, 1), "temperature: expected a number > 0, got 0.0"),
        ((SEQUENCES, COUNTED, 1.0, 0), "max_skipped: expected a number from 1 to 2, got 0"),
        ((SEQUENCES, COUNTED, 1.0, 3), "max_skipped: expected a number from 1 to 2, got 3"),
        ((SEQUENCES, COUNTED[:1], 1.0, 1), "counted: expected one flag per token"),
        (([[1, 2]], [[True, True]], 1.0, 1), "counted: expected some tokens to count, and never the first"),
        (([[1, 2]], [[False, False]], 1.0, 1), "counted: expected some tokens to count"),
    ],
)
def test_unusable_search(arguments: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layer_skip_search(tiny_model(), *arguments)
