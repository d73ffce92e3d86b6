"""The loop on the tabular toy: lossless where it is claimed, independent of the batch, ends where it should."""

import dataclasses
import functools
import itertools
from collections import Counter

import pytest
import torch
from scipy import stats

from spectoolkit.datatypes import DraftNoise, PointMass, Request, SamplingParams, TopM
from spectoolkit.decode import check_pair
from spectoolkit.drafters import CoupledDrafter, ModelDrafter, NGramDrafter, NoDrafter, TopMDrafter
from spectoolkit.errors import InvalidLogitsError, UsageError
from spectoolkit.functional.acceptance import coupled_overlap
from spectoolkit.functional.draw import draw
from spectoolkit.models.layer_skip import skip_layers
from spectoolkit.models.tabular import TabularModel, random_tabular
from spectoolkit.sampling import SamplingState
from spectoolkit.verifiers import Block, Coupled, Match, Rejection, Typical
from tests.helpers.tiny_models import tiny_model
from tests.helpers.toys import (
    DRAFTERS,
    LOSSLESS,
    VERIFIERS,
    WRONG_VERIFIERS,
    drafters,
    outcome,
    pairs,
    requests,
    run,
    toy_pair,
    wrong_drafters,
)


def plain(target, request: Request) -> list[int]:
    """Greedy decoding with the same sampling parameters, one token and one fresh prefix at a time."""
    output: list[int] = []
    while len(output) < request.max_new_tokens:
        history = [*request.prompt, *output]
        logits, _ = target.score(target.prefill([history[:-1]]), torch.tensor([history[-1:]]))
        state = SamplingState.of(["x"], [request.params], [request.prompt], [output], target.vocab_size)
        probs = state.probs(logits, torch.empty(1, 0, dtype=torch.int64), "target")
        output.append(int(probs[0, 0].argmax()))
        if output[-1] in request.stop_ids:
            break
    return output


@pytest.mark.parametrize(("drafter", "verifier"), pairs(LOSSLESS))
def test_greedy_equals_plain_decoding(drafter, verifier):
    target, draft = toy_pair()
    asked = requests(9, params=[SamplingParams(temperature=0.0)])
    done = run(target, drafters(draft, 5)[drafter], LOSSLESS[verifier], asked)
    assert {r.id: list(done[r.id].tokens) for r in asked} == {r.id: plain(target, r) for r in asked}


@pytest.mark.parametrize(("drafter", "verifier"), pairs(LOSSLESS))
def test_greedy_with_penalties_sees_the_right_history_at_every_draft_position(drafter, verifier):
    target, draft = toy_pair()
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.7),
        SamplingParams(temperature=0.0, frequency_penalty=0.9, presence_penalty=0.4),
        SamplingParams(temperature=0.0, logit_bias={0: -4.0, 3: 1.5}),
        SamplingParams(temperature=0.0),
    ]
    asked = requests(8, params=params, max_new_tokens=16)
    done = run(target, drafters(draft, 5)[drafter], LOSSLESS[verifier], asked)
    expected = {r.id: plain(target, r) for r in asked}
    assert {r.id: list(done[r.id].tokens) for r in asked} == expected
    unpenalised = [plain(target, dataclasses.replace(r, params=params[3])) for r in asked[:3]]
    assert unpenalised != [expected[r.id] for r in asked[:3]]  # the penalties did something


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    ("make", "verifier"),
    [
        (ModelDrafter, Rejection()),
        (ModelDrafter, Block()),
        (CoupledDrafter, Coupled()),
        (functools.partial(TopMDrafter, keep=5), Rejection()),
        (functools.partial(TopMDrafter, keep=5), Block()),
    ],
)
def test_self_draft_is_always_accepted(num_draft_tokens, temperature, make, verifier):
    target, _ = toy_pair()
    drafter = make(target, 5, ratio=1.0)
    full_steps = 4
    asked = requests(6, params=[SamplingParams(temperature=temperature, top_p=0.9)])
    asked = [dataclasses.replace(r, max_new_tokens=full_steps * (num_draft_tokens + 1)) for r in asked]
    for completion in run(target, drafter, verifier, asked, num_draft_tokens).values():
        assert [s.emitted for s in completion.steps] == [num_draft_tokens + 1] * full_steps


@pytest.mark.parametrize(("drafter", "verifier"), pairs(VERIFIERS))
def test_a_request_alone_equals_the_request_in_any_batch(drafter, verifier):
    target, draft = toy_pair()
    asked = requests(10)
    make = drafters(draft, 5)[drafter]
    alone = {r.id: outcome(run(target, make, VERIFIERS[verifier], [r])[r.id]) for r in asked}
    for batch_size, order in ((1, asked), (3, asked[::-1]), (10, asked), (4, asked[5:] + asked[:5])):
        together = run(target, make, VERIFIERS[verifier], order, batch_size=batch_size)
        assert {key: outcome(one) for key, one in together.items()} == alone


def test_seed_and_id_are_the_only_source_of_randomness():
    target, draft = toy_pair()
    drafter = ModelDrafter(draft, 5, ratio=1.0)
    one = Request(id="a", prompt=(1, 2), max_new_tokens=40, seed=42)
    tokens = run(target, drafter, Rejection(), [one])["a"].tokens
    other = dataclasses.replace(one, id="b", seed=7, max_new_tokens=9)
    assert run(target, drafter, Rejection(), [other, one])["a"].tokens == tokens
    assert run(target, drafter, Rejection(), [dataclasses.replace(one, seed=43)])["a"].tokens != tokens
    assert run(target, drafter, Rejection(), [dataclasses.replace(one, id="c")])["c"].tokens != tokens


def test_rows_come_and_go_and_nothing_is_prefilled_twice():
    class Counting(TabularModel):
        prefilled = 0
        widest = 0

        def prefill(self, prefixes):
            type(self).prefilled += sum(map(len, prefixes))
            return super().prefill(prefixes)

        def score(self, state, tokens):
            type(self).widest = max(type(self).widest, len(tokens))
            return super().score(state, tokens)

    target = Counting(random_tabular(5, 2).rows)
    asked = [dataclasses.replace(r, max_new_tokens=3 + 5 * (i % 4)) for i, r in enumerate(requests(23))]
    done = run(target, NGramDrafter(), Rejection(), asked, batch_size=4)
    assert len(done) == 23
    assert Counting.prefilled == sum(len(r.prompt) - 1 for r in asked)
    assert Counting.widest == 4


@pytest.mark.parametrize(("drafter", "verifier"), pairs(VERIFIERS))
def test_never_more_than_max_new_tokens(drafter, verifier):
    target, draft = toy_pair()
    for limit in (1, 2, 3, 7):
        asked = [dataclasses.replace(r, max_new_tokens=limit) for r in requests(5)]
        for completion in run(target, drafters(draft, 5)[drafter], VERIFIERS[verifier], asked, 5).values():
            assert len(completion.tokens) == limit
            assert completion.finish_reason == "length"
            assert all(s.drafted <= limit - s.start - 1 for s in completion.steps)
            assert sum(s.emitted for s in completion.steps) == limit


def test_stop_id_inside_an_accepted_block_cuts_it():
    # A cycle 1 -> 2 -> 0 -> 1: with token 0 as the end, self-drafted blocks of six hold it in the middle.
    rows = torch.eye(4, dtype=torch.float64)[[1, 2, 0, 3]]
    target = TabularModel(rows, stop_ids=[0])
    asked = [Request(id="r", prompt=(1,), max_new_tokens=20, stop_ids=target.tokenizer.stop_ids)]
    completion = run(target, ModelDrafter(target, 4, ratio=1.0), Rejection(), asked, num_draft_tokens=5)["r"]
    assert completion.tokens == (2, 0)
    assert completion.finish_reason == "stop_id"
    (step,) = completion.steps
    assert (step.drafted, step.verified, step.accepted, step.emitted, step.truncated) == (5, 5, 2, 2, True)


def test_stop_string():
    rows = torch.eye(4, dtype=torch.float64)[[1, 2, 3, 0]]
    target = TabularModel(rows)  # spells abcdabcd...
    asked = [Request(id="r", prompt=(0,), max_new_tokens=20, stop_strings=("dab",))]
    completion = run(target, ModelDrafter(target, 4, ratio=1.0), Rejection(), asked)["r"]
    assert target.tokenizer.decode(completion.tokens) == "bcdab"
    assert completion.finish_reason == "stop_string"


def test_the_last_token_of_a_fully_accepted_block_reaches_the_draft_model():
    """Every reported draft row equals the draft model's row on the full prefix, however much was accepted before."""
    target, draft = toy_pair(order=3, seed=4)
    seen = []

    class Checking(ModelDrafter):
        def propose(self, state, sampling, max_tokens, noise):
            proposal, state = super().propose(state, sampling, max_tokens, noise)
            seen.append((sampling, proposal))
            return proposal, state

    drafter = Checking(draft, 5, ratio=1.0)
    asked = requests(1, max_new_tokens=60, params=[SamplingParams(temperature=0.9)])
    (completion,) = run(target, drafter, Rejection(), asked).values()
    fully_accepted = 0
    for step, (sampling, proposal) in zip(completion.steps, seen, strict=True):
        history = [*asked[0].prompt, *completion.tokens[: step.start]]
        fully_accepted += step.drafted == step.verified == 3
        for i in range(step.drafted):
            prefix = [*history, *proposal.tokens[0, :i].tolist()]
            logits, _ = draft.score(draft.prefill([prefix[:-1]]), torch.tensor([prefix[-1:]]))
            expected = sampling.probs(logits, torch.empty(1, 0, dtype=torch.int64), "draft")[0, 0]
            torch.testing.assert_close(proposal.law.probs[0, i], expected, rtol=0, atol=1e-12)
    assert fully_accepted >= 3


@pytest.mark.parametrize("side", ["target", "draft"])
def test_nan_names_model_request_and_position(side):
    class Broken(TabularModel):
        """NaN in the row that follows two tokens 3, in the request whose prompt begins with a 4."""

        def score(self, state, tokens):
            logits, new = super().score(state, tokens)
            context = new.tokens[:, self.order :]
            for b, q in itertools.product(*map(range, tokens.shape)):
                end = int(state.lengths[b]) + q + 1
                if int(context[b, 0]) == 4 and end >= 6:
                    logits = logits.clone()
                    logits[b, q, 2] = float("nan")
            return logits, new

    good = random_tabular(5, 2)
    broken = Broken(good.rows)
    target, draft = (broken, good) if side == "target" else (good, broken)
    asked = [Request(id="fine", prompt=(1, 2), max_new_tokens=9), Request(id="bad", prompt=(4, 0), max_new_tokens=9)]
    with pytest.raises(InvalidLogitsError, match=rf"{side} logits of request 'bad' at position 6 ") as caught:
        run(target, ModelDrafter(draft, 5, ratio=1.0), Rejection(), asked)
    assert (caught.value.request_id, caught.value.position) == ("bad", 6)


def test_vocabularies_of_different_length():
    rows = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 4, dtype=torch.float64)
    short = torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=torch.float64)
    wide = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]] * 5, dtype=torch.float64)
    target = TabularModel(rows)
    for draft_rows in (short, wide):
        drafter = ModelDrafter(TabularModel(draft_rows), target.vocab_size, ratio=1.0)
        done = run(target, drafter, Rejection(), requests(40, vocab_size=3, max_new_tokens=8), batch_size=16)
        assert all(0 <= token < 4 for one in done.values() for token in one.tokens)
    # Acceptance of the short draft at T = 1 is sum(min(p, q)) = 0.9.
    drafter = ModelDrafter(TabularModel(short), 4, ratio=1.0)
    asked = requests(300, vocab_size=3, max_new_tokens=20, params=[SamplingParams()])
    steps = [s for one in run(target, drafter, Rejection(), asked, 1, 100).values() for s in one.steps if s.drafted]
    accepted = sum(s.accepted for s in steps)
    assert stats.binomtest(accepted, len(steps), 0.9).pvalue > 1e-9


class EmitsTheTargetsOwnRow(Rejection):
    """A rule known to be wrong: the recovered token is drawn from p and not from the residual."""

    def verify(self, target_probs, proposal, uniforms):
        verdict = super().verify(target_probs, proposal, uniforms)
        own = Match().verify(target_probs, dataclasses.replace(proposal, law=PointMass()), uniforms)
        at = verdict.num_accepted[:, None]
        emitted = verdict.emitted.clone()
        redrawn = torch.where(own.num_accepted[:, None] == at, own.emitted.gather(1, at), emitted.gather(1, at))
        return dataclasses.replace(verdict, emitted=emitted.scatter(1, at, redrawn))


def p_value(drafter, verifier, params, num=6000, judged_by=None) -> float:
    """Chi-square test of the first three tokens against the target's exact law, over all 64 outcomes.

    The law is that of `params`, or of `judged_by` where the drafter keeps a parameter from the target.
    """
    target, draft = toy_pair(vocab_size=4, order=1, seed=3)
    asked = [Request(id=f"s{i}", prompt=(1, 2), max_new_tokens=3, params=params) for i in range(num)]
    done = run(target, (drafters(draft, 4) | wrong_drafters(draft, 4))[drafter], verifier, asked, 3, 1000)
    params = judged_by or params
    counts = Counter(one.tokens for one in done.values())
    state = SamplingState.of(["x"], [params], [(1, 2)], [[]], 4)
    none = torch.empty(1, 0, dtype=torch.int64)
    rows = [state.probs(target.score(target.prefill([[]]), torch.tensor([[a]]))[0], none, "target") for a in range(4)]
    law = torch.stack([row[0, 0] for row in rows])
    outcomes = list(itertools.product(range(4), repeat=3))
    expected = [num * float(law[2, a] * law[a, b] * law[b, c]) for a, b, c in outcomes]
    observed = [counts[key] for key in outcomes]
    if any(o > 0 for o, e in zip(observed, expected, strict=True) if e == 0):
        return 0.0
    pairs = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    return float(stats.chisquare(*zip(*pairs, strict=True)).pvalue)


PARAMS = SamplingParams(temperature=0.9, top_p=0.97, min_p=0.02)


@pytest.mark.parametrize(("drafter", "verifier"), pairs(LOSSLESS))
def test_sampled_output_has_the_targets_law(drafter, verifier):
    """False alarm 1e-9 per case; the next test shows what the same test detects."""
    assert p_value(drafter, LOSSLESS[verifier], PARAMS) > 1e-9


@pytest.mark.parametrize("verifier", [Typical(), EmitsTheTargetsOwnRow()])
def test_the_test_above_rejects_rules_that_are_not_lossless(verifier):
    assert p_value("same_temperature", verifier, PARAMS) < 1e-9


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [
        *(("same_temperature", name) for name in WRONG_VERIFIERS if name != "recovered_with_draft_noise"),
        ("noise_by_position", "recovered_with_draft_noise"),
        ("argmax_as_sampled", "rejection"),
        ("top_m_reported_raw", "rejection"),
        ("top_p_on_draft_only", "rejection"),
    ],
)
def test_the_test_above_rejects_every_negative_control(drafter, verifier):
    plain, asked = SamplingParams(temperature=0.9), SamplingParams(temperature=0.9, top_p=0.7)
    judged_by = asked if drafter == "top_p_on_draft_only" else plain
    assert p_value(drafter, (VERIFIERS | WRONG_VERIFIERS)[verifier], plain, judged_by=judged_by) < 1e-9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens: expected an integer >= 1, got 0"),
        ({"batch_size": 0}, "batch_size: expected an integer >= 1, got 0"),
        ({"asked": []}, "requests: expected at least one"),
        ({"asked": [Request(id="a", prompt=(1,), max_new_tokens=2)] * 2}, "unique ids, got 'a' 2 times"),
        (
            {"asked": [Request(id="a", prompt=(1,) * 4000, max_new_tokens=97)]},
            "request 'a': expected prompt and output",
        ),
        ({"asked": [Request(id="a", prompt=(5,), max_new_tokens=2)]}, "prompt token ids from 0 to 4, got 5"),
    ],
)
def test_bad_input_is_refused_before_the_first_forward(change, message):
    class NoForward(TabularModel):
        def prefill(self, prefixes):
            raise AssertionError("a forward was made")

    target = NoForward(random_tabular(5, 2).rows)
    options = {"asked": requests(2), "num_draft_tokens": 2, "batch_size": 2, **change}
    with pytest.raises(UsageError, match=message):
        run(target, NGramDrafter(), Rejection(), **options)


def test_a_pair_that_does_not_fit_is_refused():
    class OnlyPointMass(Rejection):
        laws = (PointMass,)

    target, draft = toy_pair()
    with pytest.raises(UsageError, match=r"ModelDrafter with OnlyPointMass.*'PointMass'.*'Dense'"):
        run(target, ModelDrafter(draft, 5, ratio=1.0), OnlyPointMass(), requests(1))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("verifier", sorted(VERIFIERS))
def test_exactly_the_pairs_whose_laws_fit_are_accepted(drafter, verifier):
    made = drafters(None, 5)[drafter]
    if (drafter, verifier) in pairs(VERIFIERS):
        check_pair(made, VERIFIERS[verifier])
    else:
        with pytest.raises(UsageError, match=rf"{type(made).__name__} with {type(VERIFIERS[verifier]).__name__}"):
            check_pair(made, VERIFIERS[verifier])


def test_rules_that_need_the_draft_law_refuse_shared_noise():
    assert {v for d, v in pairs(VERIFIERS) if d == "coupled"} == {
        "coupled", "match", "relaxed", "threshold", "threshold_loose", "typical", "typical_medusa",
    }  # fmt: skip


@pytest.mark.parametrize(
    "parameters", [{}, {"ratio": 1.0, "constant": 0.5}, {"ratio": -0.1}, {"constant": float("nan")}]
)
def test_draft_temperature_is_given_once(parameters):
    with pytest.raises(UsageError, match="exactly one of ratio and constant"):
        ModelDrafter(None, 5, **parameters)


@pytest.mark.parametrize("make", [ModelDrafter, TopMDrafter, CoupledDrafter])
@pytest.mark.parametrize("parameters", [{"constant": 0.0}, {"ratio": 0.0}, {"constant": 0}])
def test_a_draft_temperature_of_zero_is_a_point_mass(parameters, make):
    _, draft = toy_pair()
    drafter = make(draft, 5, **parameters)
    assert drafter.laws == (PointMass,)
    assert drafter.start([(1,)]).pending == ((1,),)
    state = SamplingState.of(["a", "b"], [SamplingParams()] * 2, [(1,), (2,)], [[], []], 5)
    noise = DraftNoise(torch.tensor([[0.1, 0.9], [0.99, 0.5]], dtype=torch.float64), torch.tensor([[1, 2], [3, 4]]))
    proposal, _ = drafter.propose(drafter.start([(1,), (2,)]), state, [2, 2], noise)
    assert isinstance(proposal.law, PointMass)
    assert proposal.law.bytes_per_token(5) == 0
    logits, _ = draft.score(draft.prefill([[], []]), torch.tensor([[1], [2]]))
    assert proposal.tokens[:, 0].tolist() == logits[:, 0].argmax(-1).tolist()


def test_the_draft_row_is_the_softmax_at_the_draft_temperature_and_not_at_its_square():
    _, draft = toy_pair()
    state = SamplingState.of(["a"], [SamplingParams(temperature=0.7)], [(1,)], [[]], 5)
    logits, _ = draft.score(draft.prefill([[]]), torch.tensor([[1]]))
    for parameters, temperature in (({"ratio": 1.0}, 0.7), ({"ratio": 0.5}, 0.35), ({"constant": 1.2}, 1.2)):
        drafter = ModelDrafter(draft, 5, **parameters)
        noise = DraftNoise(torch.zeros(1, 1, dtype=torch.float64))
        proposal, _ = drafter.propose(drafter.start([(1,)]), state, [1], noise)
        torch.testing.assert_close(proposal.law.probs[0, 0], (logits[0, 0] / temperature).softmax(-1))


@pytest.mark.parametrize(("keep", "temperature"), [(1, 0.9), (2, 0.9), (5, 0.9), (99, 0.9), (2, 0.0), (3, 1.3)])
def test_a_draft_row_of_top_m_is_the_row_cut_to_its_most_probable_tokens(keep, temperature):
    _, draft = toy_pair()
    state = SamplingState.of(["a"], [SamplingParams(temperature=temperature, top_k=4)], [(1,)], [[]], 5)
    logits, _ = draft.score(draft.prefill([[]]), torch.tensor([[1]]))
    row = state.probs(logits, torch.empty(1, 0, dtype=torch.int64), "draft")[0, 0]
    cut = torch.where(row >= row.sort(descending=True).values[min(keep, 5) - 1], row, 0)
    drafter = TopMDrafter(draft, 5, ratio=1.0, keep=keep)
    assert drafter.laws == (TopM,)
    for number in (0.0, 0.3, 0.6, 0.99):
        noise = DraftNoise(torch.tensor([[number]], dtype=torch.float64))
        proposal, _ = drafter.propose(drafter.start([(1,)]), state, [1], noise)
        assert isinstance(proposal.law, TopM)
        assert proposal.law.bytes_per_token(5) == 6 * min(keep, 5)
        kept = torch.zeros(5, dtype=torch.float64).scatter(0, proposal.law.ids[0, 0], proposal.law.probs[0, 0])
        torch.testing.assert_close(kept, cut / cut.sum(), rtol=0, atol=1e-15)
        assert proposal.tokens[0, 0] == draw(cut, noise.uniforms[0, 0])


@pytest.mark.parametrize("keep", [0, -1])
def test_top_m_keeps_at_least_one_token(keep):
    with pytest.raises(UsageError, match=r"drafter\.keep: expected an integer >= 1"):
        TopMDrafter(None, 5, ratio=1.0, keep=keep)


# The coupled pair


def texts(target, drafter, asked, num_draft_tokens, verifier=None) -> dict:
    done = run(target, drafter, verifier or Coupled(), asked, num_draft_tokens)
    return {key: one.tokens for key, one in done.items()}


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_coupled_output_is_the_same_for_every_drafter(num_draft_tokens):
    """Draft models, draft temperatures, block lengths, and drafters that share no noise: not one token changes."""
    target, draft = toy_pair()
    params = [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_p=0.9),
    ]
    asked = requests(9, max_new_tokens=24, params=params)
    expected = texts(target, NGramDrafter(), asked, 1)
    others = [CoupledDrafter(random_tabular(5, 1, seed=9), 5, **p) for p in ({"constant": 2.0}, {"ratio": 1.0})]
    coupled = [CoupledDrafter(draft, 5, **p) for p in ({"ratio": 0.5}, {"ratio": 1.0}, {"constant": 1.5}, {"ratio": 0})]
    fitting = [drafter for drafter in drafters(draft, 5).values() if set(drafter.laws) <= set(Coupled.laws)]
    assert len(fitting) == len(DRAFTERS) - 2  # all but those of several chains
    for drafter in (*fitting, *others, *coupled, CoupledDrafter(target, 5, ratio=1.0)):
        assert texts(target, drafter, asked, num_draft_tokens) == expected
    assert len(set(expected.values())) == 9


def test_the_output_of_other_rules_does_depend_on_the_drafter():
    target, draft = toy_pair()
    asked = requests(9, max_new_tokens=24)
    for verifier in (Rejection(), Block(), Match()):
        few, many = (texts(target, ModelDrafter(draft, 5, ratio=1.0), asked, k, verifier) for k in (1, 4))
        assert few != many


def test_coupled_output_of_a_transformer_is_the_same_for_every_drafter():
    target = tiny_model("llama")
    params = [SamplingParams(temperature=0.8), SamplingParams(temperature=0.0), SamplingParams(top_k=7)]
    asked = requests(6, max_new_tokens=16, vocab_size=40, params=params)
    expected = texts(target, NGramDrafter(), asked, 1)
    models = [skip_layers(target, [1]), tiny_model("llama", seed=1), tiny_model("gpt2", seed=2)]
    for (model, temperature), k in zip(itertools.product(models, (0.0, 0.6, 1.0, 1.7)), itertools.cycle(range(1, 9))):
        drafter = CoupledDrafter(model, 40, constant=temperature)
        assert texts(target, drafter, asked, k) == expected
    assert len(set(expected.values())) == 6


def test_shared_noise_raises_acceptance_to_the_formula():
    """p and q do not depend on the context, so every draft is accepted with probability `coupled_overlap`."""
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ([0.4, 0.3, 0.2, 0.1], [0.2, 0.2, 0.3, 0.3]))
    target, draft = TabularModel(p.expand(4, 4)), TabularModel(q.expand(4, 4))
    asked = requests(300, vocab_size=4, max_new_tokens=20, params=[SamplingParams()])
    rates = {CoupledDrafter: coupled_overlap(p, q).item(), ModelDrafter: (p * q).sum().item()}
    for make, rate in rates.items():
        done = run(target, make(draft, 4, ratio=1.0), Coupled(), asked, 1, 100)
        steps = [s for one in done.values() for s in one.steps if s.drafted]
        accepted = sum(s.accepted for s in steps)
        assert stats.binomtest(accepted, len(steps), rate).pvalue > 1e-9
        wrong = rates[ModelDrafter] if make is CoupledDrafter else rates[CoupledDrafter]
        assert stats.binomtest(accepted, len(steps), wrong).pvalue < 1e-9


@pytest.mark.parametrize(("k", "first_position", "length"), [(1, 0.5, 1.5), (8, 1.0, 3.0)])
def test_acceptance_at_the_first_position_depends_on_where_steps_start(k, first_position, length):
    """A text that repeats easy, easy, hard: with long drafts every step starts at the first easy token."""
    target = TabularModel(torch.eye(3, dtype=torch.float64)[[1, 2, 0]])
    draft = TabularModel(torch.eye(3, dtype=torch.float64)[[1, 2, 1]])  # wrong behind token 2 only
    asked = [Request("r", prompt=(0,), max_new_tokens=60)]
    (completion,) = run(target, ModelDrafter(draft, 3, constant=0.0), Rejection(), asked, k).values()
    steps = [step for step in completion.steps if step.drafted == k][:12]
    assert sum(step.emitted for step in steps) / len(steps) == pytest.approx(length, abs=0.01)
    assert sum(step.accepted > 0 for step in steps) / len(steps) == pytest.approx(first_position, abs=0.01)


@pytest.mark.parametrize(("accepted", "kept"), [(1, 1), (3, 3), (4, 3)])
def test_the_draft_cache_drops_what_was_rejected_and_lacks_the_last_of_a_fully_accepted_block(accepted, kept):
    """Four drafts: three were fed. One accepted drops two of them; all accepted leaves one token to catch up with."""
    _, draft = toy_pair()
    drafter = ModelDrafter(draft, 5, ratio=1.0)
    state = drafter.start([(1, 2)])
    sampling = SamplingState.of(["r"], [SamplingParams()], [(1, 2)], [[]], 5)
    noise = DraftNoise(torch.full((1, 4), 0.5, dtype=torch.float64))
    proposal, state = drafter.propose(state, sampling, [4], noise)
    assert (state.num_cached, state.num_fed) == ((2,), 3)
    emitted = [*proposal.tokens[0, :accepted].tolist(), 0]
    state = drafter.commit(state, [emitted])
    assert state.num_cached == (2 + kept,)
    assert state.cache.lengths.tolist() == [2 + kept]
    assert state.pending == (tuple(emitted[kept:]),)


def test_overflow_by_the_sampling_parameters_is_an_error_and_never_a_token():
    class Loud(TabularModel):
        def score(self, state, tokens):
            logits, state = super().score(state, tokens)
            return (logits.float() * 1e37).nan_to_num(neginf=-3e38), state

    target = Loud(random_tabular(5, 1).rows)
    asked = [Request("r", (1,), 4, SamplingParams(temperature=1e-20))]
    with pytest.raises(InvalidLogitsError, match=r"target logits of request 'r' at position 1 .*overflow"):
        run(target, NoDrafter(), Rejection(), asked)


@pytest.mark.parametrize("drafter", ["argmax", "same_temperature", "top_m", "coupled"])
def test_nan_of_the_draft_model_behind_a_rows_budget_concerns_nobody(drafter):
    class Broken(TabularModel):
        """NaN in the rows of the request whose prompt begins with a 4, from where it may not draft any more."""

        def score(self, state, tokens):
            logits, new = super().score(state, tokens)
            for b, q in itertools.product(*map(range, tokens.shape)):
                if int(new.tokens[b, self.order]) == 4 and int(state.lengths[b]) + q + 1 >= 5:
                    logits = logits.clone()
                    logits[b, q] = float("nan")
            return logits, new

    target = random_tabular(5, 2)
    make = drafters(Broken(target.rows), 5)[drafter]
    short = Request("short", (4, 1, 2), 3, SamplingParams(temperature=0.7))
    long = Request("long", (1, 2), 12, SamplingParams(temperature=0.7))
    verifier = VERIFIERS["coupled" if drafter == "coupled" else "rejection"]
    alone = run(target, make, verifier, [short], 4)["short"]
    assert outcome(run(target, make, verifier, [short, long], 4)["short"]) == outcome(alone)


@pytest.mark.parametrize(
    ("request_", "draft_context", "message"),
    [
        (Request("b", (1,), 2, SamplingParams(logit_bias={9: 1.0})), 4096, "request 'b': expected logit_bias"),
        (Request("b", (1,), 20), 10, "request 'b': expected prompt and output to fit into the 10 .* the draft model"),
    ],
)
def test_bad_requests_are_refused_before_any_other_is_decoded(request_, draft_context, message):
    target, _ = toy_pair()
    draft = TabularModel(target.rows, context_length=draft_context)
    with pytest.raises(UsageError, match=message):
        run(target, ModelDrafter(draft, 5, ratio=1.0), Rejection(), [*requests(1, max_new_tokens=2), request_])


@pytest.mark.parametrize("bad", [{"seed": 2**63}, {"seed": 1.5}, {"max_new_tokens": 2.5}, {"stop_strings": "abc"}])
def test_requests_of_wrong_types(bad):
    with pytest.raises(UsageError, match="request 'r': expected"):
        Request(**{"id": "r", "prompt": (1,), "max_new_tokens": 1, **bad})
