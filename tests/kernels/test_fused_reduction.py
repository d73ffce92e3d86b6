"""A replay's reduction of rows against the float64 reference, over temperatures, dtypes, shapes and extremes."""

import math

import pytest
import torch
from torch import Tensor

from spectoolkit.functional.acceptance import overlap, probs_of
from spectoolkit.functional.conditional import given_coupled
from spectoolkit.functional.warp import warp

reduce = pytest.importorskip("spectoolkit.kernels.reduce")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURES = [0.0, 0.2, 0.7, 1.0, 3.0]


def rows(num=6, vocab_size=100, width=None, dtype=torch.float32, seed=0, spread=2.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = spread * torch.randn(num, vocab_size, generator=generator)
    draft = spread * torch.randn(num, width or vocab_size, generator=generator)
    shared = min(vocab_size, draft.shape[1])
    draft[:, :shared] += target[:, :shared]
    hidden = torch.rand(num, vocab_size, generator=generator) < 0.3 * (torch.arange(num) % 2)[:, None]
    target = target.masked_fill(hidden, -math.inf)
    target[:, 0] = target[:, 0].clamp(min=-3.0)
    probable = torch.multinomial(target.softmax(-1), 1, generator=generator)[:, 0]
    return {
        "target_logits": target.to(dtype),
        "target_temperature": torch.tensor([0.7, 1.0, 0.0, 1.4], dtype=torch.float64).repeat(num)[:num],
        "draft_logits": draft.to(dtype),
        "draft_temperatures": torch.tensor(TEMPERATURES, dtype=torch.float64).repeat(num, 1),
        "tokens": torch.where(torch.arange(num) % 5 == 4, -1, probable),
    }


def reduced(given: dict[str, Tensor], **options):
    found = reduce.reduce_rows(**{name: value.to(DEVICE) for name, value in given.items()}, **options)
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


def check(given: dict[str, Tensor], chunk: int | None = None, rtol: float = 1e-5) -> None:
    found = {name: value.cpu() for name, value in reduced(given, chunk=chunk).items()}
    target, draft, tokens = given["target_logits"].double(), given["draft_logits"].double(), given["tokens"]
    p = warp(target[:, None], given["target_temperature"], None, None, None)[:, 0]
    draft = draft[:, : target.shape[1]]
    close = {"rtol": rtol, "atol": 1e-30}
    assert found["is_valid"].all()
    assert torch.equal(found["target_argmax"].long(), target.argmax(-1))
    assert torch.equal(found["draft_argmax"].long(), draft.argmax(-1))
    divisor = torch.where(given["target_temperature"] == 0, 1, given["target_temperature"])[:, None]
    torch.testing.assert_close(found["target_logsumexp"], (target / divisor).logsumexp(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["target_prob"], probs_of(p, tokens), **close)
    torch.testing.assert_close(found["target_log_prob"], probs_of(p, tokens).log(), rtol=1e-6, atol=2e-6)
    for s in range(given["draft_temperatures"].shape[1]):
        temperature = given["draft_temperatures"][:, s]
        q = warp(draft[:, None], temperature, None, None, None)[:, 0]
        q = torch.nn.functional.pad(q, (0, target.shape[1] - q.shape[1]))
        scaled = draft / torch.where(temperature == 0, 1, temperature)[:, None]
        torch.testing.assert_close(found["draft_logsumexp"][:, s], scaled.logsumexp(-1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found["draft_prob"][:, s], probs_of(q, tokens), **close)
        torch.testing.assert_close(found["overlap"][:, s], overlap(p, q), rtol=rtol, atol=1e-7)
        torch.testing.assert_close(found["coupled"][:, s], given_coupled(p, q, tokens), rtol=3 * rtol, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype(dtype):
    check(rows(num=5, vocab_size=150, dtype=dtype), chunk=128)


@pytest.mark.parametrize(
    ("num", "vocab_size", "width", "chunk"),
    [(1, 1, None, None), (3, 16, None, 16), (5, 65, None, 64), (4, 48, 20, 32), (4, 48, 90, 32), (1, 1000, None, None)],
)
def test_every_shape(num, vocab_size, width, chunk):
    check(rows(num, vocab_size, width, seed=1), chunk)


def test_a_large_vocabulary():
    given = rows(1, 262_143, dtype=torch.bfloat16, seed=2)
    given["draft_temperatures"] = given["draft_temperatures"][:, 2:4]
    check(given, chunk=1 << 15)


def test_ties_one_hot_rows_and_chunks_of_nothing():
    given = rows(4, 48, seed=3)
    target, draft = given["target_logits"], given["draft_logits"]
    target[0], draft[0] = 0.0, 0.0
    target[1, :32], draft[1, 16:] = -math.inf, -math.inf
    target[2] = -math.inf
    target[2, 33] = 5.0
    draft[3] = -math.inf
    draft[3, 47] = -1e4
    given["tokens"] = torch.tensor([0, 40, 33, 5])
    for temperature in (given["target_temperature"], torch.zeros(4, dtype=torch.float64)):
        check({**given, "target_temperature": temperature}, 32)


def test_logits_far_apart():
    given = rows(4, 40, seed=4, spread=50.0)
    given["draft_temperatures"] = torch.tensor([[0.01, 0.3, 20.0]], dtype=torch.float64).repeat(4, 1)
    check(given, 32, rtol=3e-5)


def test_sums_are_left_out_where_nobody_asks_for_them():
    given = rows(3, 40, seed=5)
    few, all_of_them = reduced(given, chunk=16, sums=False), reduced(given, chunk=16)
    assert few["overlap"] is None
    assert few["coupled"] is None
    assert torch.equal(few["draft_prob"], all_of_them["draft_prob"])


def test_rows_without_a_distribution_are_not_valid_and_leave_the_others_alone():
    given = rows(6, 40, seed=6)
    expected = reduced(given, chunk=64)
    target, draft = given["target_logits"].clone(), given["draft_logits"].clone()
    target[1, 3], target[2], target[3, 0] = math.nan, -math.inf, math.inf
    draft[3, 39], draft[4, 7] = math.inf, math.nan
    found = reduced({**given, "target_logits": target, "draft_logits": draft}, chunk=64)
    assert found["is_valid"].all(-1).tolist() == [True, False, False, False, False, True]
    for name in ("target_prob", "draft_prob", "overlap", "coupled"):
        assert torch.equal(found[name][[0, 5]], expected[name][[0, 5]])


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")
def test_a_temperature_that_overflows_is_not_valid():
    given = rows(2, 40, seed=7)
    given["draft_logits"] = given["draft_logits"].clamp(min=1.0)
    given["draft_temperatures"] = torch.tensor([[0.7, 1e-45], [1.0, 0.5]], dtype=torch.float64)
    given["draft_logits"][0] *= 1e12
    found = reduced(given, chunk=16)
    assert found["is_valid"].tolist() == [[True, False], [True, True]]
