"""Attention with a local window on a CPU, against `reference.attend_locally`."""

import pytest
import torch
from torch import library

from linformers import LinformerAttention
from linformers.ops import local, local_cpu
from linformers.ops.local_cpu import attend_locally_on_cpu

from .common import by_reference, derive, expect
from .test_local import in_blocks, masks, tensors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests CPUs")


def on_cpu(query, *others, **options):
    return attend_locally_on_cpu(query, *others, **options, scaling=query.shape[-1] ** -0.5)


def with_bias(run):
    """`run` with `far_bias` as its last input."""
    return lambda *inputs, **options: run(*inputs[:-1], far_bias=inputs[-1], **options)


@pytest.mark.parametrize("block", [16, local.SMALLEST_BLOCK])
@pytest.mark.parametrize("k", [0, 1, 7])
@pytest.mark.parametrize(("n", "window"), [(1, 1), (5, 2), (16, 3), (33, 16), (50, 17), (40, 100), (150, 70)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_result_and_gradients(n, k, window, masked, biased, block, monkeypatch):
    monkeypatch.setattr(local, "SMALLEST_BLOCK", block)
    inputs, gradient = tensors(n, k), torch.randn(2, n, 3, 8, dtype=torch.float64)
    options = {"window": window, **(masks(n, k) if masked else {})}
    run, exact = on_cpu, by_reference
    if biased:
        inputs.append(torch.tensor([-20.0, -1.0, 3.0], dtype=torch.float64, requires_grad=True))
        run, exact = with_bias(on_cpu), with_bias(by_reference)
    results, expected = (derive(each, inputs, gradient, **options) for each in (run, exact))
    assert results[0].is_contiguous()
    torch.testing.assert_close(results, expected, rtol=0, atol=1e-12)


def test_a_row_of_padding_gives_zeros():
    inputs, gradient = tensors(20, 3), torch.randn(2, 20, 3, 8, dtype=torch.float64)
    lengths, mask = torch.tensor([0, 20]), torch.tensor([False, True])[:, None, None, None].expand(-1, -1, -1, 3)
    output, *gradients = derive(on_cpu, inputs, gradient, window=4, lengths=lengths, mask=mask)
    for result in (output, *gradients):
        assert not result[0].any()
        assert result[1].any()


@pytest.mark.parametrize(("b", "n", "k"), [(0, 40, 5), (2, 0, 5), (2, 0, 0)])
def test_empty_inputs(b, n, k):
    inputs, gradient = tensors(n, k, b=b), torch.zeros(b, n, 3, 8, dtype=torch.float64)
    results = derive(on_cpu, inputs, gradient, window=3)
    for result, expected in zip(results, [gradient, *inputs], strict=True):
        assert result.shape == expected.shape
        assert not result.any()


@pytest.mark.parametrize("kind", ["transposed", "expanded"])
def test_any_strides(kind):
    inputs = tensors(40, 5)
    if kind == "transposed":
        inputs = [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs]
    if kind == "expanded":
        inputs = [x.detach()[:1].expand(2, -1, -1, -1).requires_grad_() for x in inputs]
    gradient = torch.randn(8, 3, 40, 2, dtype=torch.float64).permute(3, 2, 1, 0)
    results = derive(on_cpu, inputs, gradient, window=3)
    torch.testing.assert_close(results, derive(by_reference, inputs, gradient, window=3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_no_larger_than_in_blocks(dtype):
    """At most twice that of SDPA over blocks with copies of the projected keys; thrice for gradients."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors(300, 20, d=16)]
    gradient, options = torch.randn(2, 300, 3, 16).to(dtype), {"window": 40, **masks(300, 20)}
    results, others = (derive(run, inputs, gradient, **options) for run in (on_cpu, in_blocks))
    for i, (result, other, exact) in enumerate(zip(results, others, expect(inputs, gradient, **options), strict=True)):
        error, other_error = ((x.double() - exact).norm() for x in (result, other))
        assert error <= (3 if i else 2) * other_error


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("k", [0, 5])
def test_torch_operator(k, masked):
    torch.use_deterministic_algorithms(False)  # opcheck also compares uninitialized memory
    inputs = [x.detach().float().requires_grad_() for x in tensors(20, k)]
    options = masks(20, k) if masked else {"mask": None, "lengths": None}
    far_bias = torch.randn(3, requires_grad=True) if masked else None
    library.opcheck(local_cpu._attend, (*inputs, options["mask"], options["lengths"], far_bias, 4, 0.25))


def test_a_layer_uses_it_without_dropout(monkeypatch):
    """Also in training, but not with dropout: then blocks copy the projected keys."""
    calls = []

    def record(*inputs, **options):
        calls.append(1)
        return attend_locally_on_cpu(*inputs, **options)

    monkeypatch.setattr("linformers.attention.attend_locally_on_cpu", record)
    x = torch.randn(2, 50, 16)
    for dropout, training, count in ((0.0, True, 1), (0.1, False, 1), (0.1, True, 0)):
        layer = LinformerAttention(16, 2, 50, 5, local_window=4, dropout=dropout).train(training)
        layer(x).sum().backward()
        assert len(calls) == count
        calls.clear()
