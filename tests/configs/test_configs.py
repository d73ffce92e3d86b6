"""Every option of every group and every experiment composes, is checked, and runs on the toy."""

from pathlib import Path

import pandas as pd
import pytest
import yaml
from hydra.utils import get_object

from spectoolkit import config
from spectoolkit.drafters import ModelDrafter
from spectoolkit.errors import UsageError
from tests.helpers.recipes import RECIPES, recipe_file

CONFIGS = config.config_folder()
TOY = ["target=tabular", "draft_model=tabular", "prompts.limit=2", "max_new_tokens=5"]
NEEDS = {
    "target=hf": ["target.model=some/model"],
    "draft_model=hf": ["draft_model.model=some/model"],
    "draft_model=layer_skip": ["draft_model.skipped_layers=[1]"],
    "draft_model=eagle3": ["draft_model.model=some/head"],
    "drafter=temperature": ["drafter.ratio=0.5"],
    "verifier=recursive": ["drafter=chains"],
    "verifier=wrong/distinct_as_independent": ["drafter=distinct_chains"],
}
STUDIES_OF_REAL_MODELS = {
    "layer_skip_search",
    "engine_benchmark",
    "engine_benchmark_tiny",
    "cpu_settings",
    "train_draft_head",
    "train_draft_head_composed",
    "train_draft_head_gpu",
}
BENCHMARKS = {"replay_benchmark"}  # measure every time
TESTED_ELSEWHERE = {"speed", "kernel_benchmark", "batched_verification", "batched_verification_ngram"}  # likewise
FEW = {  # less of what a study has much of
    "exactness": ["samples_per_prompt=300", "drafter=same_temperature"],
    "draft_sampling": ["grid.sampling.temperature=[0.0,0.5]"],
}


def options(group: str) -> list[str]:
    """Its options, those in folders of it as "folder/option"."""
    folder = CONFIGS / group
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def all_options() -> list[str]:
    return [f"{group}={option}" for group in config.GROUPS for option in options(group)]


def laws_of(group: str, option: str) -> set[type]:
    node = yaml.safe_load((CONFIGS / group / f"{option}.yaml").read_text())
    made = get_object(node.pop("_target_"))
    if group == "verifier":
        return set(made.laws)
    needed = {"draft_model": None, "vocab_size": 0} if issubclass(made, ModelDrafter) else {}
    given = dict(need.removeprefix("drafter.").split("=") for need in NEEDS.get(f"drafter={option}", []))
    return set(made(**node | needed | {key: yaml.safe_load(value) for key, value in given.items()}).laws)


def fit(drafter: str, verifier: str) -> bool:
    return laws_of("drafter", drafter) <= laws_of("verifier", verifier)


def fitting_verifier(drafter: str) -> str:
    return next(verifier for verifier in options("verifier") if fit(drafter, verifier))


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "category": "x", "text": "abc"}\n{"id": "b", "category": "x", "text": "bca"}\n')
    return path


@pytest.mark.parametrize("option", all_options())
def test_every_option_is_accepted(option, prompt_file, tmp_path):
    needs = NEEDS.get(option, [])
    if option.startswith("drafter="):
        needs = [*needs, f"verifier={fitting_verifier(option.removeprefix('drafter='))}"]
    group, name = option.split("=")
    if name in RECIPES:
        needs = [f"prompts.path={recipe_file(name, tmp_path)}"]
    if option in ("prompts=jsonl", "prompts=datasets"):
        needs = [f"prompts.path={prompt_file}", *(["prompts.column=text"] if name == "datasets" else [])]
    (cell,) = config.plan([option, *needs]).cells
    assert cell.settings[f"{group}.name"] == name


@pytest.mark.parametrize("drafter", options("drafter"))
@pytest.mark.parametrize("verifier", options("verifier"))
def test_every_pair_whose_laws_fit_runs_and_the_others_are_refused(drafter, verifier, tmp_path):
    overrides = [*TOY, f"drafter={drafter}", f"verifier={verifier}", f"folder={tmp_path}"]
    overrides += NEEDS.get(f"drafter={drafter}", [])
    if fit(drafter, verifier):
        assert "acceptance length" in config.plan(overrides).run()
    else:
        with pytest.raises(UsageError, match="the verifier judges drafts of the laws"):
            config.plan(overrides)


@pytest.mark.parametrize(
    "option", [f"{group}={option}" for group in ("drafter", "verifier") for option in options(group) if "/" in option]
)
def test_a_part_that_is_wrong_on_purpose_says_so(option):
    group, name = option.split("=")
    text = (CONFIGS / group / f"{name}.yaml").read_text()
    assert text.startswith("# WRONG on purpose")
    assert get_object(yaml.safe_load(text)["_target_"]).is_negative_control
    assert name.startswith("wrong/")
    other = [f"verifier={fitting_verifier(name)}"] if group == "drafter" else NEEDS.get(option, [])
    (cell,) = config.plan([*TOY, option, *other, "engine=auto"]).cells
    assert cell.settings["verifier.is_lossless"] is False
    assert cell.engine == "live"


@pytest.mark.parametrize("experiment", options("experiment"))
@pytest.mark.parametrize("size", [[], ["size=tiny"]])
def test_every_experiment_composes(experiment, size):
    plan = config.plan([f"experiment={experiment}", *size])
    assert plan.name == experiment
    assert plan.cells


@pytest.mark.parametrize(
    "experiment", sorted(set(options("experiment")) - STUDIES_OF_REAL_MODELS - BENCHMARKS - TESTED_ELSEWHERE)
)
def test_every_experiment_runs_on_the_toy_and_its_second_run_computes_nothing(experiment, tmp_path, monkeypatch):
    overrides = [f"experiment={experiment}", *TOY, *FEW.get(experiment, []), f"folder={tmp_path}"]
    first = config.plan(overrides)
    first.run()
    assert (tmp_path / "manifest.json").exists()
    table = (tmp_path / "table.csv").read_bytes()

    def no_building(*_):
        raise AssertionError("a stored cell was computed again")

    monkeypatch.setattr("spectoolkit.runner.run_live", no_building)
    monkeypatch.setattr("spectoolkit.runner.run_replay", no_building)
    config.plan(overrides).run()
    assert (tmp_path / "table.csv").read_bytes() == table


@pytest.mark.parametrize("experiment", sorted(BENCHMARKS))
def test_every_benchmark_runs_on_the_toy(experiment, tmp_path):
    shown = config.plan([f"experiment={experiment}", *TOY, f"folder={tmp_path}", "num_draft_tokens=2"]).run()
    assert "200 cells" in shown
    assert (tmp_path / "manifest.json").exists()


def test_the_sweep_has_a_row_per_cell_and_equal_strategies_at_temperature_zero(tmp_path):
    overrides = ["experiment=temperature_sweep", *TOY, "prompts.limit=16", f"folder={tmp_path}"]
    config.plan(overrides).run()
    table = pd.read_csv(tmp_path / "table.csv")
    overall = table[table["scope"] == "overall"]
    assert len(overall) == 5 * 3 * 2
    assert set(table[table["scope"] == "category"]["category"]) == {
        "rewriting", "summarising", "extraction", "code", "maths", "story", "factual", "multi_turn",
    }  # fmt: skip
    greedy = overall[(overall["sampling.temperature"] == 0) & (overall["drafter"] != "ngram")]
    assert greedy["acceptance_length"].nunique() == 1
    for name in ("table.md", "table.tex", "table.parquet", "figure.png", "figure.pdf", "differences.csv"):
        assert (tmp_path / name).stat().st_size > 0


def test_the_manifest_says_how_the_numbers_were_made(tmp_path):
    plan = config.plan(["experiment=temperature_sweep", *TOY, f"folder={tmp_path}"])
    plan.run()
    manifest = yaml.safe_load((tmp_path / "manifest.json").read_text())
    assert manifest["config"]["sampling"]["top_p"] == 1.0
    assert {"torch", "transformers"} <= manifest["provenance"]["packages"].keys()
    assert len(manifest["cells"]) == 30
    for cell in manifest["cells"]:
        assert (tmp_path / "cells" / cell["file"]).exists()
        assert {"settings", "wall_s", "device", "written", "spectoolkit"} <= cell.keys()


def test_a_cell_is_known_by_what_can_change_its_numbers():
    def fingerprint(*overrides):
        (cell,) = config.plan(["target=tabular", "draft_model=tabular", *overrides]).cells
        return cell.fingerprint

    base = fingerprint()
    assert fingerprint() == base
    assert fingerprint("name=other", "folder=elsewhere") == base
    for change in ("seed=1", "sampling.top_p=0.9", "num_draft_tokens=3", "drafter=argmax", "verifier=match",
                   "draft_model.weight=0.4", "prompts.limit=3", "prompts.chat_template=false", "stop_strings=[a]",
                   "max_new_tokens=31", "target.seed=1"):  # fmt: skip
        assert fingerprint(change) != base, change
    # A drafter without a draft model does not depend on one.
    ngram = fingerprint("drafter=ngram")
    assert fingerprint("drafter=ngram", "draft_model.weight=0.4") == ngram
    (smollm2,) = config.plan([]).cells
    (elsewhere,) = config.plan(["target.cache_dir=/nowhere"]).cells
    assert smollm2.fingerprint == elsewhere.fingerprint


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter=foo"], r"Could not find 'drafter/foo'[\s\S]*same_temperature"),
        (["drafter.ration=1"], r"Could not override 'drafter\.ration'"),
        (["+drafter.zzz=1"], r"drafter .*unknown zzz \(it takes: ratio, constant, "),
        (["+drafter.draft_model=x"], "unknown draft_model"),
        (["drafter.ratio=high"], "ratio: expected float | None, got 'high'"),
        (["drafter=temperature"], "exactly one of ratio and constant"),
        (["drafter=top_m", "drafter.keep=0"], r"drafter\.keep: expected an integer >= 1, got 0"),
        (["drafter=top_m", "drafter.keep=2.5"], r"keep: expected int, got 2\.5"),
        (["drafter=chains", "verifier=recursive", "drafter.num_chains=0"], r"drafter\.num_chains: expected an integer"),
        (["drafter=chains", "verifier=recursive", "engine=replay"], "Recursive has no given_output"),
        (["drafter=coupled"], r"CoupledDrafter with Rejection: .*'TopM'.*'SharedNoise'"),
        (["+zz=1"], "unknown settings: zz"),
        (["target=hf"], r"no value for model; say target\.model=\.\.\."),
        (["draft_model=layer_skip"], r"no value for skipped_layers; say draft_model\.skipped_layers"),
        (["sampling.temperature=-1"], r"sampling\.temperature: expected a number >= 0 \(0 is greedy\), got -1"),
        (["sampling.temperature=warm"], r"sampling\.temperature: expected a finite number .*got 'warm'"),
        (["sampling.temperature=nan"], r"sampling\.temperature: expected a finite number .*got nan"),
        (["sampling.top_p=0"], r"sampling\.top_p: expected a number in \(0, 1\]"),
        (["sampling.top_p=1.1"], r"sampling\.top_p: expected a number in \(0, 1\]"),
        (["sampling.top_k=2.5"], r"sampling\.top_k: expected an integer >= 0"),
        (["num_draft_tokens=0"], "num_draft_tokens: expected an integer from 1 to 1024, got 0"),
        (["num_draft_tokens=2.0"], "num_draft_tokens: expected an integer from 1 to 1024, got 2.0"),
        (["batch_size=true"], "batch_size: expected an integer >= 1, got True"),
        (["seed=x"], "seed: expected an integer"),
        (["stop_strings=[1]"], "stop_strings: expected a list of non-empty texts"),
        (["verifier=typical", "verifier.epsilon=x"], r"epsilon: expected float, got 'x'"),
        (["verifier=typical", "verifier.epsilon=0"], r"verifier\.epsilon: expected a number in \(0, 1\]"),
        (["verifier=typical", "verifier.recovery=none"], "recovery"),
        (["verifier=relaxed", "verifier.top_n=0"], r"verifier\.top_n: expected an integer >= 1, got 0"),
        (["verifier=threshold", "verifier.threshold_acc=0"], r"verifier\.threshold_acc: expected a number in \(0, 1\]"),
        (["verifier=lenient", "verifier.lenience=2"], r"verifier\.lenience: expected a number in \(0, 1\], got 2"),
        (["verifier=mixture", "verifier.draft_weight=-1"], r"verifier\.draft_weight: expected a number in \[0, 1\]"),
        (["drafter=wrong/argmax_as_sampled", "engine=replay"], "ArgmaxAsSampled is wrong on purpose"),
        (["verifier=wrong/whole_block", "engine=replay"], "WholeBlock is not lossless"),
        (["prompts.categories=[nope]"], "categories: expected only rewriting"),
        (["prompts=jsonl", "prompts.path=/nonexistent.jsonl"], "expected a readable file"),
        (["drafter._target_=no.such"], r"drafter\._target_: expected the path of a class"),
        (["experiment=temperature_sweep", "sampling.temperature=0.4"], r"is an axis of this study.*grid\.sampling"),
        (["experiment=temperature_sweep", "grid.drafter=argmax"], r"grid\.drafter: expected a non-empty list"),
        (["drafter=null"], "drafter: expected one of its options|Config group override"),
        (["~num_draft_tokens"], "num_draft_tokens: expected an integer from 1 to 1024, got nothing"),
        (["study=null"], "study: expected a mapping with a _target_, got None"),
        (["grid=5"], "grid: expected a mapping"),
        (["samples_per_prompt=null"], "samples_per_prompt: expected an integer >= 1, got None"),
        (["verifier._target_=spectoolkit.verifiers"], r"verifier\._target_: expected the path of a class or function"),
        (["sampling.top_k=99999999999999999999"], r"sampling\.top_k: expected an integer >= 0"),
        (["drafter.ratio=inf"], "as a number from 0 to 1e"),
        (["drafter.ratio=99999999999999999999"], "ratio: expected float"),
        (["sampling.logit_bias={true:5}"], r"sampling\.logit_bias: expected token ids"),
        (["sampling.logit_bias={1:1e38}"], r"sampling\.logit_bias: expected token ids .* of at most 1e\+09"),
        (["num_draft_tokens=100000"], "num_draft_tokens: expected an integer from 1 to 1024"),
        (["trajectories=/nonexistent"], "trajectories: only a replay reads them"),
        (["engine=replay", "trajectories=/nonexistent"], "trajectories: expected a file"),
        (["+grid.seed=[0,0]"], "expected one cell per point of the axes, got two at seed=0"),
        (["+grid.name=[a,b]"], r"grid\.name: a grid varies the settings of cells"),
        (["+grid.nope=[1]"], "nope: the chosen options have no such setting"),
        (["+grid.sampling=[default,greedy]", "sampling.temperature=0.5"], "sampling is an axis of this study"),
        (["cases=[{num_draft_tokens: 2}]", "num_draft_tokens=3"], r"say cases=\[\.\.\.\], which set it$"),
        (["cases=[{drafter:argmax}]", "+grid.drafter=[ngram]"], "cases: drafter meets the axis drafter of the grid"),
        (["cases=[{drafter:[argmax]}]"], "cases: expected the name of an option for drafter"),
        (["experiment=temperature_sweep", "grid.drafter=[ngram]"], r"study\.baseline: expected settings of at least"),
        (["experiment=temperature_sweep", "study.panel=seed"], "study: expected x, line and panel among the axes"),
        (["experiment=replay_check", "grid.engine=[live]"], "expected every cell live and replayed"),
        (["pairs={}"], "exactly one of ratio and constant"),
        (["pairs=all"], "pairs: expected settings of options of drafter and verifier, got 'all'"),
        (["pairs={drafter: {nope: {}}}"], r"pairs\.drafter: expected options among argmax.*got nope"),
        (["pairs={}", "+grid.verifier=[block]"], "pairs: they vary drafter and verifier themselves"),
        (["pairs={}", "drafter=coupled", "verifier=block"], "CoupledDrafter with Block"),
        (["experiment=storage", "study.lower=foo"], r"study\.lower: expected a strategy of the cells"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_before_anything_is_loaded(overrides, message, monkeypatch):
    def no_loading(dtype="", device="", cache_dir=None, graphs=""):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("spectoolkit.models.smollm2.load_smollm2", no_loading)
    with pytest.raises(UsageError, match=message):
        config.plan(overrides)


def test_all_errors_are_reported_at_once():
    overrides = ["sampling.temperature=-1", "num_draft_tokens=0", "verifier=typical", "verifier.epsilon=7"]
    with pytest.raises(UsageError) as caught:
        config.plan([*overrides, "+grid.drafter=[argmax,temperature]"])
    for part in ("sampling.temperature", "num_draft_tokens", "verifier.epsilon", "ratio and constant"):
        assert str(caught.value).count(part) == 1


def chosen(plan) -> list[tuple]:
    return [(cell.settings["drafter.name"], cell.settings["verifier.name"]) for cell in plan.cells]


def test_pairs_are_all_that_fit_and_a_chosen_option_stays():
    toy = ["target=tabular", "draft_model=tabular"]
    ratio = "pairs={drafter: {temperature: {ratio: 0.7}}}"
    every = config.plan([*toy, ratio])
    names = {group: config.option_names(group) for group in config.PAIRED}
    assert all(set(options(group)) <= set(names[group]) for group in config.PAIRED)
    assert chosen(every) == [(d, v) for d in names["drafter"] for v in names["verifier"] if fit(d, v)]
    assert every.axes == ("drafter", "verifier")
    assert {c.settings["drafter.ratio"] for c in every.cells if c.settings["drafter.name"] == "temperature"} == {0.7}
    some = config.plan([*toy, ratio, "drafter=coupled"])
    assert chosen(some) == [("coupled", v) for v in names["verifier"] if fit("coupled", v)]
    assert some.axes == ("verifier",)
    assert chosen(config.plan([*toy, ratio, "verifier=block", "drafter=ngram"])) == [("ngram", "block")]
    with_others = config.plan([*toy, ratio, "verifier=match", "+grid.num_draft_tokens=[1,2]"])
    assert len(with_others.cells) == 2 * sum(fit(drafter, "match") for drafter in names["drafter"])


def test_options_composed_apart_are_those_composed_together():
    plan = config.plan(["experiment=temperature_sweep", "grid.drafter=[top_m]", "grid.verifier=[typical]",
                        "study.baseline=null", "grid.sampling.temperature=[0.5]"])  # fmt: skip
    together = config.plan(["drafter=top_m", "verifier=typical", "sampling.temperature=0.5", "prompts.limit=80",
                            "max_new_tokens=28", "batch_size=40"])  # fmt: skip
    assert plan.cells[0].fingerprint == together.cells[0].fingerprint


def test_texts_in_a_grid_stay_as_they_are():
    values = ["x,y", " a", "k:v", "=", "a(b", "é", '"q', "1", "null"]
    plan = config.plan(["target=tabular", "draft_model=tabular", "+grid.stop_strings=[[a],[b]]"])
    assert [cell.settings["stop_strings"] for cell in plan.cells] == [["a"], ["b"]]
    base = config._compose(("target=tabular",))[0]
    for value in values:
        assert config._resolved(base, {"stop_strings": [value]})["stop_strings"] == [value]


def test_changed_files_are_not_taken_for_the_ones_before(prompt_file, tmp_path):
    overrides = ["target=tabular", "draft_model=tabular", "prompts=jsonl", f"prompts.path={prompt_file}"]
    (before,) = config.plan(overrides).cells
    prompt_file.write_text(prompt_file.read_text().replace("abc", "abd"))
    (after,) = config.plan(overrides).cells
    assert before.fingerprint != after.fingerprint
    assert before.text_identity != after.text_identity
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("1")
    (before,) = config.plan(["target=hf", f"target.model={model}"]).cells
    (model / "weights").write_text("22")
    (after,) = config.plan(["target=hf", f"target.model={model}"]).cells
    assert before.fingerprint != after.fingerprint


def test_a_home_folder_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.plan(["folder='~/study'"]).folder == tmp_path / "study"


def test_a_jsonl_fault_names_file_and_line(prompt_file):
    prompt_file.write_text(prompt_file.read_text() + "{broken\n")
    with pytest.raises(UsageError, match=r"prompts\.jsonl.*3"):
        config.plan(["prompts=jsonl", f"prompts.path={prompt_file}"])


def test_the_package_lists_every_folder_of_configs():
    """A wheel carries `*.yaml`, `*/*.yaml` and `*/*/*.yaml`; nothing may lie deeper."""
    assert {path.relative_to(CONFIGS).parts.__len__() for path in CONFIGS.rglob("*.yaml")} <= {1, 2, 3}
    assert Path(CONFIGS / "config.yaml").exists()


def test_a_folder_keeps_the_tables_of_its_study(tmp_path):
    overrides = ["experiment=temperature_sweep", *TOY, f"folder={tmp_path}", "grid.drafter=[argmax,ngram]"]
    config.plan(overrides).run()
    table = (tmp_path / "table.csv").read_bytes()
    with pytest.raises(UsageError, match=r"holds the tables of a study with other settings \(num_draft_tokens\)"):
        config.plan([*overrides, "num_draft_tokens=2"]).run()
    assert (tmp_path / "table.csv").read_bytes() == table
    config.plan([*overrides[:-1], "grid.drafter=[argmax]"]).run()  # another grid is the same study
    assert (tmp_path / "table.csv").read_bytes() != table


def test_a_stored_cell_says_so(tmp_path):
    overrides = ["target=tabular", "draft_model=tabular", "prompts.limit=2", "max_new_tokens=4", f"folder={tmp_path}"]
    first, second = config.plan(overrides).run(), config.plan(overrides).run()
    assert "same_temperature + rejection, temperature 1.0, K = 4, target tabular" in first
    assert "stored in" in first
    assert "taken from" in second


def test_a_changed_drafter_is_computed_again(monkeypatch):
    overrides = ["target=tabular", "draft_model=tabular", "drafter=ngram"]
    (before,) = config.plan(overrides).cells
    monkeypatch.setattr("spectoolkit.assembly.inspect.getsource", lambda cls: "changed")
    (after,) = config.plan(overrides).cells
    assert before.fingerprint != after.fingerprint


def test_a_broken_file_in_a_folder_of_ones_own_is_named_and_odd_names_are_no_options(tmp_path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "broken.yaml").write_text("_target_: [")
    (tmp_path / "drafter" / "a$b#{}.yaml").write_text("_target_: spectoolkit.drafters.NGramDrafter")
    own = f"hydra.searchpath=[file://{tmp_path}]"
    with pytest.raises(UsageError, match=r"broken\.yaml"):
        config.plan([own, *TOY, "drafter=broken"])
    found = config.option_names("drafter", [own])
    assert "broken" in found
    assert not any("$" in name for name in found)
