"""torch.compile without graph breaks; torch.export and ONNX for lengths and batch sizes never seen."""

import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from linformers.auto import AUTO_CLASSES

from . import modes
from .modes import gradients, random_model

# torch's compiler uses deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# Without learned weights, sharing makes no difference.
LEARNED = ("linear", "conv")
DISTINCT = [mode for mode in modes.UNIFORM if mode["projection"] in LEARNED or mode["sharing"] == "layerwise"]
KINDS = [modes.light(mode) for mode in modes.KINDS]
EVERY = [modes.light(mode) for mode in DISTINCT + modes.GAUSSIAN + modes.NON_UNIFORM + modes.LOCAL]
OTHERS = [mode for mode in EVERY if mode not in KINDS]


def inputs_of(batch, length, masked=True):
    inputs = {"input_ids": torch.randint(31, (batch, length))}
    if masked:
        inputs["attention_mask"] = torch.randint(2, (batch, length))
        inputs["attention_mask"][:, length // 2] = 1
    return inputs


def assert_same_outputs(run, model, inputs, atol=1e-5):
    """Compare all outputs, those of tokens only at real ones."""
    with torch.no_grad():
        results, expected = run(**inputs)[:], model(**inputs)[:]
    for result, other in zip(results, expected, strict=True):
        if "attention_mask" in inputs and other.shape[:2] == inputs["attention_mask"].shape:
            result, other = (own[inputs["attention_mask"].bool()] for own in (result, other))
        torch.testing.assert_close(result, other, rtol=0, atol=atol)


@pytest.mark.parametrize("mode", OTHERS, ids=modes.name)
def test_two_graphs_for_all_lengths(mode):
    torch._dynamo.reset()
    model, counter = random_model(**mode), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (5, 2, 3, 4, 7, 8, 9, 10, 11, 12):
        assert_same_outputs(compiled, model, inputs_of(3, length))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("mode", KINDS, ids=modes.name)
def test_few_graphs_for_all_batches_and_uses(mode):
    """Lengths and batch sizes both change, first without a mask, then with labels: a graph or two for each use."""
    torch._dynamo.reset()
    model, counter = random_model(**mode), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for masked, labeled in ((False, False), (True, False), (True, True)):
        before = counter.frame_count
        for batch, length in ((3, 5), (2, 4), (4, 9), (5, 7), (2, 2), (7, 11)):
            inputs = inputs_of(batch, length, masked)
            if labeled:
                inputs["labels"] = inputs["input_ids"]
            assert_same_outputs(compiled, model, inputs)
        assert counter.frame_count - before <= 3


@pytest.mark.parametrize("mode", KINDS, ids=modes.name)
def test_compiled_gradients(mode):
    torch._dynamo.reset()
    model, inputs = random_model(**mode), inputs_of(2, 9)
    inputs["labels"] = inputs["input_ids"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected, result = (gradients(model, run, **inputs) for run in (model, compiled))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_inductor():
    """The default backend; the tests of training compile layers with it as well, with their gradients."""
    torch._dynamo.reset()
    model = random_model(num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True)
    for length in (7, 9, 12):
        assert_same_outputs(compiled, model, inputs_of(3, length), atol=1e-4)


SIZES = [(1, 1), (1, 7), (2, 2), (5, 11), (4, 12), (2, 3)]


def dynamic(inputs):
    return {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in inputs}


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no-mask"])
@pytest.mark.parametrize("mode", KINDS, ids=modes.name)
def test_export(mode, masked):
    model, example = random_model(**mode), inputs_of(3, 6, masked)
    program = torch.export.export(model, (), example, dynamic_shapes=dynamic(example)).module()
    for batch, length in SIZES:
        assert_same_outputs(program, model, inputs_of(batch, length, masked))


@pytest.mark.parametrize("model_class", AUTO_CLASSES.values(), ids=lambda own: own.__name__)
def test_heads(model_class):
    """Two graphs for all sizes, and one exported graph."""
    torch._dynamo.reset()
    model, counter = random_model(model_class), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    example = inputs_of(3, 6)
    exported = torch.export.export(model, (), example, dynamic_shapes=dynamic(example)).module()
    for batch, length in [(3, 6), *SIZES]:
        inputs = inputs_of(batch, length)
        assert_same_outputs(exported, model, inputs)
        if batch > 1 and length > 1:  # a size of 1 has a graph of its own
            assert_same_outputs(compiled, model, inputs)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no-mask"])
@pytest.mark.parametrize("mode", [{"local_window": [1, 70]}, {"projection": "none", "local_window": 3}], ids=modes.name)
def test_export_for_a_range_of_lengths(mode, masked):
    """One graph for all lengths, whether or not they fill the blocks of a local window."""
    model, example = random_model(**mode, max_position_embeddings=144), inputs_of(3, 100, masked)
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", min=2, max=144)
    shapes = {name: {0: batch, 1: length} for name in example}
    program = torch.export.export(model, (), example, dynamic_shapes=shapes).module()
    for batch, length in ((1, 2), (2, 63), (2, 64), (5, 65), (3, 128), (2, 140), (1, 144)):
        assert_same_outputs(program, model, inputs_of(batch, length, masked))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("mode", KINDS, ids=modes.name)
def test_onnx(mode, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    model, example = random_model(**mode), inputs_of(3, 6)
    torch.onnx.export(
        model, (), tmp_path / "model.onnx", kwargs=example, dynamo=True, dynamic_shapes=dynamic(example),
        input_names=list(example), output_names=["logits"], verbose=False,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for batch, length in SIZES:
        inputs = inputs_of(batch, length)
        results = session.run(["logits"], {name: tensor.numpy() for name, tensor in inputs.items()})
        assert_same_outputs(lambda results=results, **_: [*map(torch.tensor, results)], model, inputs, atol=1e-4)
