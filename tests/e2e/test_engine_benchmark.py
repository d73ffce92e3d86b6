"""The benchmark on a tiny pair: its parts measure what they say."""

import pandas as pd
import pytest

from spectoolkit import config
from spectoolkit.datatypes import SamplingParams
from spectoolkit.drafters import ModelDrafter
from spectoolkit.errors import UsageError
from spectoolkit.models.layer_skip import skip_layers
from spectoolkit.studies import engine_benchmark
from spectoolkit.study import Experiment
from spectoolkit.verifiers import Rejection
from tests.helpers.tiny_models import tiny_model
from tests.helpers.toys import requests, toy_pair


def experiment(target, draft, temperature=0.7):
    asked = requests(5, max_new_tokens=9, vocab_size=40, params=[SamplingParams(temperature=temperature)])
    names = {request.id: request.id for request in asked}
    drafter = ModelDrafter(draft, target.vocab_size, ratio=1.0)
    return Experiment(target, drafter, Rejection(), asked, names, names, num_draft_tokens=3, batch_size=2)


def test_the_loop_is_recorded_and_repeated():
    target = tiny_model()
    found = engine_benchmark._loop(experiment(target, skip_layers(target, [1])))
    assert 0 < found["forward_share"] < 1
    assert found["over_floor"] > 0
    assert 1 <= found["acceptance_length"] <= 4


def test_repeated_calls_do_the_same_work():
    target = tiny_model()
    recorder = engine_benchmark.Recorder()
    model = engine_benchmark.RecordedModel(target, recorder)
    pair = experiment(model, engine_benchmark.RecordedModel(skip_layers(target, [1]), recorder))
    from spectoolkit.runner import completions_of

    assert len(list(completions_of(pair))) == 5
    assert {method for _, method, _ in recorder.calls} == {"prefill", "score", "rollback", "insert", "select"}
    assert recorder.repeat() > 0


@pytest.mark.parametrize("fixed_length", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_assisted_generation_leaves_the_models_as_they_were(fixed_length, temperature):
    target = tiny_model()
    pair = experiment(target, skip_layers(target, [1]), temperature)
    before = pair.drafter.draft_model.hf_model.generation_config.to_dict()
    assert engine_benchmark._assisted(pair, pair.requests[:2], fixed_length=fixed_length) > 0
    assert pair.drafter.draft_model.hf_model.generation_config.to_dict() == before
    assert target.hf_model.config._attn_implementation == "spectoolkit_ragged"


def test_models_of_another_kind_are_refused():
    target, draft = toy_pair()
    with pytest.raises(UsageError, match="expected a target and a draft model of transformers"):
        engine_benchmark.check_models(experiment(target, draft))


def test_the_tiny_pair_is_measured_without_a_checkpoint(tmp_path):
    overrides = ["experiment=engine_benchmark_tiny", "prompts.limit=1", "max_new_tokens=12", "study.repetitions=1"]
    shown = config.plan([*overrides, f"folder={tmp_path}"]).run()
    table = pd.read_csv(tmp_path / "table.csv")
    assert table["over_floor"].item() > 1
    assert "time over floor" in shown


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
