"""Sampling parameters of one side alone: the drafter's own penalty, and the study of who samples what was asked for."""

import math
from collections.abc import Callable

import pandas as pd
import pytest
import torch
from matplotlib.text import Text

from spectoolkit import config
from spectoolkit.datatypes import Request, SamplingParams
from spectoolkit.decode import decode
from spectoolkit.drafters import ModelDrafter
from spectoolkit.errors import ContractError, UsageError
from spectoolkit.exactness.proof import EXACT, distances_on_toy
from spectoolkit.exactness.target_law import law_variation, next_probs
from spectoolkit.replay import Strategy, replay
from spectoolkit.report.sampling_params import sampling_params_figure
from spectoolkit.sampling import SamplingState
from spectoolkit.studies import sampling_params as study
from spectoolkit.studies.sampling_params import Question
from spectoolkit.trajectories import Trajectories
from spectoolkit.verifiers import Rejection
from tests.helpers.toys import requests, toy_pair

TOY = ["experiment=sampling_params", "target=tabular", "draft_model=tabular", "prompts.limit=3", "max_new_tokens=6"]
TOP_P = Question({"temperature": 0.6, "top_p": 0.9}, ("top_p",))


def penalised(logits: torch.Tensor, seen: set[int], penalty: float) -> torch.Tensor:
    """The law of logits [V] by hand."""
    changed = [(x / penalty if x > 0 else x * penalty) if i in seen else x for i, x in enumerate(logits.tolist())]
    return torch.softmax(torch.tensor(changed, dtype=torch.float64), -1)


def draft_row(model, history: tuple[int, ...], penalty: float) -> torch.Tensor:
    logits, _ = model.score(model.prefill([history[:-1]]), torch.tensor([history[-1:]]))
    return penalised(logits[0, 0], set(history), penalty)


def test_a_penalty_of_the_draft_alone_sees_prompt_output_and_drafts():
    """In the loop, with rows that come and go; nothing on the target's side asks for histories."""
    target, draft = toy_pair()
    asked = requests(5, max_new_tokens=7, params=[SamplingParams()])
    outputs: dict[str, list[int]] = {request.id: [] for request in asked}
    prompts = {request.id: request.prompt for request in asked}
    compared = []

    def observe(request_ids, target_probs, proposal, emitted):
        for b, request_id in enumerate(request_ids):
            history = (*prompts[request_id], *outputs[request_id])
            for i in range(int(proposal.lengths[b])):
                torch.testing.assert_close(proposal.law.probs[b, i], draft_row(draft, history, 1.7))
                history = (*history, int(proposal.tokens[b, i]))
                compared.append(i)
            plain = (
                next_probs(target, asked[0], [()]) if not outputs[request_id] and request_id == asked[0].id else None
            )
            if plain is not None:
                torch.testing.assert_close(target_probs[b, 0], plain[0])
            outputs[request_id] += [int(token) for token in emitted[b] if token >= 0]

    drafter = ModelDrafter(draft, 5, ratio=1.0, repetition_penalty=1.7)
    list(decode(target, drafter, Rejection(), asked, num_draft_tokens=3, batch_size=2, observe=observe))
    assert max(compared) == 2


def test_a_penalty_of_the_draft_alone_is_replayed():
    """Two tokens, so that the number of steps is 2 less the probability that the one draft is accepted."""
    target, draft = toy_pair()
    request = Request("r", (1, 0), 2)
    drafter = ModelDrafter(draft, 5, ratio=1.0, repetition_penalty=1.7)
    outputs = Trajectories((request,), ((3, 2),), ("length",))
    ((counts,),) = replay(target, [Strategy(drafter, Rejection(), 1)], outputs)
    ratio = draft_row(draft, (1, 0), 1.7)[3] / next_probs(target, request, [()])[0, 3]
    assert counts.steps.item() == pytest.approx(2 - min(1.0, ratio.item()))
    assert ratio.item() != pytest.approx(draft_row(draft, (1, 0), 1.0)[3] / next_probs(target, request, [()])[0, 3])


def test_a_drafter_without_the_requests_penalty():
    """Its own value 1 switches the repetition penalty off, and leaves the other ones."""
    _, draft = toy_pair()
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.4)
    state = SamplingState.of(["r"], [params], [(1, 0)], [(2,)], 5)
    only_frequency = SamplingState.of(["r"], [SamplingParams(frequency_penalty=0.4)], [(1, 0)], [(2,)], 5)
    logits, none = (
        torch.randn(1, 1, 5, generator=torch.Generator().manual_seed(0)),
        torch.empty(1, 0, dtype=torch.int64),
    )
    without = ModelDrafter(draft, 5, ratio=1.0, repetition_penalty=1.0)
    expected = only_frequency.probs(logits, none, "draft")
    torch.testing.assert_close(without.draft_probs(logits, state, none), expected)
    assert not without.reads_histories
    torch.testing.assert_close(
        ModelDrafter(draft, 5, ratio=1.0).draft_probs(logits, state, none), state.probs(logits, none, "draft")
    )
    with pytest.raises(ContractError, match="expected token histories"):
        SamplingState.of(["r"], [SamplingParams()], [(1, 0)], [()], 5).with_repetition_penalty(1.2)
    with pytest.raises(UsageError, match=r"drafter\.repetition_penalty: expected a number > 0"):
        ModelDrafter(draft, 5, ratio=1.0, repetition_penalty=0.0)


@pytest.mark.parametrize(
    ("own", "asked", "is_asked"),
    [
        ({"top_p": 1.0}, {"temperature": 0.6, "top_p": 0.9}, True),
        ({"top_p": 0.9}, {"temperature": 0.6}, True),
        ({"top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}, False),
        ({"repetition_penalty": 1.3}, {"temperature": 0.6, "repetition_penalty": 1.3}, False),
        ({"repetition_penalty": 1.0}, {"temperature": 0.6, "repetition_penalty": 1.3}, True),
    ],
)
def test_it_is_the_targets_row_that_decides_what_is_sampled(own, asked, is_asked):
    """The draft's own parameters never show in what is emitted; the target's always do."""
    wanted = SamplingParams(**asked)
    params = wanted if is_asked else SamplingParams(temperature=0.6)
    found = distances_on_toy(
        lambda draft, size: (ModelDrafter(draft, size, ratio=1.0, **own), Rejection()), params, wanted
    )
    assert found is not None
    assert found[0] <= EXACT
    assert found[1] <= EXACT if is_asked else found[1] > 0.02


def test_the_variation_of_outputs_of_several_lengths():
    target, _ = toy_pair()
    asked = [Request(f"r{i}", (1, 0), 9, SamplingParams(temperature=0.6)) for i in range(11)]
    outputs = [tuple((3 * i + j) % 5 for j in range(1 + i % 4)) for i in range(11)]
    wanted = SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.2)
    found = law_variation(target, asked, outputs, wanted)
    for request, output, value in zip(asked, outputs, found.tolist(), strict=True):
        expected = 0.0
        for i in range(len(output)):
            rows = [
                next_probs(target, Request("x", (1, 0), 9, params), [output[:i]])[0]
                for params in (request.params, wanted)
            ]
            expected += float((rows[0] - rows[1]).abs().sum()) / 2
        assert value == pytest.approx(expected, abs=1e-12)
    assert law_variation(target, asked, outputs, asked[0].params).abs().max() == 0


def settings(target: dict, draft: dict, k: int = 1) -> dict:
    base = {"drafter.name": "temperature", "drafter.ratio": 1.0, "num_draft_tokens": k, "sampling.temperature": 0.6}
    return base | {f"sampling.{n}": v for n, v in target.items()} | {f"drafter.{n}": v for n, v in draft.items()}


def test_which_side_has_what_was_asked_for():
    assert TOP_P.side(settings({}, {})) == "neither"
    assert TOP_P.side(settings({"top_p": 0.9}, {})) == "both"  # the request's own
    assert TOP_P.side(settings({"top_p": 0.9}, {"top_p": 1.0})) == "target only"
    assert TOP_P.side(settings({}, {"top_p": 0.9})) == "draft only"
    assert TOP_P.side(settings({}, {"top_p": 0.8})) is None
    assert TOP_P.side(settings({"temperature": 1.0}, {"top_p": 0.9})) is None
    old = Question({"temperature": 0.6, "top_p": 0.9}, ("temperature", "top_p"))
    at_defaults = settings({"temperature": 1.0}, {"ratio": None, "constant": 0.6, "top_p": 0.9})
    assert old.side(at_defaults) == "draft only"
    assert old.side(settings({"top_p": 0.9}, {})) == "both"
    found = study.places([settings({"top_p": 0.9}, {}), at_defaults, settings({}, {})], [TOP_P, old])
    assert found == {
        ("top-p = 0.9", 1, "both"): 0, ("top-p = 0.9", 1, "neither"): 2,
        ("temperature = 0.6, top-p = 0.9", 1, "both"): 0, ("temperature = 0.6, top-p = 0.9", 1, "draft only"): 1,
    }  # fmt: skip
    assert not study.places([settings({}, {})], [TOP_P])  # nothing to compare with


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Callable[[], str], str, dict[str, pd.DataFrame]]:
    folder = tmp_path_factory.mktemp("study")

    def again() -> str:
        return config.plan([*TOY, f"folder={folder}"]).run()

    text = again()
    return again, text, {name: pd.read_csv(folder / f"{name}.csv") for name in ("laws", "sides", "comparisons")}


def test_rows_sample_what_was_asked_for_where_the_target_has_it(recorded):
    _, text, found = recorded
    laws, sides, compared = found["laws"], found["sides"], found["comparisons"]
    assert laws["samples_asked"].tolist() == [side in ("both", "target only") for side in laws["side"]]
    assert (laws["toy_own"] <= EXACT).all()
    assert (laws.loc[~laws["samples_asked"], "toy_asked"] > 0.02).all()
    assert (sides["samples_asked"] == (sides["variation"] == 0)).all()
    assert len(sides) == 4 * 3 + 2 * 3 + 4
    top_p = sides[(sides["question"] == "top-p = 0.9") & ~sides["samples_asked"]]
    assert (top_p["variation"] <= 0.1 + 1e-6).all()  # what top-p = 0.9 cuts off
    is_single = sides["num_draft_tokens"] == 1
    assert (sides["acceptance_rate"] == sides["acceptance_rate_unmasked"])[is_single].all()
    assert (sides["acceptance_rate"] <= sides["acceptance_rate_unmasked"]).all()
    assert compared["same_law"].tolist() == [
        (one, other) != ("draft only", "both") for one, other in zip(compared["one"], compared["other"], strict=True)
    ]
    row = compared[(compared["one"] == "target only") & (compared["metric"] == "acceptance_length")].iloc[0]
    at = sides[(sides["question"] == row["question"]) & (sides["num_draft_tokens"] == row["num_draft_tokens"])]
    length = at.set_index("side")["acceptance_length"]
    assert row["difference"] == pytest.approx(length["target only"] - length["both"])
    assert "*both* and *target only* sample what was asked for; *draft only* and *neither* do not" in text


def test_sides_without_a_comparison_make_no_table_of_differences(recorded):
    """*Both* beside *neither*: their texts differ and so do their drafts."""
    _, _, found = recorded
    sides = found["sides"][found["sides"]["side"].isin(["both", "neither"])]
    nothing = pd.DataFrame(columns=list(found["comparisons"]))
    assert list(study.COMPARED) == list(nothing)
    shown = study.findings(found["laws"], sides, nothing)
    assert not any("leaving out costs" in part for part in shown)


def test_a_second_run_computes_nothing(recorded, monkeypatch):
    def computed_again(*_):
        raise AssertionError("computed again")

    again, text, _ = recorded
    for name in ("spectoolkit.studies.sampling_params.law_variation", "spectoolkit.runner.run_live"):
        monkeypatch.setattr(name, computed_again)
    assert again() == text


def test_the_figure_shows_every_row_and_no_text_touches(recorded):
    sides = recorded[2]["sides"]
    figure = sampling_params_figure(sides)
    figure.canvas.draw()
    dots = [line for ax in figure.axes for line in ax.lines]
    assert len(dots) == 3 * len(sides)
    hollow = sum(str(line.get_markerfacecolor()) == "#FFFFFF" for line in dots)
    assert hollow == 3 * int((~sides["samples_asked"]).sum())
    for ax in figure.axes[:3]:
        values = sides.loc[sides["question"] == sides["question"].unique()[figure.axes.index(ax)]]
        drawn = sorted(float(line.get_ydata()[0]) for line in ax.lines)  # type: ignore[index]
        assert drawn == pytest.approx(sorted(values["acceptance_rate_unmasked"]))
    shown = [t for ax in figure.axes for t in (ax.xaxis.label, ax.yaxis.label)]
    shown += [t for ax in figure.axes for t in ax.get_children() if type(t) is Text]
    shown += [t for ax in figure.axes[-3:] for t in ax.get_xticklabels()]
    boxes = [Text.get_window_extent(t) for t in shown if t.get_text()]
    assert all(not a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(b.x0 >= 0 and b.x1 <= figure.bbox.width and b.y1 <= figure.bbox.height for b in boxes)
    with pytest.raises(UsageError, match="questions and their K: expected at most as many as fit"):
        sampling_params_figure(sides, 3.3)


def test_what_a_difference_says():
    rows = pd.DataFrame({"num_draft_tokens": [1, 2, 3], "difference": [-0.1, -0.2, 0.3]})
    assert study._decided(rows.assign(excludes_zero=[True, True, False]).to_dict("records")) == (
        "lower by 0.100 to 0.200 at K = 1, 2, undecided at K = 3"
    )
    assert study._decided(rows.assign(excludes_zero=[False, False, True]).to_dict("records")) == (
        "higher by 0.300 at K = 3, undecided at K = 1, 2"
    )
    assert study._tiny(math.nan) == "–"


TWO = "{num_draft_tokens: 1}, {num_draft_tokens: 1, sampling.top_p: 0.9}"
MANY = ", ".join(TWO.replace("s: 1", f"s: {k}") for k in range(1, 13))
ASKED = "asked: {temperature: 0.6, top_p: 0.9}"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["engine=auto"], "expected engine=live, since a replay does not know the unmasked rate"),
        (["verifier=typical"], "expected lossless rules"),
        (["drafter=wrong/top_p_on_draft_only", f"cases=[{TWO}]"], "expected lossless rules"),
        (
            ["drafter=ngram", "~drafter.ratio", f"cases=[{TWO}]"],
            r"\(drafter=temperature\), got drafter=ngram",
        ),
        (
            [f"cases=[{TWO}, {{num_draft_tokens: 1, drafter.top_p: 0.5}}]"],
            r"with draft temperature = 0\.6, top-p = 0\.5",
        ),
        (
            ["cases=[{num_draft_tokens: 1}, {drafter.top_p: 0.9, num_draft_tokens: 1}]"],
            r"top-p = 0\.9 on both sides at K",
        ),
        ([f"cases=[{TWO}]"], "no cell of the grid has its parameters"),
        (["study.questions=[]"], "study.questions: expected at least one, got none"),
        ([f"study.questions=[{{{ASKED}, left_out: [top_k]}}]"], "left_out to name some of temperature, top_p"),
        ([f"study.questions=[{{{ASKED}}}]"], "study.questions: expected mappings like"),
        ([f"study.questions=[{{{ASKED}, left_out: [[top_p]]}}]"], r"left_out to name some of .*got \[\['top_p'\]\]"),
        ([f"study.questions=[{{{ASKED}, left_out: [top_p, top_p]}}]"], "left_out to name some of .* each once"),
        (["study.questions=[{asked: {1: 0.6}, left_out: [1]}]"], "expected parameters among .* got 1"),
        (["study.questions=[{asked: {1: 0.6, heat: 1}, left_out: [1]}]"], "expected parameters among .* got 1, heat"),
        (["study.questions=[{asked: {top_p: [0.9]}, left_out: [top_p]}]"], r"top_p: expected a finite number"),
        ([f"study.questions=[{{{ASKED}, left_out: [top_p]}}, {{{ASKED}, left_out: [top_p]}}]"], "different parts"),
        ([f"cases=[{MANY}]", f"study.questions=[{{{ASKED}, left_out: [top_p]}}]"], r"their K: .* at K = 1, 2, .*, 12"),
        (["study.questions=[{asked: {heat: 1}, left_out: [heat]}]"], "expected parameters among temperature, top_k"),
    ],
)
def test_what_answers_no_question_is_refused_before_anything_runs(tmp_path, more, message):
    with pytest.raises(UsageError, match=message):
        config.plan([*TOY, f"folder={tmp_path}", *more])
    assert not list(tmp_path.iterdir())
