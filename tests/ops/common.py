"""Helpers of the kernel tests. Kernels run in Triton's interpreter, or compiled if there is a GPU."""

import pytest
import torch

from linformers import reference
from linformers.ops import attend

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
GPU_MARKS = [pytest.mark.gpu] if ON_GPU else []


def kernel_inputs(n, k, window=0, b=1, h=2, d=16, dtype=torch.float32):
    """Inputs of `attend` with the strides that a layer gives to its heads, and the gradient of its output."""
    lengths = (n, k, k, n, n) if window else (n, k, k)
    tensors = [torch.randn(b, length, h, d, device=DEVICE).to(dtype).transpose(1, 2) for length in lengths]
    return [x.requires_grad_() for x in tensors], torch.randn_like(tensors[0]).transpose(1, 2)


def by_kernels(query, *others, **options):
    return attend.attend(query, *others, **options, scaling=query.shape[-1] ** -0.5)


def by_reference(query, key, value, *near, window=0, mask=None, lengths=None, far_bias=None):
    scaling = query.shape[-1] ** -0.5
    if not near:
        return reference.attend(query, key, value, mask, scaling=scaling)[0].transpose(1, 2)
    options = {"window": window, "mask": mask, "lengths": lengths, "far_bias": far_bias, "scaling": scaling}
    return reference.attend_locally(query, key, value, *near, **options).transpose(1, 2)


def derive(function, inputs, gradient, **options):
    """The output (b, n, h, d) and the gradients of all inputs."""
    output = function(*inputs, **options)
    return [output, *torch.autograd.grad(output, inputs, gradient)]


def expect(inputs, gradient, **options):
    """What the reference gives in float64."""
    return derive(by_reference, [x.detach().double().requires_grad_() for x in inputs], gradient.double(), **options)


def assert_accurate(others, inputs, gradient, **options):
    """The kernels' error against float64 is at most twice that of `others` for the output, thrice for gradients."""
    results, torch_results = (derive(run, inputs, gradient, **options) for run in (by_kernels, others))
    rounding = torch.finfo(torch.float32).eps  # sums are float32, and torch's error may happen to be 0
    expected = expect(inputs, gradient, **options)
    for i, (result, other, exact) in enumerate(zip(results, torch_results, expected, strict=True)):
        error, torch_error = ((x.double() - exact).norm() / exact.norm().clamp(min=1e-30) for x in (result, other))
        assert error <= (3 if i else 2) * torch_error + rounding, (i, error, torch_error)
