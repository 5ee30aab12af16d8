"""The Triton kernels against their specification: interpreted where there is no GPU, compiled where there is one."""

import subprocess
import sys

import pytest
import torch
from torch import library
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from linformers import reference
from linformers.ops.attend import MAX_KEYS, _attend, are_few, attend, holds_all
from linformers.ops.launch import best_splits, padded

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
on_gpu_only = pytest.mark.skipif(not ON_GPU, reason="no CUDA device")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS, KEYS = (1, 2, 63, 127, 129, 1025), (1, 17, 96, 128, 256, 1000)
# More keys than a program holds, and no whole number of tiles; in float32, as all is interpreted, fewer suffice.
MANY = 300 if ON_GPU else 140


@pytest.fixture(autouse=True)
def poison():
    """Fill every new tensor with NaN, so that an element which no program writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def tensors(n, k, *, b=1, h=2, d=16, dtype=torch.float32):
    """Query, key and value as a layer makes them: heads side by side."""

    def of(length):
        return torch.randn(b, length, h, d, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_()

    return of(n), of(k), of(k)


def derive(function, inputs, gradient):
    """Output (b, n, h, d) and the gradients of all inputs."""
    output = function(*inputs)
    return [output, *torch.autograd.grad(output, inputs, gradient)]


def exact(query, key, value, mask=None):
    output, _ = reference.attend(query, key, value, mask, scaling=query.shape[-1] ** -0.5)
    return output.transpose(1, 2)


def torch_own(query, key, value, mask=None):
    return scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)


def ours(query, key, value, mask=None, **options):
    return attend(query, key, value, mask=mask, scaling=query.shape[-1] ** -0.5, **options)


def errors(results, expected):
    """The norm of each result's error, relative to that of what was expected."""
    return [
        ((r.double() - e).norm() / e.norm().clamp(min=1e-30)).item() for r, e in zip(results, expected, strict=True)
    ]


def assert_as_exact_as_torch(inputs, mask=None):
    """Forward error at most twice, gradients at most three times that of torch in the same type, against float64."""
    gradient = torch.randn_like(inputs[0]).transpose(1, 2)
    double = [x.detach().double().requires_grad_() for x in inputs]
    expected = derive(lambda *x: exact(*x, mask), double, gradient.double())
    own = errors(derive(lambda *x: ours(*x, mask), inputs, gradient), expected)
    others = errors(derive(lambda *x: torch_own(*x, mask), inputs, gradient), expected)
    rounding = torch.finfo(torch.float32).eps  # sums are kept in float32, and torch's may happen to be exact
    for name, error, other, factor in zip(("output", "query", "key", "value"), own, others, (2, 3, 3, 3), strict=True):
        assert error <= factor * other + rounding, (name, error, other)


# Interpreted, the largest take half a minute each.
@pytest.mark.parametrize(("n", "k"), [(n, k) for n in LENGTHS for k in KEYS if ON_GPU or n * k < 2e5])
def test_sizes(n, k):
    assert_as_exact_as_torch(tensors(n, k, h=1 if k * n > 1e5 else 2))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 17), (129, 96), (63, 256), (127, 1000)] if not ON_GPU else
                         [(n, k) for n in LENGTHS for k in KEYS])  # fmt: skip
def test_half_precision(n, k, dtype):
    assert_as_exact_as_torch(tensors(n, k, d=64, dtype=dtype))


@pytest.mark.parametrize("d", [1, 8, 40, 64, 80, 128])
@pytest.mark.parametrize("k", [24, MANY])
def test_head_sizes(d, k):
    for dtype in DTYPES if ON_GPU else (torch.float32,):
        # Heads enough that the error of torch's few numbers is no accident.
        assert_as_exact_as_torch(tensors(70, k, d=d, h=max(2, 16 // d), dtype=dtype))


def test_most_keys():
    assert_as_exact_as_torch(tensors(65, MAX_KEYS, h=1))


@pytest.mark.parametrize("k", [17, MANY])
@pytest.mark.parametrize("heads", [1, 2])
def test_masked_slots(k, heads):
    inputs = tensors(70, k, b=3)
    mask = torch.rand(3, heads, 1, k, device=DEVICE) < 0.5
    mask[..., 0] = True
    assert_as_exact_as_torch(inputs, mask)
    if heads == 1:
        assert_as_exact_as_torch(inputs, mask[:1])


@pytest.mark.parametrize("k", [17, MANY])
def test_a_row_that_sees_nothing(k):
    inputs = tensors(70, k, b=2)
    mask = torch.zeros(2, 1, 1, k, dtype=torch.bool, device=DEVICE)
    mask[1, ..., 5] = True
    output, *gradients = derive(lambda *x: ours(*x, mask), inputs, torch.ones(2, 70, 2, 16, device=DEVICE))
    assert (output[0] == 0).all()
    assert all((gradient[0] == 0).all() for gradient in gradients)
    assert all(x.isfinite().all() for x in (output, *gradients))
    torch.testing.assert_close(output[1], inputs[2][1, :, 5].expand(70, 2, 16))


@pytest.mark.parametrize("k", [17, MANY])
def test_any_strides(k):
    """Broadcast, transposed, sliced: what transformers or anybody else hands over."""
    whole = torch.randn(3, 16, 2, 140, device=DEVICE)
    query = whole[:1, :, :, ::2].permute(0, 2, 3, 1).expand(2, 2, 70, 16)
    key, value = torch.randn(2, 2, 2, k, 17, device=DEVICE)[..., 1:]
    gradient = torch.randn(1, 70, 1, 16, device=DEVICE).expand(2, 70, 2, 16)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    results = derive(ours, inputs, gradient)
    expected = derive(exact, inputs, gradient)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=0, atol=1e-4)
    assert results[0].is_contiguous()


def test_large_scores_do_not_overflow():
    query, key, value = tensors(70, 17, dtype=torch.float16)
    result = ours(100 * query, 100 * key, value)
    torch.testing.assert_close(result, exact(100 * query, 100 * key, value), rtol=0, atol=2e-3)


@pytest.mark.parametrize("shape", [(0, 2, 7, 3), (2, 2, 0, 3)])
def test_nothing_to_do(shape):
    b, h, n, k = shape
    query = torch.randn(b, h, n, 16, device=DEVICE, requires_grad=True)
    key, value = (torch.randn(b, h, k, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    output, *gradients = derive(ours, [query, key, value], torch.ones(b, n, h, 16, device=DEVICE))
    assert output.shape == (b, n, h, 16)
    assert all((gradient == 0).all() for gradient in gradients)


def kept(n, k, p, seed):
    """Which entries dropout keeps, read off an attention that is uniform onto the rows of an identity matrix."""
    query, key = torch.zeros(1, 2, n, k, device=DEVICE), torch.zeros(1, 2, k, k, device=DEVICE)
    value = torch.eye(k, device=DEVICE).expand(1, 2, k, k).contiguous()
    torch.manual_seed(seed)
    return ours(query, key, value, dropout=p).transpose(1, 2) * k  # (b, h, n, k)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(p):
    n, k = 300, 64
    entries = kept(n, k, p, seed=0)
    assert torch.unique(entries).tolist() == pytest.approx([0, 1 / (1 - p)])
    there = (entries > 0).double()
    # Four standard deviations of a mean of independent entries: over all, and of each row, column and head.
    for axes in [(0, 1, 2, 3), (0, 1, 2), (1, 3), (2, 3)]:
        counted = torch.tensor([there.shape[axis] for axis in axes]).prod().item()
        assert (there.mean(axes) - (1 - p)).abs().max() < 4.5 * (p * (1 - p) / counted) ** 0.5
    # Neighbours, heads and other seeds know nothing of each other.
    sigma = (there.numel() // 2) ** -0.5
    centred = (there - (1 - p)) / (p * (1 - p)) ** 0.5
    other = ((kept(n, k, p, seed=1) > 0).double() - (1 - p)) / (p * (1 - p)) ** 0.5
    assert (centred * other).mean().abs() < 4.5 * sigma
    assert (centred[:, 0] * centred[:, 1]).mean().abs() < 4.5 * sigma
    assert (centred[:, :, 1:] * centred[:, :, :-1]).mean().abs() < 4.5 * sigma
    assert (centred[..., 1:] * centred[..., :-1]).mean().abs() < 4.5 * sigma
    assert torch.equal(entries, kept(n, k, p, seed=0))


@pytest.mark.parametrize("k", [24, MANY])
def test_gradients_with_dropout(k):
    """Forward and backward drop the same entries, in the few-keys and the many-keys kernels."""
    n, d, p = 70, 16, 0.3
    query, key, value = tensors(n, k, d=d)
    torch.manual_seed(3)
    # The same draw with k channels shows which entries it dropped.
    seed = torch.randint(2**62, (1,), device=DEVICE)
    spread = torch.eye(k, device=DEVICE).expand(1, 2, k, k)
    shown = []
    for first in range(0, k, 64):
        part = spread[..., first : first + 64].contiguous()
        zeros = [torch.zeros(1, 2, length, part.shape[-1], device=DEVICE) for length in (n, k)]
        shown.append(_attend(*zeros, part, *(None,) * 4, seed, 0, 1.0, p)[0].transpose(1, 2) * k)
    keep = torch.cat(shown, -1)

    def expected(query, key, value):
        probs = (query @ key.mT * d**-0.5).softmax(-1) * keep
        return (probs @ value).transpose(1, 2)

    def result(query, key, value):
        return _attend(query, key, value, *(None,) * 4, seed, 0, d**-0.5, p)[0]

    gradient = torch.randn(1, n, 2, d, device=DEVICE)
    for own, other in zip(
        derive(result, [query, key, value], gradient), derive(expected, [query, key, value], gradient), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=0, atol=2e-5)


def test_dropout_of_everything_and_of_nothing():
    query, key, value = tensors(5, 3)
    assert (ours(query, key, value, dropout=1.0) == 0).all()
    assert torch.equal(ours(query, key, value, dropout=0.0), ours(query, key, value))


def test_checkpointing_replays_dropout():
    inputs = tensors(40, 24)
    gradient = torch.randn(1, 40, 2, 16, device=DEVICE)

    def run(again):
        torch.manual_seed(0)
        function = lambda *x: ours(*x, dropout=0.5)  # noqa: E731
        return derive(
            (lambda *x: checkpoint(function, *x, use_reentrant=False)) if again else function, inputs, gradient
        )

    for own, other in zip(run(True), run(False), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("k", [24, MANY])
@pytest.mark.parametrize("masked", [False, True])
def test_operator(k, masked):
    """Shapes, types and strides that tracing predicts are those that running gives; gradients are registered."""
    mask = torch.rand(1, 1, 1, k, device=DEVICE) < 0.5 if masked else None
    seed = torch.tensor([5], device=DEVICE) if masked else None
    torch.use_deterministic_algorithms(False)  # opcheck compares what is not written yet, too
    library.opcheck(_attend, (*tensors(20, k), None, None, mask, None, seed, 0, 0.25, 0.1 if masked else 0.0))


def test_compiles_whole():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: ours(*x).relu(), fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    for n in (30, 40, 50):
        inputs = tensors(n, 24)
        gradient = torch.randn(1, n, 2, 16, device=DEVICE)
        for own, other in zip(
            derive(compiled, inputs, gradient), derive(lambda *x: ours(*x).relu(), inputs, gradient), strict=True
        ):
            torch.testing.assert_close(own, other)


@pytest.mark.parametrize("k", [128, 300])
def test_reruns_are_equal(k):
    inputs = tensors(1000 if ON_GPU else 100, k, d=64, dtype=torch.bfloat16)
    gradient = torch.randn_like(inputs[0]).transpose(1, 2)
    first = derive(ours, inputs, gradient)
    for _ in range(50 if ON_GPU else 2):
        assert all(map(torch.equal, derive(ours, inputs, gradient), first))
    for _ in range(1000 if ON_GPU else 2):
        assert torch.equal(ours(*inputs), first[0])


@pytest.mark.parametrize(
    ("tiles", "programs", "processors", "cost"), [(1024, 12, 132, 2), (8, 1536, 132, 2), (3, 5, 4, 1), (1, 1, 132, 2)]
)
def test_splits(tiles, programs, processors, cost):
    splits = best_splits(tiles, programs, processors, cost)
    assert 1 <= splits <= tiles
    if programs >= 8 * processors:
        assert splits == 1
    if tiles * programs >= 4 * processors:  # most processors have work until the end
        share = -(-tiles // splits) * -(-programs * splits // processors)
        assert share * processors <= 1.35 * tiles * programs


def test_which_kernel_serves():
    def key(k, d, dtype):
        return torch.empty(1, 1, k, d, dtype=dtype, device="meta")

    assert are_few(key(128, 64, torch.bfloat16))
    assert not are_few(key(129, 64, torch.bfloat16))
    assert holds_all(key(256, 64, torch.bfloat16))
    assert not holds_all(key(257, 64, torch.bfloat16))
    assert holds_all(key(128, 128, torch.float16))
    assert not are_few(key(128, 128, torch.float16))
    assert not holds_all(key(129, 128, torch.float16))
    assert not holds_all(key(300, 16, torch.float16))
    assert holds_all(key(128, 64, torch.float32))
    assert not holds_all(key(129, 64, torch.float32))
    assert [padded(x) for x in (1, 16, 17, 64, 65, 1000)] == [16, 16, 32, 64, 128, 1024]


@on_gpu_only
def test_more_elements_than_32_bits_count():
    n, h, d, k = 3_000_000, 12, 64, 128
    torch.use_deterministic_algorithms(False)
    query = torch.randn(1, n, h, d, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    assert query.numel() > 2**31
    _, key, value = tensors(1, k, h=h, d=d, dtype=torch.bfloat16)
    output = ours(query, key, value)
    gradient = torch.randn_like(output)
    (query_gradient,) = torch.autograd.grad(output, query, gradient)
    last = query[:, :, -1000:].detach().requires_grad_()
    expected = derive(ours, [last, key, value], gradient[:, -1000:])
    torch.testing.assert_close(output[:, -1000:], expected[0])
    torch.testing.assert_close(query_gradient[:, :, -1000:], expected[1])


def test_the_specification_needs_no_triton():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import linformers.ops.attend, torch\n"
        "from linformers import LinformerConfig, LinformerModel\n"
        "config = LinformerConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=1)\n"
        "print(LinformerModel(config)(torch.ones(1, 8, dtype=torch.long)).last_hidden_state.shape)"
    )
    assert "[1, 8, 64]" in subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
