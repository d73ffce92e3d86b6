"""What a notebook needs of the package: names at hand, parts of one's own, no stale cells when their code changes."""

import linecache
import subprocess
import sys
import types

import pytest
from hydra.core.config_store import ConfigStore

import spectoolkit
from spectoolkit import config
from spectoolkit.errors import UsageError

TOY = ["target=tabular", "draft_model=tabular", "prompts.limit=2", "max_new_tokens=4"]
SOURCE = """
from dataclasses import dataclass
from spectoolkit.drafters import ModelDrafter

@dataclass(frozen=True)
class Own(ModelDrafter):
    power: int = {power}
    scale = 1

    def law_probs(self, probs):
        rows = self.raised(probs){change}
        return rows / rows.sum(-1, keepdim=True)

    @property
    def feature_layers(self):
        return (){in_property}

    def raised(self, probs):
        return probs ** self.power
"""


@pytest.fixture
def typed(monkeypatch):
    """Defines `Own` as a notebook does: in a module without a file, its lines known to `linecache`."""
    notebook = types.ModuleType("notebook_of_the_test")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    count = iter(range(100))

    def typed(power: int = 2, change: str = "", in_property: str = ""):
        source = SOURCE.format(power=power, change=change, in_property=in_property)
        name = f"<cell of the test {next(count)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), vars(notebook))
        return notebook.Own

    return typed


@pytest.fixture(autouse=True)
def no_option_stays():
    yield
    ConfigStore.instance().repo.get("drafter", {}).pop("own.yaml", None)


def fingerprints() -> list[str]:
    return [cell.fingerprint for cell in config.plan([*TOY, "drafter=own", "+grid.drafter.ratio=[0.5,1]"]).cells]


def test_a_registered_part_is_an_option_like_any_other(typed, tmp_path):
    spectoolkit.register("drafter", "own", typed(), ratio=1.0)
    assert "own" in config.option_names("drafter")
    plan = config.plan([*TOY, "engine=replay", "+grid.drafter=[argmax,own]", f"folder={tmp_path}"])
    assert plan.tables().overall["drafter"].tolist() == ["argmax", "own"]
    assert repr(plan) == f"<Plan single_cells: 2 cells over drafter, 4 requests, in {tmp_path}>"
    assert len(fingerprints()) == 2


def test_a_changed_method_or_attribute_gives_new_cells(typed):
    found = []
    for options in ({}, {}, {"change": " + 0"}, {"power": 3}, {"in_property": "  # none"}):
        spectoolkit.register("drafter", "own", typed(**options), ratio=1.0)
        found.append(fingerprints())
    assert found[0] == found[1]
    assert len({names[0] for names in found}) == 4


def test_what_could_not_be_found_again_is_refused(typed):
    class Local:
        pass

    with pytest.raises(UsageError, match="part: expected a class or function at the top level"):
        config.register("drafter", "own", Local)
    before = typed()
    typed()
    with pytest.raises(UsageError, match="part: expected"):
        config.register("drafter", "own", before)  # another class has its name now
    with pytest.raises(UsageError, match=r"group: expected one of target, .*, got 'drafters'"):
        config.register("drafters", "own", typed())
    with pytest.raises(UsageError, match="the toolkit has 'argmax' already"):
        config.register("drafter", "argmax", typed())


def test_the_package_imports_nothing_before_it_is_asked():
    code = "import sys, spectoolkit; assert not {'torch', 'hydra', 'pandas'} & sys.modules.keys(); spectoolkit.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "AttributeError: module 'spectoolkit' has no attribute 'nothing'" in done.stderr
    assert spectoolkit.plan is config.plan
    assert {getattr(spectoolkit, name).__name__ for name in spectoolkit.__all__} == {"plan", "read", "register"}


@pytest.mark.parametrize("part", [3, "Squared", None])
def test_what_is_no_class_is_refused(part):
    with pytest.raises(UsageError, match="part: expected a class or function, got"):
        config.register("drafter", "mine", part)


@pytest.mark.parametrize("overrides", [[1], None, 3])
def test_overrides_are_texts(overrides):
    with pytest.raises(UsageError, match="overrides: expected a list of texts, got"):
        config.plan(overrides)
