"""Who attends: our kernels where they can and should, SDPA elsewhere, and the model does not notice."""

import copy
import logging

import pytest
import torch

from linformers import LinformerAttention, LinformerModel
from linformers.attention import TRITON
from linformers.ops import dispatch, launch

from . import modes

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.fixture
def interpreted(monkeypatch):
    """Let the kernels serve where there is no GPU, too, and count how often they do."""
    calls = []
    start = launch.Plan.run

    def run(self, tensors):
        calls.append(self.name)
        start(self, tensors)

    monkeypatch.setattr(dispatch, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(launch.Plan, "run", run)
    dispatch._said.clear()
    return calls


def model_and_inputs(**fields):
    return [x.to(DEVICE) for x in modes.model_and_inputs(**fields)]


# The kernels know of masks, k and windows, not of sharing; interpreted, each mode takes many seconds.
FEWER = [modes.light(mode) for mode in (*modes.KINDS, modes.LOCAL[2])]


@pytest.mark.parametrize("mode", modes.ALL if ON_GPU else FEWER, ids=modes.name)
def test_the_model_is_the_same(mode, interpreted):
    model, ids, mask = model_and_inputs(**mode, attn_implementation="sdpa")
    other = copy.deepcopy(model)
    other.set_attn_implementation("triton")
    labels = torch.where(mask, ids, -100)
    expected, result = model(ids, mask, labels=labels), other(ids, mask, labels=labels)
    torch.testing.assert_close(result.logits[mask], expected.logits[mask], rtol=0, atol=2e-5)
    assert result.logits.isfinite().all()
    expected.loss.backward()
    result.loss.backward()
    for parameter, own in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own.grad, parameter.grad, rtol=1e-3, atol=2e-5)
    windows = model.config.local_windows
    assert ({"forward_few", "backward_few"} <= set(interpreted)) == (0 in windows)
    assert ("backward_near" in interpreted) == any(windows)
    torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=0, atol=2e-5)


def test_poison_in_padding(interpreted):
    model, _, mask = model_and_inputs(attn_implementation="triton")
    modes.assert_poison_in_padding_does_not_matter(model, mask)
    assert interpreted


@pytest.mark.parametrize("there", [True, False])
def test_the_default_is_triton_where_there_is_a_gpu(there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert LinformerModel(modes.config()).config._attn_implementation == (TRITON if there else "sdpa")


def test_names(tmp_path):
    model = LinformerModel(modes.config(attn_implementation="triton"))
    assert model.config._attn_implementation == TRITON
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation("triton")
    assert model.config._attn_implementation == TRITON
    model.save_pretrained(tmp_path)
    assert LinformerModel.from_pretrained(tmp_path, attn_implementation="triton").config._attn_implementation == TRITON


def test_the_layer_alone(interpreted):
    layer = LinformerAttention(16, 2, 12, 4, attn_implementation="triton").to(DEVICE)
    x = torch.randn(2, 9, 16, device=DEVICE)
    result = layer(x)
    layer.attn_implementation = "sdpa"
    torch.testing.assert_close(result, layer(x), rtol=0, atol=1e-5)
    assert interpreted == ["forward_few"]


@pytest.mark.parametrize("mode", [{"projection": "linear"}, modes.light({"projection": "mean"})], ids=modes.name)
@pytest.mark.filterwarnings("ignore")
def test_compiles_whole(mode, interpreted):
    torch._dynamo.reset()
    model, ids, mask = model_and_inputs(**mode, attn_implementation="triton")
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    expected, result = model(ids, mask), compiled(ids, mask)
    torch.testing.assert_close(result.logits[mask], expected.logits[mask], rtol=0, atol=1e-5)
    expected.logits[mask].square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    result.logits[mask].square().sum().backward()
    for own, other in zip([p.grad for p in model.parameters() if p.grad is not None], gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
    assert interpreted.count("forward_few") == 2 * model.config.num_hidden_layers


@pytest.mark.skipif(ON_GPU, reason="on a GPU they serve")
def test_cpus_are_served_by_sdpa_without_a_word(caplog):
    model, ids, mask = model_and_inputs(attn_implementation="triton")
    expected = model(ids, mask).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids, mask).logits, expected)
    assert not [record for record in caplog.records if "Triton" in record.getMessage()]


SIZES = {"n": 5, "k": 3, "d": 8}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"d": 136}, "heads of 136 channels exceed 128"),
        ({"dtype": torch.float64}, "not for torch.float64"),
        ({"mask": torch.ones(1, 1, 5, 3, dtype=torch.bool)}, "the same for all queries"),
        ({"mask": torch.zeros(1, 1, 1, 3)}, "must be boolean"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_be_served_is_said_once(change, reason, interpreted, caplog):
    size = {**SIZES, **change}
    query = torch.randn(1, 1, size["n"], size["d"], dtype=size.get("dtype"))
    key = torch.randn(1, 1, size["k"], size["d"], dtype=size.get("dtype"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not dispatch.use_triton(query, key, size.get("mask"))
    (record,) = [record for record in caplog.records if record.name == dispatch.__name__]
    assert reason in record.getMessage()


@pytest.mark.filterwarnings("ignore")
def test_compilers_say_it_too(interpreted, caplog):
    torch._dynamo.reset()
    query = torch.randn(1, 1, 5, 8, dtype=torch.float64)
    compiled = torch.compile(lambda x: x + dispatch.use_triton(x, x), fullgraph=True, backend="eager")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(compiled(query), query)
    assert "not for torch.float64" in caplog.text


def test_many_keys_go_to_the_faster_one(interpreted, caplog):
    for dtype, most in ((torch.float16, 256), (torch.float32, 128)):
        query, key = (torch.randn(1, 1, length, 8, dtype=dtype) for length in (5, most + 1))
        assert dispatch.use_triton(query, key[:, :, 1:])
        assert not dispatch.use_triton(query, key)
    assert not caplog.records


def test_without_triton(interpreted, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_what_hinders_on", lambda *device: "Triton is not installed")
    model, ids, mask = model_and_inputs(attn_implementation="triton")
    assert model(ids, mask).logits.isfinite().all()
    assert not interpreted
    assert "Triton is not installed" in caplog.text


@pytest.mark.skipif(ON_GPU, reason="exporting is tested on the CPU")
@pytest.mark.filterwarnings("ignore")
def test_exports_hold_no_operator_of_ours(interpreted):
    model, ids, mask = model_and_inputs(attn_implementation="triton")
    exported = torch.export.export(model, (ids, mask))
    assert "linformers" not in exported.graph_module.code
    torch.testing.assert_close(exported.module()(ids, mask).logits[mask], model(ids, mask).logits[mask])
