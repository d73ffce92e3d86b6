"""What the kernels take: against the bandwidth of the device, the reference in torch, and public kernels beside them.

On a CPU, where no kernel runs: what a replay's reduction takes against the plain expression in torch. Every ratio is
taken within one run on one device; nothing is measured of models.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from spectoolkit.datatypes import Dense, PointMass, Proposal, SamplingParams, Uniforms
from spectoolkit.errors import UsageError
from spectoolkit.files import replace_text
from spectoolkit.functional.conditional import given_coupled, given_rejection
from spectoolkit.functional.draw import draw, gumbel_max
from spectoolkit.functional.noise import position_keys
from spectoolkit.interfaces import Verifier
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.sampling import SamplingState
from spectoolkit.studies.reduction_on_cpu import DTYPE, TEMPERATURES, run_on_cpu
from spectoolkit.study import Cell, Store
from spectoolkit.verifiers import Block, Coupled, Rejection

RUNS_IN_ONE_PROCESS = True  # times are compared within one process

RULES: tuple[tuple[str, Verifier, str], ...] = (
    ("rejection", Rejection(), "PointMass"),
    ("rejection", Rejection(), "Dense"),
    ("rejection", Rejection(), "DraftLogits"),
    ("block", Block(), "Dense"),
    ("coupled", Coupled(), "SharedNoise"),
)
"""Rule and what it is given of the draft: a token, probabilities in float32, logits in bfloat16, or noise."""

_NOT_INSTALLED = "not installed"

Timer = Callable[[Callable[[], Any]], float]
"""Seconds that a call takes, the median of several."""


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    device: str = "cuda",
    interpret: bool = False,
    vocab_sizes: Sequence[int] = (32768, 151936, 262144),
    batch_sizes: Sequence[int] = (1, 8, 64),
    num_rows: Sequence[int] = (32, 128),
    copied_mib: int = 1024,
    repetitions: int = 9,
) -> str:
    """Time verification at every vocabulary and batch size with the settings' K and T, and a replay's reduction.

    The reduction is timed at every vocabulary size and number of rows.

    Args:
        device: where; on "cpu" without `interpret` no kernel runs, and the reduction is timed as a replay makes it.
        interpret: run the kernels in Triton's interpreter, to try this study out: its times say nothing.
        num_rows: of a reduction.
        copied_mib: size of the copy that gives the bandwidth.
        repetitions: of each call on a CPU, of which the median and the range are told; on a GPU triton chooses.

    Raises:
        UsageError: no such device, no triton, T = 0, a size below 1 or none, or an interpreter that comes too late.
    """
    sizes = {"vocab_sizes": vocab_sizes, "batch_sizes": batch_sizes, "num_rows": num_rows}
    sizes |= {"copied_mib": [copied_mib], "repetitions": [repetitions]}
    for name, values in sizes.items():
        if not values or min(values) < 1:
            raise UsageError(f"study.{name}: expected integers >= 1, got {[*values]}")
    if config["sampling"]["temperature"] == 0:
        raise UsageError("sampling.temperature: expected a number > 0, since one-hot rows leave nothing to draw, got 0")
    if device == "cpu" and not interpret:
        return run_on_cpu(store, config, vocab_sizes, num_rows, repetitions)
    prepare(device, interpret)
    timer = _once if interpret else _on_device
    place = torch.device(device)
    bandwidth = copy_bandwidth(place, copied_mib, timer)
    cases = [(v, b) for v in vocab_sizes for b in batch_sizes]
    rows, reductions = [], []
    with progress_bar(len(cases) * len(RULES) + len(vocab_sizes) * len(num_rows), "case") as bar:
        for vocab_size, batch_size in cases:
            case = Case.of(batch_size, config["num_draft_tokens"], vocab_size, config["sampling"]["temperature"], place)
            for rule, verifier, law in RULES:
                rows.append({"rule": rule, "law": law, **verification(case, verifier, law, bandwidth, timer)})
                bar.update(1)
        for vocab_size, num in [(v, num) for v in vocab_sizes for num in num_rows]:
            reductions.append(reduction(num, vocab_size, bandwidth, place, timer))
            bar.update(1)
    table, of_replay, notes = pd.DataFrame(rows), pd.DataFrame(reductions), provenance()
    text = _markdown(table, of_replay, config, str(notes["device"]), bandwidth, interpret=interpret)
    replace_text(store.folder / "table.csv", table.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "reduction.csv", of_replay.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "table.md", text)
    store.write_manifest({"provenance": notes, "config": config, "copy_bytes_per_s": bandwidth})
    return f"{text}\nTables and manifest are in {store.folder}"


def prepare(device: str, interpret: bool) -> None:
    """Refuse what cannot be measured, and tell triton to interpret where that is asked for.

    Raises:
        UsageError: see `run`.
    """
    dry = (
        "study.device=cpu study.interpret=true, with TRITON_INTERPRET=1 in the environment, tries the study out in "
        "Triton's interpreter, whose times say nothing"
    )
    if find_spec("triton") is None:
        raise UsageError("kernel_benchmark: expected triton to be installed (pip install .[gpu])")
    if device not in ("cuda", "cpu") or (interpret and device != "cpu"):
        raise UsageError(
            "kernel_benchmark: expected study.device=cuda, or cpu where study.interpret may be true, got "
            f"{device!r} with interpret={interpret}; {dry}"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"kernel_benchmark: expected a CUDA device, found none; {dry}")
    if interpret and os.environ.get("TRITON_INTERPRET") != "1":
        if "triton" in sys.modules:
            raise UsageError(
                "study.interpret: expected TRITON_INTERPRET=1 in the environment, since triton is imported already"
            )
        os.environ["TRITON_INTERPRET"] = "1"


@dataclass(frozen=True)
class Case:
    """One step of B sequences with full proposals, drawn from random logits whose drafts resemble the target.

    Attributes:
        target, draft: logits [B, K+1, V] and [B, K, V].
        draft_probs: [B, K, V] float32.
        sampling: the parameters of all sequences.
        tokens, coupled_tokens: [B, K] drafts drawn from `draft_probs`, by inversion and with the shared noise.
        lengths: [B].
        uniforms: of the verification.
    """

    target: Tensor
    draft: Tensor
    draft_probs: Tensor
    sampling: SamplingState
    tokens: Tensor
    coupled_tokens: Tensor
    lengths: Tensor
    uniforms: Uniforms

    @staticmethod
    def of(size: int, num_drafts: int, vocab_size: int, temperature: float, device: torch.device) -> Case:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return 3 * torch.randn(shape, generator=generator, device=device)

        def rand(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device, dtype=torch.float64)

        target = normal(size, num_drafts + 1, vocab_size).to(DTYPE)
        draft = (target[:, :-1] + normal(size, num_drafts, vocab_size) / 3).to(DTYPE)
        ids = [str(i) for i in range(size)]
        params, prompts = [SamplingParams(temperature=temperature)] * size, [(0,)] * size
        sampling = SamplingState.of(ids, params, prompts, [()] * size, vocab_size, device)
        counter = torch.arange(size, device=device)
        noise = Uniforms(
            rand(size, num_drafts),
            rand(size, num_drafts + 1),
            position_keys(counter, counter, torch.ones_like(counter), num_drafts + 1),
        )
        assert noise.shared is not None
        before = torch.zeros(size, num_drafts, dtype=torch.int64, device=device)  # plain rows do not look at it
        draft_probs = sampling.probs(draft, before, "draft")
        return Case(
            target=target,
            draft=draft,
            draft_probs=draft_probs,
            sampling=sampling,
            tokens=draw(draft_probs, rand(size, num_drafts)),
            coupled_tokens=gumbel_max(draft_probs, noise.shared[:, :-1]),
            lengths=torch.full((size,), num_drafts, device=device),
            uniforms=noise,
        )

    @property
    def temperature(self) -> Tensor:
        return self.sampling.params.temperature


def verification(case: Case, verifier: Verifier, law: str, bandwidth: float, timer: Timer) -> dict[str, Any]:
    """One rule on one case: the kernels, the reference, and public kernels for rejection with the whole draft row."""
    from spectoolkit.kernels.coupled import coupled
    from spectoolkit.kernels.rejection_and_block import DraftLogits, block, rejection

    num_drafts, vocab_size = case.draft.shape[1:]
    tokens = case.coupled_tokens if law == "SharedNoise" else case.tokens
    given = (case.target, case.temperature, tokens, case.lengths)
    known = {"PointMass": PointMass(), "Dense": Dense(case.draft_probs)}
    fused = block if isinstance(verifier, Block) else rejection

    def by_kernels() -> Any:
        if law == "SharedNoise":
            assert case.uniforms.shared is not None
            return coupled(*given, case.uniforms.shared)
        draft = known.get(law) or DraftLogits(case.draft, case.temperature)
        return fused(*given, draft, case.uniforms)

    def by_reference() -> Any:
        target_probs = case.sampling.probs(case.target, tokens, "target")
        draft = known.get(law, PointMass())
        if law == "DraftLogits":
            draft = Dense(case.sampling.probs(case.draft, tokens, "draft"))
        return verifier.verify(target_probs, Proposal(tokens, case.lengths, draft), case.uniforms)

    verdict, status = by_kernels()
    expected = by_reference()
    is_equal = (verdict.emitted == expected.emitted).all(-1) & (status == 0)
    seconds, reference_s = timer(by_kernels), timer(by_reference)
    num_rejected = int((verdict.num_accepted < case.lengths).sum())
    moved = bytes_read(case, law, isinstance(verifier, Block), num_rejected)
    found: dict[str, Any] = {
        "vocab_size": vocab_size,
        "batch_size": len(case.lengths),
        "num_draft_tokens": num_drafts,
        "equal_verdicts": float(is_equal.double().mean()),
        "kernel_s": seconds,
        "bytes": moved,
        "share_of_copy_bandwidth": moved / seconds / bandwidth,
        "reference_s": reference_s,
        "reference_over_kernel": reference_s / seconds,
    }
    if verifier == Rejection() and law == "Dense":
        for name, make in (("flashinfer", _flashinfer), ("vllm", _vllm)):
            found |= _public(name, make, case, seconds, timer)
    return found


def bytes_read(case: Case, law: str, is_block: bool, num_rejected: int) -> int:
    """What a verification has to read of logits and draft rows: it writes next to nothing.

    Every target row once, and a second time together with the draft's where a residual is summed: K rows for block
    verification, one for each sequence that rejected otherwise. Draft logits are read once before that, for their
    normaliser.
    """
    size, num_drafts, vocab_size = case.draft.shape
    logit = case.target.element_size()
    once = size * (num_drafts + 1) * logit
    if law in ("PointMass", "SharedNoise"):
        return once * vocab_size
    of_draft = logit if law == "DraftLogits" else case.draft_probs.element_size()
    again = (size * num_drafts if is_block else num_rejected) * (logit + of_draft)
    return (once + again + (size * num_drafts * logit if law == "DraftLogits" else 0)) * vocab_size


def reduction(num_rows: int, vocab_size: int, bandwidth: float, device: torch.device, timer: Timer) -> dict[str, Any]:
    """The reduction of a replay: at 16 draft temperatures over one, and against the reference at 16."""
    from spectoolkit.kernels.reduce import reduce_rows

    generator = torch.Generator(device).manual_seed(1)
    target = (3 * torch.randn(num_rows, vocab_size, generator=generator, device=device)).to(DTYPE)
    draft = (target + torch.randn(num_rows, vocab_size, generator=generator, device=device)).to(DTYPE)
    tokens = target.argmax(-1)
    ones = torch.ones(num_rows, dtype=torch.float64, device=device)
    many = torch.tensor(TEMPERATURES, dtype=torch.float64, device=device).repeat(num_rows, 1)
    ids, params = [str(i) for i in range(num_rows)], [SamplingParams()] * num_rows
    sampling = SamplingState.of(ids, params, [(0,)] * num_rows, [()] * num_rows, vocab_size, device)
    before = tokens[:, None][:, :0]

    def by_kernels(temperatures: Tensor, sums: bool = True) -> Any:
        return reduce_rows(target, ones, draft, temperatures, tokens, sums=sums)

    def by_reference() -> Any:
        p = sampling.probs(target[:, None], before, "target")
        results = []
        for column in many.unbind(1):
            q = sampling.with_temperature(column).probs(draft[:, None], before, "draft")
            results.append((given_rejection(p, q, tokens[:, None]), given_coupled(p, q, tokens[:, None])))
        return results

    found, expected = by_kernels(many), torch.cat([coupled for _, coupled in by_reference()], dim=1)
    one_s, many_s = timer(lambda: by_kernels(many[:, 6:7])), timer(lambda: by_kernels(many))
    reference_s = timer(by_reference)
    moved = 2 * 2 * num_rows * vocab_size * target.element_size()
    return {
        "vocab_size": vocab_size,
        "rows": num_rows,
        "largest_relative_difference": float(((found.coupled - expected).abs() / expected).max()),
        "one_temperature_s": one_s,
        "temperatures": len(TEMPERATURES),
        "all_temperatures_s": many_s,
        "all_over_one": many_s / one_s,
        "without_sums_s": timer(lambda: by_kernels(many, sums=False)),
        "share_of_copy_bandwidth_at_one": moved / one_s / bandwidth,
        "reference_s": reference_s,
        "reference_over_kernel": reference_s / many_s,
    }


def copy_bandwidth(device: torch.device, mib: int, timer: Timer) -> float:
    """Bytes per second that a copy within the device reads and writes."""
    source = torch.empty(mib << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timer(lambda: target.copy_(source))


def _public(
    name: str, make: Callable[[Case], Callable[[], Any]], case: Case, kernel_s: float, timer: Timer
) -> dict[str, Any]:
    """Time a public kernel; NaN where it is not installed, and what it said where it could not be called."""
    column = {f"{name}_over_kernel": float("nan"), f"{name}_note": _NOT_INSTALLED}
    if find_spec(name) is None:
        return column
    try:
        call = make(case)
        call()
        return {f"{name}_over_kernel": timer(call) / kernel_s, f"{name}_note": ""}
    except Exception as error:  # interfaces of other packages change; the rest of the table does not depend on them
        return column | {f"{name}_note": f"{type(error).__name__}: {error}".splitlines()[0]}


def _flashinfer(case: Case) -> Callable[[], Any]:
    """softmax(logits / T), then flashinfer's chain speculative sampling, on the same proposals.

    Called as flashinfer 0.6.18 has it: (draft_probs [B, K, V], draft_token_ids [B, K] int32, target_probs [B, K+1, V]).
    """
    from flashinfer.sampling import chain_speculative_sampling  # type: ignore[import-not-found]

    drafted, temperature = case.tokens.int(), case.temperature.float()[:, None, None]
    return lambda: chain_speculative_sampling(
        case.draft_probs, drafted, torch.softmax(case.target.float() / temperature, -1)
    )


def _vllm(case: Case) -> Callable[[], Any]:
    """softmax(logits / T), then vLLM's rejection sampling; the bonus token, which it is given, is not drawn.

    vLLM 0.9 takes the target's probabilities [B K, V], in a parameter of the name `target_probs`; 0.17 and later take
    logits divided by T as `target_logits` and make the softmax themselves. Nothing else of what is called differs.
    """
    from vllm.v1.sample.rejection_sampler import rejection_sample  # type: ignore[import-not-found]

    takes_logits = "target_logits" in inspect.signature(rejection_sample).parameters
    size, num_drafts, vocab_size = case.draft_probs.shape
    counts = [num_drafts] * size
    ends = torch.tensor(counts, device=case.target.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    drafted, rows = case.tokens.int().flatten(), case.draft_probs.reshape(-1, vocab_size)
    bonus, temperature = drafted.new_zeros(size, 1), case.temperature.float()[:, None, None]
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=temperature.flatten(), generators={})

    def call() -> Any:
        target = case.target[:, :-1].float() / temperature
        target = target if takes_logits else torch.softmax(target, -1)
        return rejection_sample(
            drafted, counts, num_drafts, ends, rows, target.reshape(-1, vocab_size), bonus, metadata
        )

    return call


def _on_device(call: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    milliseconds: Any = do_bench(call, return_mode="median")
    return milliseconds / 1e3


def _once(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _markdown(
    table: pd.DataFrame,
    reductions: pd.DataFrame,
    config: Mapping[str, Any],
    device: str,
    bandwidth: float,
    *,
    interpret: bool,
) -> str:
    warning = "**Run in Triton's interpreter: these times say nothing, and no GPU is measured.** " if interpret else ""
    lines = [
        "# Kernel benchmark",
        "",
        f"{warning}{device}; logits in bfloat16, K = {config['num_draft_tokens']}, T = "
        f"{config['sampling']['temperature']}. A copy within the device moves {bandwidth / 1e9:,.0f} GB/s, read and "
        "written.",
        "",
        "| rule | draft law | V | batch | time (us) | of copy bandwidth | reference / kernel | flashinfer / kernel | "
        "vLLM / kernel | equal verdicts |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table.to_dict("records"):
        lines.append(
            f"| {row['rule']} | {row['law']} | {row['vocab_size']:,} | {row['batch_size']} | "
            f"{row['kernel_s'] * 1e6:,.0f} | {row['share_of_copy_bandwidth']:.0%} | "
            f"{row['reference_over_kernel']:.1f} | {_of_public(row, 'flashinfer')} | {_of_public(row, 'vllm')} | "
            f"{row['equal_verdicts']:.1%} |"
        )
    lines += [
        "",
        "| V | rows | draft temperatures | time at all over time at one | of copy bandwidth at one | "
        "reference / kernel at all |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in reductions.to_dict("records"):
        lines.append(
            f"| {row['vocab_size']:,} | {row['rows']} | {row['temperatures']} | {row['all_over_one']:.2f} | "
            f"{row['share_of_copy_bandwidth_at_one']:.0%} | {row['reference_over_kernel']:.1f} |"
        )
    return "\n".join([*lines, "", _EXPLANATION]) + "\n"


def _of_public(row: Mapping[Any, Any], name: str) -> str:
    ratio, note = row.get(f"{name}_over_kernel", float("nan")), row.get(f"{name}_note", "")
    if not pd.isna(ratio):
        return f"{ratio:.1f}"
    return "" if pd.isna(note) or not note else note if note == _NOT_INSTALLED else "not callable"


_EXPLANATION = (
    "*of copy bandwidth*: the bytes that the kernels have to read over their time, over what the copy reads and writes "
    "in a second. *reference*: the same step in torch, logits to verdict. *flashinfer*: softmax in torch, then "
    "`chain_speculative_sampling`; *vLLM*: the same with `rejection_sample`, without drawing the bonus token; empty "
    "where they do not apply, and `table.csv` has what one said that is not callable. *equal verdicts*: sequences "
    "whose emitted block is the reference's; another one lies within float32 rounding of a threshold. The second table "
    "is the reduction of a replay with its sums: two reads of both rows, whatever the number of temperatures."
)
