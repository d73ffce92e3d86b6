"""The worked examples of CONTRIBUTING.md, taken out of it and done as they are written."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pandas as pd
import pytest

from spectoolkit import config
from spectoolkit.errors import RunError
from tests.e2e import test_decode as loop
from tests.helpers.toys import LOSSLESS, VERIFIERS, drafters, pairs

DOCUMENT = Path(__file__).parents[2] / "CONTRIBUTING.md"
VERIFIER, DRAFTER = "A new verifier", "A new drafter"
FOUND = "hydra.searchpath=[mine]"
QUICK = [FOUND, "experiment=exactness", "study.quick=true"]


def blocks(title: str, language: str = "") -> list[str]:
    """The code blocks of a language in a section."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.M | re.S)
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", section, re.M | re.S)
    return [dedent(text) for kind, text in found if kind == language]


def files(title: str) -> dict[Path, str]:
    """The blocks that begin with the name of a file."""
    every = [*blocks(title, "python"), *blocks(title, "yaml")]
    return {Path(name[1]): text for text in every if (name := re.match(r"# (\S+\.(?:py|yaml))\n", text))}


def commands(title: str) -> list[list[str]]:
    """What stands behind `spectoolkit` in the section's command lines."""
    lines = [shlex.split(line) for text in blocks(title) for line in text.replace("\\\n", " ").splitlines()]
    assert all(line[:3] == ["PYTHONPATH=.", "spectoolkit", "--config-dir=mine"] for line in lines)
    return [line[2:] for line in lines]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a section's files into an empty folder, which is then the current one; {old: new} is changed in them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(title: str, changes: dict[str, str] | None = None) -> None:
        for path, text in files(title).items():
            for old, new in (changes or {}).items() if path.suffix == ".py" else ():
                assert text.count(old) == 1
                text = text.replace(old, new)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            written.append(path.stem)
        assert {path.suffix for path in files(title)} == {".py", ".yaml"}

    yield write
    for name in written:
        sys.modules.pop(name, None)


def run_command(arguments: list[str]) -> str:
    """As typed, with PYTHONPATH=. in front of what there is."""
    paths = os.pathsep.join([".", *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "spectoolkit.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(arguments: list[str]) -> str:
    """The same without a new process, by the way that the document names for Python."""
    return config.plan([FOUND, *arguments[1:]]).run()


def partners(side: str, like: str) -> set[str]:
    """Options that form a pair with `like`."""
    overrides = ["experiment=exactness", "study.quick=true", like]
    left_out = {"wrong/top_p_on_draft_only"}  # judged by another law than the request's
    return {str(cell.settings[f"{side}.name"]) for cell in config.plan(overrides).cells} - left_out


def test_the_command_proves_the_new_verifier_with_every_drafter(write):
    write(VERIFIER)
    (command,) = commands(VERIFIER)
    assert "proven" in run_command(command)
    table = pd.read_csv("results/exactness/table.csv")
    assert set(table["verifier"]) == {"one_uniform"}
    assert set(table["drafter"]) == partners("drafter", "verifier=rejection")
    claimed = table[table["claim"] == "lossless"]
    assert {"argmax", "same_temperature", "top_m", "ngram"} <= set(claimed["drafter"])
    assert set(claimed["verdict"]) == {"proven"}


def test_the_audit_refutes_the_verifier_that_the_document_calls_wrong(write):
    write(VERIFIER, {"rest = (u - a) / (1 - a)": "rest = u"})
    assert "with `rest = u` it says `FAILS`" in DOCUMENT.read_text()
    with pytest.raises(RunError, match=r"same_temperature \+ one_uniform claims to be lossless: total variation 0\.\d"):
        config.plan([*QUICK, "verifier=one_uniform", "drafter=same_temperature"]).run()
    assert pd.read_csv("results/exactness/table.csv")["verdict"].tolist() == ["FAILS"]


def test_the_new_verifier_is_replayed_and_accepts_what_rejection_does(write):
    write(VERIFIER)
    axes = ["grid.verifier=[rejection,one_uniform]", "grid.drafter=[argmax,same_temperature,top_m]"]
    toy = ["target=tabular", "draft_model=tabular", "prompts.limit=4", "max_new_tokens=6"]
    config.plan([FOUND, "experiment=temperature_sweep", *toy, *axes, "grid.sampling.temperature=[0,0.7]"]).run()
    table = pd.read_csv("results/temperature_sweep/table.csv").query("scope == 'overall'")
    assert set(table["engine"]) == {"replay"}
    lengths = table.pivot(index=["sampling.temperature", "drafter"], columns="verifier", values="acceptance_length")
    assert len(lengths) == 6
    assert lengths["one_uniform"].tolist() == lengths["rejection"].tolist()


@pytest.mark.parametrize(
    "test",
    [
        loop.test_greedy_equals_plain_decoding,
        loop.test_greedy_with_penalties_sees_the_right_history_at_every_draft_position,
        loop.test_a_request_alone_equals_the_request_in_any_batch,
        loop.test_never_more_than_max_new_tokens,
    ],
)
def test_the_line_of_the_toys_puts_the_new_verifier_into_the_tests_of_the_loop(test, write, monkeypatch):
    write(VERIFIER)
    (line,) = (text for text in blocks(VERIFIER, "python") if not text.startswith("#"))
    ((name, rule),) = eval(f"{{{line}}}", vars(importlib.import_module("one_uniform"))).items()
    for rules in (VERIFIERS, LOSSLESS) if rule.is_lossless else (VERIFIERS,):
        monkeypatch.setitem(rules, name, rule)
    fitting = [drafter for drafter, verifier in pairs(VERIFIERS) if verifier == name]
    assert set(fitting) == drafters(None, 2).keys() - {"coupled", "chains", "distinct_chains"}
    for drafter in fitting:
        test(drafter, name)


def test_the_commands_prove_the_new_drafter_with_every_verifier_and_measure_it(write):
    write(DRAFTER)
    audit, sweep = commands(DRAFTER)
    assert "proven" in run_here(audit)
    table = pd.read_csv("results/exactness/table.csv")
    assert set(table["drafter"]) == {"squared"}
    assert set(table["verifier"]) == partners("verifier", "drafter=same_temperature")
    verdicts = table.set_index("verifier")["verdict"]
    assert (verdicts[["rejection", "block", "match"]] == "proven").all()
    assert verdicts["typical"].startswith("lossy: distance 0.")
    run_here(sweep)
    found = pd.read_csv("results/try/table.csv").query("scope == 'overall' and verifier == 'rejection'")
    assert set(found["drafter"]) == {"argmax", "squared"}
    assert (found["acceptance_length"] > 1).all()
    assert set(found["engine"]) == {"replay"}


def test_the_audit_refutes_the_drafter_that_the_document_calls_wrong(write):
    write(DRAFTER, {"(rows,)": "(probs,)"})
    assert "With `(probs,)` in the place of `(rows,)` the audit says `FAILS`" in DOCUMENT.read_text()
    with pytest.raises(RunError, match=r"squared \+ rejection claims to be lossless: total variation 0\.\d"):
        config.plan([*QUICK, "drafter=squared", "verifier=rejection"]).run()


def test_options_of_ones_own_are_among_all_pairs(write):
    write(VERIFIER)
    write(DRAFTER)
    (Path("mine") / "drafter" / "deeper").mkdir()
    Path("mine/drafter/squared.yaml").rename("mine/drafter/deeper/squared.yaml")

    def chosen(overrides: list[str]) -> set[tuple[object, object]]:
        return {
            (cell.settings["drafter.name"], cell.settings["verifier.name"]) for cell in config.plan(overrides).cells
        }

    own = chosen([*QUICK, "verifier=one_uniform"])
    assert {("deeper/squared", "one_uniform"), ("argmax", "one_uniform")} <= own
    assert ("argmax", "one_uniform") in chosen([*QUICK, "drafter=argmax"])
    assert ("argmax", "one_uniform") not in chosen([*QUICK[1:], "drafter=argmax"])


def test_the_search_path_may_stand_on_the_command_line(write):
    write(VERIFIER)
    toy = ["target=tabular", "draft_model=tabular", "prompts.limit=2", "max_new_tokens=4"]
    assert "same_temperature + one_uniform" in run_command([FOUND, *toy, "verifier=one_uniform"])
