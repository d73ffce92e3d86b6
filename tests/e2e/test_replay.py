"""Replay against the real verifiers: exactly on the toy, where every output can be weighed, and against decoding."""

import dataclasses
import functools
import itertools
import math

import pandas as pd
import pytest
import torch
from scipy.integrate import quad

from spectoolkit import config, metrics, trajectories
from spectoolkit.datatypes import Dense, Request, SamplingParams
from spectoolkit.drafters import CoupledDrafter, ModelDrafter, NGramDrafter, NoDrafter
from spectoolkit.errors import InvalidLogitsError, UsageError
from spectoolkit.models.layer_skip import skip_layers
from spectoolkit.models.tabular import TabularModel, random_tabular
from spectoolkit.records import request_row
from spectoolkit.replay import Strategy, replay
from spectoolkit.sampling import SamplingState
from spectoolkit.trajectories import Trajectories
from spectoolkit.verifiers import Block, Coupled, Match, Rejection, Typical
from tests.helpers.enumerate import block_cells, emission
from tests.helpers.tiny_models import tiny_model
from tests.helpers.toys import LOSSLESS, VERIFIERS, drafters, pairs, requests, run, toy_pair

PROMPT = (1, 0)
LENGTH = 5


def table_of(model: TabularModel, params: SamplingParams, depth: int, before: tuple[int, ...] = ()) -> list:
    """The model's rows after PROMPT, the output tokens `before` and every context of 0 .. depth - 1 further tokens."""
    size = model.vocab_size
    tables = []
    for d in range(depth):
        rows = torch.empty((size,) * (d + 1), dtype=torch.float64)
        for context in itertools.product(range(size), repeat=d):
            output = (*before, *context)
            history = [*PROMPT, *output]
            logits, _ = model.score(model.prefill([history[:-1]]), torch.tensor([history[-1:]]))
            state = SamplingState.of(["x"], [params], [PROMPT], [output], size)
            rows[context] = state.probs(logits, torch.empty(1, 0, dtype=torch.int64), "target")[0, 0]
        tables.append(rows)
    return tables


def all_outputs(model: TabularModel, params: SamplingParams) -> tuple[Trajectories, torch.Tensor]:
    """Every output of LENGTH tokens with its probability."""
    tables = table_of(model, params, LENGTH)
    outputs = list(itertools.product(range(model.vocab_size), repeat=LENGTH))
    weights = torch.stack([torch.stack([tables[i][o[: i + 1]] for i in range(LENGTH)]).prod() for o in outputs])
    outputs = [output for output, weight in zip(outputs, weights, strict=True) if weight > 0]
    asked = tuple(Request(f"o{i}", PROMPT, LENGTH, params) for i in range(len(outputs)))
    return Trajectories(asked, tuple(outputs), ("length",) * len(outputs)), weights[weights > 0]


CASES = {
    "rejection": (Rejection(), {"ratio": 1.0}),
    "rejection at another draft temperature": (Rejection(), {"ratio": 0.5}),
    "rejection of argmax": (Rejection(), {"constant": 0.0}),
    "block": (Block(), {"ratio": 1.0}),
    "block of argmax": (Block(), {"constant": 0.0}),
    "match": (Match(), {"ratio": 1.0}),
    "match of argmax": (Match(), {"constant": 0.0}),
}


def exact_run(
    target: TabularModel, draft: TabularModel, params, draft_params, reported: bool, verifier, k: int
) -> dict:
    """Expected counts of a whole request by the real verifier: every draft, every uniform, every step enumerated."""

    @functools.cache
    def blocks_after(context: tuple[int, ...], num_drafts: int) -> dict:
        target_table = table_of(target, params, num_drafts + 1, context)
        if num_drafts == 0:
            return {(token,): float(p) for token, p in enumerate(target_table[0])}
        draft_table = table_of(draft, draft_params, num_drafts, context)
        cells = block_cells if isinstance(verifier, Block) else None
        return emission(target_table, draft_table, draft_table if reported else None, verifier, cells=cells).blocks

    expected = dict.fromkeys(("steps", "drafted", "accepted"), 0.0)
    reaches = {(): 1.0}
    while reaches:
        following: dict[tuple[int, ...], float] = {}
        for context, weight in reaches.items():
            num_drafts = min(k, LENGTH - len(context) - 1)
            expected["steps"] += weight
            expected["drafted"] += weight * num_drafts
            for tokens, mass in blocks_after(context, num_drafts).items():
                expected["accepted"] += weight * float(mass) * (len(tokens) - 1)
                if len(context) + len(tokens) < LENGTH:
                    new = (*context, *tokens)
                    following[new] = following.get(new, 0.0) + weight * float(mass)
        reaches = following
    return expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_averaged_over_all_outputs_it_is_the_enumerated_run_of_the_real_verifier(name, k):
    target, draft = toy_pair(vocab_size=2, order=2, seed=5)
    verifier, options = CASES[name]
    drafter = ModelDrafter(draft, 2, **options)
    params = SamplingParams(temperature=0.8, repetition_penalty=1.3)
    draft_temperature = options.get("constant", 0.8 * options.get("ratio", 0.0))
    draft_params = dataclasses.replace(params, temperature=draft_temperature)
    outputs, weights = all_outputs(target, params)
    found = replay(target, [Strategy(drafter, verifier, k)], outputs)[0][k - 1]
    expected = exact_run(target, draft, params, draft_params, drafter.laws == (Dense,), verifier, k)
    for count, value in expected.items():
        assert float(weights @ getattr(found, count)[:, 0]) == pytest.approx(value, abs=1e-10), count


def test_coupled_against_the_integral_over_its_noise():
    """Both take the least E_y / weight_y of exponential noise E: the chance that both take x, by quadrature."""
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    target, draft = TabularModel(p), TabularModel(q)
    outputs, weights = all_outputs(target, SamplingParams())
    found = replay(target, [Strategy(CoupledDrafter(draft, 3, ratio=1.0), Coupled(), 1)], outputs)[0][0]
    joint = 0.0
    for x in range(3):
        rate = sum(float(torch.maximum(p[y] / p[x], q[y] / q[x])) for y in range(3) if y != x)
        joint += quad(lambda e, rate=rate: math.exp(-e) * math.exp(-e * rate), 0, math.inf)[0]
    # Drafts are accepted independently here, so the rate is the chance of one.
    rate = float(weights @ found.accepted[:, 0]) / float(weights @ found.drafted[:, 0])
    assert rate == pytest.approx(joint, abs=1e-9)


def live_and_replayed(target, drafter, verifier, asked, k):
    """Rows of a live run, and the replay of its own outputs."""
    done = run(target, drafter, verifier, asked, k, 64)
    rows = pd.DataFrame([request_row(done[r.id], k, cluster=r.id, category="x") for r in asked])
    outputs = Trajectories(
        tuple(asked), tuple(done[r.id].tokens for r in asked), tuple(done[r.id].finish_reason for r in asked)
    )
    return rows, replay(target, [Strategy(drafter, verifier, k)], outputs)[0][k - 1], outputs


@pytest.mark.parametrize(
    ("drafter", "verifier"), pairs({name: rule for name, rule in LOSSLESS.items() if hasattr(rule, "given_output")})
)
def test_live_runs_scatter_around_the_replay_of_their_own_outputs(drafter, verifier):
    """The mean difference is within 6.2 standard errors: false alarm below 1e-9 per count; ends and limits included."""
    target, draft = toy_pair(vocab_size=6, order=2, seed=2)
    make, rule = drafters(draft, 6)[drafter], VERIFIERS[verifier]
    params = [SamplingParams(temperature=t, top_p=p) for t, p in ((0.7, 1.0), (1.0, 0.9), (0.0, 1.0))]
    asked = requests(600, max_new_tokens=10, vocab_size=6, params=params, stop_ids=frozenset({4}))
    rows, counts, _ = live_and_replayed(target, make, rule, asked, 3)
    for name in ("steps", "proposing_steps", "drafted", "accepted", "truncated"):
        difference = torch.tensor(rows[name].tolist(), dtype=torch.float64) - getattr(counts, name)[:, 0]
        error = float(difference.std()) / len(asked) ** 0.5
        assert abs(float(difference.mean())) <= 6.2 * error + 1e-9, name
    for name in ("drafted_at", "accepted_at", "reached_at"):
        difference = torch.tensor(rows[name].tolist(), dtype=torch.float64) - getattr(counts, name)[:, 0]
        error = difference.std(0) / len(asked) ** 0.5
        assert (difference.mean(0).abs() <= 6.2 * error + 1e-9).all(), name


def test_the_test_above_sees_a_wrong_rule():
    """Replaying block verification as rejection is caught."""
    target, draft = toy_pair(vocab_size=6, order=2, seed=2)
    asked = requests(2500, max_new_tokens=21, vocab_size=6, params=[SamplingParams(temperature=1.0)])
    drafter = ModelDrafter(draft, 6, ratio=1.0)
    rows, _, outputs = live_and_replayed(target, drafter, Block(), asked, 3)
    wrong = replay(target, [Strategy(drafter, Rejection(), 3)], outputs)[0][2]
    difference = torch.tensor(rows["steps"].tolist(), dtype=torch.float64) - wrong.steps[:, 0]
    assert abs(float(difference.mean())) > 6.2 * float(difference.std()) / len(asked) ** 0.5


def test_on_a_real_architecture_with_penalties_self_draft_is_always_accepted():
    target = tiny_model("llama")
    params = [SamplingParams(temperature=0.9, frequency_penalty=0.5, top_p=0.9), SamplingParams(temperature=0.0)]
    asked = requests(5, max_new_tokens=11, vocab_size=40, params=params)
    drafter = ModelDrafter(target, 40, ratio=1.0)
    _, counts, _ = live_and_replayed(target, drafter, Rejection(), asked, 3)
    torch.testing.assert_close(counts.accepted, counts.drafted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 7, 10_000])
def test_chunks_and_groups_change_nothing(rows, monkeypatch):
    target = tiny_model("mistral")
    draft = skip_layers(target, [1])
    asked = requests(9, max_new_tokens=12, vocab_size=40)
    strategies = [
        Strategy(ModelDrafter(draft, 40, ratio=1.0), Rejection(), 4),
        Strategy(NGramDrafter(2, 1), Match(), 4),
    ]
    done = run(target, NoDrafter(), Rejection(), asked)
    outputs = Trajectories(tuple(asked), tuple(done[r.id].tokens for r in asked), ("length",) * 9)
    expected = replay(target, strategies, outputs)
    monkeypatch.setattr("spectoolkit.replay.ROWS", rows)
    monkeypatch.setattr("spectoolkit.replay.BATCH", max(1, rows % 5))
    found = replay(target, strategies, outputs)
    for one, other in zip(found, expected, strict=True):
        for k in range(4):
            torch.testing.assert_close(one[k].accepted_at, other[k].accepted_at, rtol=1e-9, atol=1e-9)


def test_lossy_verifiers_are_refused_with_the_reason():
    target, draft = toy_pair()
    outputs = Trajectories(tuple(requests(1)), ((1, 2),), ("length",))
    with pytest.raises(UsageError, match=r"Typical is not lossless.*decode it with engine=live"):
        replay(target, [Strategy(ModelDrafter(draft, 5, ratio=1.0), Typical(), 2)], outputs)
    with pytest.raises(UsageError, match="Typical is not lossless"):
        config.plan(["target=tabular", "draft_model=tabular", "engine=replay", "verifier=typical"])


def test_typical_acceptance_is_replayed_where_it_is_exact_match():
    """At temperature 0 live and replay agree to the last step; with other parameters the rule accepts nothing there."""
    target, draft = toy_pair()
    asked = requests(9, params=[SamplingParams(temperature=0.0)])
    rows, counts, _ = live_and_replayed(target, ModelDrafter(draft, 5, constant=0.0), Typical(), asked, 3)
    assert rows["steps"].tolist() == counts.steps[:, 0].tolist()
    assert rows["accepted"].tolist() == counts.accepted[:, 0].tolist()
    assert 0 < rows["accepted"].sum() < rows["drafted"].sum()
    for verifier in (Typical(recovery="first_only"), Typical(epsilon=1.0, delta=1.0)):
        with pytest.raises(UsageError, match="is not lossless"):
            live_and_replayed(target, ModelDrafter(draft, 5, constant=0.0), verifier, asked, 3)


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_proposals_without_a_model_replay_to_the_last_step_at_temperature_0(name):
    """One replay gives every K: a smaller budget may do nothing but cut a proposal."""
    target, _ = toy_pair(vocab_size=6, order=2, seed=3)
    drafter = drafters(None, 6)[name]
    asked = requests(9, max_new_tokens=30, vocab_size=6, params=[SamplingParams(temperature=0.0)])
    outputs = live_and_replayed(target, drafter, Rejection(), asked, 5)[2]
    counts = replay(target, [Strategy(drafter, Rejection(), 5)], outputs)[0]
    for k in range(1, 6):
        rows = live_and_replayed(target, drafter, Rejection(), asked, k)[0]
        for column in ("steps", "proposing_steps", "drafted", "accepted"):
            assert rows[column].tolist() == getattr(counts[k - 1], column)[:, 0].tolist(), (k, column)
        assert 0 < rows["accepted"].sum() < rows["drafted"].sum()


@pytest.mark.parametrize("side", ["target", "draft"])
def test_nan_names_model_request_and_position(side):
    good = random_tabular(5, 2)
    rows = good.rows.clone()
    broken = TabularModel(good.rows)
    broken._logits = rows.log().reshape(-1, 5)
    broken._logits[3 * 5 + 3] = float("nan")  # behind two tokens 3
    target, draft = (broken, good) if side == "target" else (good, broken)
    asked = (Request("fine", (1, 2), 4), Request("bad", (4,), 4))
    outputs = Trajectories(asked, ((1, 2, 1, 2), (3, 3, 1, 1)), ("length",) * 2)
    with pytest.raises(InvalidLogitsError, match=f"{side} logits of request 'bad' at position 3 "):
        replay(target, [Strategy(ModelDrafter(draft, 5, ratio=1.0), Rejection(), 2)], outputs)


TOY = ["target=tabular", "draft_model=tabular", "prompts.limit=6", "max_new_tokens=8", "engine=replay"]


def test_a_study_by_replay_samples_once_and_shares_the_outputs(tmp_path, monkeypatch):
    overrides = [
        *TOY,
        f"folder={tmp_path}",
        "+grid.drafter=[argmax,same_temperature,ngram]",
        "+grid.num_draft_tokens=[1,3]",
    ]
    plan = config.plan(overrides)
    shown = plan.run()
    assert shown.count("engine=replay") == 6
    assert len(list((tmp_path / "trajectories").iterdir())) == 1
    frames = [pd.read_parquet(path) for path in (tmp_path / "cells").iterdir()]
    assert all(frame["tokens"].map(list).tolist() == frames[0]["tokens"].map(list).tolist() for frame in frames)
    assert all(frame.attrs["trajectories"].startswith("sampled: ") for frame in frames)
    monkeypatch.setattr("spectoolkit.runner.sample", None)  # another strategy later reads the stored outputs
    config.plan([*TOY, f"folder={tmp_path}", "verifier=match"]).run()


def test_cells_of_one_strategy_at_several_k_share_a_pass_and_equal_those_computed_alone(tmp_path):
    def lengths(*overrides):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        plan = config.plan([*TOY, f"folder={folder}", *overrides])
        plan.run()
        frames = [pd.read_parquet(folder / "cells" / f"{cell.fingerprint}.parquet") for cell in plan.cells]
        return [metrics.summarise(frame)["acceptance_length"] for frame in frames]

    together = lengths("+grid.num_draft_tokens=[1,2,4]")
    alone = [lengths(f"num_draft_tokens={k}")[0] for k in (1, 2, 4)]
    assert together == pytest.approx(alone, abs=1e-12)
    assert together == sorted(together)


def test_given_trajectories_must_be_of_this_target_at_this_setting(tmp_path):
    config.plan([*TOY, f"folder={tmp_path / 'a'}"]).run()
    (path,) = (tmp_path / "a" / "trajectories").iterdir()
    given = [*TOY, f"folder={tmp_path / 'b'}", f"trajectories={path}"]
    assert "engine=replay" in config.plan(given).run()
    for change, key in (("sampling.temperature=0.5", "sampling.temperature"), ("target.seed=1", "target.seed")):
        with pytest.raises(UsageError, match=rf"sampled from this target at this setting.*differs in {key}: "):
            config.plan([*given, change]).run()
    with pytest.raises(UsageError, match="trajectories: expected a file, got"):
        config.plan([*given[:-1], f"trajectories={tmp_path / 'none'}"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tokens: [99, *tokens[1:]], "token ids below 8"),
        (lambda tokens: [-1, *tokens[1:]], "token ids below 8"),
        (lambda tokens: [*tokens, *tokens], "expected 1 to 8 token ids"),
        (lambda tokens: [], "expected 1 to 8 token ids"),
        (lambda tokens: tokens[:3], "length only at the limit"),
    ],
)
def test_given_trajectories_must_be_outputs_that_the_requests_can_have(change, message, tmp_path):
    (cell,) = config.plan(TOY).cells
    asked, identity = cell.build().requests, cell.text_identity
    outputs = tuple(tuple(change([1, 2, 3, 4, 5, 6, 7, 0])) for _ in asked)
    trajectories.save(tmp_path / "t", Trajectories(tuple(asked), outputs, ("length",) * len(asked)), identity)
    with pytest.raises(UsageError, match=message):
        trajectories.load(tmp_path / "t", asked, identity, 8)


def test_more_drafts_than_an_output_has_room_for_change_nothing():
    target, draft = toy_pair()
    asked = requests(3, max_new_tokens=5)
    outputs = Trajectories(tuple(asked), tuple((1,) * r.max_new_tokens for r in asked), ("length",) * 3)
    counts = replay(target, [Strategy(ModelDrafter(draft, 5, ratio=1.0), Rejection(), 40)], outputs)[0]
    assert len(counts) == 40
    assert torch.equal(counts[39].steps, counts[7].steps)
    assert counts[39].accepted_at.shape == (3, 1, 40)
