"""The loop on a device that is not there (`helpers.pretend_gpu`): as on a CPU, and the host waits once per step."""

import contextlib
from unittest import mock

import pytest
import torch

from spectoolkit.batch import Batch
from spectoolkit.datatypes import Request, SamplingParams
from spectoolkit.decode import decode
from spectoolkit.drafters import CoupledDrafter, ModelDrafter, NGramDrafter, TopMDrafter
from spectoolkit.errors import ContractError, InvalidLogitsError
from spectoolkit.functional.ragged import to_device
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.tabular import TabularModel, random_tabular
from spectoolkit.replay import Strategy, replay
from spectoolkit.scoring import score_by_length, score_expanded
from spectoolkit.trajectories import Trajectories
from spectoolkit.verifiers import Block, Coupled, Match, Rejection
from tests.helpers.pretend_gpu import PretendTensor, Waits, pretend_gpu, to_gpu
from tests.helpers.tiny_models import tiny_head, tiny_model
from tests.helpers.toys import (
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

ONCE = ["_on_host (batch): copy to the host"]
"""What a step waits for: the verdict."""

MIXED = [
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.2, top_k=3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(min_p=0.05, logit_bias={0: 1.5, 3: -2.0}),
]
SAMPLED = [SamplingParams(temperature=0.8), SamplingParams(temperature=1.3)]
GREEDY = [SamplingParams(temperature=0.0)]
LAYERS = (0, 1, 3)


def on_device(model: TabularModel) -> TabularModel:
    moved = type(model)(model.rows.to("cuda"), context_length=model.context_length)
    moved.tokenizer = model.tokenizer
    return moved


@contextlib.contextmanager
def steps_of(waits: Waits):
    """The waits of every step from its proposal to its end, without those for rows that join or leave behind it."""
    steps, begin = [], [0]
    draft_noise, record_laps = Batch.draft_noise, Batch.record_laps

    def begins(batch):
        begin[0] = len(waits.at)
        return draft_noise(batch)

    def ends(batch, laps):
        steps.append(waits.at[begin[0] :])
        record_laps(batch, laps)

    with mock.patch.object(Batch, "draft_noise", begins), mock.patch.object(Batch, "record_laps", ends):
        yield steps


def compare(make, verifier, asked, models=toy_pair, move=on_device, **options):
    """Decode on the CPU and on the device; the waits of every step there.

    `make` gets the draft model; `move` takes a model to the device.
    """
    target, draft = models()
    expected = {key: outcome(one) for key, one in run(target, make(draft), verifier, asked, **options).items()}
    with pretend_gpu() as waits, steps_of(waits) as steps:
        target, draft = map(move, models())
        found = run(target, make(draft), verifier, asked, **options)
    assert {key: outcome(one) for key, one in found.items()} == expected
    return steps


@pytest.mark.parametrize(("drafter", "verifier"), pairs(VERIFIERS))
def test_tokens_and_counts_are_those_of_the_cpu_and_a_step_waits_once(drafter, verifier):
    """Rows of all kinds in one batch, of different lengths, that end at different times and are replaced by others."""
    asked = requests(5, max_new_tokens=4, params=MIXED)
    steps = compare(lambda draft: drafters(draft, 5)[drafter], VERIFIERS[verifier], asked, batch_size=3)
    assert len(steps) >= 4
    assert all(step == ONCE for step in steps), steps


PLAIN = [(d, v) for d, v in pairs(VERIFIERS) if v in ("rejection", "block", "coupled", "match", "typical", "recursive")]


@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("drafter", ["argmax", "same_temperature", "top_m", "coupled", "chains"])
def test_plain_rows(drafter, params):
    """Rows that go other ways than mixed ones: all sampled without filters, or all greedy."""
    asked = requests(3, max_new_tokens=6, params=params)
    for name in [v for d, v in PLAIN if d == drafter]:
        steps = compare(lambda draft: drafters(draft, 5)[drafter], VERIFIERS[name], asked)
        assert all(step == ONCE for step in steps), (name, steps)


def test_rules_and_drafters_that_are_wrong_on_purpose():
    asked = requests(3, max_new_tokens=4)
    for name, verifier in WRONG_VERIFIERS.items():
        steps = compare(lambda draft: ModelDrafter(draft, 5, ratio=1.0), verifier, asked)
        assert all(step == ONCE for step in steps), (name, steps)
    for name in wrong_drafters(None, 5):
        steps = compare(lambda draft, name=name: wrong_drafters(draft, 5)[name], Rejection(), asked)
        assert all(step == ONCE for step in steps), (name, steps)


def test_draft_rows_with_parameters_of_their_own():
    asked = requests(3, max_new_tokens=6, params=MIXED)
    for options in ({"top_k": 2}, {"top_p": 0.7, "min_p": 0.1}, {"repetition_penalty": 1.4}):
        steps = compare(lambda draft, own=options: ModelDrafter(draft, 5, constant=0.7, **own), Block(), asked)
        assert all(step == ONCE for step in steps), steps


def test_vocabularies_of_different_sizes():
    for own, other in ((6, 5), (5, 6)):
        models = lambda own=own, other=other: (random_tabular(own, 1, seed=3), random_tabular(other, 1, seed=4))  # noqa: E731
        asked = requests(3, max_new_tokens=5, params=MIXED)
        for make in (ModelDrafter, TopMDrafter):
            compare(lambda draft, make=make, own=own: make(draft, own, ratio=1.0), Block(), asked, models)


def test_an_observer_sees_rows_on_the_device_and_costs_no_wait():
    asked, seen = requests(4, max_new_tokens=6, params=MIXED), []

    def observe(request_ids, target_probs, proposal, emitted):
        assert all(isinstance(part, PretendTensor) for part in (target_probs, proposal.tokens, emitted))
        seen.append([target_probs.inner, proposal.tokens.inner, emitted.inner])

    for name in ("same_temperature", "chains"):
        target, draft = toy_pair()
        verifier = VERIFIERS["recursive" if name == "chains" else "rejection"]
        expected = []
        options = {"num_draft_tokens": 3, "batch_size": 2}
        list(
            decode(
                target,
                drafters(draft, 5)[name],
                verifier,
                asked,
                observe=lambda ids, probs, proposal, emitted, to=expected: to.append([probs, proposal.tokens, emitted]),
                **options,
            )
        )
        seen.clear()
        with pretend_gpu() as waits, steps_of(waits) as steps:
            target, draft = map(on_device, (target, draft))
            list(decode(target, drafters(draft, 5)[name], verifier, asked, observe=observe, **options))
        assert all(step == ONCE for step in steps)
        assert len(seen) == len(expected) == len(steps)
        for one, other in zip(seen, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def llama(model: CausalLM) -> CausalLM:
    return CausalLM(to_gpu(model.hf_model), model.tokenizer, model.name, model.feature_layers, graphs="off")


@pytest.mark.parametrize("way", [score_expanded, score_by_length])
@pytest.mark.parametrize("kind", ["tabular", "llama"])
def test_other_ways_to_score_wait_for_the_shapes_they_need(way, kind):
    """Which slots hold a token is asked of the device; so is which numbers of drafts there are, and who has each."""
    asked = requests(4, max_new_tokens=5, vocab_size=5, params=MIXED)

    def decoded(target):
        found = decode(target, NGramDrafter(2, 1), Match(), asked, num_draft_tokens=3, batch_size=3, score=way)
        return {one.request.id: outcome(one) for one in found}

    target = toy_pair()[0] if kind == "tabular" else tiny_model()
    expected = decoded(target)
    with pretend_gpu() as waits, steps_of(waits) as steps:
        assert decoded(on_device(target) if kind == "tabular" else llama(target)) == expected
    name = f"{way.__name__} (scoring): "
    slots = name + "nonzero_numpy"
    for step in steps:
        if way is score_expanded:
            assert step == [slots, *ONCE]
        else:
            num_lengths = len(step) - 3
            assert step == [name + "_unique2", name + "tolist", *[slots] * num_lengths, *ONCE]
            assert 1 <= num_lengths <= 3


TRANSFORMERS = {
    "same_temperature block": (lambda draft: ModelDrafter(draft, 40, ratio=1.0), Block()),
    "coupled coupled": (lambda draft: CoupledDrafter(draft, 40, ratio=1.0), Coupled()),
    "ngram match": (lambda draft: NGramDrafter(2, 1), Match()),
    "chains recursive": (lambda draft: drafters(draft, 40)["chains"], VERIFIERS["recursive"]),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer(name):
    make, verifier = TRANSFORMERS[name]
    asked = requests(5, max_new_tokens=6, vocab_size=40, params=MIXED)
    models = lambda: (tiny_model(), tiny_model(seed=1, layers=1))  # noqa: E731
    steps = compare(make, verifier, asked, models, llama, batch_size=3)
    assert all(step == ONCE for step in steps), steps


HEADS = {
    "argmax rejection": (lambda draft: ModelDrafter(draft, 40, constant=0.0), Rejection()),
    "same_temperature block": (lambda draft: ModelDrafter(draft, 40, ratio=1.0), Block()),
    "chains recursive": (lambda draft: drafters(draft, 40)["distinct_chains"], VERIFIERS["recursive"]),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_draft_head(name):
    make, verifier = HEADS[name]
    asked = requests(5, max_new_tokens=6, vocab_size=40, params=MIXED)
    target = tiny_model().with_features(LAYERS)
    done = run(target, make(tiny_head(target)), verifier, asked, batch_size=3)
    expected = {key: outcome(one) for key, one in done.items()}
    with pretend_gpu() as waits, steps_of(waits) as steps:
        target = llama(target)
        head = tiny_head(target)
        to_gpu(head.head)
        found = run(target, make(head), verifier, asked, batch_size=3)
    assert {key: outcome(one) for key, one in found.items()} == expected
    assert all(step == ONCE for step in steps), steps


def counts_of(target, strategies, asked, outputs):
    texts = Trajectories(tuple(asked), outputs, ("length",) * len(asked))
    return [[of_k.accepted_at for of_k in some] for some in replay(target, strategies, texts)]


def test_replay():
    asked = requests(5, max_new_tokens=6, params=MIXED)
    target, draft = toy_pair()
    outputs = tuple(one.tokens for _, one in sorted(run(target, NGramDrafter(2, 1), Rejection(), asked).items()))

    def strategies(draft):
        made = drafters(draft, 5)
        rules = {"rejection": ("argmax", "temperature", "top_m", "ngram", "suffix"), "block": ("same_temperature",)}
        rules["coupled"] = ("coupled", "none")
        return [Strategy(made[name], VERIFIERS[rule], 3) for rule, names in rules.items() for name in names]

    expected = counts_of(target, strategies(draft), asked, outputs)
    with pretend_gpu():
        found = counts_of(on_device(target), strategies(on_device(draft)), asked, outputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_replay_of_a_transformer_and_a_draft_head():
    asked = requests(5, max_new_tokens=6, vocab_size=40, params=MIXED)
    target, draft = tiny_model().with_features(LAYERS), tiny_model(seed=1, layers=1)
    outputs = tuple(one.tokens for _, one in sorted(run(target, NGramDrafter(2, 1), Rejection(), asked).items()))

    def strategies(head, draft):
        return [Strategy(ModelDrafter(model, 40, ratio=1.0), Block(), 3) for model in (head, draft)]

    expected = counts_of(target, strategies(tiny_head(target), draft), asked, outputs)
    with pretend_gpu():
        target, draft = llama(target), llama(draft)
        head = tiny_head(target)
        to_gpu(head.head)
        found = counts_of(target, strategies(head, draft), asked, outputs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


class Breaks(TabularModel):
    """A row is NaN once a sequence that began with token 4 has six tokens."""

    def score(self, state, tokens):
        logits, new = super().score(state, tokens)
        ends = to_device(state.lengths[:, None] + torch.arange(tokens.shape[1]) + 1, logits.device)
        began = new.tokens[:, self.order : self.order + 1] == 4
        return logits.masked_fill(((ends == 6) & began)[..., None], torch.nan), new


BROKEN = [("same_temperature", "block"), ("argmax", "match"), ("coupled", "coupled"), ("chains", "recursive")]


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize(("drafter", "verifier"), BROKEN)
def test_nan_names_model_request_and_position(side, drafter, verifier):
    good = random_tabular(5, 2)
    asked = [Request("fine", (1, 2), 9), Request("bad", (4, 0), 9)]
    messages = []
    for place in (contextlib.nullcontext, pretend_gpu):
        with place():
            models = [Breaks(good.rows), good] if side == "target" else [good, Breaks(good.rows)]
            target, draft = models if place is contextlib.nullcontext else map(on_device, models)
            with pytest.raises(InvalidLogitsError, match=rf"{side} logits of request 'bad' at position 6 ") as caught:
                run(target, drafters(draft, 5)[drafter], VERIFIERS[verifier], asked)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_nan_of_the_draft_model_behind_a_rows_budget_concerns_nobody():
    good = random_tabular(5, 2)
    asked = [Request("short", (4, 1, 2), 3, SAMPLED[0]), Request("long", (1, 2), 12, SAMPLED[0])]
    for drafter in ("same_temperature", "chains"):
        verifier = VERIFIERS["recursive" if drafter == "chains" else "rejection"]
        models = lambda: (good, Breaks(good.rows))  # noqa: E731
        steps = compare(lambda draft, name=drafter: drafters(draft, 5)[name], verifier, asked, models)
        assert all(step == ONCE for step in steps), steps


class Foreign(ModelDrafter):
    """Says that it draws from rows of two tokens, and gives another one."""

    def sample(self, probs, noise, index):
        return probs.argmin(-1), (probs,)


class ForeignTopM(TopMDrafter):
    def sample(self, probs, noise, index):
        _, kept = super().sample(probs, noise, index)
        return (kept[0].amax(-1) + 1) % probs.shape[-1], kept


class ForeignChains(drafters(None, 2)["chains"].__class__):
    def sample(self, probs, noise, index):
        return probs.argmin(-1), (probs,)


class RepeatedChains(drafters(None, 2)["chains"].__class__):
    """Says that the first tokens differ, and gives the same one."""

    def sample(self, probs, noise, index):
        return probs.argmax(-1), (probs,)


FOREIGN = {
    "dense": (lambda draft: Foreign(draft, 5, ratio=1.0, top_k=2), ("rejection", "block", "lenient", "mixture")),
    "top_m": (lambda draft: ForeignTopM(draft, 5, ratio=1.0, keep=1), ("rejection", "block")),
    "chains": (lambda draft: ForeignChains(draft, 5, ratio=1.0, top_k=2, num_chains=2), ("recursive",)),
    "repeated": (
        lambda draft: RepeatedChains(draft, 5, ratio=1.0, num_chains=2, with_replacement=False),
        ("recursive",),
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_token_that_was_not_drawn_from_its_law_is_an_error(kind):
    make, verifiers = FOREIGN[kind]
    asked = requests(3, params=SAMPLED)
    for name in verifiers:
        for place in (contextlib.nullcontext, pretend_gpu):
            with place():
                target, draft = toy_pair() if place is contextlib.nullcontext else map(on_device, toy_pair())
                drafter = make(draft)
                with pytest.raises(ContractError, match="drawn from the law"):
                    run(target, drafter, VERIFIERS[name], asked)
