"""`linformers contrast`: pairs of documents and titles or spans, the loss, and the folder that it writes."""

import json
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from linformers import (
    LinformerConfig,
    LinformerForMaskedLM,
    LinformerForSequenceClassification,
    LinformerModel,
    pooling,
)
from linformers import files as manifests
from linformers.training import contrast
from linformers.training.contrast import Contrast, ContrastiveTrainer, Pairs, encode_titled
from linformers.training.trainer import read_metrics

from ..modes import refused
from . import small
from .test_adopt import tokenizer
from .test_trainer import interrupted

SETTINGS = {"steps": 20, "batch_size": 4, "learning_rate": 3e-3}


def source(folder, model_class=LinformerForMaskedLM):
    """The folder of a small model, as pretrain writes it."""
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    model_class(LinformerConfig(vocab_size=31, **small.MODEL, **special)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def corpus(tmp_path):
    """Documents of five letters each, some with a title."""
    random, letters = np.random.default_rng(0), list("abcdefghijklmnopqrstuvwxyz")
    texts = ["".join(random.choice(random.choice(letters, 5), size=60)) for _ in range(80)]
    rows = [{"text": own, "title": own[:8] if i % 2 else None} for i, own in enumerate(texts)]
    return small.write_table(tmp_path / "topics.jsonl", rows)


def train(folder, corpus, out, **settings):
    options = {"console": small.QUIET, "command": "linformers contrast"}
    return contrast.contrast(folder, [corpus], out, Contrast(**{**SETTINGS, **settings}), **options)


def weights_of(folder):
    return (folder / "model.safetensors").read_bytes()


def test_it_lowers_the_loss_and_keeps_the_head(corpus, tmp_path, monkeypatch):
    metrics, folder, out = [], source(tmp_path / "in"), tmp_path / "out"
    monkeypatch.setattr(contrast, "clean", lambda run: metrics.extend(read_metrics(run)) or shutil.rmtree(run))
    assert train(folder, corpus, out) == 0
    errors = [entry["error"] for entry in metrics if "error" in entry]
    assert len(errors) == 5
    assert errors[-1] < 0.8 * errors[0]
    assert f"{errors[-1]:.3f} (step 20)" in (out / "README.md").read_text()
    assert manifests.damage(out) is None
    before, after = (AutoModelForMaskedLM.from_pretrained(own) for own in (folder, out))
    assert type(after) is LinformerForMaskedLM
    assert torch.equal(before.head.dense.weight, after.head.dense.weight)
    assert after.head.decoder.weight is after.linformer.embeddings.word_embeddings.weight
    for name, value in AutoModel.from_pretrained(out).state_dict().items():  # one file serves both
        assert torch.equal(value, after.linformer.state_dict()[name])
    queries = [own.linformer.layers[0].attention.query.weight for own in (before, after)]
    assert not torch.equal(*queries)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


@pytest.mark.parametrize("kind", ["plain", "cls"])
def test_its_folder_is_one_of_sentence_transformers(kind, corpus, tmp_path):
    """A plain model gets the mean of all tokens; what the folder of a model says comes along."""
    folder, out = source(tmp_path / "in", LinformerModel), tmp_path / "out"
    if kind == "cls":
        train(folder, corpus, tmp_path / "first", steps=1)
        shutil.move(tmp_path / "first", folder := tmp_path / "described")
        described = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(described))
    train(folder, corpus, out, steps=1)
    modules = json.loads((out / "modules.json").read_text())
    assert [module["type"].split(".")[-1] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    modes = json.loads((out / "1_Pooling" / "config.json").read_text())
    assert modes == {
        "word_embedding_dimension": 16,
        f"pooling_mode_{'cls_token' if kind == 'cls' else 'mean_tokens'}": True,
    }
    assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == 32
    assert LinformerConfig.from_pretrained(out).architectures == ["LinformerModel"]
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(out), device="cpu")
    texts = ["abc" * 9, "quick fox"]
    ids = AutoTokenizer.from_pretrained(out)(texts, padding=True, return_tensors="pt")
    states = AutoModel.from_pretrained(out).eval()(**ids).last_hidden_state
    pool = pooling.first_real_token if kind == "cls" else pooling.mean_of_real_tokens
    vectors = torch.nn.functional.normalize(pool(states, ids["attention_mask"]), dim=-1)
    torch.testing.assert_close(torch.tensor(model.encode(texts)), vectors.detach(), rtol=0, atol=1e-5)


def test_an_interrupted_run_resumes(corpus, tmp_path):
    folder, out = source(tmp_path / "in"), tmp_path / "out"
    train(folder, corpus, tmp_path / "straight")
    with interrupted(9):
        assert train(folder, corpus, out) == 128 + signal.SIGTERM
    assert not out.exists()
    with refused("learning_rate was 0.003 and is now 0.1"):
        train(folder, corpus, out, learning_rate=0.1)
    assert train(folder, corpus, out) == 0
    assert weights_of(out) == weights_of(tmp_path / "straight") != weights_of(folder)


def test_what_is_refused(corpus, tmp_path):
    folder = source(tmp_path / "in", LinformerForSequenceClassification)
    with refused("is a LinformerForSequenceClassification, but this takes a LinformerModel or a LinformerFor"):
        train(folder, corpus, tmp_path / "out")
    with refused("is not an empty folder: choose a new one"):
        train(folder, corpus, folder)
    with refused("contains no model"):
        train(tmp_path, corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pairs_depend_on_seed_and_number_alone():
    rows = [{"input_ids": np.arange(100, 200), "title": [7, 8], "label": 0}]
    rows.append({"input_ids": np.arange(50), "title": None, "label": 1})
    prefixes = {"document": [2, 4], "query": [2, 5]}
    first, second = (Pairs(rows * 40, 0, prefixes, [3]) for _ in range(2))
    titles = 0
    for index in range(80):
        pair = first[index]
        assert all((pair[name] == second[index][name]).all() for name in ("input_ids", "query"))
        text = rows[index % 2]["input_ids"]
        assert pair["input_ids"].tolist() == [2, 4, *text, 3]
        query = pair["query"].tolist()
        assert (query[:2], query[-1]) == ([2, 5], 3)
        if query[2:-1] == [7, 8]:
            titles += 1
        else:
            start = query[2] - text[0]
            assert query[2:-1] == text[start : start + (40 if index % 2 == 0 else 25)].tolist()
    assert 10 < titles < 30  # of the 40 documents with a title
    assert len({first[index]["query"].tobytes() for index in range(1, 80, 2)}) > 10
    other = Pairs(rows * 40, 1, prefixes, [3])
    assert any(first[index]["query"].tolist() != other[index]["query"].tolist() for index in range(80))


def test_the_contrastive_loss_is_infonce_of_all_documents_at_once():
    vectors = torch.nn.functional.normalize(torch.randn(20, 6), dim=-1)

    class Model(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return SimpleNamespace(last_hidden_state=vectors[input_ids])

    trainer = SimpleNamespace(pool=pooling.mean_of_real_tokens, temperature=0.1)
    trainer.vectors = lambda *inputs: ContrastiveTrainer.vectors(trainer, *inputs)
    documents, queries = torch.arange(10)[:, None], torch.arange(10, 20)[:, None]
    inputs = {"input_ids": documents, "query_input_ids": queries}
    inputs |= {"attention_mask": torch.ones_like(documents), "query_attention_mask": torch.ones_like(queries)}
    scores = vectors[10:] @ vectors[:10].T / 0.1
    for labels in (torch.arange(10), torch.tensor([0, 1, 2, 3, 3, 5, 6, 7, 3, 9])):
        for i, j in ((3, 4), (3, 8), (4, 8)) if labels[4] == 3 else ():  # the same title: no negatives
            scores[i, j] = scores[j, i] = -torch.inf
        expected = -(scores.log_softmax(1) + scores.log_softmax(0)).diagonal().mean() / 2
        found = ContrastiveTrainer.compute_loss(trainer, Model(), {**inputs, "labels": labels})
        torch.testing.assert_close(found, expected)


def test_titled_documents_in_parts(tmp_path):
    rows = [{"title": "a title", "text": "abcdefghij" * 2}, {"title": None, "text": "kl"}, {"title": "x", "text": "m"}]
    encoded = encode_titled([small.write_table(tmp_path / "a.jsonl", rows * 2)], tokenizer(), 12, special=4)
    letters = ["".join(tokenizer().convert_ids_to_tokens(row["input_ids"])) for row in encoded]
    assert letters == ["abcdefgh", "ijabcdef", "ghij", "kl"] * 2
    assert [row["title"] and len(row["title"]) for row in encoded] == [7, None, None, None] * 2
    assert [row["label"] for row in encoded] == [0, 0, 0, 3, 0, 0, 0, 7]
    with refused("contrast has 1 document, but it takes at least 4"):
        encode_titled([small.write_table(tmp_path / "b.jsonl", rows[1:])], tokenizer(), 12, special=4)
