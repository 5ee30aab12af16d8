"""A Linformer is a transformers model: Auto classes, saving, Trainer, pipelines, gradient checkpointing."""

import copy

import pytest
import torch
from linformers.encoder import FeedForward
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

import linformers
from linformers import (
    LinformerConfig,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)
from linformers.benchmark.measure import peak_memory

from . import modes

AUTO_CLASSES = {
    AutoModel: LinformerModel,
    AutoModelForPreTraining: LinformerForMaskedLM,
    AutoModelForMaskedLM: LinformerForMaskedLM,
    AutoModelForSequenceClassification: LinformerForSequenceClassification,
    AutoModelForTokenClassification: LinformerForTokenClassification,
    AutoModelForQuestionAnswering: LinformerForQuestionAnswering,
}
WORDS = list("abcdefghijklmnopqr")


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {word: number for number, word in enumerate(special + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=12,
    )


@pytest.mark.parametrize(("auto_class", "model_class"), AUTO_CLASSES.items(), ids=lambda c: c.__name__)
def test_auto_classes(auto_class, model_class, tmp_path):
    model = modes.randomised(model_class(modes.config(num_labels=3)))
    model.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path)
    assert type(loaded) is model_class
    assert type(auto_class.from_config(model.config)) is model_class
    assert type(AutoConfig.from_pretrained(tmp_path)) is LinformerConfig
    ids = torch.randint(31, (2, 8))
    assert all(torch.equal(a, b) for a, b in zip(model(ids).to_tuple(), loaded(ids).to_tuple(), strict=True))


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_saving_and_loading_is_exact(mode, tmp_path):
    model = modes.randomised(LinformerForMaskedLM(modes.config(**mode, norm_first="mean" in mode.values())))
    model.save_pretrained(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "model.safetensors"]
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    for (name, weight), (other_name, other) in zip(
        sorted(model.state_dict().items()), sorted(loaded.state_dict().items()), strict=True
    ):
        assert name == other_name
        assert torch.equal(weight, other)
    ids, mask = torch.randint(31, (2, 8)), torch.randint(2, (2, 8))
    assert torch.equal(model(ids, mask).logits, loaded(ids, mask).logits)


def test_head_loads_the_encoder_of_another(tmp_path):
    pretrained = modes.randomised(LinformerForMaskedLM(modes.config()))
    pretrained.save_pretrained(tmp_path)
    classifier = LinformerForSequenceClassification.from_pretrained(tmp_path)
    for name, weight in pretrained.linformer.state_dict().items():
        assert torch.equal(weight, classifier.linformer.state_dict()[name])
    bare = LinformerModel.from_pretrained(tmp_path)
    assert torch.equal(bare.projections[0].delta, pretrained.linformer.projections[0].delta)


def test_words_are_tied_and_can_be_untied():
    tied, untied = (LinformerForMaskedLM(modes.config(tie_word_embeddings=tie)) for tie in (True, False))
    assert tied.head.decoder.weight is tied.linformer.embeddings.word_embeddings.weight
    assert untied.head.decoder.weight is not untied.linformer.embeddings.word_embeddings.weight


def test_initial_values():
    model = LinformerModel(LinformerConfig(vocab_size=2000, hidden_size=64, num_attention_heads=4, num_hidden_layers=1))
    positions = model.embeddings.position_embeddings.weight
    assert positions.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.02)
    assert model.embeddings.word_embeddings.weight.std().item() == pytest.approx(0.02, rel=0.02)
    scale = 0.02 * 2**0.5
    torch.testing.assert_close(positions[:, 0], scale * torch.arange(512).sin())
    torch.testing.assert_close(positions[:, 1], scale * torch.arange(512).cos())
    gaussian = LinformerModel(
        modes.config(projection_init="gaussian", max_position_embeddings=600, projected_length=60)
    )
    assert gaussian.projections[0](600).std().item() == pytest.approx(600**-0.5, rel=0.05)


@pytest.mark.parametrize("mode", modes.UNIFORM, ids=modes.name)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(mode, reentrant):
    model = modes.randomised(LinformerForMaskedLM(modes.config(**mode))).double().train()
    ids, mask = torch.randint(31, (2, 9)), torch.rand(2, 9) < 0.8
    model(ids, mask, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(ids, mask, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        # What layers share is summed up in another order.
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)


def test_gradient_checkpointing_recomputes_dropout_as_it_was():
    model = LinformerForMaskedLM(modes.config(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)).train()
    ids = torch.randint(31, (2, 9))
    gradients = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(7)
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, plain in gradients[0].items():
        assert torch.equal(plain, gradients[1][name])
    torch.manual_seed(8)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert not torch.equal(model.head.dense.weight.grad, gradients[0]["head.dense.weight"])


def test_sparse_prediction_is_the_same_loss_from_fewer_scores():
    dense = modes.randomised(LinformerForMaskedLM(modes.config()))
    sparse = copy.deepcopy(dense)
    sparse.config.sparse_prediction = True
    ids = torch.randint(31, (3, 8))
    labels = torch.where(torch.rand(3, 8) < 0.3, ids, -100)
    expected, result = dense(ids, labels=labels), sparse(ids, labels=labels)
    torch.testing.assert_close(result.loss, expected.loss)
    assert result.logits.shape == ((labels != -100).sum(), 31)
    torch.testing.assert_close(result.logits, expected.logits[labels != -100])
    assert sparse(ids).logits.shape == (3, 8, 31)


def test_loss_of_several_batches_counts_all_their_items():
    """`Trainer` passes `num_items_in_batch` so that accumulating gradients weighs every label alike."""
    model = modes.randomised(LinformerForMaskedLM(modes.config()))
    ids = torch.randint(31, (2, 8))
    loss = model(ids, labels=ids, num_items_in_batch=torch.tensor(64)).loss
    torch.testing.assert_close(loss, model(ids, labels=ids).loss * 16 / 64)


def test_hidden_states_stand_where_their_tokens_do():
    model = modes.randomised(LinformerModel(modes.config(norm_first=True)))
    ids, mask = torch.randint(31, (1, 5)), torch.tensor([[0, 0, 1, 0, 1, 1, 1, 0, 1]])
    spread = torch.zeros(1, 9, dtype=torch.long)
    spread[mask.bool()] = ids[0]
    alone = model(ids, output_hidden_states=True).hidden_states
    batch = model(spread, mask, output_hidden_states=True).hidden_states
    assert len(alone) == len(batch) == 3
    for a, b in zip(alone, batch, strict=True):
        torch.testing.assert_close(b[mask.bool()], a[0], rtol=0, atol=2e-6)


def test_attentions_come_from_eager_attention():
    model = modes.randomised(LinformerModel(modes.config(attn_implementation="sdpa")))
    ids = torch.randint(31, (2, 7))
    outputs = model(ids, output_attentions=True)
    assert [tuple(probs.shape) for probs in outputs.attentions] == [(2, 4, 7, 4)] * 2
    torch.testing.assert_close(outputs.last_hidden_state, model(ids).last_hidden_state)


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


@pytest.mark.parametrize("mode", [{}, {"sharing": "none"}, {"projection": "identity"}], ids=["linear", "none", "twin"])
def test_trainer_takes_twenty_steps(mode, tokenizer, tmp_path):
    generator = torch.Generator().manual_seed(0)
    texts = [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator)) for n in [3, 9, 6, 10] * 8
    ]
    arguments = TrainingArguments(
        output_dir=tmp_path,
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        LinformerForMaskedLM(modes.config(**mode, vocab_size=len(tokenizer), sparse_prediction=True)),
        arguments,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=0),
        train_dataset=[tokenizer(text) for text in texts],
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5])
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "checkpoint-20").config.sparse_prediction


def test_pipelines(tokenizer, tmp_path):
    LinformerForMaskedLM(modes.config(vocab_size=len(tokenizer))).save_pretrained(tmp_path / "words")
    labels = {0: "bad", 1: "good"}
    LinformerForSequenceClassification(
        modes.config(vocab_size=len(tokenizer), id2label=labels, label2id={v: k for k, v in labels.items()})
    ).save_pretrained(tmp_path / "classes")
    for folder in ("words", "classes"):
        tokenizer.save_pretrained(tmp_path / folder)
    guesses = pipeline("fill-mask", model=str(tmp_path / "words"))("a b <mask> d e")
    assert len(guesses) == 5
    assert all(guess["sequence"].startswith("a b") for guess in guesses)
    answers = pipeline("text-classification", model=str(tmp_path / "classes"))(["a c", "d o g"])
    assert {answer["label"] for answer in answers} <= {"bad", "good"}


def test_pipeline_in_batches_equals_one_by_one(tokenizer, tmp_path):
    modes.randomised(LinformerForSequenceClassification(modes.config(vocab_size=len(tokenizer)))).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    classify = pipeline("text-classification", model=str(tmp_path))
    texts = ["a c", "d o g s a t", "r i b"]
    for single, batched in zip(map(classify, texts), classify(texts, batch_size=3), strict=True):
        assert single[0]["score"] == pytest.approx(batched["score"], abs=1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
def test_overfits_a_batch(norm_first):
    model = LinformerForMaskedLM(modes.config(norm_first=norm_first, hidden_size=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(2, 31, (4, 12))
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_feed_forward_in_chunks_is_the_same():
    model = modes.randomised(LinformerModel(modes.config()))
    ids = torch.randint(31, (2, 11))
    expected = model(ids).last_hidden_state
    chunked = LinformerModel(modes.config(chunk_size_feed_forward=4)).eval()
    chunked.load_state_dict(model.state_dict())
    torch.testing.assert_close(chunked(ids).last_hidden_state, expected, rtol=0, atol=1e-6)


def test_without_gradients_the_feed_forward_network_goes_in_slices(monkeypatch):
    """The same result at a smaller peak, in inference alone."""
    model = LinformerModel(modes.config(intermediate_size=1024)).eval()
    ids = torch.randint(31, (50, 12))
    calls = []
    transform = FeedForward.transform
    monkeypatch.setattr(FeedForward, "transform", lambda self, x: calls.append(len(x)) or transform(self, x))

    @torch.no_grad()
    def run():
        return model(ids).last_hidden_state

    whole, peak = run(), peak_memory(run, "cpu")
    monkeypatch.setattr(FeedForward, "slice_size", 128)
    calls.clear()
    torch.testing.assert_close(run(), whole)
    assert calls == [128, 128, 128, 128, 88] * 2
    assert peak_memory(run, "cpu") < 0.5 * peak
    calls.clear()
    torch.testing.assert_close(model(ids).last_hidden_state, whole)
    assert calls == [50] * 2


def test_public_names():
    assert set(linformers.__all__) == {
        "LinformerAttention",
        "LinformerConfig",
        "LinformerForMaskedLM",
        "LinformerForQuestionAnswering",
        "LinformerForSequenceClassification",
        "LinformerForTokenClassification",
        "LinformerModel",
        "LinformerPreTrainedModel",
        "pretrained",
    }
    assert all(hasattr(linformers, name) for name in linformers.__all__)


class Adapter(torch.nn.Module):
    """A low-rank adapter (LoRA) around a linear layer, as peft makes it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_adapters_around_linear_layers_count(mode):
    """Keys and values through an adapter equal those through a weight that has it added."""
    model = modes.randomised(LinformerModel(modes.config(**mode)))
    merged = copy.deepcopy(model)
    for layer, other in zip(model.layers, merged.layers, strict=True):
        for name in ("query", "key", "value"):
            adapter = Adapter(getattr(layer.attention, name))
            setattr(layer.attention, name, adapter)
            getattr(other.attention, name).weight.data += adapter.up.weight @ adapter.down.weight
    ids, mask = torch.randint(31, (2, 12)), torch.ones(2, 12, dtype=torch.long)  # two windows at least
    mask[1, [0, 4]] = 0
    result, expected = (m(ids, mask).last_hidden_state for m in (model, merged))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    result.square().sum().backward()
    assert all(layer.attention.key.up.weight.grad.abs().max() > 0 for layer in model.layers)


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_weights_may_be_offloaded(mode, tmp_path):
    from accelerate import cpu_offload, disk_offload

    model = modes.randomised(LinformerForMaskedLM(modes.config(**mode)))
    ids, mask = torch.randint(31, (2, 9)), torch.rand(2, 9) < 0.8
    expected = model(ids, mask).logits
    on_disk = copy.deepcopy(model)
    cpu_offload(model, execution_device="cpu")
    disk_offload(on_disk, tmp_path, execution_device="cpu")
    assert next(on_disk.linformer.layers[0].parameters()).device.type == "meta"
    with torch.no_grad():
        for offloaded in (model, on_disk):
            torch.testing.assert_close(offloaded(ids, mask).logits, expected, rtol=0, atol=1e-5)
