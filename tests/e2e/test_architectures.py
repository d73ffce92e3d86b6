"""The ragged cache against plain forward passes of transformers, on every supported family."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from spectoolkit.errors import ContractError, UsageError
from spectoolkit.models.causal_lm import CausalLM, check_supported
from spectoolkit.models.hf import load_hf
from tests.helpers.tiny_models import FAMILIES, tiny_model

VOCAB_SIZE = 40


def reference(model: CausalLM, attention: str):
    """Logits [n, V] of a whole sequence by transformers alone: its own attention, no cache, no batch."""
    hf_model = copy.deepcopy(model.hf_model)
    hf_model.set_attn_implementation(attention)

    def logits(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return hf_model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_score_equals_whole_forward(family: str) -> None:
    # Gemma 2 caps its scores, which transformers can do only with attention whose softmax is in float32.
    attention, tolerance = ("eager", 1e-5) if family == "gemma2" else ("sdpa", 1e-10)
    model = tiny_model(family, VOCAB_SIZE)
    expected = reference(model, attention)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, high: int = VOCAB_SIZE) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    committed = [draw(length).tolist() for length in (7, 0, 2, 12)]
    state = model.prefill(committed)
    for step in range(8):
        num_queries = (1, 4, 3, 1, 5, 2, 4, 1)[step]
        tokens = draw(len(committed), num_queries)
        logits, state = model.score(state, tokens)
        assert logits.shape == (len(committed), num_queries, VOCAB_SIZE)
        for row, prefix in enumerate(committed):
            whole = expected(prefix + tokens[row].tolist())[len(prefix) :]
            torch.testing.assert_close(logits[row], whole, rtol=tolerance, atol=tolerance)
        accepted = draw(len(committed), high=num_queries + 1).tolist()
        committed = [prefix + tokens[row, : accepted[row]].tolist() for row, prefix in enumerate(committed)]
        state = model.rollback(state, [len(prefix) for prefix in committed])
        if step == 2:
            committed = [committed[row] for row in (3, 0, 1)]
            state = model.select(state, [3, 0, 1])
        if step == 4:
            joined = [draw(length).tolist() for length in (20, 1)]
            committed[2], committed[0] = joined
            state = model.insert(state, [2, 0], model.prefill(joined))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_row_alone_equals_row_in_a_batch(family: str) -> None:
    model = tiny_model(family)
    prefixes = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [], [3, 5, 8]]
    tokens = torch.tensor([[7, 8], [9, 3], [2, 3], [8, 4]])
    together, _ = model.score(model.prefill(prefixes), tokens)
    for row, prefix in enumerate(prefixes):
        alone, _ = model.score(model.prefill([prefix]), tokens[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], rtol=1e-10, atol=1e-10)


def test_two_states_used_alternately() -> None:
    model = tiny_model()
    first, second = model.prefill([[1, 2, 3]]), model.prefill([[4, 5]])
    _, first = model.score(first, torch.tensor([[6]]))
    _, second = model.score(second, torch.tensor([[7]]))
    logits, _ = model.score(first, torch.tensor([[8]]))
    expected, _ = model.score(model.prefill([[1, 2, 3, 6]]), torch.tensor([[8]]))
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_all_prefixes_empty_then_insert() -> None:
    model = tiny_model()
    state = model.insert(model.prefill([[], []]), [1], model.prefill([[1, 2, 3]]))
    logits, _ = model.score(state, torch.tensor([[4, 5], [6, 7]]))
    expected, _ = model.score(model.prefill([[1, 2, 3]]), torch.tensor([[6, 7]]))
    torch.testing.assert_close(logits[1:], expected, rtol=1e-10, atol=1e-10)


def test_filler_may_reach_beyond_the_context_and_real_tokens_may_not() -> None:
    model = tiny_model("gpt2")
    prefix = [1] * (model.context_length - 1)
    logits, state = model.score(model.prefill([prefix]), torch.tensor([[2, 0, 0]]))
    whole = reference(model, "sdpa")([*prefix, 2])[-1]
    torch.testing.assert_close(logits[0, 0], whole, rtol=1e-10, atol=1e-10)
    with pytest.raises(UsageError, match="at most 96 tokens of context, got 98"):
        model.score(state, torch.tensor([[1]]))
    with pytest.raises(UsageError, match="got 97"):
        model.prefill([[1] * 97])


def test_rollback_to_more_than_is_cached() -> None:
    model = tiny_model()
    with pytest.raises(ContractError, match=r"at most the current lengths \[2, 1\], got \[2, 2\]"):
        model.rollback(model.prefill([[1, 2], [3]]), [2, 2])
    with pytest.raises(ContractError, match=r"at most the current lengths \[2, 1\], got \[1\]"):
        model.rollback(model.prefill([[1, 2], [3]]), [1])
    with pytest.raises(ContractError, match="expected tokens of 2 rows, got 1"):
        model.score(model.prefill([[1, 2], [3]]), torch.tensor([[1]]))


REFUSED = {
    "mamba": (AutoConfig.for_model("mamba", num_hidden_layers=1), "MambaForCausalLM"),
    "qwen3_next": (AutoConfig.for_model("qwen3_next", num_hidden_layers=4), "linear_attention"),
    "recurrent_gemma": (AutoConfig.for_model("recurrent_gemma", num_hidden_layers=3), "RecurrentGemmaForCausalLM"),
    "jamba": (AutoConfig.for_model("jamba", num_hidden_layers=8), "JambaForCausalLM"),
    "rwkv": (AutoConfig.for_model("rwkv", num_hidden_layers=1), "RwkvForCausalLM"),
    "bart": (AutoConfig.for_model("bart"), "encoder-decoder"),
    "bloom": (AutoConfig.for_model("bloom"), "BloomForCausalLM"),
    "gpt_oss": (AutoConfig.for_model("gpt_oss", num_hidden_layers=2), "sinks"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name_before_weights_are_read(family: str, tmp_path) -> None:
    config, named = REFUSED[family]
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=named) as refusal:
        load_hf(str(tmp_path))
    assert family in str(refusal.value)
    assert "Supported: decoder-only models" in str(refusal.value)


def test_unknown_class_is_judged_by_its_config_alone() -> None:
    check_supported(AutoConfig.for_model("llama"), None)
    with pytest.raises(UsageError, match="linear_attention"):
        check_supported(REFUSED["qwen3_next"][0], None)
