"""The compiled kernel against the definition in torch float64 and against plain numpy."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from dobnb import check_equality, dobrushin_coefficient, kernel, leave_one_out, load_model, restrict, stream_attention
from dobnb.dobrushin import leave_one_out_anywhere, on_cpu
from dobnb.equality import check_equality_anywhere
from dobnb.inputs import photographs
from dobnb.stochastic import MatrixError
from dobnb.tokens import content_mask, image_token_roles


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def random_rows(draw, n):
    return draw.dirichlet(np.ones(n), size=n)


def peaked(draw, n):
    return softmax(4 * draw.standard_normal((n, n)) + 6 * np.eye(n))


def saturated(draw, n):
    """Rows with disjoint support, but for one entry here and there."""
    A = np.eye(n)[draw.permutation(n)]
    mixed = draw.integers(n)
    A[mixed] = 0.75 * A[mixed] + 0.25 * A[draw.integers(n)]
    return A


def underflowing(draw, n):
    """Overlaps far below the resolution of the screen: ties at 1 within 1e-12 that only 64 bits can tell."""
    return softmax(60 * draw.standard_normal((n, n)))


def tied(draw, n):
    """Dyadic entries, so that total variations tie exactly."""
    counts = draw.multinomial(8, np.full(n, 1 / n), size=n)
    return counts / 8


def circulant(draw, n):
    row = draw.multinomial(64, draw.dirichlet(np.ones(n))) / 64
    return np.stack([np.roll(row, shift) for shift in range(n)])


def uniform(draw, n):
    return np.full((n, n), 1 / n)


def two_class(draw, n):
    kinds = draw.dirichlet(np.ones(n), size=2)
    return kinds[draw.integers(0, 2, n)]


def near_tied(draw, n):
    """Pairs that differ by far less than the screen resolves and more than what counts as a tie."""
    kinds = draw.dirichlet(np.ones(n), size=2)[draw.integers(0, 2, n)]
    moved = kinds + 1e-9 * draw.random((n, n)) * kinds
    return moved / moved.sum(-1, keepdims=True)


def rank_one_ish(draw, n):
    """Nearly equal rows: kappa itself is small."""
    return softmax(draw.standard_normal(n) + 1e-4 * draw.standard_normal((n, n)))


def self_attending(draw, n):
    """Heavy diagonals of one size: the condition holds at many near-maximal pairs."""
    return 0.5 * np.eye(n) + 0.5 * draw.dirichlet(np.full(n, 0.05), size=n)


KINDS = [
    random_rows, peaked, saturated, underflowing, tied, circulant, uniform, two_class, near_tied, rank_one_ish,
    self_attending,
]  # fmt: skip


def agree(A, alpha=0.5, rows="stochastic", tokens=None):
    """Every field of the report, and the scores, against the definition."""
    found = check_equality(A, alpha, rows, tokens)
    whole = A if tokens is None else restrict(A, tokens)
    expected = check_equality_anywhere(whole, alpha, rows)
    for field in ("holds", "attaining", "pair"):
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
    for field in ("kappa", "factor_kappa", "bound", "gap", "margin"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field), atol=1e-12, rtol=0)
    torch.testing.assert_close(
        found.relative_gap * expected.kappa, expected.relative_gap * expected.kappa, atol=4e-12 / (1 - alpha), rtol=0,
        equal_nan=True,
    )  # fmt: skip
    if rows == "stochastic":
        assert torch.equal(dobrushin_coefficient(whole), found.kappa) or tokens is not None
        torch.testing.assert_close(leave_one_out(whole), leave_one_out_anywhere(whole), atol=2e-12, rtol=0)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_definition_is_met_at_every_small_n(kind, dtype):
    draw = np.random.default_rng(KINDS.index(kind))
    for n in range(2, 66):
        A = np.stack([kind(draw, n) for _ in range(6)])
        agree(torch.from_numpy(A.astype(dtype)), alpha=float(draw.uniform(0.05, 0.95)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_is_met_at_257(kind):
    draw = np.random.default_rng(257)
    A = torch.from_numpy(np.stack([kind(draw, 257) for _ in range(3)]).astype(np.float32))
    agree(A)
    agree(A.double() / A.double().sum(-1, keepdim=True), alpha=0.3)


def test_the_definition_is_met_on_the_heads_of_a_model():
    """Every head of three layers on two photographs, with cls and on patches."""
    model, images = load_model("dinov2-small-saliency"), photographs(2)
    patches = content_mask(image_token_roles(model.config, images.size))
    tested = 0

    def compare(layer, weights):
        nonlocal tested
        if layer in (0, 5, 11):
            agree(weights)
            agree(weights, tokens=patches)
            tested += weights.shape[:2].numel()

    stream_attention(model, images.batch(0, 2), compare)
    assert tested == 36


@pytest.mark.parametrize("n", [33, 48, 100])
def test_numpy_alone_gives_the_same(n):
    """A third opinion that shares no line with the package: the factor is built, and each pair is compared."""
    draw = np.random.default_rng(n)
    for kind in (random_rows, peaked, self_attending):
        A = kind(draw, n)
        B = 0.5 * np.eye(n) + 0.5 * A
        tv = {i: 0.5 * np.abs(A[i] - A).sum(-1) for i in range(n)}
        kappa = max(tv[i].max() for i in range(n))
        factor = max(0.5 * np.abs(B[i] - B).sum(-1).max() for i in range(n))
        found = check_equality(A)
        assert found.kappa.item() == pytest.approx(kappa, abs=1e-13)
        assert found.factor_kappa.item() == pytest.approx(factor, abs=1e-13)
        assert bool(found.holds) == (0.5 + 0.5 * kappa - factor < 1e-12)
        scores = [kappa - max(np.delete(tv[i], x).max() for i in range(n) if i != x) for x in range(n)]
        np.testing.assert_allclose(leave_one_out(A), scores, atol=1e-13)


def test_the_screens_bounds_enclose_the_truth():
    """The docstring's bounds, on what the compiled code sums, against total variation in float64."""
    draw = np.random.default_rng(5)
    for kind in KINDS:
        A = kind(draw, 70)
        panels, S = np.empty((5, 70, 16), np.uint32), np.empty((80, 80), np.uint32)
        kernel._fill(A, 2.0**31, panels)
        kernel._sum_minima(panels, S, 0, 9)
        i, j = np.triu_indices(70, 1)
        tv = 0.5 * np.abs(A[i] - A[j]).sum(-1)
        low = 0.5 * (A[i].sum(-1) + A[j].sum(-1)) - S[i, j] * 2.0**-31
        high = low + np.minimum(S[i, j], 70) * 2.0**-31
        assert (low <= tv + 1e-14).all() and (tv <= high + 1e-14).all(), kind


def test_substochastic_rows():
    draw = np.random.default_rng(1)
    for n in (2, 7, 31, 40, 65):
        for kind in KINDS:
            A = np.stack([kind(draw, n) for _ in range(3)]) * draw.random((3, n, 1))
            agree(torch.from_numpy(A), rows="substochastic", alpha=0.4)
    assert check_equality(torch.zeros(40, 40), rows="substochastic").kappa == 0


@pytest.mark.parametrize("n", [5, 40, 70])
def test_a_subset_of_tokens_is_the_restriction(n):
    draw = np.random.default_rng(n)
    for kind in (random_rows, peaked, self_attending, rank_one_ish):
        A = torch.from_numpy(np.stack([kind(draw, n) for _ in range(4)]).astype(np.float32))
        agree(A, tokens=torch.arange(n) > 0)
        agree(A, tokens=draw.permutation(n)[: n // 2 + 1])


def test_any_layout_and_any_batch():
    A = torch.softmax(3 * torch.randn(3, 4, 41, 41, generator=torch.Generator().manual_seed(0)), -1)
    whole = agree(A)
    assert whole.pair.shape == (3, 4, 2)
    crossed = A.transpose(0, 1)
    assert torch.equal(check_equality(crossed).margin, whole.margin.T)
    padded = torch.zeros(3, 4, 50, 50)[..., 3:44, 3:44].copy_(A)
    assert torch.equal(check_equality(padded).gap, whole.gap)
    columns = A.mT.contiguous().mT
    assert torch.equal(check_equality(columns).kappa, whole.kappa)
    assert check_equality(A[0, 0]).kappa.shape == ()
    assert check_equality(A[:0]).pair.shape == (0, 4, 2)
    assert leave_one_out(A[:, :0]).shape == (3, 0, 41)
    assert check_equality(A.clone().requires_grad_()).kappa.requires_grad is False


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.bfloat16])
def test_other_types(dtype):
    agree(torch.eye(40)[torch.randperm(40, generator=torch.Generator().manual_seed(1))].to(dtype))


def test_threads_change_nothing():
    A = torch.softmax(3 * torch.randn(37, 50, 50, generator=torch.Generator().manual_seed(2)), -1)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(check_equality(A))
    finally:
        torch.set_num_threads(before)
    for field in ("kappa", "gap", "margin", "holds", "pair", "attaining"):
        assert torch.equal(getattr(found[0], field), getattr(found[1], field))
        assert torch.equal(getattr(found[0], field), getattr(found[2], field))


@pytest.mark.parametrize("n", [4, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bad_input_is_named(n, dtype):
    A = torch.full((5, n, n), 1 / n, dtype=dtype)
    for value, message in ((float("nan"), "is nan"), (float("inf"), "is inf"), (-0.25, "is -0.25"), (1.0, "sums to")):
        bad = A.clone()
        bad[3, 2, 1] = value
        where = r"row \(3, 2\)" if value == 1 else r"entry \(3, 2, 1\)"
        for function in (check_equality, dobrushin_coefficient, leave_one_out):
            with pytest.raises(MatrixError, match=f"{where} {message}"):
                function(bad)
        with pytest.raises(MatrixError, match=where):
            check_equality(bad, tokens=[0, 1])
    lone = A.clone()
    lone[4, 1] = torch.eye(n, dtype=dtype)[0]
    with pytest.raises(MatrixError, match=r"row \(4, 0\) of the subchain has no mass"):
        check_equality(lone, tokens=range(1, n))


def test_a_large_matrix():
    """Two kinds of rows whose distance is known, N beyond what an N x N x N array allows."""
    n = 1500
    A = torch.full((n, n), 1 / n, dtype=torch.float64)
    A[7] = torch.cat([torch.full((n // 2,), 2 / n, dtype=torch.float64), torch.zeros(n // 2, dtype=torch.float64)])
    found = check_equality(A)
    assert found.kappa.item() == pytest.approx(0.5, abs=1e-12)
    assert found.attaining == n - 1
    assert found.holds and found.pair.tolist() == [7, n // 2]  # the first token on which row 7 puts nothing
    scores = leave_one_out(A)
    assert scores[7].item() == pytest.approx(0.5, abs=1e-12) and scores.count_nonzero() == 1


MEMORY = """
import json, re, sys
import torch
from dobnb import check_equality

def kib(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

n, found = 4096, []
check_equality(torch.full((2, 64, 64), 1 / 64))  # loads the kernel
A = torch.full((n, n), 1 / n)
A[7, : n // 2], A[7, n // 2 :] = 2 / n, 0
before = kib("VmRSS")
for row in (None, torch.full((n,), 1 / n)):
    if row is not None:
        A[7] = row
    report = check_equality(A)
    squares = (kib("VmHWM") - before) * 1024 / (8 * n * n)
    found.append([report.kappa.item(), report.gap.item(), report.attaining.item(), report.pair.tolist(), squares])
print(json.dumps(found))
"""


def in_a_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_4096_tokens_take_a_few_squares_of_memory():
    """At most three N x N float64 arrays beyond the input; five where all pairs tie and 64 bits are needed.

    Row 7 puts 2/N on half of the tokens, all others are uniform: TV 1/2 with each of them. Then all rows are uniform.
    """
    n = 4096
    one, none = json.loads(in_a_process(MEMORY))
    assert one[:4] == [pytest.approx(0.5, abs=1e-12), 0, n - 1, [7, n // 2]]  # the first token that row 7 leaves out
    assert none[:4] == [0, 0, n * (n - 1) // 2, [0, 1]]
    assert one[4] < 3 and none[4] < 5


CALLS = """
import numpy as np
from dobnb import check_equality, dobrushin_coefficient, leave_one_out

for n in (5, 70):
    for dtype in (np.float32, np.float64):
        for function in (check_equality, dobrushin_coefficient, leave_one_out):
            function(np.full((2, n, n), 1 / n, dtype))
"""


def test_a_second_process_does_not_compile_again():
    exec(CALLS, {})
    counted = """
from dobnb import kernel
stats = [f.stats for f in vars(kernel).values() if hasattr(f, "stats")]
print(sum(sum(s.cache_hits.values()) for s in stats), sum(sum(s.cache_misses.values()) for s in stats))
"""
    hits, misses = map(int, in_a_process(CALLS + counted).split())
    assert hits >= 4 and misses == 0  # two kernels, two dtypes


def test_other_devices_are_for_the_definition():
    """The code that `agree` holds the kernel against is the one that a GPU's tensors take."""
    assert on_cpu(torch.empty(2, 3, 3, device="meta"), kernel.REPORT) is None
