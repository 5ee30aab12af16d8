"""torch.compile without graph breaks; torch.export and ONNX for lengths and batch sizes never seen."""

import logging

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from linformers import (
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
)

from . import modes

# torch's compiler uses deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# Without learned weights, sharing makes no difference.
LEARNED = ("linear", "conv")
DISTINCT = [mode for mode in modes.UNIFORM if mode["projection"] in LEARNED or mode["sharing"] == "layerwise"]
KINDS = [modes.light(mode) for mode in modes.KINDS]
EVERY = [modes.light(mode) for mode in DISTINCT + modes.GAUSSIAN + modes.NON_UNIFORM + modes.LOCAL]
OTHERS = [mode for mode in EVERY if mode not in KINDS]


def model_of(mode):
    return modes.randomized(LinformerForMaskedLM(modes.config(**mode)))


def inputs_of(batch, length, masked=True):
    inputs = {"input_ids": torch.randint(31, (batch, length))}
    if masked:
        inputs["attention_mask"] = torch.randint(2, (batch, length))
        inputs["attention_mask"][:, length // 2] = 1
    return inputs


@pytest.mark.parametrize("mode", OTHERS, ids=modes.name)
def test_two_graphs_for_all_lengths(mode):
    torch._dynamo.reset()
    model, counter = model_of(mode), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (5, 2, 3, 4, 7, 8, 9, 10, 11, 12):
        inputs = inputs_of(3, length)
        mask = inputs["attention_mask"].bool()
        with torch.no_grad():
            result, expected = compiled(**inputs).logits[mask], model(**inputs).logits[mask]
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("mode", KINDS, ids=modes.name)
def test_few_graphs_for_all_batches_and_uses(mode):
    """Lengths and batch sizes both change, first without a mask, then with labels: a graph or two for each use."""
    torch._dynamo.reset()
    model, counter = model_of(mode), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for masked, labeled in ((False, False), (True, False), (True, True)):
        before = counter.frame_count
        for batch, length in ((3, 5), (2, 4), (4, 9), (5, 7), (2, 2), (7, 11)):
            inputs = inputs_of(batch, length, masked)
            if labeled:
                inputs["labels"] = inputs["input_ids"]
            mask = inputs["attention_mask"].bool() if masked else torch.ones(batch, length, dtype=torch.bool)
            with torch.no_grad():
                result, expected = compiled(**inputs), model(**inputs)
            torch.testing.assert_close(result.logits[mask], expected.logits[mask], rtol=0, atol=1e-5)
        assert counter.frame_count - before <= 3


@pytest.mark.parametrize("mode", KINDS, ids=modes.name)
def test_compiled_gradients(mode):
    torch._dynamo.reset()
    model = model_of(mode)
    inputs = inputs_of(2, 9)
    labels = inputs["input_ids"]
    model(**inputs, labels=labels).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs, labels=labels).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_inductor():
    """The default backend; the tests of training compile layers with it as well, with their gradients."""
    torch._dynamo.reset()
    model = model_of({"num_hidden_layers": 1})
    compiled = torch.compile(model, fullgraph=True)
    for length in (7, 9, 12):
        inputs = inputs_of(3, length)
        mask = inputs["attention_mask"].bool()
        with torch.no_grad():
            result, expected = compiled(**inputs).logits[mask], model(**inputs).logits[mask]
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


SIZES = [(1, 1), (1, 7), (2, 2), (5, 11), (4, 12), (2, 3)]


def dynamic(inputs):
    return {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in inputs}


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no-mask"])
@pytest.mark.parametrize("mode", KINDS, ids=modes.name)
def test_export(mode, masked):
    model, example = model_of(mode), inputs_of(3, 6, masked)
    program = torch.export.export(model, (), example, dynamic_shapes=dynamic(example)).module()
    for batch, length in SIZES:
        inputs = inputs_of(batch, length, masked)
        torch.testing.assert_close(program(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-5)


HEADS = [LinformerForSequenceClassification, LinformerForTokenClassification, LinformerForQuestionAnswering]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_heads(head):
    """Two graphs for all sizes, and one exported graph."""
    torch._dynamo.reset()
    model, counter = modes.randomized(head(modes.config())), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    example = inputs_of(3, 6)
    exported = torch.export.export(model, (), example, dynamic_shapes=dynamic(example)).module()
    for batch, length in [(3, 6), *SIZES]:
        inputs = inputs_of(batch, length)
        with torch.no_grad():
            expected = model(**inputs)[0]
            torch.testing.assert_close(exported(**inputs)[0], expected, rtol=0, atol=1e-5)
            if batch > 1 and length > 1:  # a size of 1 has a graph of its own
                torch.testing.assert_close(compiled(**inputs)[0], expected, rtol=0, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no-mask"])
@pytest.mark.parametrize("mode", [{"local_window": [1, 70]}, {"projection": "none", "local_window": 3}], ids=modes.name)
def test_export_for_a_range_of_lengths(mode, masked):
    """One graph for all lengths, whether or not they fill the blocks of a local window."""
    model, example = model_of({**mode, "max_position_embeddings": 144}), inputs_of(3, 100, masked)
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", min=2, max=144)
    shapes = {name: {0: batch, 1: length} for name in example}
    program = torch.export.export(model, (), example, dynamic_shapes=shapes).module()
    for batch, length in ((1, 2), (2, 63), (2, 64), (5, 65), (3, 128), (2, 140), (1, 144)):
        inputs = inputs_of(batch, length, masked)
        torch.testing.assert_close(program(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("mode", KINDS, ids=modes.name)
def test_onnx(mode, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    model, example = model_of(mode), inputs_of(3, 6)
    torch.onnx.export(
        model,
        (),
        tmp_path / "model.onnx",
        kwargs=example,
        dynamo=True,
        dynamic_shapes=dynamic(example),
        input_names=list(example),
        output_names=["logits"],
        verbose=False,
    )
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for batch, length in SIZES:
        inputs = inputs_of(batch, length)
        (result,) = session.run(["logits"], {name: tensor.numpy() for name, tensor in inputs.items()})
        mask = inputs["attention_mask"].bool().numpy()
        np.testing.assert_allclose(result[mask], model(**inputs).logits.detach().numpy()[mask], rtol=0, atol=1e-4)
