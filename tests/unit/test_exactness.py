"""The audit sees what is wrong, and its numbers are what they say: enumerated laws, p-values, power."""

import dataclasses
import itertools
import math
from collections import Counter
from dataclasses import dataclass

import pandas as pd
import pytest
import torch

from spectoolkit import config
from spectoolkit.datatypes import Request, SamplingParams, Uniforms
from spectoolkit.drafters import ModelDrafter, NGramDrafter
from spectoolkit.errors import RunError, UsageError
from spectoolkit.exactness import proof
from spectoolkit.exactness.audit import Finding, claim_of, failures
from spectoolkit.exactness.boxes import integrate
from spectoolkit.exactness.calibrated import cells, combined, expected_distance, sample_test, smallest_detectable
from spectoolkit.exactness.proof import EXACT, Proof, distance, emitted_blocks, prove, sequence_law
from spectoolkit.exactness.target_law import most_probable, next_probs
from spectoolkit.exactness.traced import TooManyTokensError, UntraceableError
from spectoolkit.functional.acceptance import emitted_block, take
from spectoolkit.functional.draw import draw, gumbel_max
from spectoolkit.functional.noise import exponentials
from spectoolkit.models.tabular import TabularModel, blend_tabular, random_tabular
from spectoolkit.verifiers import Block, Coupled, Match, Rejection
from tests.helpers.enumerate import block_cells, emission
from tests.helpers.tiny_models import tiny_model
from tests.helpers.toys import VERIFIERS, drafters, run

TARGET_ROW, DRAFT_ROW = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]


@dataclass(frozen=True)
class RecoversFromTarget(Rejection):
    """Wrong: the recovered token is drawn from p and not from what p has beyond q."""

    def verify(self, target_probs, proposal, uniforms):
        verdict = super().verify(target_probs, proposal, uniforms)
        at = verdict.num_accepted
        own = draw(take(target_probs, at), take(uniforms.emit, at))
        return dataclasses.replace(verdict, emitted=emitted_block(proposal.tokens, at, own))


class WrongOnPurpose(RecoversFromTarget):
    is_negative_control = True


class ReusesDraftNoise(ModelDrafter):
    """Wrong: every step drafts with the noise of the first."""

    def start(self, prompts, features=None):
        return super().start(prompts, features), None

    def propose(self, state, sampling, max_tokens, noise):
        inner, first = state
        proposal, inner = super().propose(inner, sampling, max_tokens, first or noise)
        return proposal, (inner, first or noise)

    def commit(self, state, emitted, features=None):
        return super().commit(state[0], emitted), state[1]


class ReportsAnotherRow(ModelDrafter):
    """Wrong: the reported row is not the one that was drawn from."""

    def sample(self, probs, noise, index):
        drawn, (row,) = super().sample(probs, noise, index)
        return drawn, ((row + 1 / row.shape[-1]) / 2,)


@dataclass(frozen=True)
class SharesNoise(Rejection):
    """Wrong: the token behind the accepted prefix is drawn with the noise that judged the first draft."""

    def verify(self, target_probs, proposal, uniforms):
        emit = uniforms.accept[:, :1].expand(-1, uniforms.emit.shape[1])
        return super().verify(target_probs, proposal, Uniforms(uniforms.accept, emit))


@dataclass(frozen=True)
class TakesLogarithms(Rejection):
    """Right, in a way that cannot be followed."""

    def verify(self, target_probs, proposal, uniforms):
        return super().verify(target_probs, proposal, dataclasses.replace(uniforms, accept=uniforms.accept.log().exp()))


def constant(row):
    return TabularModel(torch.tensor(row, dtype=torch.float64).expand(len(row), len(row)))


# Enumeration


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [("same_temperature", "block"), ("top_m", "rejection"), ("argmax", "match"), ("coupled", "coupled"),
     ("ngram", "coupled"), ("coupled", "typical"), ("ngram", "typical"), ("none", "typical")],
)  # fmt: skip
def test_what_claims_to_be_lossless_is_proven_and_the_rest_is_seen(drafter, verifier):
    found = prove(lambda draft, vocab_size: (drafters(draft, vocab_size)[drafter], VERIFIERS[verifier]))
    assert found.one_step is not None
    assert found.is_exact == (VERIFIERS[verifier].is_lossless or drafter == "none")
    if not found.is_exact:
        assert max(found.one_step, found.two_steps) > 0.1
    reads_shared_noise = "coupled" in (drafter, verifier)
    assert found.how == ("enumerated, V = 2, K = 2" if reads_shared_noise else "enumerated, V = 3 and 2, K = 2")


def test_a_recovered_token_from_the_target_by_hand():
    """Accepted mass .2 + .3 + .2; what is missing, .3, falls on p: .2 + .3 p. TV = (.15 + .09 + .06) / 2 = .15."""
    target, drafter = constant(TARGET_ROW), ModelDrafter(constant(DRAFT_ROW), 3, ratio=1.0)
    request = Request("r", (0,), 2)
    blocks = emitted_blocks(target, drafter, RecoversFromTarget(), request, 1, 1)
    first = [sum(mass for tokens, mass in blocks.items() if tokens[0] == x) for x in range(3)]
    assert first == pytest.approx([0.35, 0.39, 0.26])
    assert distance(target, request, blocks) == pytest.approx(0.15)
    right = emitted_blocks(target, drafter, Rejection(), request, 1, 1)
    assert distance(target, request, right) <= EXACT


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=repr)
@pytest.mark.parametrize("parameters", [{"ratio": 1.0}, {"constant": 0.0}])
def test_the_blocks_are_those_of_the_enumeration_that_knows_the_rule(rule, parameters, num_drafts):
    target = random_tabular(3, order=2, seed=4)
    draft = blend_tabular(target, weight=0.4, seed=5)
    request = Request("r", (0, 1, 0, 1), num_drafts + 1)

    def table(model, depth):
        contexts = [list(itertools.product(range(3), repeat=d)) for d in range(depth)]
        return [next_probs(model, request, c).reshape((3,) * (d + 1)) for d, c in enumerate(contexts)]

    drafted = table(draft, num_drafts)
    is_argmax = "constant" in parameters
    drawn = [torch.nn.functional.one_hot(t.argmax(-1), 3).double() for t in drafted] if is_argmax else drafted
    known = block_cells if rule == Block() else None
    expected = emission(table(target, num_drafts + 1), drawn, None if is_argmax else drawn, rule, cells=known).blocks
    blocks = emitted_blocks(target, ModelDrafter(draft, 3, **parameters), rule, request, num_drafts, 1)
    assert blocks.keys() == {tokens for tokens, mass in expected.items() if mass > 0}
    for tokens, mass in blocks.items():
        assert mass == pytest.approx(float(expected[tokens]), abs=EXACT)


def test_a_larger_toy():
    target = random_tabular(4, order=2, seed=6)
    request = Request("r", (0, 1, 0, 1), 4)
    drafter = ModelDrafter(blend_tabular(target, weight=0.4, seed=7), 4, ratio=1.0)
    blocks = emitted_blocks(target, drafter, Rejection(), request, 3, 1)
    assert distance(target, request, blocks) <= EXACT
    assert sum(blocks.values()) == pytest.approx(1, abs=EXACT)


def test_noise_that_comes_back_in_the_next_step_is_seen_there():
    found = prove(lambda draft, vocab_size: (ReusesDraftNoise(draft, vocab_size, ratio=1.0), Rejection()))
    assert found.one_step <= EXACT
    assert found.two_steps > 0.01


def test_noise_of_the_engine_that_comes_back_is_seen(monkeypatch):
    """As if the start of the step were missing in the key of the noise."""
    real = proof.draft_noise
    monkeypatch.setattr(proof, "draft_noise", lambda seeds, keys, starts, *rest: real(seeds, keys, 0 * starts, *rest))
    found = prove(lambda draft, vocab_size: (ModelDrafter(draft, vocab_size, ratio=1.0), Rejection()))
    assert found.one_step <= EXACT
    assert found.two_steps > 0.01


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [(ModelDrafter, SharesNoise()), (ModelDrafter, RecoversFromTarget()), (ReportsAnotherRow, Rejection()),
     (ReportsAnotherRow, Block())],
    ids=str,
)  # fmt: skip
def test_wrong_rules_and_laws_are_seen_at_once(drafter, verifier):
    found = prove(lambda draft, vocab_size: (drafter(draft, vocab_size, ratio=1.0), verifier))
    assert found.one_step > 0.01


def test_what_cannot_be_followed_is_not_guessed():
    found = prove(lambda draft, vocab_size: (ModelDrafter(draft, vocab_size, ratio=1.0), TakesLogarithms()))
    assert found.one_step is None
    assert not found.is_exact
    assert "log of a uniform" in found.how


def test_boxes_have_the_probabilities_of_what_is_drawn():
    probs = torch.tensor([0.125, 0.0, 0.5, 0.375], dtype=torch.float64)
    noise = torch.tensor([[0.1, 0.2]], dtype=torch.float64)  # two uniforms, whatever their values

    def program(boxes):
        uniforms = boxes.uniforms(noise.expand(len(boxes), -1))
        return torch.stack([draw(probs.expand(len(boxes), 4), uniforms[:, i]) for i in range(2)], dim=1)

    found = Counter()
    for drawn, is_whole, volumes in integrate(program):
        for pair, volume in zip(drawn[is_whole].tolist(), volumes[is_whole].tolist(), strict=True):
            found[tuple(pair)] += volume
    assert found == {(a, b): float(probs[a] * probs[b]) for a, b in itertools.product((0, 2, 3), repeat=2)}


@pytest.mark.parametrize(
    "operation",
    [
        lambda u: 1 - u * 0.5 < 0.75,  # u > .5
        lambda u: torch.tensor(0.5) < u,
        lambda u: torch.where(torch.tensor([True]), u, 0.25).flip(1)[:, :1] > 0.5,
        lambda u: torch.cat([u, torch.ones(len(u), 1)], dim=1)[:, :1].clone() >= 0.5,
        lambda u: (u / 2 + 0.25).squeeze(1)[:, None] > 0.5,
        lambda u: -u < -0.5,
        lambda u: torch.nn.functional.pad(u, (1, 0), value=0.9)[:, 1:].double() > 0.5,
    ],
)
def test_numbers_may_be_moved_scaled_shifted_and_compared(operation):
    noise = torch.tensor([[0.1]], dtype=torch.float64)
    found = Counter()
    for outcome, is_whole, volumes in integrate(lambda boxes: operation(boxes.uniforms(noise.expand(len(boxes), 1)))):
        for true, volume in zip(outcome[is_whole].flatten().tolist(), volumes[is_whole].tolist(), strict=True):
            found[true] += volume
    assert found == {True: 0.5, False: 0.5}


@pytest.mark.parametrize(
    "operation",
    [lambda u: u.floor(), lambda u: u + u, lambda u: bool(u), lambda u: u.tolist(), lambda u: u.to(torch.float32),
     lambda u: u.sum(), lambda u: u == 0.5, lambda u: 1 / u],
)  # fmt: skip
def test_other_operations_are_refused(operation):
    noise = torch.tensor([[0.1]], dtype=torch.float64)
    with pytest.raises(UntraceableError):
        list(integrate(lambda boxes: operation(boxes.uniforms(noise.expand(len(boxes), 1)))))


def test_shared_noise_over_two_tokens_is_one_uniform():
    keys = torch.arange(2000)
    noise = exponentials(keys, 2)
    uniform = noise[:, 1] / noise.sum(-1)
    for row in ([0.3, 0.7], [0.9, 0.1], [1.0, 0.0], [0.0, 1.0], [3.0, 1.0]):
        probs = torch.tensor(row, dtype=torch.float64)
        chosen = torch.where(uniform > probs[1] / probs.sum(), 0, 1)
        assert torch.equal(gumbel_max(probs.expand(2000, 2), keys), chosen)
    # 2,000 uniforms: the largest distance to their law is below 0.05 but for one in 20,000 such sets.
    assert (uniform.sort().values - torch.arange(2000) / 2000).abs().max() < 0.05


def test_shared_noise_over_more_tokens_is_refused():
    target = random_tabular(3, order=1)
    with pytest.raises(TooManyTokensError, match="got a vocabulary of 3"):
        emitted_blocks(target, NGramDrafter(), Coupled(), Request("r", (0, 1), 2), 1, 1)


# The target's law


def test_the_most_probable_outputs_and_their_probabilities():
    target = random_tabular(4, order=2, seed=3)
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.4, frequency_penalty=0.3)
    request = Request("r", (0, 1, 2), 3, params)
    law = sequence_law(target, request, 3)
    assert law.sum().item() == pytest.approx(1)
    everything = most_probable(target, request, 64)
    assert set(everything.outputs) == {tuple(index) for index in law.nonzero().tolist()}
    assert everything.probs.tolist() == pytest.approx([float(law[output]) for output in everything.outputs])
    few = most_probable(target, request, 5)
    assert few.outputs == everything.outputs[:5]


def test_an_output_ends_at_a_stop_id():
    target = random_tabular(3, order=1, seed=1)
    request = Request("r", (0,), 3, stop_ids=frozenset([2]))
    law = most_probable(target, request, 100)
    assert {output for output in law.outputs if 2 in output} == {
        (*before, 2) for size in range(3) for before in itertools.product(range(2), repeat=size)
    }
    assert law.probs.sum().item() == pytest.approx(1)
    counts, probs = cells({(2,): 3, (0, 1, 2): 1}, most_probable(target, request, 2))
    assert counts.sum().item() == 4
    assert len(probs) == 3
    assert probs.sum().item() == pytest.approx(1)


# The calibrated test


def multinomial(num, probs):
    """Every table of `num` outputs over three cells, and its probability."""
    for first in range(num + 1):
        for second in range(num + 1 - first):
            counts = (first, second, num - first - second)
            ways = math.factorial(num) / math.prod(math.factorial(count) for count in counts)
            yield counts, ways * math.prod(p**c for p, c in zip(probs, counts, strict=True))


@pytest.mark.parametrize("probs", [(0.5, 0.3, 0.2), (0.9, 0.08, 0.02), (1 / 3, 1 / 3, 1 / 3), (0.6, 0.4, 0.0)])
@pytest.mark.parametrize("num", [1, 7, 40])
def test_p_values_are_never_too_small_under_the_null(num, probs):
    """Exactly: over all tables, P(p <= a) <= a at every p-value a that occurs."""
    row = torch.tensor(probs, dtype=torch.float64)
    tables = list(multinomial(num, probs))
    tests = [sample_test(torch.tensor(counts, dtype=torch.float64), row) for counts, _ in tables]
    weights = [weight for _, weight in tables]
    for a in {test.p_value for test in tests}:
        assert sum(w for test, w in zip(tests, weights, strict=True) if test.p_value <= a) <= a + 1e-12
    mean = sum(w * test.distance for test, w in zip(tests, weights, strict=True))
    assert expected_distance(row, num) == pytest.approx(mean)


def test_p_values_of_larger_tables_are_conservative():
    """2,000 tables of 40 cells: a p-value at most a has probability at most a, 6 standard deviations are allowed."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(40, generator=generator, dtype=torch.float64) ** 3
    probs /= probs.sum()
    drawn = torch.multinomial(probs, 2000 * 500, replacement=True, generator=generator).reshape(2000, 500)
    found = [sample_test(torch.bincount(row, minlength=40).double(), probs).p_value for row in drawn]
    for a in (0.5, 0.1, 0.01, 1e-3):
        assert sum(p <= a for p in found) / 2000 <= a + 6 * math.sqrt(a * (1 - a) / 2000)


@pytest.mark.parametrize("num_cells", [2, 20, 65])
@pytest.mark.parametrize("shape", ["one cell", "every other cell"])
def test_a_distortion_of_the_stated_size_is_detected(num_cells, shape):
    """300 tables at the distance that is said to be detected with probability .999: not 4 are missed (1 - 3e-4)."""
    generator = torch.Generator().manual_seed(1)
    probs = torch.full((num_cells,), 1 / num_cells, dtype=torch.float64)
    num, level = 3000, 1e-6 / 30
    size = smallest_detectable(probs, num, level, 0.999)
    moved = probs.clone()
    if shape == "one cell":
        moved[0] += size
        moved[1:] -= size / (num_cells - 1)
    else:
        up = torch.arange(num_cells) < num_cells / 2
        moved[up] += size / up.sum()
        moved[~up] -= size / (~up).sum()
    assert float((moved - probs).abs().sum()) / 2 == pytest.approx(size)
    drawn = torch.multinomial(moved, 300 * num, replacement=True, generator=generator).reshape(300, num)
    found = [sample_test(torch.bincount(row, minlength=num_cells).double(), probs).p_value for row in drawn]
    assert sum(p >= level for p in found) < 4


def test_one_token_that_the_target_never_says_is_enough():
    probs = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)
    assert sample_test(torch.tensor([600.0, 400.0, 0.0]), probs).p_value == 1
    assert sample_test(torch.tensor([600.0, 399.0, 1.0]), probs).p_value < 1e-6


def test_several_tests_are_one():
    tests = [sample_test(torch.tensor(counts), torch.tensor([0.5, 0.5])) for counts in ([50.0, 50.0], [90.0, 10.0])]
    assert combined(tests) == 2 * tests[1].p_value


@pytest.mark.parametrize(("rule", "is_right"), [(Rejection(), True), (Match(), True), (RecoversFromTarget(), False)])
def test_sampled_outputs_of_the_engine_are_tested(rule, is_right):
    """The wrong rule is off by .15 on the first token, of which 4,000 outputs detect more than .1."""
    target, drafter = constant(TARGET_ROW), ModelDrafter(constant(DRAFT_ROW), 3, ratio=1.0)
    asked = [Request(f"r{i}", (0,), 2) for i in range(4000)]
    done = run(target, drafter, rule, asked, num_draft_tokens=1, batch_size=500)
    law = most_probable(target, asked[0], 9)
    counts, probs = cells(Counter(one.tokens for one in done.values()), law)
    assert smallest_detectable(probs, 4000, 1e-6, 0.999) < 0.15
    found = sample_test(counts, probs)
    assert (found.p_value > 1e-6) == is_right
    assert found.distance == pytest.approx(0.0 if is_right else 0.15, abs=0.04)


@pytest.mark.parametrize(
    ("parameters", "rule"), [({"ratio": 1.0}, Block()), ({"constant": 0.0}, Rejection())], ids=["sampled", "argmax"]
)
def test_sampled_outputs_of_a_transformer_with_every_sampling_parameter(parameters, rule):
    """The target's law by teacher forcing, the outputs through its cache, in batches that change."""
    target = tiny_model("llama")
    drafter = ModelDrafter(tiny_model("llama", seed=1), target.vocab_size, **parameters)
    params = SamplingParams(
        temperature=0.7, top_k=20, top_p=0.8, min_p=0.02, repetition_penalty=1.3, presence_penalty=1
    )
    asked = [Request(f"r{i}", (3, 1, 4, 1, 5), 3, params) for i in range(1500)]
    done = run(target, drafter, rule, asked, num_draft_tokens=2, batch_size=500)
    counts, probs = cells(Counter(one.tokens for one in done.values()), most_probable(target, asked[0], 30))
    assert smallest_detectable(probs, 1500, 1e-6, 0.999) < 0.2
    assert sample_test(counts, probs).p_value > 1e-6
    # Without the penalties the same outputs do not follow the target's law.
    plain = dataclasses.replace(
        asked[0], params=dataclasses.replace(params, repetition_penalty=1.0, presence_penalty=0)
    )
    counts, probs = cells(Counter(one.tokens for one in done.values()), most_probable(target, plain, 30))
    assert sample_test(counts, probs).p_value < 1e-6


# Verdicts


def finding(**changes):
    given = {
        "drafter": "d", "verifier": "v", "control": "", "claim": "lossless", "proof": Proof(1e-16, 1e-16, ""),
        "p_value": None, "smallest_detectable": None, "level": 1e-8,
    }  # fmt: skip
    return Finding(**given | changes)


def test_verdicts():
    off, unknown = Proof(0.2, 0.3, ""), Proof(None, None, "not enumerated")
    assert finding().verdict == "proven"
    assert finding(p_value=0.5).verdict == "proven"
    assert finding(p_value=1e-9).verdict == "FAILS"
    assert finding(proof=off).verdict == "FAILS"
    assert finding(proof=Proof(1e-16, 0.1, "")).verdict == "FAILS"
    assert finding(proof=unknown).verdict == "not shown"
    assert finding(proof=unknown, p_value=0.5).verdict == "holds"
    assert finding(proof=unknown, p_value=1e-9).verdict == "FAILS"
    assert finding(claim="lossy", proof=off).verdict == "lossy: distance 0.300"
    assert finding(claim="lossy").verdict == "lossy: exact here"
    control = {"claim": "wrong on purpose", "control": "verifier=v"}
    assert finding(**control, proof=off).verdict == "caught"
    assert finding(**control, p_value=1e-9).verdict == "caught"
    assert finding(**control).verdict == "right here"


def test_what_fails():
    off = Proof(0.2, 0.3, "")
    control = {"claim": "wrong on purpose", "control": "verifier=v"}
    assert failures([finding(), finding(claim="lossy", proof=off)]) == []
    (message,) = failures([finding(proof=off)])
    assert message.startswith("d + v claims to be lossless: total variation 0.2 after one step, 0.3 after two")
    assert failures([finding(**control), finding(**control, proof=off)]) == []
    (message,) = failures([finding(**control), finding()])
    assert message == "verifier=v is wrong on purpose and was not caught (d + v)"


# The study

QUICK = ["experiment=exactness", "study.quick=true"]
HERE = "tests.unit.test_exactness"


def test_the_quick_audit_of_every_pair_passes_and_loads_no_model(tmp_path, monkeypatch):
    def no_loading(dtype="", device="", cache_dir=None, graphs=""):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("spectoolkit.models.smollm2.load_smollm2", no_loading)
    plan = config.plan([*QUICK, f"folder={tmp_path}"])
    assert "proven" in plan.run()
    table = pd.read_parquet(tmp_path / "table.parquet")
    judged = [c for c in plan.cells if c.settings["drafter.name"] != "wrong/top_p_on_draft_only"]
    assert len(table) == len(judged)
    verdicts = table["verdict"].str.split(":").str[0]
    assert set(verdicts[table["claim"] == "lossless"]) == {"proven"}
    assert "FAILS" not in (tmp_path / "table.md").read_text()


def test_a_pair_on_its_own_is_proven_and_tested(tmp_path):
    overrides = ["experiment=exactness", "drafter=argmax", "verifier=block", f"folder={tmp_path}"]
    overrides += ["target=tabular", "draft_model=tabular", "samples_per_prompt=3000", "prompts.limit=2"]
    shown = config.plan(overrides).run()
    table = pd.read_csv(tmp_path / "table.csv")
    assert table["verdict"].tolist() == ["proven"]
    assert table["p_value"].between(1e-6, 1).all()
    assert table["smallest_detectable"].between(0.01, 0.2).all()
    assert "3,000 outputs" in shown


def test_only_what_samples_could_contradict_is_sampled(tmp_path):
    overrides = ["experiment=exactness", "drafter=argmax", f"folder={tmp_path}", "samples_per_prompt=50"]
    overrides += ["target=tabular", "draft_model=tabular", "sampling.temperature=1.0"]
    config.plan(overrides).run()
    table = pd.read_csv(tmp_path / "table.csv")
    is_sampled = table["p_value"].notna()
    assert (is_sampled == (table["claim"] != "lossy")).all()
    assert set(table["level"]) == {1e-6 / is_sampled.sum()}
    assert f"of {is_sampled.sum()} pairs: 50 outputs" in (tmp_path / "table.md").read_text()


def test_every_part_that_makes_a_claim_is_sampled_with_a_partner(monkeypatch, tmp_path):
    plan = config.plan(["experiment=exactness", "target=tabular", "draft_model=tabular", f"folder={tmp_path}"])
    asked = []

    def compute(cells, *_):
        asked.extend((cell.settings["drafter.name"], cell.settings["verifier.name"]) for cell in cells)
        raise InterruptedError

    monkeypatch.setattr("spectoolkit.studies.exactness.compute", compute)
    monkeypatch.setattr("spectoolkit.studies.exactness.prove", lambda make_pair, **_: None)
    with pytest.raises(InterruptedError):
        plan.run()
    pairs = {(cell.settings["drafter.name"], cell.settings["verifier.name"]): cell for cell in plan.cells}
    claims = {pair for pair, cell in pairs.items() if claim_of(*cell.pair_on(None, 0)) != "lossy"}
    judged = {pair for pair in claims if pair[0] != "wrong/top_p_on_draft_only"}
    assert set(asked) <= judged
    assert {drafter for drafter, _ in asked} == {drafter for drafter, _ in judged}
    assert {verifier for _, verifier in asked} == {rule for one, rule in judged if not one.startswith("wrong/")}
    assert len(asked) < len(judged) / 2


def test_a_false_claim_fails_loudly(tmp_path):
    overrides = [*QUICK, "drafter=same_temperature", "verifier=rejection", f"folder={tmp_path}"]
    with pytest.raises(RunError, match="same_temperature \\+ rejection claims to be lossless"):
        config.plan([*overrides, f"verifier._target_={HERE}.RecoversFromTarget"]).run()
    assert "FAILS" in (tmp_path / "table.md").read_text()


def test_a_control_must_be_caught(tmp_path):
    overrides = [*QUICK, "verifier=rejection", f"verifier._target_={HERE}.WrongOnPurpose"]
    shown = config.plan([*overrides, "drafter=same_temperature", f"folder={tmp_path}/a"]).run()
    assert "wrong on purpose" in shown
    assert "caught" in shown
    with pytest.raises(RunError, match="verifier=rejection is wrong on purpose and was not caught"):
        config.plan([*overrides, "drafter=none", f"folder={tmp_path}/b"]).run()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target=smollm2"], "expected a target in float32 or float64"),
        (["study.power=1"], r"study\.power: expected a number between 0 and 1"),
        (["study.num_cells=0"], r"study\.num_cells: expected an integer >= 1"),
        (["+study.partners.target=[x]"], "study.partners: expected names under drafter and verifier, got target"),
        (["engine=auto"], "expected engine=live"),
        (["stop_strings=[a]"], "expected no stop_strings"),
    ],
)
def test_what_could_not_be_judged_is_refused(overrides, message):
    with pytest.raises(UsageError, match=message):
        config.plan(["experiment=exactness", "drafter=argmax", "verifier=rejection", *overrides])


def test_laws_that_a_verifier_cannot_judge_make_no_pair():
    made = {(cell.settings["drafter.name"], cell.settings["verifier.name"]) for cell in config.plan(QUICK).cells}
    assert ("same_temperature", "rejection") in made
    assert ("coupled", "rejection") not in made
    assert ("coupled", "match") in made
