"""What a cell's provenance says of kernels and graphs is what was done for this cell, and for no other."""

from __future__ import annotations

import pytest

from spectoolkit import config, runner
from spectoolkit.datatypes import SamplingParams
from spectoolkit.drafters import NGramDrafter
from spectoolkit.models import cuda_graphs
from spectoolkit.models.hf import wrap
from spectoolkit.provenance import NUM, begin_cell, note, provenance
from spectoolkit.runner import run_cells
from spectoolkit.study import Store
from spectoolkit.verifiers import Match
from tests.helpers.fake_graphs import graphed
from tests.helpers.tiny_models import tiny_model
from tests.helpers.toys import requests, run

TOY = ["target=tabular", "draft_model=tabular", "prompts.limit=2", "max_new_tokens=3", "+grid.seed=[0,1,2]"]


class Quiet:
    def update(self, n=1):
        pass

    def set_description(self, desc):
        pass


def test_a_cell_inherits_nothing_from_the_one_before(tmp_path):
    store, cells = Store(tmp_path), config.plan(TOY).cells

    def decode_cell(cell):
        if cell is cells[1]:
            note("kernels", "cuda:0: rejection (self-check passed)")
            note("graphs", f"a model: captured {NUM} forward passes", 3)
        runner.run_live(cell, store, Quiet())

    run_cells(cells, store, Quiet(), decode_cell)
    before, noted, after = store.describe(cells)
    assert before["kernels"] == after["kernels"] == "cpu: reference"  # the toy's logits are float64: no kernel's
    assert before["graphs"] == after["graphs"] == "no model that has any"
    assert noted["kernels"] == "cuda:0: rejection (self-check passed); cpu: reference"
    assert noted["graphs"] == "a model: captured 3 forward passes"
    whole = provenance()  # of a manifest: all that the process did
    assert "cuda:0: rejection (self-check passed)" in whole["kernels"]
    assert "a model: captured 3 forward passes" in whole["graphs"]


def test_a_replay_s_cells_say_what_the_replay_did_and_not_what_came_before(tmp_path):
    store = Store(tmp_path)
    note("kernels", "cuda:0: coupled (self-check passed)")
    cells = config.plan([*TOY[:-1], "engine=replay", "+grid.drafter=[argmax,same_temperature]"]).cells
    run_cells(cells, store, Quiet())
    assert [one["kernels"] for one in store.describe(cells)] == ["cpu: reference"] * 2


def test_rows_that_are_stored_again_keep_what_computed_them(tmp_path):
    store, cells = Store(tmp_path), config.plan(TOY[:-1]).cells
    (result,) = run_cells(cells, store, Quiet())
    begin_cell()
    note("kernels", "of another cell")
    store.save(cells[0], result.rows, {"kernels": result.rows.attrs["kernels"]})
    assert store.describe(cells)[0]["kernels"] == "cpu: reference"


def said_of_graphs(target) -> str:
    begin_cell()
    asked = requests(3, max_new_tokens=12, vocab_size=40, params=[SamplingParams()])
    run(target, NGramDrafter(2, 1), Match(), asked)
    return provenance(of_cell=True)["graphs"]


def refusing(forward):
    raise RuntimeError("operation not permitted when stream is capturing\nand more of it")


@pytest.mark.parametrize("eager_steps", [1, 1000])
def test_captured_forward_passes_are_counted(eager_steps, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_EAGER_STEPS", eager_steps)
    target = tiny_model()
    capture = graphed(target)
    counts = []
    for _ in range(2):
        capture.graphs.clear()
        assert said_of_graphs(target) == f"tiny llama: captured {len(capture.graphs)} forward passes"
        counts.append(len(capture.graphs))
    assert all(counts) if eager_steps == 1 else counts == [0, 0]


def test_why_a_model_is_eager_is_said_of_every_cell(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_EAGER_STEPS", 1)
    target = tiny_model()
    assert said_of_graphs(target) == "none (CPU)"
    plain = wrap(target.hf_model, target.tokenizer.hf_tokenizer, "plain", "off")
    assert said_of_graphs(plain) == "plain: off"
    target.graphs.capture = refusing
    why = "tiny llama: eager, because a forward pass could not be captured: operation not permitted when stream is "
    first, second = said_of_graphs(target), said_of_graphs(target)
    assert first == f"tiny llama: captured 0 forward passes; {why}capturing"
    assert second == f"{why}capturing"
