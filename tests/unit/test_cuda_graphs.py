"""Forward passes that are replayed, against eager ones; the graphs are those of `fake_graphs`, on the CPU."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import spectoolkit as st
from spectoolkit.datatypes import SamplingParams
from spectoolkit.drafters import ChainsDrafter, CoupledDrafter, ModelDrafter, NGramDrafter
from spectoolkit.errors import UsageError
from spectoolkit.models import cuda_graphs, ragged_cache
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.cuda_graphs import CudaCapture, GraphedForwards, Graphs
from spectoolkit.models.hf import wrap
from spectoolkit.models.layer_skip import self_draft, skip_layers
from spectoolkit.models.prefix_cache import PrefixCache
from spectoolkit.models.ragged_cache import bucket
from spectoolkit.verifiers import Block, Coupled, Match, Recursive, Rejection
from tests.helpers.fake_graphs import graphed
from tests.helpers.tiny_models import FAMILIES, tiny_head, tiny_model, tiny_tokenizer
from tests.helpers.toys import outcome, requests, run

LAYERS = (0, 1, 3)
PARAMS = [
    SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2),
    SamplingParams(temperature=0.0),
    SamplingParams(),
]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Tiny models live for a few steps within a few slots: many buckets, and captures as soon as may be."""
    monkeypatch.setattr(ragged_cache, "_BUCKET", 16)
    monkeypatch.setattr(cuda_graphs, "_EAGER_STEPS", 1)


def asked(num: int = 9, max_new_tokens: int = 20) -> list:
    return requests(num, max_new_tokens=max_new_tokens, vocab_size=40, params=PARAMS)


def outcomes(*args, **options) -> dict:
    return {key: outcome(one) for key, one in run(*args, **options).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_logits_are_the_eager_ones(family):
    eager, model = tiny_model(family), tiny_model(family)
    # With one, GPT-2 looks for padding among its tokens.
    model.hf_model.config.pad_token_id = None
    capture = graphed(model)
    prefixes = [[3, 1, 4, 1, 5, 9, 2], [], [6, 5], list(range(12))]
    states = [one.prefill(prefixes) for one in (eager, model)]
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    generator = torch.Generator().manual_seed(0)
    for step in range(14):
        for num_queries in (4, 1, 1) if step % 5 else (2,):
            tokens = torch.randint(0, 40, (len(lengths), num_queries), generator=generator)
            expected, states[0] = eager.score(states[0], tokens)
            found, states[1] = model.score(states[1], tokens)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        accepted = torch.randint(0, 3, lengths.shape, generator=generator)
        accepted[-1] = 2  # through several buckets
        lengths = lengths + accepted
        states = [one.rollback(state, lengths.tolist()) for one, state in zip((eager, model), states, strict=True)]
        if step == 6:  # joins, in place
            lengths[[1, 3]] = torch.tensor([1, 41])
            states = [
                one.insert(state, [1, 3], one.prefill([[7], [*range(40), 5]]))
                for one, state in zip((eager, model), states, strict=True)
            ]
        if step == 10:  # leaves: other buffers
            lengths = lengths[[2, 3]]
            states = [one.select(state, [2, 3]) for one, state in zip((eager, model), states, strict=True)]
    assert capture.num_replays > 12
    assert len(capture.graphs) >= 3


PAIRS = {
    "argmax rejection": (lambda draft: ModelDrafter(draft, 40, constant=0.0), Rejection()),
    "same_temperature block": (lambda draft: ModelDrafter(draft, 40, ratio=1.0), Block()),
    "coupled coupled": (lambda draft: CoupledDrafter(draft, 40, ratio=1.0), Coupled()),
    "ngram match": (lambda draft: NGramDrafter(2, 1), Match()),
}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("pair", PAIRS)
def test_decoding_with_a_draft_model_gives_the_same_tokens(family, pair):
    make, verifier = PAIRS[pair]
    target = tiny_model(family)
    draft = skip_layers(target, [1])
    expected = outcomes(target, make(draft), verifier, asked())
    captures = [graphed(target), graphed(draft)]
    assert outcomes(target, make(draft), verifier, asked()) == expected
    assert captures[0].num_replays > 5
    assert captures[1].num_replays > 5 or pair == "ngram match"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoding_with_a_draft_head_gives_the_same_tokens(dtype):
    plain = tiny_model("qwen2")
    target = CausalLM(plain.hf_model.to(dtype), plain.tokenizer, "target").with_features(LAYERS)
    head = tiny_head(target)
    head.head.to(dtype)
    drafter = ModelDrafter(head, 40, ratio=1.0)
    expected = outcomes(target, drafter, Block(), asked())
    captures = [graphed(target), graphed(head)]
    cached = PrefixCache(target, 10_000)
    for _ in range(2):  # the second time all prompts come out of the prefix cache
        assert outcomes(cached, drafter, Block(), asked()) == expected
    assert all(capture.num_replays > 20 for capture in captures)


def test_a_target_that_is_its_own_draft_model():
    target = tiny_model()
    drafter = ModelDrafter(self_draft(target), 40, ratio=1.0)
    expected = outcomes(target, drafter, Rejection(), asked())
    capture = graphed(target)
    assert outcomes(target, drafter, Rejection(), asked()) == expected
    assert capture.num_replays > 20


def test_states_of_one_step_are_not_captured():
    target = tiny_model()
    draft = skip_layers(target, [1])
    drafter = ChainsDrafter(draft, 40, ratio=1.0, num_chains=3)
    expected = outcomes(target, drafter, Recursive(), asked(4))
    captures = [graphed(target), graphed(draft)]
    assert outcomes(target, drafter, Recursive(), asked(4)) == expected
    # The target's state has a row per chain and is copied at every step. The draft model has one that stays, too.
    assert not captures[0].graphs
    assert {len(graph.outputs[0]) for graph in captures[1].graphs} <= {1, 2, 3, 4}


def test_what_was_given_out_is_not_written_over():
    model = tiny_model()
    capture = graphed(model)
    state = model.prefill([[1, 2, 3], [4]])
    lengths = torch.tensor([3, 1])
    given, copies = [], []
    for step in range(5):
        for _ in range(2):
            logits, state = model.score(state, torch.tensor([[step], [5]]))
            given.append(logits)
            copies.append(logits.clone())
        state = model.rollback(state, lengths.tolist())
    assert capture.num_replays >= 6
    for logits, copied in zip(given, copies, strict=True):
        torch.testing.assert_close(logits, copied, rtol=0, atol=0)


def test_joining_rows_keep_the_graphs_and_moved_buffers_drop_them():
    model = tiny_model()
    capture = graphed(model)

    def steps(state, lengths, num=3):
        for _ in range(num):
            _, state = model.score(state, torch.ones(len(lengths), 1, dtype=torch.long))
            state = model.rollback(state, lengths)
        return state

    state = steps(model.prefill([[1, 2], [3]]), [2, 1])
    assert (len(capture.graphs), capture.num_replays) == (1, 2)
    state = steps(model.insert(state, [1], model.prefill([[5, 6, 7, 8]])), [2, 4], 1)
    assert (len(capture.graphs), capture.num_replays) == (1, 3)
    state = steps(model.insert(state, [1], model.prefill([[5] * 20])), [2, 20])  # the buffers grow
    assert (len(capture.graphs), capture.num_replays) == (2, 5)
    state = steps(model.insert(state, [1], model.prefill([[5]])), [2, 1])  # another bucket again, in the same buffers
    assert (len(capture.graphs), capture.num_replays) == (3, 7)
    steps(model.select(state, [1]), [1])
    assert (len(capture.graphs), capture.num_replays) == (4, 9)


def refusing(forward):
    raise RuntimeError("operation not permitted when stream is capturing\nand more of it")


def test_a_capture_that_fails_is_said_once_and_changes_nothing(caplog):
    target = tiny_model()
    drafter = ModelDrafter(skip_layers(target, [1]), 40, ratio=1.0)
    expected = outcomes(target, drafter, Block(), asked())
    target.graphs.capture = refusing
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert outcomes(target, drafter, Block(), asked()) == expected
    (record,) = caplog.records
    assert record.getMessage() == (
        "tiny llama runs without CUDA graphs, since a forward pass could not be captured: "
        "operation not permitted when stream is capturing"
    )


def test_an_architecture_that_waits_for_the_device_stays_eager(caplog):
    """Rotary frequencies that follow the length are recomputed under an `if` on the positions."""
    config = AutoConfig.for_model(
        "llama", vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=96, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = wrap(AutoModelForCausalLM.from_config(config).double(), tiny_tokenizer(), "dynamic")
    expected = outcomes(target, NGramDrafter(2, 1), Match(), asked(5))
    capture = graphed(target)
    with caplog.at_level(logging.WARNING):
        assert outcomes(target, NGramDrafter(2, 1), Match(), asked(5)) == expected
    assert "dynamic runs without CUDA graphs" in caplog.text
    assert not capture.graphs


def test_scaled_frequencies_that_stay_on_the_device_are_captured():
    config = AutoConfig.for_model(
        "phi3", vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, original_max_position_embeddings=64, pad_token_id=0,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.1] * 4,
                         "long_factor": [1.7] * 4, "original_max_position_embeddings": 64},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = wrap(AutoModelForCausalLM.from_config(config).double(), tiny_tokenizer(), "longrope")
    expected = outcomes(target, NGramDrafter(2, 1), Match(), asked(5))
    capture = graphed(target)
    assert outcomes(target, NGramDrafter(2, 1), Match(), asked(5)) == expected
    assert capture.num_replays > 5


class Device:
    """torch.cuda as far as a capture needs it; notes what it is asked for, in order."""

    def __init__(self, monkeypatch):
        self.notes: list[str] = []
        self.mode, self.stream = 0, "main"
        outer = self

        class Stream:
            name = "side"

            def wait_stream(self, other):
                outer.notes.append(f"{self.name} waits for {other.name}")

        main, side = Stream(), Stream()
        main.name = "main"

        @contextlib.contextmanager
        def on(stream):
            before, outer.stream = outer.stream, stream.name
            try:
                yield
            finally:
                outer.stream = before

        @contextlib.contextmanager
        def graph(graph, pool, stream):
            assert (pool, stream) == ("pool", side)
            outer.notes.append("begin")
            outer.stream = stream.name
            yield  # as torch's: the stream stays where the capture fails
            outer.notes.append("end")
            outer.stream = "main"

        parts = {
            "Stream": lambda: side, "current_stream": lambda: main, "stream": on, "graph": graph,
            "graph_pool_handle": lambda: "pool", "CUDAGraph": lambda: None, "device": contextlib.nullcontext,
            "set_stream": lambda stream: setattr(outer, "stream", stream.name),
            "get_sync_debug_mode": lambda: outer.mode,
            "set_sync_debug_mode": lambda mode: setattr(outer, "mode", mode),
        }  # fmt: skip
        for name, part in parts.items():
            monkeypatch.setattr(torch.cuda, name, part)


def test_a_capture_warms_up_on_the_stream_that_it_captures(monkeypatch):
    device = Device(monkeypatch)

    def forward():
        device.notes.append(f"forward on {device.stream}, mode {device.mode}")
        return (torch.ones(1),)

    capture = CudaCapture(torch.device("cpu"))
    capture(forward)
    assert device.notes[:2] == ["begin", "end"]  # what keeps the pool
    expected = [
        "side waits for main",
        *["forward on side, mode 0"] * 2,
        "forward on side, mode error",
        "main waits for side",
        "begin",
        "forward on side, mode 0",
        "end",
    ]
    assert device.notes[2:] == expected
    capture(forward)
    assert device.notes[2:] == 2 * expected
    assert (device.stream, device.mode) == ("main", 0)


@pytest.mark.parametrize("call", [2, 3])
def test_a_capture_that_fails_leaves_the_device_as_it_was(monkeypatch, call):
    device = Device(monkeypatch)
    calls = []

    def forward():
        calls.append(1)
        if len(calls) > call:
            raise RuntimeError("called a synchronizing CUDA operation")
        return (torch.ones(1),)

    with pytest.raises(RuntimeError, match="synchronizing"):
        CudaCapture(torch.device("cpu"))(forward)
    assert (device.stream, device.mode) == ("main", 0)
    assert device.notes.count("begin") == call - 1  # while warming up, nothing but the pool's own


def test_a_state_goes_with_its_last_reference():
    """Its buffers are most of a GPU's memory; a cycle through a graph would keep them until a collection."""
    model = tiny_model()
    capture = graphed(model)
    state = model.prefill([[1, 2]])
    for _ in range(3):
        _, state = model.score(state, torch.tensor([[3]]))
        state = model.rollback(state, [2])
    assert capture.num_replays == 2
    capture.graphs.clear()
    gc.disable()
    try:
        gone = weakref.ref(state), weakref.ref(state.layers[0].keys)
        del state
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_only_shapes_that_come_often_are_kept(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_EAGER_STEPS", 2)
    monkeypatch.setattr(cuda_graphs, "_MAX_GRAPHS", 2)
    model = tiny_model()
    capture = graphed(model)
    state, buffer, step = GraphedForwards(), torch.zeros(3), 0

    def add(given):
        return (buffer + given,)

    def replays(shape: int) -> bool:
        nonlocal step
        step += 1
        given = torch.full((shape, 3), float(step))
        found = state.run(model.graphs, shape, step, [buffer], [given], add)
        assert found is None or torch.equal(found[0], given)
        return found is not None

    assert [replays(1) for _ in range(4)] == [False, False, True, True]
    assert [replays(2) for _ in range(3)] == [False, False, True]
    assert replays(1)
    assert [replays(3) for _ in range(3)] == [False, False, True]  # goes into the place of shape 2
    assert replays(1)
    assert not replays(2)
    assert len(capture.graphs) == 3


def test_long_passes_and_other_devices_stay_eager():
    model = tiny_model()
    capture = graphed(model)
    state = model.prefill([[1]])
    for _ in range(4):
        _, state = model.score(state, torch.ones(1, 33, dtype=torch.long))
        state = model.rollback(state, [1])
    assert not capture.graphs
    assert tiny_model().graphs.capture is None  # on a CPU


def test_buckets():
    for size in range(1, 9000, 7):
        assert size <= bucket(size) <= max(size + 15, size * 9 / 8)
        assert bucket(size) % 16 == 0
    assert bucket(16) == 16
    assert bucket(17) == 32


def test_the_switch():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert isinstance(Graphs("auto", cuda, "").capture, CudaCapture)
    assert Graphs("auto", cpu, "").capture is None
    assert Graphs("off", cuda, "").capture is None
    assert Graphs(False, cuda, "").switch == "off"  # as YAML reads a bare off
    plain = tiny_model()
    with pytest.raises(UsageError, match="graphs: expected auto or off, got 'on'"):
        CausalLM(plain.hf_model, plain.tokenizer, "x", graphs="on")
    with pytest.raises(UsageError, match="graphs: expected auto or off, got 'on'"):
        st.models.hf.load_hf("nowhere", graphs="on")
    target = CausalLM(plain.hf_model, plain.tokenizer, "x", graphs="off")
    derived = [target.with_features(LAYERS), skip_layers(target, [1]), tiny_head(target)]
    assert [one.graphs.switch for one in derived] == ["off"] * 3


def test_the_switch_is_a_setting_that_changes_no_numbers():
    plain, off, draft_off = (
        st.plan([*overrides, "target=hf", "target.model=a/b", "draft_model=hf", "draft_model.model=a/c"]).cells[0]
        for overrides in ([], ["target.graphs=off"], ["draft_model.graphs=off"])
    )
    assert off.settings["target.graphs"] == "off"
    assert plain.fingerprint == off.fingerprint == draft_off.fingerprint
