"""A linear layer and GELU in one kernel, against the two of torch."""

import pytest
import torch
from torch import library, nn
from torch.nn import functional

from linformers import LinformerModel, modeling
from linformers.ops.linear_gelu import FEWEST_TOKENS, _linear_gelu, linear_gelu, use_linear_gelu

from .. import modes
from .common import DEVICE, GPU_MARKS, ON_GPU

pytest.importorskip("triton")
pytestmark = GPU_MARKS

DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def tensors(rows, inner, columns):
    tokens, weight = torch.randn(rows, inner), torch.randn(columns, inner) * 2 * inner**-0.5
    return [x.to(DEVICE, DTYPE) for x in (tokens, weight, torch.randn(columns))]


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 8, 16), (130, 40, 304), (300, 64, 256), (129, 72, 512)])
def test_as_accurate_as_torch(rows, inner, columns):
    inputs = tensors(rows, inner, columns)
    expected = functional.gelu(functional.linear(*(x.double() for x in inputs)))
    own = (linear_gelu(*inputs).double() - expected).norm()
    other = (functional.gelu(functional.linear(*inputs)).double() - expected).norm()
    assert own <= 1.5 * other + 2.5e-4 * expected.norm()
    tokens, *others = inputs
    assert torch.equal(linear_gelu(tokens[None, :, None], *others)[0, :, 0], linear_gelu(*inputs))  # leading axes


def test_operator():
    library.opcheck(_linear_gelu, tensors(40, 16, 32), test_utils=("test_schema", "test_faketensor"))


def test_when_the_kernel_is_used():
    linear = nn.Linear(64, 128, device="meta", dtype=torch.bfloat16)
    tokens = torch.empty(FEWEST_TOKENS, 64, device="meta", dtype=torch.bfloat16)
    with torch.no_grad():
        assert not use_linear_gelu(tokens, linear)  # no GPU
        if ON_GPU and torch.cuda.get_device_capability() >= (9, 0):
            linear, tokens = linear.to_empty(device="cuda"), torch.zeros_like(tokens, device="cuda")
            assert use_linear_gelu(tokens, linear)
            assert not use_linear_gelu(tokens[:100], linear)
            assert not use_linear_gelu(tokens.half(), linear)
            assert not use_linear_gelu(tokens.float(), linear.float())
    assert not use_linear_gelu(tokens, linear)  # with gradients


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_models_give_the_same_results(compiled, monkeypatch):
    """Close, but not bitwise equal, which shows that the kernel was used."""
    torch._dynamo.reset()
    model = LinformerModel(modes.config()).to(DEVICE, DTYPE).eval()
    ids = torch.randint(5, 20, (2, 12), device=DEVICE)
    calls = []
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        monkeypatch.setattr(modeling, "use_linear_gelu", lambda tokens, linear: calls.append(tokens.shape) or True)
        run = torch.compile(model, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager") if compiled else model
        result = run(ids).last_hidden_state
    assert len(calls) >= model.config.num_hidden_layers
    torch.testing.assert_close(result, expected, rtol=0, atol=0.05 if ON_GPU else 2e-3)
    assert not torch.equal(result, expected)
