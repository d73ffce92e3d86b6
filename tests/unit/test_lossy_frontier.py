"""The distance of lossy rules, and the study that sets it against acceptance length."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from spectoolkit import config
from spectoolkit.datatypes import SamplingParams
from spectoolkit.decode import decode
from spectoolkit.drafters import ModelDrafter
from spectoolkit.errors import UsageError
from spectoolkit.functional.emission import divergences
from spectoolkit.studies.lossy_frontier import DistanceMeter, _columns, _gain, _Samples, at_temperature
from spectoolkit.verifiers import Mixture, Rejection, Typical
from tests.helpers.toys import requests, toy_pair


def test_divergences_of_known_rows():
    p, e = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.5, 0.5, 0.0]])
    variation, information = divergences(e, p)
    assert variation.item() == pytest.approx(0.2)
    assert information.item() == pytest.approx(0.5 * math.log(0.5 / 0.3))
    assert divergences(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))[1].item() == math.inf
    assert divergences(p, p)[0].item() == divergences(p, p)[1].item() == 0


def test_rows_at_another_temperature():
    logits = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        at_temperature(torch.softmax(logits / 0.6, -1), 0.6, 1.1), torch.softmax(logits / 1.1, -1)
    )


@pytest.mark.parametrize("verifier", [Mixture(0.3), Typical(), Rejection()])
@pytest.mark.parametrize("how", [{"ratio": 1.0}, {"constant": 0.0}])
def test_the_meter_sums_over_every_emitted_token(verifier, how):
    """Against the rows of each step, seen by an observer of its own."""
    target, draft = toy_pair()
    asked = requests(6, max_new_tokens=9, params=[SamplingParams(temperature=0.8)])
    meter = DistanceMeter(verifier, 0.8, [0.8, 1.0])
    expected: dict[str, list[float]] = {}

    def observe(request_ids, target_probs, proposal, emitted):
        meter(request_ids, target_probs, proposal, emitted)
        for b, request_id in enumerate(request_ids):
            sums = expected.setdefault(request_id, [0.0] * 5)
            for i in range(int((emitted[b] >= 0).sum())):
                p = law = target_probs[b, i]
                if i < proposal.lengths[b] and not verifier.is_lossless:
                    token = proposal.tokens[b, i]
                    q = torch.eye(5).double()[token] if "constant" in how else proposal.law.probs[b, i]
                    law = verifier.emitted_probs(p[None], q[None])[0]
                wide = p ** (0.8 / 1.0) / (p ** (0.8 / 1.0)).sum()
                of_own, of_wide = divergences(law, p), divergences(law, wide)
                for place, value in enumerate((1.0, *of_own, *of_wide)):
                    sums[place] += float(value)

    drafter = ModelDrafter(draft, 5, **how)
    found = list(decode(target, drafter, verifier, asked, num_draft_tokens=3, batch_size=2, observe=observe))
    for completion in found:
        sums = meter.sums[completion.request.id]
        assert sums.tolist() == pytest.approx(expected[completion.request.id], rel=1e-9)
        assert sums[0] == len(completion.tokens)
        assert (sums[1] < 1e-12) == verifier.is_lossless


def test_the_gain_is_read_off_between_the_rivals_points():
    def samples(kl, length):
        return _Samples(np.array(kl), np.array(length))

    mine = samples([0.5, 0.5, 3.0], [2.0, 2.2, 2.0])
    rival = [samples([1.0, 2.0, 1.0], [1.5, 1.6, 1.5]), samples([0.0, 0.0, 0.0], [1.0, 1.2, 1.0])]
    np.testing.assert_allclose(_gain(mine, rival), [0.75, 0.9, np.nan])
    assert _columns("gain", np.array([1.0, *[0.5] * 97, *[np.nan] * 3]))["gain_low"] != 0.5
    assert _columns("gain", np.array([1.0, *[0.5] * 98, *[np.nan] * 2]))["gain_low"] == 0.5


TOY = ["experiment=lossy_frontier", "target=tabular", "draft_model=tabular", "prompts.limit=3", "max_new_tokens=6"]


def test_the_study_holds_lossless_rules_at_distance_zero(tmp_path):
    few = "cases=[{verifier: rejection},{verifier: lenient, verifier.lenience: 0.3},{verifier: typical}]"
    text = config.plan([*TOY, f"folder={tmp_path}", few, "grid.sampling.temperature=[0.5,1.0]"]).run()
    table = pd.read_csv(tmp_path / "table.csv")
    rival = table[table["rule"] == "lower temperature"]
    assert (rival[rival["sampled_at"] == rival["temperature"]]["kl"] < 1e-12).all()
    assert (rival[rival["sampled_at"] < rival["temperature"]]["kl"] > 0).all()
    assert (table[table["rule"] == "lenient"]["tv"] > 0).all()
    assert len(table) == 2 * (2 * 3 + 1)
    assert (tmp_path / "figure.pdf").stat().st_size > 0
    assert rival["gain"].isna().all()
    before = (tmp_path / "table.csv").read_bytes()
    config.plan([*TOY, f"folder={tmp_path}", few, "grid.sampling.temperature=[0.5,1.0]"]).run()
    assert (tmp_path / "table.csv").read_bytes() == before
    assert "| 1 | argmax | lenient | lenience = 0.3 |" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["grid.sampling.temperature=[0.0,0.7]"], r"sampling.temperature > 0 without filters"),
        (["sampling.top_p=0.9"], r"without filters and penalties"),
        (["cases=[{verifier: typical}]"], "a lossless cell for every drafter and temperature"),
        (["cases=[{verifier: rejection},{verifier: wrong/reseeded}]"], r"\(emitted_probs\), got Reseeded"),
        (["cases=[{verifier: rejection},{verifier: typical, verifier.recovery: first_only}]"], "recovery=first_only"),
    ],
)
def test_what_has_no_distance_is_refused(more, message):
    with pytest.raises(UsageError, match=message):
        config.plan([*TOY, *more])
