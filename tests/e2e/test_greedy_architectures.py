"""Greedy speculative decoding equals `generate` of transformers, token for token, on every architecture we name."""

import copy

import pytest
import torch

from spectoolkit.datatypes import Request, SamplingParams
from spectoolkit.drafters import ModelDrafter, NGramDrafter
from spectoolkit.models.layer_skip import skip_layers
from spectoolkit.verifiers import Block, Coupled, Match, Rejection
from tests.helpers.tiny_models import FAMILIES, tiny_model
from tests.helpers.toys import outcome, run

PROMPTS = [(5, 9, 3), (7,), (11, 4, 4, 2, 8, 13, 21), (3, 3), (20, 6, 9, 9, 1), (8, 2)]
MAX_NEW_TOKENS = 24  # longer than the sliding windows of the tiny models
FACTORY = {
    "argmax": lambda target: ModelDrafter(skip_layers(target, [1]), target.vocab_size, constant=0.0),
    "same_temperature": lambda target: ModelDrafter(skip_layers(target, [1]), target.vocab_size, ratio=1.0),
    "ngram": lambda target: NGramDrafter(max_ngram=2, min_ngram=1),
}


def generated(target, prompt: tuple[int, ...]) -> tuple[int, ...]:
    hf_model = copy.deepcopy(target.hf_model)
    # Gemma 2 caps its scores, which transformers does in its eager attention only.
    hf_model.set_attn_implementation("eager" if hf_model.config.model_type == "gemma2" else "sdpa")
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS, "pad_token_id": 0, "eos_token_id": 0}
    output = hf_model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family):
    target = tiny_model(family)
    expected = [generated(target, prompt) for prompt in PROMPTS]
    assert len(set(expected)) > 3  # the outputs depend on the prompts
    asked = [
        Request(f"r{i}", prompt, MAX_NEW_TOKENS, SamplingParams(temperature=0.0), stop_ids=target.tokenizer.stop_ids)
        for i, prompt in enumerate(PROMPTS)
    ]
    for name, make in FACTORY.items():
        drafter = make(target)
        for verifier in (Rejection(), Block(), Match(), Coupled()):
            done = run(target, drafter, verifier, asked, num_draft_tokens=3, batch_size=4)
            assert [done[r.id].tokens for r in asked] == expected, (name, type(verifier).__name__)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_sampled_request_alone_equals_the_request_in_a_batch(family):
    target = tiny_model(family)
    drafter = FACTORY["same_temperature"](target)
    params = [SamplingParams(temperature=0.8, top_p=0.95), SamplingParams(temperature=0.0), SamplingParams(top_k=7)]
    asked = [Request(f"r{i}", prompt, 12 + i, params[i % 3]) for i, prompt in enumerate(PROMPTS)]
    alone = {r.id: outcome(run(target, drafter, Rejection(), [r])[r.id]) for r in asked}
    together = run(target, drafter, Rejection(), asked[::-1], batch_size=4)
    assert {key: outcome(one) for key, one in together.items()} == alone
