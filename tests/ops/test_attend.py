"""The Triton kernels against `reference.attend`."""

import pytest
import torch
from torch import library
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from linformers.ops.attend import _attend, fits_in_registers, fits_on_chip
from linformers.ops.launch import best_splits

from .common import DEVICE, GPU_MARKS, ON_GPU, assert_accurate, by_kernels, by_reference, derive, kernel_inputs

pytest.importorskip("triton")
pytestmark = GPU_MARKS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS, KEYS = (1, 2, 63, 127, 129, 1025), (1, 17, 96, 128, 256, 1000)
# More keys than fit on chip, and not a multiple of a tile. The interpreter computes in float32, where fewer suffice.
MANY = 300 if ON_GPU else 140


@pytest.fixture(autouse=True)
def poison():
    """Fill every new tensor with NaN, so that an element that no program writes is noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def by_torch(query, key, value, mask=None):
    return scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)


# In the interpreter, the largest sizes take half a minute each.
@pytest.mark.parametrize(("n", "k"), [(65, 2048), *((n, k) for n in LENGTHS for k in KEYS if ON_GPU or n * k < 2e5)])
def test_sizes(n, k):
    assert_accurate(by_torch, *kernel_inputs(n, k, h=1 if k * n > 1e5 else 2))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 17), (129, 96), (63, 256), (127, 1000)] if not ON_GPU else
                         [(n, k) for n in LENGTHS for k in KEYS])  # fmt: skip
def test_half_precision(n, k, dtype):
    assert_accurate(by_torch, *kernel_inputs(n, k, d=64, dtype=dtype))


@pytest.mark.parametrize("d", [1, 8, 40, 64, 80, 128])
@pytest.mark.parametrize("k", [24, MANY])
def test_head_sizes(d, k):
    for dtype in DTYPES if ON_GPU else (torch.float32,):
        # With too few numbers, torch's error could be small by accident.
        assert_accurate(by_torch, *kernel_inputs(70, k, d=d, h=max(2, 16 // d), dtype=dtype))


@pytest.mark.parametrize("k", [17, MANY])
@pytest.mark.parametrize("heads", [1, 2])
def test_masked_slots(k, heads):
    inputs = kernel_inputs(70, k, b=3)
    mask = torch.rand(3, heads, 1, k, device=DEVICE) < 0.5
    mask[..., 0] = True
    assert_accurate(by_torch, *inputs, mask=mask)
    if heads == 1:
        assert_accurate(by_torch, *inputs, mask=mask[:1])


@pytest.mark.parametrize("k", [17, MANY])
def test_a_row_without_visible_keys(k):
    inputs, gradient = kernel_inputs(70, k, b=2)
    mask = torch.zeros(2, 1, 1, k, dtype=torch.bool, device=DEVICE)
    mask[1, ..., 5] = True
    output, *gradients = derive(by_kernels, inputs, gradient, mask=mask)
    assert all((x[0] == 0).all() for x in (output, *gradients))
    assert all(x.isfinite().all() for x in (output, *gradients))
    torch.testing.assert_close(output[1], inputs[2][1, :, 5].expand(70, 2, 16))


@pytest.mark.parametrize(("k", "window"), [(17, 0), (MANY, 0), (9, 5)])
def test_any_strides(k, window):
    """Broadcast, transposed and sliced inputs."""
    whole = torch.randn(3, 16, 2, 140, device=DEVICE)
    query = whole[:1, :, :, ::2].permute(0, 2, 3, 1).expand(2, 2, 70, 16)
    lengths = (k, k, 70, 70) if window else (k, k)
    others = [torch.randn(2, 2, length, 17, device=DEVICE)[..., 1:] for length in lengths]
    gradient = torch.randn(1, 70, 1, 16, device=DEVICE).expand(2, 70, 2, 16)
    inputs = [x.requires_grad_() for x in (query, *others)]
    results, expected = (derive(run, inputs, gradient, window=window) for run in (by_kernels, by_reference))
    torch.testing.assert_close(results, expected, rtol=0, atol=1e-4)
    assert results[0].is_contiguous()


def test_large_scores_do_not_overflow():
    (query, key, value), _ = kernel_inputs(70, 17, dtype=torch.float16)
    inputs = 100 * query, 100 * key, value
    torch.testing.assert_close(by_kernels(*inputs), by_reference(*inputs), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("b", "n"), [(0, 7), (2, 0)])
def test_empty_batch_and_empty_sequence(b, n):
    output, *gradients = derive(by_kernels, *kernel_inputs(n, 3, b=b))
    assert output.shape == (b, n, 2, 16)
    assert all((gradient == 0).all() for gradient in gradients)


def dropout_mask(n, k, p, seed):
    """The entries that dropout keeps, times 1 / (1 - p): uniform attention onto the rows of an identity matrix."""
    query, key = torch.zeros(1, 2, n, k, device=DEVICE), torch.zeros(1, 2, k, k, device=DEVICE)
    value = torch.eye(k, device=DEVICE).expand(1, 2, k, k).contiguous()
    torch.manual_seed(seed)
    return by_kernels(query, key, value, dropout=p).transpose(1, 2) * k  # (b, h, n, k)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(p):
    n, k = 300, 64
    entries = dropout_mask(n, k, p, seed=0)
    assert torch.unique(entries).tolist() == pytest.approx([0, 1 / (1 - p)])
    kept = (entries > 0).double()
    # 4.5 standard deviations of a mean of independent entries: of all, and of each row, column and head.
    for axes in [(0, 1, 2, 3), (0, 1, 2), (1, 3), (2, 3)]:
        count = torch.tensor([kept.shape[axis] for axis in axes]).prod().item()
        assert (kept.mean(axes) - (1 - p)).abs().max() < 4.5 * (p * (1 - p) / count) ** 0.5
    # Neighbors, heads and other seeds are not correlated.
    sigma = (kept.numel() // 2) ** -0.5
    normalized = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
    other = ((dropout_mask(n, k, p, seed=1) > 0).double() - (1 - p)) / (p * (1 - p)) ** 0.5
    assert (normalized * other).mean().abs() < 4.5 * sigma
    assert (normalized[:, 0] * normalized[:, 1]).mean().abs() < 4.5 * sigma
    assert (normalized[:, :, 1:] * normalized[:, :, :-1]).mean().abs() < 4.5 * sigma
    assert (normalized[..., 1:] * normalized[..., :-1]).mean().abs() < 4.5 * sigma
    assert torch.equal(entries, dropout_mask(n, k, p, seed=0))


@pytest.mark.parametrize(("k", "window"), [(24, 0), (MANY, 0), (12, 6)])
def test_gradients_with_dropout(k, window):
    """Forward and backward pass drop the same entries."""
    n, d = 70, 16
    seed, positions = torch.tensor([3], device=DEVICE), torch.arange(n, device=DEVICE)
    visible = torch.ones(n, k, dtype=torch.bool, device=DEVICE)
    if window:
        visible = torch.cat([visible, (positions[:, None] - positions).abs() <= window], 1)

    def run(query, key, value, near_key=None, near_value=None):
        return _attend(query, key, value, near_key, near_value, None, None, seed, None, window, d**-0.5, 0.3)[0]

    # Uniform attention onto 64 rows of an identity matrix at a time shows which entries this seed drops.
    keep = []
    for part in torch.eye(visible.shape[1], device=DEVICE).expand(1, 2, -1, -1).split(64, -1):
        (query, key, _, *near), _ = kernel_inputs(n, k, window, d=part.shape[-1])
        values = [own.contiguous() for own in part.split((k, n) if window else k, 2)]
        inputs = (0 * query, 0 * key, values[0], *(0 * x for x in near[:1]), *values[1:])
        keep.append(run(*inputs).transpose(1, 2) * visible.sum(1, keepdim=True))

    def expected(query, key, value, *near):
        scores = query @ torch.cat([key, *near[:1]], 2).mT * d**-0.5
        probs = scores.masked_fill(~visible, -torch.inf).softmax(-1) * torch.cat(keep, -1)
        return (probs @ torch.cat([value, *near[1:]], 2)).transpose(1, 2)

    inputs, gradient = kernel_inputs(n, k, window, d=d)
    results = derive(run, inputs, gradient)
    torch.testing.assert_close(results, derive(expected, inputs, gradient), rtol=0, atol=2e-5)


def test_dropout_of_everything_and_of_nothing():
    inputs, _ = kernel_inputs(5, 3)
    assert (by_kernels(*inputs, dropout=1.0) == 0).all()
    assert torch.equal(by_kernels(*inputs, dropout=0.0), by_kernels(*inputs))


@pytest.mark.parametrize(("k", "window"), [(24, 0), (MANY, 0), (8, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_operator(k, window, masked):
    """Tracing predicts shapes, dtypes and strides; gradients are registered; compiling works with dynamic shapes."""
    inputs, _ = kernel_inputs(20, k, window)
    inputs += [] if window else [None, None]
    mask = torch.rand(1, 1, 1, k, device=DEVICE) < 0.5 if masked else None
    lengths = torch.tensor([13], device=DEVICE) if masked and window else None
    seed = torch.tensor([5], device=DEVICE) if masked else None
    torch.use_deterministic_algorithms(False)  # opcheck also compares uninitialized memory
    far_bias = torch.randn(2, device=DEVICE, requires_grad=True) if masked and window else None
    library.opcheck(_attend, (*inputs, mask, lengths, seed, far_bias, window, 0.25, 0.1 if masked else 0.0))


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[:1], ids=str)
@pytest.mark.parametrize("k", [9, 0, MANY])
def test_far_bias(k, dtype):
    """The bias of projected keys and its gradient, summed over rows, queries and keys."""
    inputs, gradient = kernel_inputs(70, k, 5, b=2, dtype=dtype)
    far_bias = torch.tensor([-2.0, 1.5], device=DEVICE, requires_grad=True)

    def with_bias(run):
        return lambda *tensors, **options: run(*tensors[:-1], far_bias=tensors[-1], **options)

    options = {"window": 5, "lengths": torch.tensor([70, 33], device=DEVICE)}
    options["mask"] = torch.rand(2, 1, 1, k, device=DEVICE) < 0.5
    results = derive(with_bias(by_kernels), [*inputs, far_bias], gradient, **options)
    exact = [x.detach().double().requires_grad_() for x in (*inputs, far_bias)]
    expected = derive(with_bias(by_reference), exact, gradient.double(), **options)
    tolerance = 20 * torch.finfo(dtype).eps * max(1, k) ** 0.5
    torch.testing.assert_close(results, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize(("k", "window"), [(128, 0), (300, 0), (30, 20)])
def test_deterministic(k, window):
    inputs, gradient = kernel_inputs(1000 if ON_GPU else 100, k, window, d=64, dtype=torch.bfloat16)
    first = derive(by_kernels, inputs, gradient, window=window)
    for _ in range(50 if ON_GPU else 2):
        assert all(map(torch.equal, derive(by_kernels, inputs, gradient, window=window), first))
    for _ in range(1000 if ON_GPU else 2):
        assert torch.equal(by_kernels(*inputs, window=window), first[0])


@pytest.mark.parametrize("window", [0, 6])
def test_checkpointing_replays_dropout(window):
    inputs, gradient = kernel_inputs(40, 24, window)

    def checkpointed(*x, **options):
        return checkpoint(by_kernels, *x, **options, use_reentrant=False)

    results = []
    for run in (by_kernels, checkpointed):
        torch.manual_seed(0)
        results.append(derive(run, inputs, gradient, window=window, dropout=0.5))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("tiles", "programs", "processors", "cost"), [(1024, 12, 132, 2), (8, 1536, 132, 2), (3, 5, 4, 1), (1, 1, 132, 2)]
)
def test_splits(tiles, programs, processors, cost):
    splits = best_splits(tiles, programs, processors, cost)
    assert 1 <= splits <= tiles
    if programs >= 8 * processors:
        assert splits == 1
    if tiles * programs >= 4 * processors:  # most processors are busy until the end
        share = -(-tiles // splits) * -(-programs * splits // processors)
        assert share * processors <= 1.35 * tiles * programs


@pytest.mark.parametrize(
    ("d", "dtype", "in_registers", "on_chip"),
    [(64, torch.bfloat16, 128, 256), (16, torch.float16, 128, 256), (128, torch.float16, 64, 128),
     (64, torch.float32, 128, 128), (128, torch.float32, 64, 64)],
)  # fmt: skip
def test_most_keys_of_each_kernel(d, dtype, in_registers, on_chip):
    for fits, most in ((fits_in_registers, in_registers), (fits_on_chip, on_chip)):
        key = torch.empty(1, 1, most + 1, d, dtype=dtype, device="meta")
        assert fits(key[:, :, 1:])
        assert not fits(key)
        assert not fits(key[:, :, 1:], near_key=key)


@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
def test_more_than_2_to_the_31_elements():
    n, h, d, k = 3_000_000, 12, 64, 128
    torch.use_deterministic_algorithms(False)
    query = torch.randn(1, n, h, d, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    assert query.numel() > 2**31
    (_, key, value), _ = kernel_inputs(1, k, h=h, d=d, dtype=torch.bfloat16)
    output = by_kernels(query, key, value)
    gradient = torch.randn_like(output)
    (query_gradient,) = torch.autograd.grad(output, query, gradient)
    last = query[:, :, -1000:].detach().requires_grad_()
    expected = derive(by_kernels, [last, key, value], gradient[:, -1000:])
    torch.testing.assert_close(output[:, -1000:], expected[0])
    torch.testing.assert_close(query_gradient[:, :, -1000:], expected[1])
