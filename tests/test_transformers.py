"""A Linformer is a transformers model: Auto classes, saving, Trainer."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import linformers
from linformers import LinformerConfig, LinformerForMaskedLM
from linformers.auto import AUTO_CLASSES

from . import modes


@pytest.mark.parametrize(("auto_class", "model_class"), AUTO_CLASSES.items(), ids=lambda c: c.__name__)
def test_auto_classes(auto_class, model_class, tmp_path):
    model = modes.random_model(model_class, num_labels=3)
    model.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path)
    assert type(loaded) is model_class
    assert type(auto_class.from_config(model.config)) is model_class
    assert type(AutoConfig.from_pretrained(tmp_path)) is LinformerConfig
    ids = torch.randint(31, (2, 8))
    torch.testing.assert_close(loaded(ids).to_tuple(), model(ids).to_tuple(), rtol=0, atol=1e-6)


def aligned(model):
    """Copy all weights to aligned memory.

    Loaded weights start at any multiple of 4 bytes of a mapped file, others at multiples of 64. A product of one row
    with an unaligned matrix may be summed in another order, which changes the last bits.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_saving_and_loading_is_exact(mode, tmp_path):
    model = modes.random_model(**mode, norm_first="mean" in mode.values())
    model.save_pretrained(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "linformer_classes.py", "manifest.json", "model.safetensors"]
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    before, after = (own.config.to_dict() for own in (model, loaded))
    resolved = {
        "projected_length",
        "projection_scale",
        "shifted_windows",
        "architectures",
        "dtype",
    }  # written even if left open
    assert {name for name in before if before[name] != after[name]} <= {*resolved, "_name_or_path"}
    assert loaded.config.projected_lengths == model.config.projected_lengths
    weights, loaded_weights = model.state_dict(), loaded.state_dict()
    assert weights.keys() == loaded_weights.keys()
    assert all(torch.equal(weights[name], loaded_weights[name]) for name in weights)
    ids, mask = torch.randint(31, (2, 8)), torch.randint(2, (2, 8))
    aligned(loaded)
    for implementation in ("eager", "sdpa"):
        for own in (model, loaded):
            own.set_attn_implementation(implementation)
        for rows in (slice(0, 1), slice(0, 2)):
            assert torch.equal(model(ids[rows], mask[rows]).logits, loaded(ids[rows], mask[rows]).logits)


def test_loss_of_several_batches_counts_all_their_items():
    """`Trainer` passes `num_items_in_batch`, so that accumulated gradients weight all labels equally."""
    model = modes.random_model()
    ids = torch.randint(31, (2, 8))
    loss = model(ids, labels=ids, num_items_in_batch=torch.tensor(64)).loss
    torch.testing.assert_close(loss, model(ids, labels=ids).loss * 16 / 64)


@pytest.mark.parametrize("mode", [{}, {"sharing": "none", "norm_first": True}, {"projection": "identity"}], ids=str)
def test_trainer_takes_twenty_steps(mode, tmp_path):
    tokenizer, letters = AutoTokenizer.from_pretrained(linformers.pretrained()), "abcdefghijklmnopqr"
    texts = [" ".join(letters[i] for i in torch.randint(18, (length,))) for length in [3, 9, 6, 10] * 8]
    arguments = TrainingArguments(
        tmp_path, max_steps=20, per_device_train_batch_size=4, learning_rate=1e-2, gradient_accumulation_steps=2,
        logging_steps=1, save_steps=10, report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(
        LinformerForMaskedLM(modes.config(**mode, vocab_size=len(tokenizer), sparse_prediction=True)),
        arguments,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=0),
        train_dataset=[tokenizer(text, truncation=True, max_length=12) for text in texts],
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5])
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "checkpoint-20").config.sparse_prediction


def test_unaligned_weights_change_only_the_order_of_sums():
    """As loaded weights are: the same values at an odd multiple of 4 bytes."""
    model, ids, _ = modes.model_and_inputs()
    expected = model(ids[:1]).logits
    for parameter in model.parameters():
        parameter.data = torch.cat([torch.zeros(1), parameter.detach().flatten()])[1:].view_as(parameter)
        assert parameter.data_ptr() % 64 == 4
    torch.testing.assert_close(model(ids[:1]).logits, expected, rtol=0, atol=1e-5)
    aligned(model)
    assert torch.equal(model(ids[:1]).logits, expected)


def test_public_names():
    heads = {f"LinformerFor{head}" for head in ("MaskedLM", "QuestionAnswering")}
    heads |= {f"LinformerFor{unit}Classification" for unit in ("Sequence", "Token")}
    others = {"LinformerAttention", "LinformerConfig", "LinformerModel", "LinformerPreTrainedModel"}
    others |= {"embed", "pretrained"}
    assert set(linformers.__all__) == heads | others
    assert all(hasattr(linformers, name) for name in linformers.__all__)


@pytest.mark.parametrize(("name", "message"), [("spda", "adds `attn_impl"), ("\n", "must be a name"), (4, "must be a")])
def test_unknown_attention_is_refused_in_one_line(name, message):
    with modes.refused(message) as refusal:
        modes.random_model(attn_implementation=name)
    assert "\n" not in str(refusal.value)
