"""Forward passes replayed as CUDA graphs give what eager ones give. Run where there is a GPU: `make gpu-check`."""

from __future__ import annotations

import contextlib
import logging
import warnings

import pytest
import torch

from spectoolkit.drafters import ModelDrafter, NGramDrafter
from spectoolkit.models import cuda_graphs, ragged_cache
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.cuda_graphs import CudaCapture
from spectoolkit.models.eagle3 import Eagle3
from spectoolkit.models.layer_skip import skip_layers
from spectoolkit.verifiers import Block, Match
from tests.helpers.tiny_models import FAMILIES, tiny_head, tiny_model
from tests.helpers.toys import outcome, requests, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS = (0, 1, 3)


def on_gpu(family: str, graphs: str, dtype: torch.dtype = torch.float64) -> CausalLM:
    model = tiny_model(family)
    model.hf_model.config.pad_token_id = None  # with one, GPT-2 looks for padding among its tokens
    return CausalLM(model.hf_model.to("cuda", dtype), model.tokenizer, model.name, graphs=graphs)


class Counting:
    """A capture that counts, and refuses where it is told to."""

    def __init__(self, model: CausalLM | Eagle3) -> None:
        assert isinstance(model.graphs.capture, CudaCapture)
        self.capture, model.graphs.capture = model.graphs.capture, self
        self.num_captures = self.num_replays = 0

    def __call__(self, forward):
        self.num_captures += 1
        graph = self.capture(forward)
        replay = graph.graph.replay

        def counted() -> None:
            self.num_replays += 1
            replay()

        return cuda_graphs._CudaGraph(type("Counted", (), {"replay": staticmethod(counted)}), graph.outputs)


@contextlib.contextmanager
def refusing_synchronisation():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_rows", [1, 32, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_logits_are_the_eager_ones(family, num_rows):
    eager, model = on_gpu(family, "off"), on_gpu(family, "auto")
    counted = Counting(model)
    prefixes = [[(row + i) % 40 for i in range(row % 9)] for row in range(num_rows)]
    states = [one.prefill(prefixes) for one in (eager, model)]
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        for num_queries in (4, 1, 1):
            tokens = torch.randint(0, 40, (num_rows, num_queries), generator=generator).cuda()
            expected, states[0] = eager.score(states[0], tokens)
            found, states[1] = model.score(states[1], tokens)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        lengths = lengths + torch.randint(0, 4, lengths.shape, generator=generator)
        states = [one.rollback(state, lengths.tolist()) for one, state in zip((eager, model), states, strict=True)]
        if step == 7:
            lengths[0] = 2
            states = [
                one.insert(state, [0], one.prefill([[8, 9]])) for one, state in zip((eager, model), states, strict=True)
            ]
    assert counted.num_captures == 2
    assert counted.num_replays > 20


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_decoding_gives_the_tokens_of_eager_passes(family, monkeypatch):
    monkeypatch.setattr(ragged_cache, "_BUCKET", 16)  # growth, too
    asked = requests(20, max_new_tokens=30, vocab_size=40)
    found = {}
    for graphs in ("off", "auto"):
        target = on_gpu(family, graphs).with_features(LAYERS)
        head = tiny_head(target)
        head.head.to(target.device)
        draft = skip_layers(target, [1])
        counted = [Counting(one) for one in (target, head, draft)] if graphs == "auto" else []
        drafters = [ModelDrafter(head, 40, ratio=1.0), ModelDrafter(draft, 40, ratio=1.0), NGramDrafter(2, 1)]
        for name, drafter, verifier in zip("hdn", drafters, (Block(), Block(), Match()), strict=True):
            done = run(target, drafter, verifier, asked, batch_size=8)
            found[graphs, name] = {key: outcome(one) for key, one in done.items()}
        assert all(one.num_replays > 20 for one in counted)
    assert all(found["off", name] == found["auto", name] for name in "hdn")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_replayed_forward_does_not_synchronise(dtype):
    model = on_gpu("llama", "auto", dtype).with_features(LAYERS)
    counted = Counting(model)
    state = model.prefill([[1, 2, 3], [4]])
    tokens = torch.tensor([[5, 6], [7, 8]], device="cuda")
    lengths, num_tokens = [3, 1], [2, 1]
    for step in range(8):
        with refusing_synchronisation() if step > 3 else contextlib.nullcontext():
            _, state = model.score(state, tokens)
            state = model.rollback(state, lengths)
            model.features(state, num_tokens)
    assert (counted.num_captures, counted.num_replays) == (1, 6)


@pytest.mark.parametrize("how", ["waits", "fails in the capture"])
def test_a_forward_that_cannot_be_captured_runs_eagerly(how, caplog):
    """Once refused before the capture begins, and once broken off within it: the device is usable afterwards."""
    asked = requests(9, max_new_tokens=20, vocab_size=40)
    eager, target = on_gpu("llama", "off"), on_gpu("llama", "auto")
    norm = target.hf_model.model.norm

    def hook(module, args, output):
        if how == "waits":
            float(output.flatten()[0])
        elif torch.cuda.is_current_stream_capturing():
            raise RuntimeError("broken off")

    handle = norm.register_forward_hook(hook)
    drafter = ModelDrafter(skip_layers(eager, [1]), 40, ratio=1.0)
    with caplog.at_level(logging.WARNING):
        found = run(target, drafter, Block(), asked)
    handle.remove()
    assert [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()] != []
    assert target.graphs.capture is None
    expected = run(eager, drafter, Block(), asked)
    assert {key: outcome(one) for key, one in found.items()} == {key: outcome(one) for key, one in expected.items()}
    # Another model is captured as ever.
    other = on_gpu("llama", "auto")
    counted = Counting(other)
    again = run(other, drafter, Block(), asked)
    assert counted.num_replays > 5
    assert {key: outcome(one) for key, one in again.items()} == {key: outcome(one) for key, one in expected.items()}


def test_graphs_go_with_their_state_and_new_ones_share_the_pool():
    model = on_gpu("llama", "auto", torch.bfloat16)
    counted = Counting(model)
    reserved = []
    for _ in range(6):
        state = model.prefill([[1, 2, 3], [4]])
        for _ in range(5):
            _, state = model.score(state, torch.tensor([[5], [7]], device="cuda"))
            state = model.rollback(state, [3, 1])
        del state
        reserved.append(torch.cuda.memory_allocated())
    assert counted.num_captures == 6
    assert len(set(reserved[1:])) == 1
