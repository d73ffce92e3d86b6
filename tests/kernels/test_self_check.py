"""What a device has to show before kernels run there, and that a kernel that is wrong or fails is not used."""

import warnings
from dataclasses import replace

import pytest
import torch

from spectoolkit.datatypes import Dense, PointMass, Request, SamplingParams
from spectoolkit.drafters import ModelDrafter, NGramDrafter, NoDrafter
from spectoolkit.kernels import self_check
from spectoolkit.kernels.switch import SWITCH
from spectoolkit.models.tabular import TabularModel, random_tabular
from spectoolkit.provenance import begin_cell, provenance
from spectoolkit.replay import Strategy, replay
from spectoolkit.trajectories import Trajectories
from spectoolkit.verifiers import Block, Coupled, Match, Rejection
from tests.helpers.toys import outcome, requests, run

coupled = pytest.importorskip("spectoolkit.kernels.coupled")
reduce = pytest.importorskip("spectoolkit.kernels.reduce")
fused = pytest.importorskip("spectoolkit.kernels.rejection_and_block")

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
ON = "auto" if DEVICE.type == "cuda" else "interpret"
PROBLEMS = [self_check.Problem.of(dtype, vocab_size, torch.device("cpu")) for dtype, vocab_size in self_check.PROBLEMS]


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    """Kernels are on, and no device has been tried; nor is it said afterwards that one has."""
    monkeypatch.setenv(SWITCH, ON)
    self_check.failure.cache_clear()
    yield
    self_check.failure.cache_clear()


def verdicts(one: self_check.Problem) -> list[list[list[int]]]:
    laws = [(rule, law) for rule in (Rejection(), Block()) for law in (PointMass(), Dense(one.draft_probs))]
    found = [self_check.expected_verdict(one, rule, law) for rule, law in [*laws, (Coupled(), None)]]
    return [torch.cat([v.num_accepted[:, None], v.judged_alone, v.emitted], 1).tolist() for v in found]


@pytest.mark.parametrize("one", PROBLEMS, ids=["float32", "bfloat16"])
def test_no_verdict_lies_near_a_threshold(one):
    expected, noise = verdicts(one), one.uniforms
    for by in (-1, 1):
        moved = replace(noise, accept=noise.accept + by * 1e-3, emit=noise.emit + by * 1e-4)
        assert verdicts(replace(one, uniforms=moved)) == expected
    blurred = one.target.double() + 1e-4 * torch.randn(one.target.shape, generator=torch.Generator().manual_seed(0))
    assert verdicts(replace(one, target=blurred)) == expected


def test_the_problems_have_proposals_rejected_cut_and_accepted_and_tell_the_rules_apart():
    for one in PROBLEMS:
        of_rule = [[row[0] for row in verdict] for verdict in verdicts(one)]
        whole = {accepted for accepted, length in zip(of_rule[1], self_check.LENGTHS, strict=True) if accepted < length}
        assert {0, 1} <= whole  # rejected at once, and cut
        assert any(accepted == 3 for accepted in of_rule[1])
        assert of_rule[0] != of_rule[2]
        assert of_rule[1] != of_rule[3]
        assert of_rule[4] not in of_rule[:4]


class Single(TabularModel):
    """The toy with logits in float32, where the kernels would run."""

    def score(self, state, tokens):
        logits, new = super().score(state, tokens)
        return logits.float(), new


def judged_by(verifier, drafter=None, params=None) -> str:
    """What a cell's provenance says of kernels after some requests were decoded."""
    begin_cell()
    target = Single(random_tabular(vocab_size=6, order=1, seed=0).rows.to(DEVICE))
    assert run(target, drafter or NoDrafter(), verifier, requests(1, 2, 6, params=[params or SamplingParams()]))
    return provenance(of_cell=True)["kernels"]


def test_kernels_that_agree_are_used_and_said_to_be():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert judged_by(Rejection()) == f"{DEVICE}: rejection (self-check passed)"
    assert judged_by(Block()) == f"{DEVICE}: block (self-check passed)"
    assert self_check.failure.cache_info().misses == 1


def shifted(function):
    def wrong(*arguments, **options):
        verdict, status = function(*arguments, **options)
        return replace(verdict, emitted=verdict.emitted + (verdict.emitted > 0)), status

    return wrong


def scaled(name):
    def of(function):
        def wrong(*arguments, **options):
            found = function(*arguments, **options)
            return replace(found, **{name: getattr(found, name) * (1 + 1e-4)})

        return wrong

    return of


def statuses(function):
    def wrong(*arguments, **options):
        verdict, status = function(*arguments, **options)
        return verdict, status + 1

    return wrong


def refusing(function):
    def refused(*arguments, **options):
        raise RuntimeError("out of resource: shared memory\nmore lines")

    return refused


WRONG = {
    "rejection": (fused, "rejection", shifted, r"rejection of a point mass \(float32 logits, V = 5,003\): emitted is"),
    "block": (fused, "block", shifted, r"block verification of a point mass .* by the reference"),
    "coupled": (coupled, "coupled", statuses, r"coupled verification .* have the status \[1, 1, 1, 1, 1\]"),
    "overlap": (reduce, "reduce_rows", scaled("overlap"), "a replay's reduction .* overlap differs"),
    "draft_prob": (reduce, "reduce_rows", scaled("draft_prob"), "a replay's reduction .* draft_prob differs"),
    "raises": (fused, "block", refusing, r"block verification .*: RuntimeError: out of resource: shared memory$"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_or_fails_is_named_and_not_used(name, monkeypatch):
    module, kernel, wrongly, message = WRONG[name]
    monkeypatch.setattr(self_check, "PROBLEMS", self_check.PROBLEMS[:1])
    monkeypatch.setattr(module, kernel, wrongly(getattr(module, kernel)))
    with pytest.warns(RuntimeWarning, match=f"kernels are not used on {DEVICE}, .*{message}") as caught:
        said = [judged_by(Rejection()) for _ in range(2)]
    assert all(one.startswith(f"{DEVICE}: reference, because the self-check failed: ") for one in said)
    assert len(caught) == 1


def test_decoding_goes_on_with_the_reference(monkeypatch):
    target = Single(random_tabular(vocab_size=6, order=2, seed=0).rows.to(DEVICE))
    asked = requests(3, max_new_tokens=5, vocab_size=6, params=[SamplingParams(temperature=0.8)])
    drafter = ModelDrafter(target, 6, constant=1.2)
    monkeypatch.setenv(SWITCH, "off")
    expected = run(target, drafter, Rejection(), asked)
    assert f"{DEVICE}: reference, because SPECTOOLKIT_KERNELS=off" in provenance()["kernels"]
    monkeypatch.setenv(SWITCH, ON)
    monkeypatch.setattr(fused, "rejection", refusing(fused.rejection))
    with pytest.warns(RuntimeWarning, match="rejection of a point mass"):
        found = run(target, drafter, Rejection(), asked)
    assert {key: outcome(one) for key, one in found.items()} == {key: outcome(one) for key, one in expected.items()}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a device")
def test_nothing_is_tried_where_there_is_no_device(monkeypatch):
    monkeypatch.delenv(SWITCH)
    assert judged_by(Rejection()) == "cpu: reference, because it is no CUDA device"
    assert self_check.failure.cache_info().misses == 0
    assert judged_by(Match()) == "cpu: reference"


@pytest.mark.parametrize(
    ("verifier", "params"),
    [(Match(), SamplingParams()), (Rejection(), SamplingParams(top_p=0.9)), (Block(), SamplingParams(min_p=0.1))],
)
def test_what_has_no_kernel_is_the_reference_s_and_no_device_is_tried_for_it(verifier, params):
    assert judged_by(verifier, NGramDrafter(2, 1), params) == f"{DEVICE}: reference"
    assert self_check.failure.cache_info().misses == 0


def test_a_replay_tries_the_device_only_for_strategies_that_have_a_kernel():
    target = Single(random_tabular(vocab_size=6, order=1, seed=0).rows.to(DEVICE))
    asked = (Request("r", (3, 4), 3),)
    outputs = Trajectories(asked, ((1, 2, 0),), ("length",))
    filtered = Strategy(ModelDrafter(target, 6, ratio=1.0, top_p=0.9), Rejection(), 2)
    plain = Strategy(ModelDrafter(target, 6, ratio=1.0), Rejection(), 2)
    said = []
    for strategies in ([filtered], [filtered, plain], [plain]):
        begin_cell()
        replay(target, strategies, outputs)
        said.append(provenance(of_cell=True)["kernels"])
        assert (self_check.failure.cache_info().misses == 0) is (len(said) == 1)
    fused = f"{DEVICE}: a replay's reduction (self-check passed)"
    assert said == [f"{DEVICE}: reference", f"{fused}; {DEVICE}: reference", fused]
