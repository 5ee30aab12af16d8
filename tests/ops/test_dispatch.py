"""The choice between Triton and SDPA, and models that give the same results with both."""

import copy
import logging

import pytest
import torch

from linformers import LinformerAttention, LinformerModel
from linformers.attention import TRITON
from linformers.ops import dispatch, launch

from .. import modes
from .common import DEVICE, GPU_MARKS, ON_GPU

pytest.importorskip("triton")
pytestmark = GPU_MARKS


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels launched so far; without a GPU, they run in the interpreter."""
    names = []
    run = launch.Plan.run

    def record(self, tensors):
        names.append(self.name)
        run(self, tensors)

    monkeypatch.setattr(dispatch, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(launch.Plan, "run", record)
    dispatch._logged.clear()
    return names


def model_and_inputs(**fields):
    return [x.to(DEVICE) for x in modes.model_and_inputs(**fields)]


# Kernels depend on masks, k and windows, not on sharing; in the interpreter, each mode takes many seconds.
FEWER = [modes.light(mode) for mode in (*modes.KINDS, modes.LOCAL[2])]


@pytest.mark.parametrize("mode", modes.ALL if ON_GPU else FEWER, ids=modes.name)
def test_models_give_the_same_results(mode, launched):
    model, ids, mask = model_and_inputs(**mode, attn_implementation="sdpa")
    other = copy.deepcopy(model)
    other.set_attn_implementation("triton")
    torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=0, atol=2e-5)
    expected, result = model(ids, mask).logits, other(ids, mask).logits
    torch.testing.assert_close(result[mask], expected[mask], rtol=0, atol=2e-5)
    assert result.isfinite().all()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask, ids, -100)}
    expected, result = (modes.gradients(own, **inputs) for own in (model, other))
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=2e-5)
    windows = model.config.local_windows
    assert ({"forward_resident", "backward_resident"} <= set(launched)) == (0 in windows)
    assert ("backward_near_keys" in launched) == any(windows)


def test_names_and_default(tmp_path, monkeypatch):
    """Triton is the default on a GPU, under a short name that survives changes and saving."""
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert LinformerModel(modes.config()).config._attn_implementation == (TRITON if has_gpu else "sdpa")
    model = LinformerModel(modes.config(attn_implementation="triton"))
    assert model.config._attn_implementation == TRITON
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation("triton")
    assert model.config._attn_implementation == TRITON
    model.save_pretrained(tmp_path)
    assert LinformerModel.from_pretrained(tmp_path, attn_implementation="triton").config._attn_implementation == TRITON


def test_the_layer_alone(launched):
    layer = LinformerAttention(16, 2, 12, 4, attn_implementation="triton").to(DEVICE)
    x = torch.randn(2, 9, 16, device=DEVICE)
    result = layer(x)
    layer.attn_implementation = "sdpa"
    torch.testing.assert_close(result, layer(x), rtol=0, atol=1e-5)
    assert launched == ["forward_resident"]


@pytest.mark.parametrize("mode", [{"projection": "linear"}, modes.light({"projection": "mean"})], ids=modes.name)
@pytest.mark.filterwarnings("ignore")
def test_compiles_whole(mode, launched):
    torch._dynamo.reset()
    model, ids, mask = model_and_inputs(**mode, attn_implementation="triton")
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask, ids, -100)}
    expected, result = (modes.gradients(model, run, **inputs) for run in (model, compiled))
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=2e-5)
    with torch.no_grad():
        expected, result = (run(ids, mask).logits[mask] for run in (model, compiled))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    assert launched.count("forward_resident") == 4 * model.config.num_hidden_layers


@pytest.mark.skipif(ON_GPU, reason="on a GPU the kernels run")
def test_cpus_use_sdpa_without_a_warning(caplog):
    model, ids, mask = model_and_inputs(attn_implementation="triton")
    expected = model(ids, mask).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids, mask).logits, expected)
    assert not [record for record in caplog.records if "Triton" in record.getMessage()]


@pytest.mark.parametrize(
    ("d", "dtype", "mask", "reason"),
    [
        (136, None, None, "136"),
        (8, torch.float64, None, "float64"),
        (8, None, torch.ones(1, 1, 5, 3, dtype=torch.bool), "same for all queries"),
        (8, None, torch.zeros(1, 1, 1, 3), "boolean"),
    ],
    ids=["channels", "dtype", "mask of each query", "float mask"],
)
def test_unsupported_inputs_are_logged_once(d, dtype, mask, reason, launched, caplog):
    query, key = (torch.randn(1, 1, length, d, dtype=dtype) for length in (5, 3))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not dispatch.use_triton(query, key, mask)
    (record,) = [record for record in caplog.records if record.name == dispatch.__name__]
    assert reason in record.getMessage()


@pytest.mark.filterwarnings("ignore")
def test_logs_while_compiling(launched, caplog):
    torch._dynamo.reset()
    query = torch.randn(1, 1, 5, 8, dtype=torch.float64)
    compiled = torch.compile(lambda x: x + dispatch.use_triton(x, x), fullgraph=True, backend="eager")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(compiled(query), query)
    assert "float64" in caplog.text


def test_sdpa_is_used_for_many_keys(launched, caplog):
    for dtype, most in ((torch.float16, 256), (torch.float32, 128)):
        query, key = (torch.randn(1, 1, length, 8, dtype=dtype) for length in (5, most + 1))
        assert dispatch.use_triton(query, key[:, :, 1:])
        assert not dispatch.use_triton(query, key)
        assert dispatch.use_triton(query, key, local=True)
    assert not caplog.records


def test_without_triton(launched, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_unsupported_device", lambda *device: "Triton is not installed")
    model, ids, mask = model_and_inputs(attn_implementation="triton")
    assert model(ids, mask).logits.isfinite().all()
    assert not launched
    assert "Triton is not installed" in caplog.text


@pytest.mark.skipif(ON_GPU, reason="exporting is tested on the CPU")
@pytest.mark.filterwarnings("ignore")
def test_exports_contain_no_custom_operator(launched):
    model, ids, mask = model_and_inputs(attn_implementation="triton")
    exported = torch.export.export(model, (ids, mask))
    assert "linformers" not in exported.graph_module.code
    torch.testing.assert_close(exported.module()(ids, mask).logits[mask], model(ids, mask).logits[mask])
