"""The benchmark on a tiny pair: its parts measure what they say."""

import contextlib
import gc
import importlib.util
import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from spectoolkit import config
from spectoolkit.datatypes import SamplingParams
from spectoolkit.drafters import ModelDrafter
from spectoolkit.errors import RunError, UsageError
from spectoolkit.models.layer_skip import skip_layers
from spectoolkit.studies import engine_benchmark, engines, recorded_calls
from spectoolkit.study import Experiment
from spectoolkit.verifiers import Rejection
from tests.helpers.tiny_models import tiny_model
from tests.helpers.toys import requests, toy_pair

HAS_FLASHSPEC = importlib.util.find_spec("flashspec") is not None  # never a dependency


def experiment(target, draft, temperature=0.7, num=5):
    asked = requests(num, max_new_tokens=9, vocab_size=40, params=[SamplingParams(temperature=temperature)])
    names = {request.id: request.id for request in asked}
    drafter = ModelDrafter(draft, target.vocab_size, ratio=1.0)
    return Experiment(target, drafter, Rejection(), asked, names, names, num_draft_tokens=3, batch_size=2)


def tiny_pair(temperature=0.7, num=5):
    target = tiny_model()
    return experiment(target, skip_layers(target, [1]), temperature, num)


def others(pair):
    found = {
        "assisted": engines.assisted_generation(pair, pair.requests, fixed_length=True),
        "defaults": engines.assisted_generation(pair, pair.requests, fixed_length=False),
    }
    return found | ({"flashspec": engines.flashspec(pair, pair.requests)} if HAS_FLASHSPEC else {})


needs_flashspec = pytest.mark.skipif(not HAS_FLASHSPEC, reason="needs flashspec")
OTHERS = ["assisted", "defaults", pytest.param("flashspec", marks=needs_flashspec)]


def test_the_loop_is_measured():
    pair = tiny_pair()
    row = engine_benchmark.Row({}, engines.loop(pair), 2, pair.target.device, pair.target.vocab_size)
    found = engine_benchmark.measured(row)
    assert 0 < found["forward_share"] < 1
    assert found["over_forwards"] == pytest.approx(1 / found["forward_share"])
    assert found["over_floor"] > 0
    assert 1 <= found["acceptance_length"] <= 4
    assert found["repeated"] == 1


def test_the_run_that_is_timed_is_not_the_one_that_is_recorded():
    asked = [replace(requests(1)[0], max_new_tokens=4)]

    def run():
        time.sleep(0.1)
        return [(1, 2, 3, 4)]

    def record():
        time.sleep(0.3)
        spans = SimpleNamespace(seconds=lambda: 0.15)
        return [(1, 2, 3, 3)], 2, SimpleNamespace(spans=spans, repeat=lambda: 0.05)

    row = engine_benchmark.Row({}, engines.Engine("other", asked, run, record), 1, torch.device("cpu"), 5)
    found = engine_benchmark.measured(row)
    assert found["over_floor"] == pytest.approx(2, rel=0.3)
    assert found["tokens_per_s"] == pytest.approx(40, rel=0.3)
    assert found["over_forwards"] == pytest.approx(2, rel=0.3)
    assert found["acceptance_length"] == 2
    assert found["repeated"] == 0


@pytest.mark.parametrize("name", OTHERS)
def test_another_engine_is_measured(name):
    pair = tiny_pair(num=2)
    row = engine_benchmark.Row({}, others(pair)[name], 1, pair.target.device, pair.target.vocab_size)
    found = engine_benchmark.measured(row)
    assert 0 < found["forward_share"] < 1
    assert 1 <= found["acceptance_length"] <= 9
    assert found["repeated"] == 1


def test_repeated_calls_of_the_loop_do_the_same_work():
    pair = tiny_pair()
    widths = []
    for model in (pair.target, pair.drafter.draft_model):
        model.hf_model.register_forward_pre_hook(
            lambda model, args, kwargs: widths.append((id(model), tuple(kwargs["input_ids"].shape))), with_kwargs=True
        )
    outputs, _, recording = engines.loop(pair).record()
    assert {method for _, method, _ in recording.calls} == {"prefill", "score", "rollback", "insert", "select"}
    in_the_run, widths[:] = list(widths), []
    assert recording.repeat() > 0
    assert widths == in_the_run
    assert outputs == engines.loop(pair).run()


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_repeated_forwards_of_another_engine_give_the_same_logits(name, temperature):
    """The same inputs on the same caches, with the same cut off them in between: else the logits would differ."""
    pair = tiny_pair(temperature, num=2)
    seen = []
    for model in (pair.target, pair.drafter.draft_model):
        model.hf_model.register_forward_hook(lambda model, args, output: seen.append((model, output["logits"])))
    engine = others(pair)[name]
    _, steps, recording = engine.record()
    assert any(model is None for model, *_ in recording.recording.calls)  # caches were cut
    in_the_run, seen[:] = list(seen), []
    assert recording.repeat() > 0
    assert recording.repeat() > 0  # not used up
    assert len(seen) == 2 * len(in_the_run) > 2 * steps
    for (model, logits), (other, again) in zip(2 * in_the_run, seen, strict=True):
        assert model is other
        torch.testing.assert_close(logits, again, rtol=0, atol=0)


def test_a_cache_that_the_model_makes_is_made_again():
    """An engine that gives the first forward pass none, and hands on what comes out."""
    model = tiny_model().hf_model
    model.set_attn_implementation("sdpa")
    seen = []
    with torch.no_grad(), recorded_calls.recorded_forwards([model, model], torch.device("cpu")) as recorder:
        output = model(torch.tensor([[3, 4, 5]]), use_cache=True)
        output.cache.crop(-1)
        model(torch.tensor([[7]]), cache=output.cache, use_cache=True)
    assert recorder.count(model) == 2
    assert recorder.spans.seconds() > 0
    model.register_forward_hook(lambda model, args, output: seen.append(output["cache"].get_seq_length()))
    recorder.repeat()
    assert seen == [3, 3]


@pytest.mark.parametrize("name", OTHERS)
def test_other_engines_leave_the_models_as_they_were(name):
    pair = tiny_pair(num=2)
    draft = pair.drafter.draft_model.hf_model
    before = draft.generation_config.to_dict()
    engine = others(pair)[name]
    outputs, _, recording = engine.record()
    recording.repeat()
    assert list(map(len, outputs)) == [request.max_new_tokens for request in pair.requests]
    assert draft.generation_config.to_dict() == before
    for model in (pair.target.hf_model, draft):
        assert model.config._attn_implementation == "spectoolkit_ragged"
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


def test_what_transformers_says_to_itself_is_not_shown():
    """Its assisted generation calls its own `generate` in a way that it calls deprecated."""
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logging.Logger.warning_once.cache_clear()  # it is said once per process
    logger.addHandler(handler)
    try:
        engines.assisted_generation(tiny := tiny_pair(num=1), tiny.requests, fixed_length=True).run()
        assert shown == []
        logging.getLogger("transformers.generation.utils").warning("something else")
        assert shown == ["something else"]
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("name", OTHERS)
def test_all_engines_decode_greedily_to_the_same_tokens(name):
    pair = tiny_pair(temperature=0.0, num=3)
    assert others(pair)[name].run() == engines.loop(pair).run()


def test_on_a_gpu_nothing_is_waited_for_between_marks(monkeypatch):
    waits, clock = [], iter([10.0, 13.0, 20.0, 24.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at_ms = next(clock)

        def synchronize(self):
            waits.append(self.at_ms)

        def elapsed_time(self, end):
            assert waits, "read before the device has come there"
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    spans = recorded_calls.Spans(torch.device("cuda"))
    for _ in range(4):
        spans.mark()
    assert not waits
    assert spans.seconds() == pytest.approx(7e-3)
    assert waits == [24.0]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([(1,) * 9], "expected 2 outputs, got 1"),
        ([(1,) * 9, (1,) * 8], "expected 9 tokens of request 'r1', or fewer with a stop id at their end, got 8"),
        ([(1,) * 9, (1,) * 10], "got 10"),
        ([(1,) * 9, (1,) * 8 + (-1,)], "expected tokens from 0 to 39"),
        ([(1,) * 9, (1,) * 8 + (40,)], "expected tokens from 0 to 39"),
    ],
)
def test_outputs_that_cannot_be_are_refused(outputs, message):
    asked = requests(2, max_new_tokens=9)
    asked = [replace(one, id=f"r{i}", max_new_tokens=9) for i, one in enumerate(asked)]
    engine = engines.Engine("other", asked, list, lambda: None)
    with pytest.raises(RunError, match=message):
        engines.check_outputs(engine, outputs, 40)
    stopping = engines.Engine("other", [replace(asked[0], stop_ids=frozenset({2}))], list, list)
    engines.check_outputs(stopping, [(1, 1, 2)], 40)


def test_models_of_another_kind_are_refused():
    target, draft = toy_pair()
    with pytest.raises(UsageError, match="expected a target and a draft model of transformers"):
        engine_benchmark.check_models(experiment(target, draft))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["sampling.top_p=0.9"], "sampling: expected nothing but a temperature.*top_p=0.9"),
        (["sampling.repetition_penalty=1.1"], "sampling: expected nothing but a temperature"),
        (["stop_strings=[x]"], r"stop_strings: expected none.*\['x'\]"),
        (["+grid.num_draft_tokens=[2,4]"], "grid: expected axes of engine_benchmark among .*, got num_draft_tokens"),
        (["study.repetitions=0"], r"study\.repetitions: expected an integer >= 1, got 0"),
        (["study.requests_per_row=0"], r"study\.requests_per_row: expected an integer >= 1, got 0"),
        (["study.compared_requests=-1"], r"study\.compared_requests: expected an integer >= 1, got -1"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_model_is_loaded(more, message):
    with pytest.raises(UsageError, match=message):
        config.plan(["experiment=engine_benchmark", *more])


def test_requests_are_spread():
    assert engine_benchmark.spread("abcdefg", 3) == ["a", "c", "e"]
    assert engine_benchmark.spread("abc", 4) == "abc"
    assert engine_benchmark.spread("abc", None) == "abc"


def test_the_collector_is_off_while_something_is_timed():
    with contextlib.suppress(ZeroDivisionError), engine_benchmark.undisturbed():
        was_enabled = gc.isenabled()
        raise ZeroDivisionError
    assert (was_enabled, gc.isenabled()) == (False, True)


def test_every_batch_size_and_every_other_engine_is_measured_once_in_each_repetition():
    overrides = ["experiment=engine_benchmark_tiny", "prompts.limit=4", "grid.batch_size=[1,2]"]
    cells = config.plan(overrides).cells
    assert engine_benchmark._groups(cells) == [list(cells)]
    rows = engine_benchmark.rows_of(cells, 1, 3, with_flashspec=False)
    found = [(row.engine.name, row.batch_size, len(row.engine.requests)) for row in rows]
    assert found == [
        ("spectoolkit", 1, 1),
        ("spectoolkit", 2, 2),
        ("transformers", 1, 3),
        ("transformers, its defaults", 1, 3),
    ]
    one = [{"tokens_per_s": rate} for rate in (6.0, 9.0, 3.0, 2.0)]
    ratios = engine_benchmark.with_ratios(rows, one)
    assert ratios[1] == {"tokens_per_s": 9.0, "over_transformers": 3.0, "over_transformers_defaults": 4.5}
    assert ratios[2] == {"tokens_per_s": 3.0}
    runs = [[{"over_floor": value, "repeated": value > 1} for _ in rows] for value in (3.0, 1.0, 1.5)]
    entry = engine_benchmark.summary(rows, runs).iloc[0]
    assert [entry[f"over_floor{end}"] for end in ("", "_min", "_max")] == [1.5, 1.0, 3.0]
    assert entry["repeated"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("version", "said"),
    [(None, "not installed"), ("0.2.9", "not measured, since version 0.3.* was expected, got 0.2.9"), ("0.3.7", None)],
)
def test_flashspec_is_measured_where_it_is_installed(version, said, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: version)
    monkeypatch.setattr(engines.importlib, "import_module", lambda name: SimpleNamespace(__version__=version))
    assert engines.flashspec_missing() == said


def test_the_tiny_pair_is_measured_without_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "flashspec_missing", lambda: "not installed")
    overrides = ["experiment=engine_benchmark_tiny", "prompts.limit=1", "max_new_tokens=12", "study.repetitions=2"]
    shown = config.plan([*overrides, f"folder={tmp_path}"]).run()
    table = pd.read_csv(tmp_path / "table.csv").set_index("engine")
    assert list(table.index) == ["spectoolkit", "transformers", "transformers, its defaults"]
    assert (table["over_forwards"] > 1).all()
    assert (table["over_floor_min"] <= table["over_floor"]).all()
    assert (table["over_floor"] <= table["over_floor_max"]).all()
    ours = table.loc["spectoolkit"]
    assert ours["over_transformers_min"] <= ours["over_transformers"] <= ours["over_transformers_max"]
    assert table["over_transformers"].isna().tolist() == [False, True, True]
    assert "time over floor" in shown
    assert "flashspec: not installed." in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["target.vocab_size=100"], "vocab_size: expected at least 256"),
        (["target.num_layers=0"], "num_layers: expected an integer >= 1, got 0"),
        (["target.hidden_size=60"], r"hidden_size: expected a multiple of 2 \* num_heads = 8, got 60"),
        (["draft_model.share=2"], r"draft_model\.share: expected a number in \[0, 1\], got 2"),
        (["target=tabular"], "expected a target=random for a random draft model"),
    ],
)
def test_random_models_of_no_size_are_refused(more, message):
    with pytest.raises(UsageError, match=message):
        config.plan(["experiment=engine_benchmark_tiny", *more]).cells[0].build()
