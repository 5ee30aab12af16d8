"""Training on from a model's weights: on the same text or other text, and from a twin to a Linformer."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from linformers import LinformerForMaskedLM, LinformerForSequenceClassification
from linformers.training import pretrain
from linformers.training.corpus import Corpus
from linformers.training.prepare import prepare
from linformers.training.recipe import Recipe

from . import small


@pytest.fixture(scope="module")
def first(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("first")
    assert small.train(small.recipe(corpus, out)) == 0
    return out


def start_of(recipe):
    """The model before the first step."""
    return pretrain.make_trainer(recipe, Corpus.open(Path(recipe.data)), pretrain.training_arguments(recipe)).model


def refused(message):
    return pytest.raises(ValueError, match=re.escape(message))


def test_training_goes_on_from_the_weights(first, corpus, tmp_path):
    own = small.recipe(corpus, tmp_path / "run", start=str(first / "model"), learning_rate=1e-6, warmup_steps=0)
    saved = LinformerForMaskedLM.from_pretrained(first / "model").state_dict()
    model = start_of(own)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor.cpu(), saved[name], rtol=0, atol=0)
    assert small.train(own) == 0
    before, after = (small.read_metrics(out)[-1]["perplexity"] for out in (first, tmp_path / "run"))
    assert after == pytest.approx(before, rel=1e-2)  # at this rate nothing moves
    new = next(r["perplexity"] for r in small.read_metrics(first) if "perplexity" in r)
    assert before < 0.9 * new


def test_other_text_of_the_same_tokenizer(first, corpus, tmp_path):
    lines = (corpus.parent / "text.jsonl").read_text().splitlines()[:60]
    (tmp_path / "other.jsonl").write_text("\n".join(lines) + "\n")
    options = {"tokenizer": str(first / "model"), "validation_share": 0.1, "workers": 1}
    prepare([str(tmp_path / "other.jsonl")], tmp_path / "other", **options, console=small.QUIET)
    assert small.train(small.recipe(tmp_path / "other", tmp_path / "run", start=str(first / "model"), steps=2)) == 0


def test_from_a_twin_to_a_linformer(corpus, tmp_path):
    twin = small.recipe(corpus, tmp_path / "twin", steps=2, model={"projection": "identity"})
    assert small.train(twin) == 0
    saved = LinformerForMaskedLM.from_pretrained(tmp_path / "twin" / "model").state_dict()
    model = start_of(small.recipe(corpus, tmp_path / "run", start=str(tmp_path / "twin" / "model")))
    new = {
        name for name, tensor in model.state_dict().items() if name not in saved or (tensor.cpu() != saved[name]).any()
    }
    assert new == {"linformer.projections.0.delta"}


def test_what_cannot_be_a_start(first, corpus, tmp_path):
    start = str(first / "model")

    def train(**fields):
        small.train(small.recipe(corpus, tmp_path / "run", **{"start": start, **fields}))

    with refused("start='' must be the folder of a model, or null for a new one"):
        train(start="")
    with refused("start='nowhere' holds no model: expected a folder that pretrain or finetune wrote"):
        train(start="nowhere")
    with refused(f"start={start!r} has hidden_size=16, not 32"):
        train(model={"hidden_size": 32})
    with refused("the checkpoint is for n=32, k=8, but n=64, k=8 was asked for; load it as it is, then call"):
        train(model={"max_position_embeddings": 64})
    LinformerForSequenceClassification.from_pretrained(start).save_pretrained(tmp_path / "classifier")
    shutil.copy(first / "model" / "tokenizer.json", tmp_path / "classifier")
    with refused("is a ['LinformerForSequenceClassification'], not a LinformerForMaskedLM"):
        train(start=str(tmp_path / "classifier"))
    other = small.corpus(tmp_path / "other")
    prepare(
        [str(tmp_path / "other" / "text.jsonl")],
        tmp_path / "c",
        vocab_size=280,
        validation_share=0.1,
        workers=1,
        console=small.QUIET,
    )
    with refused(f"was made with another tokenizer than start={start!r}; prepare it with --tokenizer {start}"):
        small.train(small.recipe(tmp_path / "c", tmp_path / "run", start=start))
    assert Recipe(**small.recipe(other, tmp_path).to_dict()).start is None


def test_other_weights_than_a_run_began_with(first, corpus, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(first / "model", model)
    own = small.recipe(corpus, tmp_path / "run", start=str(model), steps=4)
    assert small.train(own) == 0
    network = LinformerForMaskedLM.from_pretrained(model)
    with torch.no_grad():
        network.linformer.embeddings.word_embeddings.weight.add_(0.01)
    network.save_pretrained(model)
    with refused(f"start={str(model)!r} holds other weights than the run in out="):
        small.train(own)
