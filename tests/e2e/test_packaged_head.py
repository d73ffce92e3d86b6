"""The draft head that comes with the package, on the model that it was trained for."""

import json
from pathlib import Path

import pytest
import yaml

import spectoolkit
from spectoolkit import config
from spectoolkit.errors import UsageError
from spectoolkit.metrics import summarise
from spectoolkit.models.eagle3_files import load_packaged_eagle3
from spectoolkit.study import Store
from tests.helpers.tiny_models import tiny_model

FOLDER = Path(spectoolkit.__file__).parent / "data" / "eagle3" / "smollm2"
OPTION = yaml.safe_load((config.config_folder() / "draft_model" / "smollm2_eagle3.yaml").read_text())


def test_it_is_small_and_has_a_card():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 15e6
    card = (FOLDER / "README.md").read_text()
    for name in ("Text", "Training", "Held out", "Command", "Licence", "none shares 12 consecutive tokens"):
        assert name in card
    layout = json.loads((FOLDER / "config.json").read_text())
    assert layout["speculators_model_type"] == "eagle3"
    assert layout["speculators_config"]["verifier"]["name_or_path"] == "smollm2"


def test_another_target_is_refused_with_what_to_do():
    with pytest.raises(
        UsageError, match=r"expected the target smollm2.*draft_model=eagle3.*experiment=train_draft_head"
    ):
        load_packaged_eagle3(tiny_model(), "smollm2", OPTION["sha256"])


def test_a_damaged_file_is_refused():
    target = tiny_model()
    target.name = "smollm2"
    with pytest.raises(UsageError, match=r"model.safetensors with the SHA-256 0000.*install the package anew"):
        load_packaged_eagle3(target, "smollm2", "0000")


def test_it_drafts_well_and_greedy_output_is_that_of_the_target(tmp_path):
    """float32, because bf16 has near ties that flip with the shape of a matrix product."""
    settings = ["target.dtype=float32", "prompts.limit=8", "max_new_tokens=16", f"folder={tmp_path}"]
    plan = config.plan([*settings, "+grid.sampling.temperature=[0.0,0.7]", "+grid.drafter=[same_temperature,none]"])
    plan.run()
    lengths, texts = {}, {}
    for cell in plan.cells:
        rows = Store(tmp_path).load(cell).rows
        key = (cell.settings["drafter.name"], cell.settings["sampling.temperature"])
        lengths[key] = summarise(rows)["acceptance_length"]
        texts[key] = {row["request_id"]: tuple(row["tokens"]) for row in rows.to_dict("records")}
    assert lengths["same_temperature", 0.0] > 1.3
    assert lengths["same_temperature", 0.7] > 1.3
    assert texts["same_temperature", 0.0] == texts["none", 0.0]
