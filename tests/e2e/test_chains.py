"""Several chains per step in the loop. The tests of all pairs (`test_decode`) run them too."""

import pytest
import torch
from scipy import stats

from spectoolkit.datatypes import Request, SamplingParams
from spectoolkit.decode import decode
from spectoolkit.drafters import ChainsDrafter, ModelDrafter
from spectoolkit.models.tabular import TabularModel
from spectoolkit.sampling import SamplingState
from spectoolkit.verifiers import Recursive, Rejection
from tests.helpers.tiny_models import tiny_head, tiny_model
from tests.helpers.toys import outcome, requests, run, toy_pair

NOTHING = torch.empty(1, 0, dtype=torch.int64)
LAYERS = (0, 1, 3)
PARAMS = [
    SamplingParams(temperature=0.8, repetition_penalty=1.2),
    SamplingParams(temperature=0.0),
    SamplingParams(top_p=0.9),
]


def transformer(kind):
    """Target and draft model."""
    target = tiny_model("llama").with_features(LAYERS)
    return target, tiny_head(target) if kind == "head" else tiny_model("llama", seed=1, layers=1)


@pytest.mark.parametrize("with_replacement", [True, False])
def test_one_chain_is_an_ordinary_proposal(with_replacement):
    """Same noise, same tokens, same counts as rejection of a single proposal."""
    target, draft = toy_pair()
    asked = requests(12, params=PARAMS)
    chains = ChainsDrafter(draft, 5, ratio=1.0, num_chains=1, with_replacement=with_replacement)
    one = run(target, chains, Recursive(), asked)
    other = run(target, ModelDrafter(draft, 5, ratio=1.0), Rejection(), asked)
    assert {key: outcome(done) for key, done in one.items()} == {key: outcome(done) for key, done in other.items()}


@pytest.mark.parametrize("with_replacement", [True, False])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_requests_on_transformers_do_not_depend_on_their_batch(kind, with_replacement):
    """Rows with different budgets, that end at different times and are replaced by others."""
    target, draft = transformer(kind)
    drafter = ChainsDrafter(draft, 40, ratio=1.0, num_chains=3, with_replacement=with_replacement)
    asked = [
        Request(f"r{i}", tuple((7 * i + 3 * j) % 40 for j in range(1 + i % 4)), 3 + 4 * (i % 3), PARAMS[i % 3])
        for i in range(7)
    ]
    alone = {r.id: outcome(run(target, drafter, Recursive(), [r])[r.id]) for r in asked}
    for batch_size, order in ((3, asked[::-1]), (7, asked)):
        together = run(target, drafter, Recursive(), order, batch_size=batch_size)
        assert {key: outcome(one) for key, one in together.items()} == alone
    greedy = [r for r in asked if r.params.temperature == 0]
    plain = run(target, ModelDrafter(draft, 40, constant=0.0), Rejection(), greedy)
    assert {r.id: plain[r.id].tokens for r in greedy} == {r.id: alone[r.id][0] for r in greedy}


@pytest.mark.parametrize("with_replacement", [True, False])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_every_step_goes_on_behind_the_chain_that_was_accepted(kind, with_replacement):
    """The first target row and the first draft row of every step are those of fresh states on the emitted tokens.

    Hot sampling, so that the chains differ and later ones are accepted too.
    """
    target, draft = transformer(kind)
    seen = {"proposals": [], "rows": [], "later": 0}

    class Watched(Recursive):
        def verify(self, target_probs, proposal, uniforms):
            verdict = super().verify(target_probs, proposal, uniforms)
            seen["later"] += int(((verdict.chain > 0) & (verdict.num_accepted > 0)).sum())
            return verdict

    def observe(request_ids, target_probs, proposal, emitted):
        seen["rows"].append(target_probs[0, 0])
        seen["proposals"].append(proposal)

    drafter = ChainsDrafter(draft, 40, constant=2.0, num_chains=4, with_replacement=with_replacement)
    params = SamplingParams(temperature=2.0, repetition_penalty=1.1)
    asked = Request("r", (3, 1, 4), 60, params)
    (done,) = decode(target, drafter, Watched(), [asked], num_draft_tokens=3, batch_size=1, observe=observe)
    assert seen["later"] >= 3
    for step, row, proposal in zip(done.steps, seen["rows"], seen["proposals"], strict=True):
        history = [*asked.prompt, *done.tokens[: step.start]]
        sampling = SamplingState.of(["x"], [params], [asked.prompt], [done.tokens[: step.start]], 40)
        state = target.prefill([history[:-1]])
        features = target.features(state, [len(history) - 1])
        logits, _ = target.score(state, torch.tensor([history[-1:]]))
        torch.testing.assert_close(row, sampling.probs(logits, NOTHING, "target")[0, 0])
        if step.drafted:
            stream = drafter.stream
            logits, _ = stream.first(stream.start([history], features))
            expected = drafter.draft_probs(logits, sampling, NOTHING)[0, 0]
            torch.testing.assert_close(proposal.law.probs[0, :, 0], expected.expand(4, -1))


def lengths(num_chains, with_replacement=True, num=150):
    """Acceptance length of every request."""
    target, draft = toy_pair(vocab_size=8)
    drafter = ChainsDrafter(draft, 8, ratio=1.0, num_chains=num_chains, with_replacement=with_replacement)
    asked = requests(num, max_new_tokens=24, vocab_size=8, params=[SamplingParams()])
    done = run(target, drafter, Recursive(), asked, 3, 50)
    return {key: len(one.tokens) / len(one.steps) for key, one in done.items()}


def test_more_chains_are_accepted_for_longer():
    """Paired by request: the mean gain of four chains, independent or distinct, is 6 standard errors above 0."""
    one, four = lengths(1), lengths(4)
    distinct = lengths(4, with_replacement=False)
    for low, high in ((one, four), (one, distinct)):
        gains = torch.tensor([high[key] - low[key] for key in low])
        assert gains.mean() > 6 * gains.std() / len(gains) ** 0.5


@pytest.mark.parametrize(("with_replacement", "rate"), [(True, 0.76), (False, 0.82)])
def test_acceptance_of_two_chains_by_hand(with_replacement, rate):
    """p = (.5, .3, .2), q = (.2, .3, .5): the first is accepted with .7, and what is left of p is token 0 alone.

    The second is that with q(0) = .2, or q(0) / (1 - q(2)) = .4 without replacement: .7 + .3 * .2 and .7 + .3 * .4.
    """
    p, q = ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
    target, draft = (TabularModel(torch.tensor(row, dtype=torch.float64).expand(3, 3)) for row in (p, q))
    drafter = ChainsDrafter(draft, 3, ratio=1.0, num_chains=2, with_replacement=with_replacement)
    asked = requests(400, vocab_size=3, max_new_tokens=20, params=[SamplingParams()])
    steps = [s for one in run(target, drafter, Recursive(), asked, 1, 200).values() for s in one.steps if s.drafted]
    accepted = sum(s.accepted for s in steps)
    assert stats.binomtest(accepted, len(steps), rate).pvalue > 1e-9
    assert stats.binomtest(accepted, len(steps), 0.7).pvalue < 1e-9


def test_records_count_one_chain():
    target, draft = toy_pair()
    drafter = ChainsDrafter(draft, 5, ratio=1.0, num_chains=3)
    for one in run(target, drafter, Recursive(), requests(5), 3).values():
        assert one.draft_bytes_per_token == 3 * 5 * 2
        for step in one.steps:
            assert len(step.judged_alone) == step.drafted <= 3
            assert all(step.judged_alone[: step.verified])


def test_a_chain_that_does_not_exist_concerns_nobody():
    """NaN behind token 0, which the draft never proposes: what fills a missing chain is not judged."""

    class Broken(TabularModel):
        def score(self, state, tokens):
            logits, state = super().score(state, tokens)
            return logits.masked_fill((tokens == 0)[..., None], float("nan")), state

    rows = torch.tensor([[0.0, 0.6, 0.4]] * 3, dtype=torch.float64)
    drafter = ChainsDrafter(Broken(rows), 3, ratio=1.0, num_chains=4, with_replacement=False)
    target = TabularModel(torch.tensor([[0.0, 0.3, 0.7]] * 3, dtype=torch.float64))
    done = run(target, drafter, Recursive(), [Request("r", (1,), 20)])["r"]
    assert set(done.tokens) == {1, 2}
