"""Models on a GPU: the same numbers as on the CPU in every mode, without synchronization."""

import copy

import pytest
import torch

from .. import modes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
every_mode = pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)


@every_mode
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "triton"])
def test_equals_the_cpu(mode, attn_implementation):
    model, ids, mask = modes.model_and_inputs(**mode, attn_implementation=attn_implementation)
    twin = copy.deepcopy(model).cuda()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask, ids, -100)}
    on_gpu = {name: value.cuda() for name, value in inputs.items()}
    expected, result = model(**inputs).logits, twin(**on_gpu).logits.cpu()
    torch.testing.assert_close(result[mask], expected[mask], rtol=0, atol=1e-4)
    assert result.isfinite().all()
    result = [gradient.cpu() for gradient in modes.gradients(twin, **on_gpu)]
    torch.testing.assert_close(result, modes.gradients(model, **inputs), rtol=1e-3, atol=1e-4)


@every_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "triton"])
def test_half_precision(mode, dtype, attn_implementation):
    model, ids, mask = modes.model_and_inputs(**mode, attn_implementation=attn_implementation)
    expected = model(ids, mask).logits
    result = model.to("cuda", dtype)(ids.cuda(), mask.cuda()).logits
    assert result.isfinite().all()
    difference = result.double().cpu()[mask] - expected[mask]
    # On a CPU, the relative error of eager attention against float32 is up to 3.4 eps.
    assert difference.norm() < 6 * torch.finfo(dtype).eps * expected[mask].norm()


@every_mode
@pytest.mark.parametrize("attn_implementation", ["sdpa", "triton"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_synchronization(mode, attn_implementation):
    """Neither a branch on the values of the mask nor a copy from the host, which would stall the pipeline."""
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
def test_nan_in_padding(mode):
    model, _, mask = modes.model_and_inputs(**mode)
    modes.assert_poison_in_padding_does_not_matter(model.cuda(), mask.cuda())


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_without_masks():
    model, *_ = modes.model_and_inputs(projection="linear", hidden_size=64)
    model = model.cuda()
    ids = torch.randint(31, (4, 12), device="cuda")
    expected = model(ids).logits
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4)
