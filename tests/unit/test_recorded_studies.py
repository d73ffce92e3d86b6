"""What the documents say of the recorded studies holds in their tables."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

STUDIES = Path(__file__).parents[2] / "experiments"
REPLAYED_WITH_BOTH = {"draft_length", "storage"}


def pairs(study: Path) -> pd.DataFrame:
    """Recorded replays of block verification and of rejection, side by side at settings that are otherwise equal."""
    if not (study / "table.csv").exists():
        return pd.DataFrame()
    table = pd.read_csv(study / "table.csv")
    if not {"verifier", "engine", "scope"} <= set(table):
        return pd.DataFrame()
    settings = [name for name in table.columns[: table.columns.get_loc("engine")] if not name.startswith("verifier")]
    table = table[table["engine"] == "replay"].astype(dict.fromkeys(settings, "str"))
    if "num_draft_tokens" not in table:
        config = json.loads((study / "manifest.json").read_text())["config"]
        table["num_draft_tokens"] = config["num_draft_tokens"]
    by_rule = [table[table["verifier"] == rule] for rule in ("block", "rejection")]
    return by_rule[0].merge(by_rule[1], on=settings, suffixes=("", "_rejection"), validate="1:1")


PAIRS = {study.name: found for study in sorted(STUDIES.iterdir()) if len(found := pairs(study))}


def test_the_studies_that_hold_both_rules_are_found():
    assert PAIRS.keys() >= REPLAYED_WITH_BOTH
    assert {len(PAIRS[name]) for name in REPLAYED_WITH_BOTH} == {9 * 2, 9 * 8}  # overall and 8 categories


@pytest.mark.parametrize("study", PAIRS)
def test_both_rules_judged_equal_drafts_on_the_same_outputs(study):
    def without_rule(cell: dict[str, Any]) -> str:
        settings = {name: value for name, value in cell["settings"].items() if not name.startswith("verifier.")}
        return json.dumps([settings, cell["trajectories"]], sort_keys=True)

    cells = json.loads((STUDIES / study / "manifest.json").read_text())["cells"]
    of = {
        rule: {without_rule(c) for c in cells if c["settings"]["verifier.name"] == rule}
        for rule in ("block", "rejection")
    }
    assert of["block"]
    assert of["block"] <= of["rejection"]
    found = PAIRS[study]
    assert len(found) == 9 * len(of["block"])  # every such cell has its pair
    for name in ("emitted", "requests", "clusters"):
        assert (found[name] == found[f"{name}_rejection"]).all()


@pytest.mark.parametrize("study", PAIRS)
def test_block_verification_accepts_at_least_as_many_as_rejection_and_more_of_several_drafts(study):
    """With one draft, or at temperature 0, both are the same rule, else block gains over all prompts of a cell.

    A step of block accepts at least as many, but the next one may then begin at a worse place: a few outputs may lose.
    By less than 1e-9 accepted tokens the two count as equal: rounding of sums over some thousand steps.
    """
    found = PAIRS[study]
    gain = found["accepted"] - found["accepted_rejection"]
    is_same = found["num_draft_tokens"].astype(int) == 1
    if "sampling.temperature" in found:
        is_same |= found["sampling.temperature"].astype(float) == 0
    assert (gain[is_same].abs() <= 1e-9).all()
    gains = ~is_same & (found["scope"] == "overall")
    assert (gain[gains] > 1e-9).all()
    is_longer = found["acceptance_length"] > found["acceptance_length_rejection"]
    assert is_longer[gains].all()


def test_tables_with_both_numbers_of_drafts_are_among_them():
    drafted = {int(k) for found in PAIRS.values() for k in found["num_draft_tokens"]}
    assert {1, 4} <= drafted
    assert max(drafted) > 4
