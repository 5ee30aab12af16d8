"""The weights of other encoders in the Transformer twin give their outputs, and in a Linformer a start."""

import argparse
import itertools
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModel, RobertaConfig, RobertaForMaskedLM, RobertaForSequenceClassification, RobertaModel

from linformers import LinformerForMaskedLM, LinformerModel
from linformers.convert import ARCHITECTURES, SAME_FIELDS, from_fairseq, from_jargon, from_pretrained, load_original

from . import modes
from .modes import refused
from .test_resizing import Payload

SIZES = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "type_vocab_size": 2}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 25}
CLASSES = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert", "bert": "Bert"}
CLASSES |= {"distilbert": "DistilBert", "electra": "Electra"}
HEADS = ["ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering", "ForSequenceClassification"]


def original(kind, head="Model", **fields):
    """A small model of transformers with random weights everywhere."""
    config_class = getattr(transformers, f"{CLASSES[kind]}Config")
    sizes = dict(SIZES)
    if kind == "distilbert":
        sizes["hidden_dim"] = sizes.pop("intermediate_size")
    if kind == "electra":
        sizes["embedding_size"] = 12
    pad = {"pad_token_id": 1} if "pad_token_id" not in fields else {}
    model = getattr(transformers, CLASSES[kind] + head)(config_class(**{**sizes, **pad, **fields})).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("orm.weight" in name or "layer_norm.weight" in name), std=0.2)
    return model


def roberta(model_class, **fields):
    return original("roberta", model_class.__name__.removeprefix("Roberta"), **fields)


def padded_batch(left=False):
    """Padding on the right, as tokenizers put it; RoBERTa derives positions from it wherever it is."""
    ids = torch.randint(3, 31, (4, 20))
    ids[1, 12:] = 1
    if left:
        ids[0, :5] = 1
        ids[2, 7:11] = 1
    return ids, ids != 1


def assert_near(result, expected):
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", CLASSES)
def test_hidden_states(kind, attn_implementation):
    model = original(kind)
    twin = from_pretrained(model, projection="identity", attn_implementation=attn_implementation)
    ids, mask = padded_batch(left="bert" in kind and kind not in ("bert", "distilbert"))
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "output_hidden_states": True}
    if kind != "distilbert":
        inputs["token_type_ids"] = torch.randint(2, ids.shape)
    expected, result = model(**inputs).hidden_states, twin(**inputs).hidden_states
    assert len(result) == len(expected) == 4
    for ours, theirs in zip(result, expected, strict=True):
        assert_near(ours[mask], theirs[mask])
    assert twin.config.max_position_embeddings == 25 - (2 if "roberta" in kind or kind == "camembert" else 0)


@pytest.mark.parametrize("fields", [{"pad_token_id": 3}, {"type_vocab_size": 1}, {"layer_norm_eps": 1e-5}], ids=str)
def test_variants_of_roberta(fields):
    model, (ids, mask) = roberta(RobertaModel, **fields), padded_batch(left=True)
    ids = torch.where(mask, ids.clamp(min=4), fields.get("pad_token_id", 1))
    result = from_pretrained(model, projection="identity")(ids, mask).last_hidden_state
    assert_near(result[mask], model(ids, mask).last_hidden_state[mask])


def test_electra_whose_embeddings_have_the_size_of_the_layers():
    model, (ids, mask) = original("electra", embedding_size=16), padded_batch()
    twin = from_pretrained(model, projection="identity")
    assert twin.embeddings.project is None
    assert_near(twin(ids, mask).last_hidden_state[mask], model(ids, mask).last_hidden_state[mask])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", CLASSES)
def test_heads(kind, head):
    model = original(kind, head, id2label={0: "a", 1: "b"})
    ids, mask = padded_batch(left=kind == "roberta" and head != "ForSequenceClassification")
    twin = from_pretrained(model, projection="identity")
    compared = slice(None) if head == "ForSequenceClassification" else mask
    for result, expected in zip(twin(ids, mask)[:], model(ids, mask)[:], strict=True):
        assert_near(result[compared], expected[compared])
    assert twin.config.id2label == {0: "a", 1: "b"}


def test_heads_for_pretraining():
    """BERT's keeps its masked words, without the next sentence; ELECTRA's discriminator has none of ours."""
    ids, mask = padded_batch()
    model = original("bert", "ForPreTraining")
    result = from_pretrained(model, projection="identity")(ids, mask).logits
    assert_near(result[mask], model(ids, mask).prediction_logits[mask])
    model = original("electra", "ForPreTraining")
    result = from_pretrained(model, projection="identity")(ids, mask).last_hidden_state
    assert_near(result[mask], model.electra(ids, mask).last_hidden_state[mask])


def test_every_architecture_is_tested():
    assert CLASSES.keys() == ARCHITECTURES.keys()


def test_linformer_with_the_weights_of_roberta():
    model = roberta(RobertaForMaskedLM)
    options = {"length": 23, "local_window": 0, "projection_init": "window"}
    linformer = from_pretrained(model, projected_length=23, sharing="layerwise", **options)
    ids = torch.randint(3, 31, (2, 19))
    # With k = n each window is one token, so this Linformer starts as RoBERTa.
    assert_near(linformer(ids).logits, model(ids).logits)
    # A window that sees everything, and no projected keys.
    near = from_pretrained(model, 23, projection="none", local_window=23)
    assert_near(near(ids).logits, model(ids).logits)


def test_the_defaults_are_for_long_text():
    config = from_pretrained(roberta(RobertaModel)).config
    assert (config.max_position_embeddings, config.projected_lengths[0][0], config.local_windows[0]) == (4096, 256, 64)
    assert from_pretrained(roberta(RobertaModel), 100, projected_length=7).config.projected_length == 7


def test_fields_dtype_and_mode_are_those_of_the_original():
    model = from_pretrained(roberta(RobertaModel).bfloat16().train(), projection="identity")
    assert (model.dtype, model.training) == (torch.bfloat16, True)
    model = roberta(RobertaForSequenceClassification, hidden_dropout_prob=0.3, classifier_dropout=0.2)
    config = from_pretrained(model, projection="identity").config
    for field in (*SAME_FIELDS, "num_labels"):
        assert getattr(config, field) == getattr(model.config, field)
    assert from_pretrained(model, hidden_dropout_prob=0.0).config.hidden_dropout_prob == 0.0


@pytest.mark.parametrize("length", [10, 40])
def test_another_length(length):
    model = roberta(RobertaModel)
    twin = from_pretrained(model, length, projection="identity")
    positions, ours = model.embeddings.position_embeddings.weight[2:], twin.embeddings.position_embeddings.weight
    # Beyond the original's 23 positions, those of the 21 tokens of text in a chunk are repeated.
    rows = [*range(23), *range(2, 19)]
    assert torch.equal(ours, positions[rows[:length]])
    if length == 10:
        ids = torch.randint(3, 31, (2, 10))
        assert_near(twin(ids).last_hidden_state, model(ids).last_hidden_state)
    pooled = from_pretrained(model, 64, projection="mean", projected_length=16, local_window=0)
    assert pooled(torch.randint(3, 31, (2, 60))).last_hidden_state.shape == (2, 60, 16)


@pytest.mark.parametrize(("kind", "head"), [("bert", "Model"), ("electra", "ForPreTraining"), ("distilbert", HEADS[3])])
def test_folders(kind, head, tmp_path):
    """The class that the folder names, with its head."""
    model, (ids, mask) = original(kind, head), padded_batch()
    model.save_pretrained(tmp_path)
    for source in (tmp_path, str(tmp_path)):
        results = (from_pretrained(own, projection="identity")(ids, mask)[0] for own in (source, model))
        assert torch.equal(*results)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("MPNet", "a model of type 'mpnet' cannot be converted: its attention has relative position biases"),
        ("Albert", "a model of type 'albert' cannot be converted: its layers share their weights"),
        ("FNet", "a model of type 'fnet' cannot be converted: use one of roberta, xlm-roberta, camembert, bert"),
    ],
)
def test_other_architectures_are_refused(kind, message, tmp_path):
    config = getattr(transformers, f"{kind}Config")()
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    with refused(message):
        from_pretrained(model)
    config.save_pretrained(tmp_path)
    with refused(message):
        from_pretrained(tmp_path)


def test_what_does_not_fit_is_named(tmp_path):
    with refused("a model of type 'linformer' cannot be converted: it is a Linformer already: use linformers resize"):
        from_pretrained(LinformerModel(modes.config()))
    with refused("BertForMultipleChoice has a head without a counterpart: load its encoder with AutoModel"):
        from_pretrained(original("bert", "ForMultipleChoice"))
    with refused("BertForMaskedLM has hidden_act='relu' in its head for masked words, ours has GELU"):
        from_pretrained(original("bert", "ForMaskedLM", hidden_act="relu"))
    with refused(f"model={str(tmp_path)!r} does not load: "):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "changes", "fragment"),
    [
        ({"is_decoder": True}, {}, "the model has is_decoder=True"),
        ({"pad_token_id": None}, {}, "the model has pad_token_id=None"),
        *(({}, {name: 32}, f"{name}=32 is not supported") for name in ("hidden_size", "norm_first", "num_labels")),
        ({}, {"position_embedding_type": "rotary"}, "position_embedding_type='rotary' is not supported"),
        ({}, {"sharing": "none", "projection": "identity"}, "sharing='none' has no effect"),
        ({}, {"max_position_embeddings": 32}, "pass it to convert.from_pretrained as length"),
        ({}, {"projecton": "linear"}, "did you mean 'projection'?"),
        ({}, {"k": 3}, "did you mean 'projected_length'?"),
        ({}, {"nonsense": 3}, "nonsense=3 is not a field of LinformerConfig"),
    ],
)
def test_invalid_changes_are_named(fields, changes, fragment):
    with refused(fragment):
        from_pretrained(roberta(RobertaModel, **fields), **changes)


def test_the_config_of_roberta_is_refused_with_the_way_to_convert_it():
    with pytest.raises(TypeError, match=r"linformers\.convert\.from_pretrained converts other encoders"):
        LinformerModel(RobertaConfig())


# fairseq.


def fairseq_state(sharing, n=12, k=4, d=8, layers=2, vocab=20):
    """A state dict in the layout of `examples/linformer`, with the names of its older and newer versions."""
    shapes = {"embed_tokens.weight": (vocab, d), "embed_positions.weight": (n + 2, d)}
    norms = ["emb_layer_norm" if sharing == "headwise" else "layernorm_embedding"]
    if sharing == "layerwise":
        shapes |= {"compress_layer.weight": (k, n), "compress_layer.bias": (k,)}
    for i in range(layers):
        layer = f"layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= {f"{layer}.self_attn.{name}.weight": (d, d), f"{layer}.self_attn.{name}.bias": (d,)}
        for name in {"headwise": "kv", "key-value": "k"}.get(sharing, ""):
            shapes[f"{layer}.self_attn.compress_{name}.weight"] = (k, n)
        shapes |= {f"{layer}.fc1.weight": (12, d), f"{layer}.fc1.bias": (12,), f"{layer}.fc2.weight": (d, 12)}
        shapes[f"{layer}.fc2.bias"] = (d,)
        norms += [f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm"]
    shapes |= {f"{norm}.{part}": (d,) for norm in norms for part in ("weight", "bias")}
    state = {f"encoder.sentence_encoder.{name}": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    if sharing == "layerwise":  # every layer names the shared one again
        for i, (kind, part) in itertools.product(range(layers), itertools.product("kv", ("weight", "bias"))):
            own = f"encoder.sentence_encoder.layers.{i}.self_attn.compress_{kind}.{part}"
            state[own] = state[f"encoder.sentence_encoder.compress_layer.{part}"]
    shapes = {"dense.weight": (d, d), "dense.bias": (d,), "layer_norm.weight": (d,), "layer_norm.bias": (d,)}
    state |= {f"encoder.lm_head.{name}": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    state["encoder.lm_head.weight"] = state["encoder.sentence_encoder.embed_tokens.weight"]
    return {**state, "encoder.lm_head.bias": torch.randn(vocab), "encoder.version": torch.tensor(2)}


def by_fairseq(state, ids, heads=2):
    """The logits, as the code of fairseq computes them."""
    own = {name.partition("sentence_encoder.")[2]: value for name, value in state.items()}

    def linear(x, name):
        return functional.linear(x, own[f"{name}.weight"], own[f"{name}.bias"])

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], own[f"{name}.weight"], own[f"{name}.bias"])

    x = own["embed_tokens.weight"][ids] + own["embed_positions.weight"][2 : 2 + ids.shape[1]]
    x = norm(x, "emb_layer_norm" if "emb_layer_norm.weight" in own else "layernorm_embedding")
    for i in range(2):
        layer = f"layers.{i}"
        E = own[f"{layer}.self_attn.compress_k.weight"][:, : x.shape[1]]
        F = own.get(f"{layer}.self_attn.compress_v.weight", own[f"{layer}.self_attn.compress_k.weight"])[
            :, : x.shape[1]
        ]
        inputs = (x, E @ x, F @ x)
        query, key, value = (
            linear(source, f"{layer}.self_attn.{name}").unflatten(-1, (heads, -1)).transpose(1, 2)
            for source, name in zip(inputs, ("q_proj", "k_proj", "v_proj"), strict=True)
        )
        probs = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        attended = linear((probs @ value).transpose(1, 2).flatten(2), f"{layer}.self_attn.out_proj")
        x = norm(x + attended, f"{layer}.self_attn_layer_norm")
        x = norm(x + linear(functional.gelu(linear(x, f"{layer}.fc1")), f"{layer}.fc2"), f"{layer}.final_layer_norm")
    head = {name.partition("lm_head.")[2]: value for name, value in state.items()}
    x = functional.gelu(functional.linear(x, head["dense.weight"], head["dense.bias"]))
    x = functional.layer_norm(x, x.shape[-1:], head["layer_norm.weight"], head["layer_norm.bias"])
    return functional.linear(x, head["weight"], head["bias"])


@pytest.mark.parametrize("sharing", ["headwise", "key-value", "layerwise"])
def test_checkpoints_of_fairseq(sharing, tmp_path):
    state = fairseq_state(sharing)
    torch.save({"model": state, "args": argparse.Namespace(compressed=3)}, tmp_path / "checkpoint.pt")
    for source in (state, {"model": state}, tmp_path / "checkpoint.pt"):
        model = from_fairseq(source, num_attention_heads=2)
        for length in (12, 7):
            ids = torch.randint(3, 20, (2, length))
            assert_near(model(ids).logits, by_fairseq(state, ids))
    assert (model.config.sharing, model.config.projected_length) == (sharing, 4)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(LinformerForMaskedLM.from_pretrained(tmp_path / "saved")(ids).logits, model(ids).logits)


def test_wrong_checkpoints_of_fairseq(tmp_path):
    state = fairseq_state("headwise")
    for part in ("compress_", "embed_positions", "lm_head.dense.weight"):
        with refused(f"it has no {'layers.0.self_attn.compress_k' if part == 'compress_' else part}"):
            from_fairseq({name: value for name, value in state.items() if part not in name}, 2)
    with refused("cannot be read: No such file"):
        from_fairseq(tmp_path / "none.pt", 2)
    trace = tmp_path / "trace"
    torch.save({"model": state, "evil": Payload(trace)}, tmp_path / "evil.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "evil.pt").read_bytes()[:1000])
    for name in ("evil.pt", "half.pt"):
        with refused(f"{name} is damaged, or holds more than weights"):
            from_fairseq(tmp_path / name, 2)
    assert not trace.exists()


# jargon.


def jargon(folder, sharing, head="ForMaskedLM", n=12, rows=14, k=4, d=8, layers=2, vocab=20, pickled=False, **fields):
    """A folder in the layout of the French jargon encoders, and its state dict."""
    shapes = {"embeddings.word_embeddings": (vocab, d), "embeddings.position_embeddings": (rows, d)}
    shapes["embeddings.token_type_embeddings"] = (1, d)
    linear, norms = {}, ["embeddings.LayerNorm", "encoder.layer_norm"]
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        linear |= {f"{layer}.attention.{name}_proj": (d, d) for name in ("q", "k", "v", "out")}
        linear |= {f"{layer}.intermediate.dense": (12, d), f"{layer}.output.dense": (d, 12)}
        norms += [f"{layer}.{name}" for name in ("attn_layer_norm", "final_layer_norm", "output.LayerNorm")]
        for kind in {"headwise": "kv", "key-value": "k"}.get(sharing, ""):
            shapes[f"{layer}.attention.compress_{kind}"] = (k, n)
    if sharing == "layerwise":
        linear["encoder.compress_layer"] = (k, n)
    prefix = "" if head == "Model" else "roberta."
    weights = {f"{name}.weight": shape for name, shape in (shapes | linear | dict.fromkeys(norms, (d,))).items()}
    weights |= {f"{name}.bias": shape[:1] for name, shape in (linear | dict.fromkeys(norms, (d,))).items()}
    state = {prefix + name: torch.randn(shape) * 0.3 for name, shape in weights.items()}
    if sharing == "layerwise":  # every layer names the shared one again
        for i, (kind, part) in itertools.product(range(layers), itertools.product("kv", ("weight", "bias"))):
            own = state[f"{prefix}encoder.compress_layer.{part}"]
            state[f"{prefix}encoder.layer.{i}.attention.compress_{kind}.{part}"] = own
    if head == "ForMaskedLM":
        sizes = {"dense.weight": (d, d), "dense.bias": (d,), "layer_norm.weight": (d,), "layer_norm.bias": (d,)}
        state |= {f"lm_head.{name}": torch.randn(size) for name, size in ({**sizes, "bias": (vocab,)}).items()}
        state["lm_head.decoder.weight"] = state["roberta.embeddings.word_embeddings.weight"]
        state["lm_head.decoder.bias"] = state["lm_head.bias"]
        state |= {"sbo_head.bias": torch.randn(vocab), "sbo_head.position_embeddings.weight": torch.randn(10, 6)}
    config = {"model_type": "jargon", "architectures": [f"Jargon{head}"], "encoder_normalize_before": True}
    config |= {"num_layers": layers, "encoder_attention_heads": 2, "hidden_act": "relu", "max_positions": n}
    config |= {"shared_layer_kv_compressed": int(sharing == "layerwise"), "pad_token_id": 1, **fields}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:  # which has each tensor once
        unique = {id(value): (name, value) for name, value in reversed(state.items())}
        save_file(dict(unique.values()), folder / "model.safetensors")
    return state


def by_jargon(state, ids, heads=2):
    """The hidden states, as the code of jargon computes them: normalized before each block, but not at first."""
    own = {name.removeprefix("roberta."): value for name, value in state.items()}

    def linear(x, name):
        return functional.linear(x, own[f"{name}.weight"], own[f"{name}.bias"])

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], own[f"{name}.weight"], own[f"{name}.bias"])

    words, positions, types = (
        own[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")
    )
    x = words[ids] + types[0] + positions[2 : 2 + ids.shape[1]]
    for i in range(2):
        layer = f"encoder.layer.{i}"
        E, F = (own.get(f"{layer}.attention.compress_{kind}.weight") for kind in "kv")
        source = norm(x, f"{layer}.attn_layer_norm")
        inputs = (source, *(matrix[:, : x.shape[1]] @ source for matrix in (E, E if F is None else F)))
        query, key, value = (
            linear(part, f"{layer}.attention.{name}_proj").unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, name in zip(inputs, "qkv", strict=True)
        )
        probs = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        x = x + linear((probs @ value).transpose(1, 2).flatten(2), f"{layer}.attention.out_proj")
        hidden = functional.relu(linear(norm(x, f"{layer}.final_layer_norm"), f"{layer}.intermediate.dense"))
        x = x + linear(hidden, f"{layer}.output.dense")
    return norm(x, "encoder.layer_norm")


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("sharing", ["headwise", "key-value", "layerwise"])
def test_jargon(sharing, pickled, tmp_path):
    state = jargon(tmp_path, sharing, pickled=pickled)
    model = from_jargon(tmp_path)
    assert (model.config.sharing, model.config.projected_length, model.config.pad_token_id) == (sharing, 4, 1)
    for length in (12, 7):
        ids = torch.randint(3, 20, (2, length))
        expected = by_jargon(state, ids)
        assert_near(model.base_model(ids).last_hidden_state, expected)
        x = functional.gelu(functional.linear(expected, state["lm_head.dense.weight"], state["lm_head.dense.bias"]))
        x = functional.layer_norm(x, x.shape[-1:], state["lm_head.layer_norm.weight"], state["lm_head.layer_norm.bias"])
        torch.testing.assert_close(
            model(ids).logits, functional.linear(x, state["lm_head.decoder.weight"], state["lm_head.bias"])
        )
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(LinformerForMaskedLM.from_pretrained(tmp_path / "saved")(ids).logits, model(ids).logits)
    padded = functional.pad(ids, (0, 3), value=1)
    assert_near(model(padded, padded != 1).logits[:, :7], model(ids).logits)  # unlike the original


def test_jargon_with_few_positions_or_without_a_head(tmp_path):
    state = jargon(tmp_path, "layerwise", "Model", rows=11)
    model = from_jargon(tmp_path)
    assert type(model) is LinformerModel
    assert model.config.max_position_embeddings == 9
    ids = torch.randint(3, 20, (2, 9))
    assert_near(model(ids).last_hidden_state, by_jargon(state, ids))


def test_wrong_folders_of_jargon(tmp_path):
    for number, (fields, message) in enumerate(
        [
            ({"model_type": "roberta"}, "is of type 'roberta', expected 'jargon'"),
            ({"encoder_normalize_before": False}, "has encoder_normalize_before=False, but only True"),
            ({"layer_norm_eps": 1e-12}, "has layer_norm_eps=1e-12, but only 1e-05"),
            ({"architectures": ["JargonForCausalLM"]}, "has a head without a counterpart: JargonForCausalLM"),
        ]
    ):
        jargon(tmp_path / str(number), "layerwise", **fields)
        with refused(message):
            from_jargon(tmp_path / str(number))
    folder = tmp_path / "spoiled"
    state = jargon(folder, "layerwise")
    for part, message in (
        ("compress", "it has no compress_layer.weight"),
        ("position", "it has no embeddings.position"),
    ):
        save_file({k: v.clone() for k, v in state.items() if part not in k}, folder / "model.safetensors")
        with refused(message):
            from_jargon(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with refused("model.safetensors is damaged"):
        from_jargon(folder)


# Damaged originals.


def save_pickled(model, folder):
    """As transformers saved models before safetensors."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


@pytest.mark.parametrize("save", [lambda model, folder: model.save_pretrained(folder), save_pickled])
@pytest.mark.parametrize("keep", [0, 50, -100])
def test_a_truncated_file_of_weights_is_named(save, keep, tmp_path):
    save(original("bert"), tmp_path)
    assert isinstance(load_original(str(tmp_path)), transformers.BertModel)
    (path,) = [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.bin")]
    path.write_bytes(path.read_bytes()[:keep])
    with refused(f"{path} is damaged"):
        load_original(str(tmp_path))


def test_a_truncated_shard_is_named(tmp_path):
    original("bert").save_pretrained(tmp_path, max_shard_size="4KB")
    path = sorted(tmp_path.glob("*.safetensors"))[2]
    path.write_bytes(path.read_bytes()[:-7])
    with refused(f"{path} is damaged or truncated"):
        load_original(str(tmp_path))
    path.unlink()
    with refused(path.name):
        load_original(str(tmp_path))


def test_weights_that_are_missing_or_of_another_shape_are_named(tmp_path):
    original("bert").save_pretrained(tmp_path)
    path, name = tmp_path / "model.safetensors", "encoder.layer.1.output.dense.weight"
    state = load_file(path)
    save_file({**state, name: torch.zeros(2, 3)}, path, {"format": "pt"})
    with refused(f"has the weight {name} of shape (2, 3), expected (16, 24) as in config.json"):
        load_original(str(tmp_path))
    save_file({key: weight for key, weight in state.items() if key != name}, path, {"format": "pt"})
    with refused(f"is incomplete: it has no weight {name}"):
        load_original(str(tmp_path))
    save_file({key: weight for key, weight in state.items() if "pooler" not in key}, path, {"format": "pt"})
    load_original(str(tmp_path))  # a Linformer has no pooler


def test_pickled_code_is_not_executed(tmp_path):
    save_pickled(original("bert"), tmp_path)
    torch.save({"evil": Payload(tmp_path / "trace")}, tmp_path / "pytorch_model.bin")
    with refused("pytorch_model.bin is damaged, or holds more than weights"):
        load_original(str(tmp_path))
    assert not (tmp_path / "trace").exists()
