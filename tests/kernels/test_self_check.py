"""What a device has to show before kernels run there, and that a kernel that is wrong or fails is not used."""

import warnings
from dataclasses import replace

import pytest
import torch

from spectoolkit.datatypes import Dense, PointMass, SamplingParams
from spectoolkit.drafters import ModelDrafter, NoDrafter
from spectoolkit.kernels import dispatch, self_check
from spectoolkit.models.tabular import TabularModel, random_tabular
from spectoolkit.provenance import provenance
from spectoolkit.verifiers import Block, Coupled, Rejection
from tests.helpers.toys import outcome, requests, run

verify = pytest.importorskip("spectoolkit.kernels.verify")
reduce = pytest.importorskip("spectoolkit.kernels.reduce")

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
ON = "auto" if DEVICE.type == "cuda" else "interpret"
LOGITS = torch.zeros(1, 1, 4, device=DEVICE)
PROBLEMS = [self_check.Problem.of(dtype, vocab_size, torch.device("cpu")) for dtype, vocab_size in self_check.PROBLEMS]


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    """Kernels are on, and no device has been tried; nor is it said afterwards that one has."""
    monkeypatch.setenv(dispatch.SWITCH, ON)
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


def test_kernels_that_agree_are_used_and_said_to_be():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.is_on(LOGITS)
    assert f"{DEVICE}: on (self-check passed)" in provenance()["kernels"]
    assert dispatch.is_on(LOGITS)
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
    "rejection": (verify, "rejection", shifted, r"rejection of a point mass \(float32 logits, V = 5,003\): emitted is"),
    "block": (verify, "block", shifted, r"block verification of a point mass .* by the reference"),
    "coupled": (verify, "coupled", statuses, r"coupled verification .* have the status \[1, 1, 1, 1, 1\]"),
    "overlap": (reduce, "reduce_rows", scaled("overlap"), "a replay's reduction .* overlap differs"),
    "draft_prob": (reduce, "reduce_rows", scaled("draft_prob"), "a replay's reduction .* draft_prob differs"),
    "raises": (verify, "block", refusing, r"block verification .*: RuntimeError: out of resource: shared memory$"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_or_fails_is_named_and_not_used(name, monkeypatch):
    module, kernel, wrongly, message = WRONG[name]
    monkeypatch.setattr(self_check, "PROBLEMS", self_check.PROBLEMS[:1])
    monkeypatch.setattr(module, kernel, wrongly(getattr(module, kernel)))
    with pytest.warns(RuntimeWarning, match=f"kernels are not used on {DEVICE}, .*{message}") as caught:
        are_on = [dispatch.is_on(LOGITS) for _ in range(2)]
    assert are_on == [False, False]
    assert len(caught) == 1
    assert f"{DEVICE}: reference, because the self-check failed: " in provenance()["kernels"]


class Single(TabularModel):
    """The toy with logits in float32, where the kernels would run."""

    def score(self, state, tokens):
        logits, new = super().score(state, tokens)
        return logits.float(), new


def test_decoding_goes_on_with_the_reference(monkeypatch):
    target = Single(random_tabular(vocab_size=6, order=2, seed=0).rows.to(DEVICE))
    asked = requests(3, max_new_tokens=5, vocab_size=6, params=[SamplingParams(temperature=0.8)])
    drafter = ModelDrafter(target, 6, constant=1.2)
    monkeypatch.setenv(dispatch.SWITCH, "off")
    expected = run(target, drafter, Rejection(), asked)
    assert f"{DEVICE}: off (SPECTOOLKIT_KERNELS=off)" in provenance()["kernels"]
    monkeypatch.setenv(dispatch.SWITCH, ON)
    monkeypatch.setattr(verify, "rejection", refusing(verify.rejection))
    with pytest.warns(RuntimeWarning, match="rejection of a point mass"):
        found = run(target, drafter, Rejection(), asked)
    assert {key: outcome(one) for key, one in found.items()} == {key: outcome(one) for key, one in expected.items()}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a device")
def test_nothing_is_tried_where_there_is_no_device(monkeypatch):
    monkeypatch.delenv(dispatch.SWITCH)
    target = Single(random_tabular(vocab_size=6, order=1, seed=0).rows)
    assert run(target, NoDrafter(), Rejection(), requests(1, 2, 6, params=[SamplingParams()]))
    assert self_check.failure.cache_info().misses == 0
    assert "cpu: reference, because it is no CUDA device" in provenance()["kernels"]
