"""The encoder: its definition, initial values, inputs, outputs, and everything that wraps its modules."""

import copy
import math
import re

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.utils import send_to_device
from torch import nn

from linformers import (
    LinformerConfig,
    LinformerForMaskedLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
    reference,
)
from linformers.benchmark.measure import peak_memory
from linformers.errors import UserError

from . import modes
from .modes import gradients, random_model, refused
from .naive import naive_attention

ONES = torch.ones(2, 12, dtype=torch.long)


def by_definition(model, ids, types, attend, activation="gelu"):
    """Embeddings, residuals, norms and feed-forward networks written out, around the attention of `attend`."""

    def norm(layer, x):
        centered = x - x.mean(-1, keepdim=True)
        return layer.weight * centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() + layer.bias

    def feed_forward(layer, x):
        x = x @ layer.intermediate.weight.T + layer.intermediate.bias
        x = x.clamp(min=0) if activation == "relu" else x * (1 + torch.erf(x / 2**0.5)) / 2
        return x @ layer.output.weight.T + layer.output.bias

    table, n = model.embeddings, ids.shape[1]
    x = table.word_embeddings.weight[ids] + table.token_type_embeddings.weight[types]
    x = norm(table.norm, x + table.position_embeddings.weight[:n])
    for layer, (E, F) in zip(model.layers, model.projections(n, None, ids.device), strict=True):
        if model.config.norm_first:
            x = x + attend(layer.attention, E, F, norm(layer.attention_norm, x))
            x = x + feed_forward(layer.feed_forward, norm(layer.feed_forward_norm, x))
        else:
            x = norm(layer.attention_norm, x + attend(layer.attention, E, F, x))
            x = norm(layer.feed_forward_norm, x + feed_forward(layer.feed_forward, x))
    return norm(model.final_norm, x) if model.config.norm_first else x


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_encoder_equals_its_definition(norm_first, activation):
    model = random_model(LinformerModel, norm_first=norm_first, hidden_act=activation).double()
    ids, types = torch.randint(31, (2, 7)), torch.randint(2, (2, 7))
    expected = by_definition(model, ids, types, naive_attention, activation)
    torch.testing.assert_close(model(ids, token_type_ids=types).last_hidden_state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sharing", modes.SHARINGS)
@pytest.mark.parametrize("n", [12, 9])
def test_the_papers_model_equals_the_reference(sharing, n):
    """`LinformerConfig.paper()`: a post-norm encoder around equation 7, in which E is the parameter itself."""
    model = LinformerModel(LinformerConfig.paper(12, 4, sharing, num_hidden_layers=3, **modes.SIZES)).double().eval()
    parameters = [projection.delta for projection in model.projections]
    if sharing == "layerwise":
        parameters *= 3
    if sharing in ("layerwise", "key-value"):
        parameters = [parameter for parameter in parameters for _ in ("E", "F")]
    matrices = [own[:n] if own.dim() == 2 else own[:n].transpose(0, 1) for own in parameters]  # (n, k) or (h, n, k)
    pairs = iter(zip(matrices[::2], matrices[1::2], strict=True))

    def attend(layer, E, F, x):
        weights = [(own.weight.T, own.bias) for own in (layer.query, layer.key, layer.value)]
        own_E, own_F = next(pairs)
        heads = [reference.linformer_attention(row, *weights, own_E, own_F, num_heads=4) for row in x]
        return torch.stack(heads) @ layer.output.weight.T + layer.output.bias

    ids = torch.randint(31, (2, n))
    expected = by_definition(model, ids, torch.zeros_like(ids), attend)
    torch.testing.assert_close(model(ids).last_hidden_state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
@pytest.mark.parametrize("shape", [(0, 7), (2, 0)], ids=["no rows", "no tokens"])
def test_empty_inputs(mode, shape):
    model, ids = LinformerModel(modes.config(**mode)), torch.zeros(shape, dtype=torch.long)
    for mask in (None, torch.ones_like(ids)):
        assert model(ids, mask).last_hidden_state.shape == (*shape, 16)


@pytest.mark.parametrize("projection", modes.PROJECTIONS)
def test_shapes_without_memory(projection):
    """On the meta device, where costs are counted."""
    model = LinformerModel(modes.config(projection=projection, attn_implementation="eager")).to("meta")
    assert model(ONES.to("meta"), ONES.to("meta")).last_hidden_state.shape == (2, 12, 16)


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_attention_matters_to_models_that_are_compared(mode):
    """More than the errors that half precision is allowed, so that a comparison notices wrong attention."""
    model, ids, mask = modes.model_and_inputs(**mode)
    expected = model(ids, mask).logits
    for layer in model.linformer.layers:
        layer.attention.scaling = 1e-6  # nearly uniform attention
    assert (model(ids, mask).logits - expected)[mask].abs().max() > 0.1
    for layer in model.linformer.layers:
        nn.init.zeros_(layer.attention.output.weight)
    assert (model(ids, mask).logits - expected)[mask].abs().max() > 0.5


@pytest.mark.parametrize("position_init", ["waves", "sinusoidal", "normal"])
def test_embeddings_start_as_noise_and_positions_as_waves(position_init):
    fields = {"vocab_size": 2000, "hidden_size": 64, "max_position_embeddings": 256}
    embeddings = LinformerModel(modes.config(position_init=position_init, **fields)).embeddings
    assert embeddings.word_embeddings.weight.std().item() == pytest.approx(0.02, rel=0.02)
    positions = embeddings.position_embeddings.weight.detach()
    assert positions.square().mean().sqrt() == pytest.approx(0.02, rel=0.05)
    similarity = torch.cosine_similarity(positions[1:], positions[:-1]).mean()
    assert (similarity > 0.9) == (position_init != "normal")
    if position_init != "normal":
        torch.testing.assert_close(positions[:, 0], 0.02 * 2**0.5 * torch.arange(256).sin())
        torch.testing.assert_close(positions[:, 1], 0.02 * 2**0.5 * torch.arange(256).cos())
        # The longest wave turns by 1 over n tokens, or by n/10000.
        slowest = torch.atan2(positions[:, -2], positions[:, -1])
        assert slowest[-1] == pytest.approx(255 / (256 if position_init == "waves" else 10000) ** (62 / 64), rel=1e-3)


WIDE = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 256, "projected_length": 64}


@pytest.mark.parametrize(
    ("fields", "times"),
    [({}, 2), ({"local_window": 4}, 1), ({"projected_length": 256}, 1), ({"projection": "identity"}, 1)],
    ids=str,
)
def test_keys_start_as_queries_with_larger_scores_where_keys_are_blurred(fields, times):
    for layer in LinformerModel(modes.config(initial_self_score=3.0, **{**WIDE, **fields})).layers:
        query, key = layer.attention.query.weight, layer.attention.key.weight
        assert torch.equal(query, key)
        tokens = nn.functional.layer_norm(torch.randn(100, 256), (256,))
        scores = (tokens @ query.T).square().sum(-1) / 4 / math.sqrt(64)  # of tokens with themselves, in each head
        assert scores.mean().item() == pytest.approx(3.0 * times, rel=0.1)


@pytest.mark.parametrize(("score", "times"), [(None, 1), (2.0, 1.4), (6.5, 3.7)])
def test_attention_starts_near_each_token(score, times):
    fields = {**WIDE, "norm_first": True, "projection": "identity", "attn_implementation": "eager"}
    model = LinformerModel(modes.config(initial_self_score=score, **fields))
    if score is None:
        query, key = model.layers[0].attention.query.weight, model.layers[0].attention.key.weight
        assert not torch.equal(query, key)
        assert query.std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
    probs = model(torch.randint(2, 31, (1, 256)), output_attentions=True).attentions[0][0].mean(0)
    near = (torch.arange(256)[:, None] - torch.arange(256)).abs() <= 8
    assert (probs[near].sum() / near.sum() * 256).item() == pytest.approx(times, rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"input_ids": torch.ones(2, 13).long()}, "input_ids has 13 tokens, but at most n=12"),
        ({"input_ids": ONES, "attention_mask": ONES[:1]}, "attention_mask has shape (1, 12), expected (2, 12)"),
        ({"input_ids": ONES, "attention_mask": ONES.float()}, "attention_mask has type torch.float32, expected bool"),
        ({}, "pass exactly one of input_ids and inputs_embeds"),
        ({"input_ids": ONES, "inputs_embeds": torch.zeros(2, 12, 16)}, "pass exactly one of"),
        ({"input_ids": ONES[0]}, "input_ids has shape (12,), expected (batch, length)"),
        ({"input_ids": ONES.tolist()}, "input_ids is of type list"),
        ({"input_ids": ONES.float()}, "input_ids has type torch.float32, expected torch.int64"),
        ({"input_ids": 31 * ONES}, "input_ids ranges from 31 to 31, expected 0 to 30"),
        ({"input_ids": -ONES}, "input_ids ranges from -1 to -1, expected 0 to 30"),
        ({"inputs_embeds": torch.zeros(2, 12, 15)}, "inputs_embeds has shape (2, 12, 15), expected (batch, length,"),
        ({"inputs_embeds": torch.zeros(2, 12, 16).double()}, "inputs_embeds has type torch.float64"),
        ({"input_ids": ONES, "token_type_ids": 2 * ONES}, "token_type_ids ranges from 2 to 2, expected 0 to 1"),
        ({"input_ids": ONES, "token_type_ids": ONES[0]}, "token_type_ids has shape (12,), expected (2, 12)"),
        *(({"input_ids": ONES, name: ONES}, f"{name} is") for name in ("position_ids", "encoder_hidden_states")),
        ({"input_ids": ONES, "is_causal": True}, "is_causal is"),
        ({"input_ids": ONES, "atention_mask": ONES}, "argument 'atention_mask'; did you mean 'attention_mask'"),
    ],
)
def test_invalid_inputs_are_named(arguments, fragment):
    with pytest.raises((UserError, TypeError), match=re.escape(fragment)):
        LinformerModel(modes.config())(**arguments)


def test_arguments_that_ask_for_nothing_are_accepted():
    model = LinformerModel(modes.config(output_attentions=True, attn_implementation="eager"))
    result = model(ONES, use_cache=False, position_ids=None, past_key_values=None, is_causal=False)
    assert torch.equal(result.last_hidden_state, model(ONES).last_hidden_state)
    assert model(ONES, output_attentions=False).attentions is None


@pytest.mark.parametrize(("projection", "length"), [("linear", 13), ("mean", 16), ("conv", 16), ("identity", 13)])
def test_the_advice_on_a_longer_input_works(projection, length):
    model, ids = LinformerModel(modes.config(projection=projection)), torch.ones(2, 13, dtype=torch.long)
    with refused(f"model.resize_length({length})"):
        model(ids)
    model.resize_length(length)
    assert model(ids).last_hidden_state.shape == (2, 13, 16)


@pytest.mark.parametrize("mode", modes.UNIFORM + modes.GAUSSIAN + modes.NON_UNIFORM[:3], ids=modes.name)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(mode, reentrant):
    model = random_model(**mode).double().train()
    ids, mask = torch.randint(31, (2, 9)), torch.rand(2, 9) < 0.8
    expected = gradients(model, input_ids=ids, attention_mask=mask, labels=ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    result = gradients(model, input_ids=ids, attention_mask=mask, labels=ids)
    # Gradients of what layers share are summed in another order.
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def test_gradient_checkpointing_repeats_dropout():
    model = LinformerForMaskedLM(modes.config(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)).train()
    ids, results = torch.randint(31, (2, 9)), []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        results.append(gradients(model, input_ids=ids, labels=ids))
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plain, checkpointed, other = results
    assert all(map(torch.equal, checkpointed, plain))
    assert not all(map(torch.equal, other, plain))


@pytest.mark.parametrize(
    ("model_class", "field"),
    [(LinformerModel, "hidden_dropout_prob"), (LinformerModel, "attention_probs_dropout_prob")]
    + [(own, "classifier_dropout") for own in (LinformerForSequenceClassification, LinformerForTokenClassification)],
)
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_each_dropout_acts_in_training_only(model_class, field, attn_implementation):
    model = random_model(model_class, **{field: 0.5, "attn_implementation": attn_implementation})
    ids = torch.randint(31, (2, 9))
    assert torch.equal(model(ids)[0], model(ids)[0])
    model.train()
    assert not torch.equal(model(ids)[0], model(ids)[0])
    without = random_model(model_class, attn_implementation=attn_implementation).train()
    assert torch.equal(without(ids)[0], without(ids)[0])


def test_sparse_prediction_is_the_same_loss_from_fewer_scores():
    dense = random_model()
    sparse = copy.deepcopy(dense)
    sparse.config.sparse_prediction = True
    ids = torch.randint(31, (3, 8))
    labels = torch.where(torch.rand(3, 8) < 0.3, ids, -100)
    expected, result = dense(ids, labels=labels), sparse(ids, labels=labels)
    torch.testing.assert_close(result.loss, expected.loss)
    assert result.logits.shape == ((labels != -100).sum(), 31)
    torch.testing.assert_close(result.logits, expected.logits[labels != -100])
    assert sparse(ids).logits.shape == (3, 8, 31)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", modes.UNIFORM, ids=modes.name)
def test_half_precision(mode, dtype):
    model = LinformerForMaskedLM(modes.config(**mode)).eval()
    ids, mask = torch.randint(31, (2, 9)), torch.rand(2, 9) < 0.8
    expected = model(ids, mask).logits
    result = copy.deepcopy(model).to(dtype)(ids, mask).logits
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(ids, mask).logits.float(), expected, rtol=0.05, atol=0.02)


def test_without_gradients_the_feed_forward_network_works_in_chunks():
    """The same result with less memory, in inference only."""
    model, chunked = (
        LinformerModel(modes.config(intermediate_size=1024, chunk_size_feed_forward=size)).eval() for size in (0, 128)
    )
    chunked.load_state_dict(model.state_dict())
    ids, sizes = torch.randint(31, (50, 12)), []
    for layer in chunked.layers:
        layer.feed_forward.output.register_forward_hook(lambda _, args, output: sizes.append(output.shape[:-1].numel()))
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        torch.testing.assert_close(chunked(ids).last_hidden_state, expected)
        assert sizes == [128, 128, 128, 128, 88] * 2
        peaks = [peak_memory(lambda own=own: own(ids), "cpu") for own in (model, chunked)]
    assert peaks[1] < 0.5 * peaks[0]
    sizes.clear()
    torch.testing.assert_close(chunked(ids).last_hidden_state, expected)
    assert sizes == [600] * 2


class Adapter(nn.Module):
    """A low-rank adapter (LoRA) around a linear layer, as in peft."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_adapters_around_linear_layers_count(mode):
    """Keys and values through an adapter equal those through a weight to which it was added."""
    model = random_model(LinformerModel, **mode)
    merged = copy.deepcopy(model)
    for layer, other in zip(model.layers, merged.layers, strict=True):
        for name in ("query", "key", "value"):
            adapter = Adapter(getattr(layer.attention, name))
            setattr(layer.attention, name, adapter)
            getattr(other.attention, name).weight.data += adapter.up.weight @ adapter.down.weight
    mask = ONES.index_fill(1, torch.tensor([0, 4]), 0)
    ids = torch.randint(31, (2, 12))
    result, expected = (m(ids, mask).last_hidden_state for m in (model, merged))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    result.square().sum().backward()
    assert all(layer.attention.key.up.weight.grad.abs().max() > 0 for layer in model.layers)


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_weights_may_be_offloaded(mode, tmp_path):
    model = random_model(**mode)
    ids, mask = torch.randint(31, (2, 9)), torch.rand(2, 9) < 0.8
    expected = model(ids, mask).logits
    on_disk = copy.deepcopy(model)
    cpu_offload(model, execution_device="cpu")
    disk_offload(on_disk, tmp_path, execution_device="cpu")
    assert next(on_disk.linformer.layers[0].parameters()).device.type == "meta"
    with torch.no_grad():
        for offloaded in (model, on_disk):
            torch.testing.assert_close(offloaded(ids, mask).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_class", [LinformerModel, LinformerForMaskedLM, LinformerForSequenceClassification])
def test_layers_on_several_devices(model_class):
    """As accelerate spreads them: the inputs of a layer are moved to it, and nothing is moved back."""
    model = model_class(modes.config())
    last = model.base_model.layers[-1]
    if model.base_model is not model:
        for head in list(model.children())[1:]:
            head.to("meta")
    last.to("meta").register_forward_pre_hook(
        lambda layer, args, kwargs: send_to_device((args, kwargs), "meta"), with_kwargs=True
    )
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1]])
    assert model(torch.randint(31, (2, 4)), mask)[0].device.type == "meta"
