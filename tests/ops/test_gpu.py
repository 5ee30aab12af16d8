"""The model on a GPU: the same numbers as on the CPU, in every mode, without waiting for the device."""

import copy

import pytest
import torch

from . import modes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
every_mode = pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)


@every_mode
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "triton"])
def test_equals_the_cpu(mode, attn_implementation):
    model, ids, mask = modes.model_and_inputs(**mode, attn_implementation=attn_implementation)
    twin = copy.deepcopy(model).cuda()
    labels = torch.where(mask, ids, -100)
    expected = model(ids, mask, labels=labels)
    result = twin(ids.cuda(), mask.cuda(), labels=labels.cuda())
    torch.testing.assert_close(result.logits.cpu()[mask], expected.logits[mask], rtol=0, atol=1e-4)
    assert result.logits.isfinite().all()
    expected.loss.backward()
    result.loss.backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), parameter.grad, rtol=1e-3, atol=1e-4)


@every_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "triton"])
def test_half_precision(mode, dtype, attn_implementation):
    model, ids, mask = modes.model_and_inputs(**mode, attn_implementation=attn_implementation)
    expected = model(ids, mask).logits
    result = model.to("cuda", dtype)(ids.cuda(), mask.cuda()).logits
    assert result.isfinite().all()
    difference = result.double().cpu()[mask] - expected[mask]
    # On a CPU, eager attention is up to 3.4 roundings away from what float32 gives, by the norm.
    assert difference.norm() < 6 * torch.finfo(dtype).eps * expected[mask].norm()


@every_mode
@pytest.mark.parametrize("attn_implementation", ["sdpa", "triton"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device(mode, attn_implementation):
    """Neither a branch on the mask's values nor a number sent from the host: both would stall the pipeline."""
    model, ids, mask = modes.model_and_inputs(**mode, attn_implementation=attn_implementation)
    model, ids, mask = model.cuda(), ids.cuda(), mask.cuda()
    model(ids, mask, labels=ids).loss.backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        model(ids, mask, labels=ids).loss.backward()
        model(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_mode
def test_poison_in_padding(mode):
    model, _, mask = modes.model_and_inputs(**mode)
    modes.assert_poison_in_padding_does_not_matter(model.cuda(), mask.cuda())


@pytest.mark.filterwarnings("ignore")
def test_inductor():
    torch._dynamo.reset()
    model, ids, mask = modes.model_and_inputs(projection="linear")
    model, ids, mask = model.cuda(), ids.cuda(), mask.cuda()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(ids, mask).logits[mask], model(ids, mask).logits[mask], rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_where_nothing_is_masked():
    model, *_ = modes.model_and_inputs(projection="linear", hidden_size=64)
    model = model.cuda()
    ids = torch.randint(31, (4, 12), device="cuda")
    expected = model(ids).logits
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4)
