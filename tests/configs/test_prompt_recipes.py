"""The recipes of public data sets on files of their shape, and what a study says of prompts that it changed."""

import json
import logging

import pytest

from spectoolkit import config
from spectoolkit.errors import UsageError
from spectoolkit.runner import missing_requests, run_cells
from spectoolkit.study import Store
from tests.helpers.recipes import RECIPES, recipe_file

TOY = ["target=tabular", "draft_model=tabular", "max_new_tokens=4", "target.vocab_size=5"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def built(name, tmp_path, *overrides):
    """What the one cell of a recipe decodes."""
    (cell,) = config.plan([*TOY, f"prompts={name}", f"prompts.path={recipe_file(name, tmp_path)}", *overrides]).cells
    return cell.build()


def texts(experiment):
    """The texts of the requests, given back by the toy's tokenizer (a vocabulary that holds all bytes)."""
    return ["".join(chr((token + ord("a")) % 256) for token in request.prompt) for request in experiment.requests]


BYTES = ["target.vocab_size=256", "target.order=1"]


def test_every_recipe_is_tested():
    folder = config.config_folder() / "prompts"
    found = {path.stem for path in folder.glob("*.yaml") if "defaults: [datasets, _self_]" in path.read_text()}
    assert found == RECIPES.keys()
    for name in found:
        text = (folder / f"{name}.yaml").read_text()
        assert "# Licence: " in text
        assert "prompts.path=FILE" in text


def test_c4_continues_beginnings_of_pages(tmp_path):
    experiment = built("c4", tmp_path, *BYTES)
    assert texts(experiment) == [f"page {i} " + "word " * 10 + "word" for i in range(3)]  # 61 of 64 bytes
    assert experiment.prompt_changes == {"prompts cut to the first part that fits 64 tokens": 3}


def test_cnn_dailymail_summarises_and_long_articles_lose_their_end(tmp_path):
    experiment = built("cnn_dailymail", tmp_path, *BYTES)
    first, _, last = texts(experiment)
    assert first == "Summarise this article in three sentences.\n\narticle 1 word "
    assert last.startswith("Summarise this article in three sentences.\n\narticle 2000 word word")
    assert 4092 - 5 <= len(last) <= 4092
    assert experiment.prompt_changes == {"prompts cut to the first part that fits 4092 tokens": 1}


def test_gsm8k_asks_the_question(tmp_path):
    assert texts(built("gsm8k", tmp_path, *BYTES)) == [f"What is {i} + 1?" for i in range(3)]


def test_mt_bench_asks_the_first_turn(tmp_path):
    experiment = built("mt_bench", tmp_path, *BYTES, "prompts.limit=2")
    assert texts(experiment) == ["first 0", "first 1"]
    assert experiment.categories == {"0/0": "writing", "1/0": "maths"}
    assert experiment.prompt_changes == {"prompts without the user's later turns": 2}


def test_sharegpt_asks_the_first_message_and_leaves_out_what_is_no_or_too_long_a_prompt(tmp_path):
    experiment = built("sharegpt", tmp_path, *BYTES)
    assert texts(experiment) == ["one", "five"]
    assert sorted(experiment.prompt_changes.values()) == [1, 1, 2]
    assert experiment.prompt_changes["prompts left out (longer than 4092 tokens)"] == 1


def test_what_was_changed_is_said_in_every_place(tmp_path, caplog):
    said = "Of the prompt set: 1 prompts without the user's later turns; 2 rows skipped (first: "
    left_out = "1 prompts left out (longer than 4092 tokens)."
    prompts = ["prompts=sharegpt", f"prompts.path={recipe_file('sharegpt', tmp_path)}"]
    one = [*TOY, *prompts, f"folder={tmp_path / 'one'}"]
    for _ in range(2):  # decoded, then taken from the store
        shown = config.plan(one).run()
        assert said in shown
        assert left_out in shown
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="spectoolkit"):
        study = [*TOY, *prompts, "experiment=temperature_sweep", f"folder={tmp_path / 'study'}"]
        plan = config.plan(
            [*study, "grid.drafter=[argmax]", "grid.sampling.temperature=[1]", "grid.verifier=[rejection]"]
        )
        assert said in plan.run()
    assert len([record for record in caplog.records if "later turns" in record.getMessage()]) == 1
    assert left_out in (tmp_path / "study" / "table.md").read_text()
    for folder in ("one", "study"):
        manifest = json.loads((tmp_path / folder / "manifest.json").read_text())
        assert manifest["cells"][0]["prompt_changes"]["prompts left out (longer than 4092 tokens)"] == 1


@pytest.mark.parametrize("engine", ["live", "replay"])
def test_the_progress_bar_ends_at_its_end_also_where_prompts_were_left_out(tmp_path, engine):
    class Count:
        done = 0

        def update(self, n=1):
            self.done += n

        def set_description(self, desc): ...

    prompts = ["prompts=sharegpt", f"prompts.path={recipe_file('sharegpt', tmp_path)}"]
    cells = config.plan([*TOY, *prompts, f"engine={engine}"]).cells
    store, progress = Store(tmp_path), Count()
    total = missing_requests(cells, store)
    (result,) = run_cells(cells, store, progress)
    assert len(result.rows) == 2 < cells[0].num_requests
    assert progress.done == total


def test_nothing_is_said_where_nothing_was_changed(tmp_path):
    shown = config.plan([*TOY, "prompts.limit=2", f"folder={tmp_path / 'one'}"]).run()
    assert "prompt set" not in shown


def test_cells_are_known_by_the_prompts_that_are_there(tmp_path):
    def fingerprints(*overrides):
        (cell,) = config.plan([*TOY, "prompts=gsm8k", f"prompts.path={path}", *overrides]).cells
        return cell.fingerprint, json.dumps(cell.text_identity, sort_keys=True)

    path = recipe_file("gsm8k", tmp_path)
    base = fingerprints("prompts.limit=2")
    changes = [["prompts.seed=5"], ["prompts.max_tokens=7", "prompts.too_long=keep_head"], ["prompts.too_long=skip"]]
    for change in changes:
        both = zip(base, fingerprints("prompts.limit=2", *change), strict=True)
        assert all(one != other for one, other in both), change
    # Refusing changes no numbers.
    assert fingerprints("prompts.limit=2", "prompts.max_tokens=70") == base
    path.write_text(path.read_text().replace("What is", "What was"))
    assert fingerprints("prompts.limit=2") != base


def test_the_commands_of_the_document_are_read_as_they_are_meant(tmp_path):
    path = tmp_path / "my.jsonl"
    path.write_text('{"language": "French", "text": "Good day."}\n')
    said = ["prompts=datasets", f"prompts.path={path}", 'prompts.template="Translate into {language}: {text}"']
    said += ['prompts.system="Answer in one line."', 'prompts.split="train[:5000]"']
    (cell,) = config.plan([*TOY, *BYTES, *said]).cells
    assert texts(cell.build()) == ["Answer in one line.Translate into French: Good day."]


def test_length_rules_hold_for_every_prompt_set(tmp_path):
    (cell,) = config.plan([*TOY, "prompts.limit=8", "prompts.max_tokens=60", "prompts.too_long=keep_tail"]).cells
    assert max(len(request.prompt) for request in cell.build().requests) <= 60
    (cell,) = config.plan([*TOY, "prompts.limit=8", "prompts.max_tokens=60"]).cells
    with pytest.raises(UsageError, match=r"expected at most 60 tokens \(prompts.max_tokens\), got"):
        cell.build()
    with pytest.raises(UsageError, match=r"prompts.too_long: expected one of error, skip, .*got 'cut'"):
        config.plan([*TOY, "prompts.too_long=cut"])


def test_a_request_that_does_not_fit_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(UsageError, match=r"fit into the 4096 tokens .*prompts.too_long=skip, keep_head or keep_tail"):
        config.plan([*TOY, "max_new_tokens=4090", "prompts.limit=1", f"folder={tmp_path}"]).run()
