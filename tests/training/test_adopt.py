"""`linformers convert`: the folder that it writes, and its report."""

import json
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, PreTrainedTokenizerFast, pipeline

from linformers import LinformerConfig, files
from linformers.training import adopt, predict, rows
from linformers.training.distill import DistillationTrainer
from linformers.training.trainer import read_metrics

from ..modes import refused
from ..test_convert import original
from . import small
from .test_trainer import interrupted

CONFIG = {"length": 64, "projected_length": 8, "local_window": 4}
PIPELINES = {
    "Model": "feature-extraction",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
}
PIPELINES |= {"ForTokenClassification": "token-classification", "ForQuestionAnswering": "question-answering"}


def tokenizer():
    """BERT's kind, with one token for each letter."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    letters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    letters.normalizer, letters.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Split("", "isolated")
    letters.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=letters, mask_token="[MASK]", **special)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog and sleeps. " * 20)
    return tmp_path / "text.txt"


def source(folder, kind="bert", head="Model", **fields):
    """The folder of a small model with its tokenizer."""
    original(kind, head, pad_token_id=0, **fields).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def convert(folder, out, text, **config):
    options = {"text": [text], "console": small.QUIET, "command": "linformers convert"}
    code = adopt.adopt(str(folder), out, **options, **{**CONFIG, **config})
    return json.loads((out / "conversion.json").read_text()) if code == 0 else code


@pytest.mark.parametrize("head", PIPELINES)
@pytest.mark.parametrize("kind", ["bert", "distilbert", "electra"])
def test_a_converted_folder(kind, head, text, tmp_path, monkeypatch):
    """It has the original's head and tokenizer, is intact, and works in a pipeline."""
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    out = tmp_path / "out"
    report = convert(source(tmp_path / "in", kind, head, id2label={0: "a", 1: "b"}), out, text)
    measure = "cosine" if head == "Model" else "agreement"
    rows = ["converted", "without projected", "without window"]
    assert [0 <= report[row][measure] <= 1 for row in rows] == [True] * 3
    assert files.damage(out) is None
    config, loaded = LinformerConfig.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert (config.max_position_embeddings, config.projected_length, config.local_window) == (64, 8, 4)
    assert (loaded.model_max_length, loaded.vocab_size) == (64, 31)
    if head == "ForQuestionAnswering":  # which has no pipeline anymore
        assert AutoModelForQuestionAnswering.from_pretrained(out).config.architectures == [f"Linformer{head}"]
    else:
        assert len(pipeline(PIPELINES[head], model=str(out))("the quick [MASK] fox")) > 0
    assert f"pipeline_tag: {PIPELINES[head]}" in (out / "README.md").read_text()


def test_with_as_many_keys_as_tokens_nothing_changes(text, tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    folder = source(tmp_path / "in", "bert", "ForMaskedLM")
    options = {"length": 25, "projected_length": 25, "projection_init": "window", "local_window": 0}
    report = convert(folder, tmp_path / "out", text, **options)
    assert report["converted"] == {"agreement": 1.0}
    assert "without window" not in report
    found, expected = (pipeline("fill-mask", model=str(own))("the [MASK] fox") for own in (tmp_path / "out", folder))
    assert [guess["token"] for guess in found] == [guess["token"] for guess in expected]


def test_it_loads_in_a_fresh_process_and_in_our_commands(text, tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    out = tmp_path / "out"
    convert(source(tmp_path / "in", "electra", "ForSequenceClassification"), out, text)
    program = "import sys, linformers; from transformers import AutoModelForSequenceClassification as auto;"
    program += "print(type(auto.from_pretrained(sys.argv[1])).__name__)"
    result = subprocess.run([sys.executable, "-c", program, str(out)], check=True, capture_output=True, text=True)
    assert result.stdout == "LinformerForSequenceClassification\n"
    with (tmp_path / "answers.jsonl").open("w") as file:
        predict.predict_lines(out, ["the quick fox"], file)
    assert json.loads((tmp_path / "answers.jsonl").read_text())["label"] in ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize("mode", ["mean", "cls"])
@pytest.mark.parametrize("layout", ["flags", "name"])
def test_pooling_of_sentence_transformers_comes_along(mode, layout, text, tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    folder, out = source(tmp_path / "in"), tmp_path / "out"
    (folder / "1_Pooling").mkdir()
    flags = {"pooling_mode_cls_token": mode == "cls", "pooling_mode_mean_tokens": mode == "mean"}
    pooling = {"word_embedding_dimension": 16, **(flags if layout == "flags" else {"pooling_mode": mode})}
    types = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": kind} for i, kind in enumerate(types)
    ]
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": 25, "do_lower_case": False}),
        ("config_sentence_transformers.json", {"prompts": {"query": "query: "}}),
    ):
        (folder / name).write_text(json.dumps(content))
    seen = []
    for name in ("mean_of_real_tokens", "first_real_token"):
        pool = getattr(adopt, name)
        monkeypatch.setattr(adopt, name, lambda *inputs, name=name, pool=pool: seen.append(name) or pool(*inputs))
    convert(folder, out, text)
    assert set(seen) == {"mean_of_real_tokens" if mode == "mean" else "first_real_token"}
    assert json.loads((out / "modules.json").read_text()) == modules
    assert json.loads((out / "1_Pooling" / "config.json").read_text()) == pooling
    assert json.loads((out / "sentence_bert_config.json").read_text()) == {"max_seq_length": 64, "do_lower_case": False}
    assert json.loads((out / "config_sentence_transformers.json").read_text())["prompts"] == {"query": "query: "}
    assert files.damage(out) is None
    assert rows.load_tokenizer(out).model_max_length == 64  # as our commands load it
    for spoiled in ("{}", "[1]", "[" * 10**5):
        (folder / "modules.json").write_text(spoiled)
        with refused("modules.json is damaged: it is not a list of modules"):
            convert(folder, tmp_path / f"out-{len(spoiled)}", text)


def distilled(folder, out, text, corpus, **settings):
    settings = adopt.Settings(**{"steps": 20, "batch_size": 4, "learning_rate": 3e-3, **settings})
    return convert(folder, out, text, distill=[corpus], settings=settings)


@pytest.fixture
def corpus(tmp_path):
    """Documents of different lengths, some longer than the model reads."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 150, size=40)
    texts = ["".join(random.choice(list("abcdefghijklmnopqrstuvwxyz "), size=length)) for length in lengths]
    return small.write_table(tmp_path / "corpus.jsonl", [{"text": own} for own in texts])


def test_distillation_lowers_the_error(text, corpus, tmp_path, monkeypatch):
    """Of all hidden states, on held-out documents."""
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    metrics = []
    monkeypatch.setattr(adopt, "clean", lambda run: metrics.extend(read_metrics(run)))
    report = distilled(source(tmp_path / "in", "bert"), tmp_path / "out", text, corpus, learning_rate=1e-2)
    assert report.keys() > {"before distillation", "converted"}
    assert "with whose weights it started, then distilled from it" in (tmp_path / "out" / "README.md").read_text()
    errors = [entry["error"] for entry in metrics if "error" in entry]
    assert len(errors) == 5
    assert errors[-1] < 0.8 * errors[0]


def test_an_interrupted_distillation_resumes(text, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    folder, out = source(tmp_path / "in", "electra", "ForSequenceClassification"), tmp_path / "out"
    distilled(folder, tmp_path / "straight", text, corpus)
    with interrupted(9):
        assert distilled(folder, out, text, corpus) == 128 + signal.SIGTERM
    assert not (out / "config.json").exists()
    with refused("learning_rate was 0.003 and is now 0.1"):
        distilled(folder, out, text, corpus, learning_rate=0.1)
    distilled(folder, out, text, corpus)
    weights = [(own / "model.safetensors").read_bytes() for own in (out, tmp_path / "straight")]
    assert weights[0] == weights[1]
    assert not (tmp_path / "out.distillation").exists()


def test_hidden_states_of_chunks():
    """Of a teacher that maps each token to itself and its place in its chunk."""

    class Teacher(torch.nn.Module):
        config = LinformerConfig(pad_token_id=0)

        def forward(self, ids, attention_mask, output_hidden_states):
            places = torch.arange(ids.shape[1]).expand_as(ids)
            return SimpleNamespace(hidden_states=[torch.stack([ids, places, attention_mask], -1)])

    ids = torch.tensor([[2, 10, 11, 12, 13, 14, 3, 0], [2, 20, 21, 22, 23, 24, 25, 3]])
    trainer = SimpleNamespace(teacher=Teacher(), chunk=5, before=1, after=1)
    (states,), places = DistillationTrainer.states_of_chunks(trainer, ids, (ids != 0).long())
    assert states[:, 0].tolist() == ids.flatten()[places].tolist() == [2, 10, 11, 12, 13, 14, 2, *range(20, 26)]
    assert states[:, 1].tolist() == [0, 1, 2, 3, 1, 2, 0, 1, 2, 3, 1, 2, 3]
    assert states[:, 2].all()


def test_wrong_arguments(text, tmp_path):
    folder = source(tmp_path / "in")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with refused(f"out='{tmp_path / 'full'}' is not an empty folder: choose a new one"):
        convert(folder, tmp_path / "full", text)
    (tmp_path / "short.txt").write_text("short")
    with refused("text has 0 passages of 25 tokens, but comparing takes at least 2"):
        convert(folder, tmp_path / "out", tmp_path / "short.txt")
    with refused("projected_length=65 exceeds max_position_embeddings=64"):
        convert(folder, tmp_path / "out", text, projected_length=65)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with refused("has no tokenizer files"):
        convert(folder, tmp_path / "out", text)
    shutil.rmtree(folder)
    with refused("is neither a folder nor a name on the hub that can be reached"):
        convert(folder, tmp_path / "out", text)
    with refused("steps, batch_size and learning_rate have no effect without distill"):
        convert(folder, tmp_path / "out", text, settings=adopt.Settings())
    assert not (tmp_path / "out").exists()


def test_the_manual_of_python_is_the_default_text():
    rows = adopt.encode_passages(tokenizer(), adopt.read([]), 512)
    assert len(rows) == adopt.PASSAGES
    assert all((len(row), row[0], row[-1]) == (512, 2, 3) for row in rows)


def test_agreement():
    theirs = torch.nn.functional.normalize(torch.randn(5, 8), dim=-1)
    assert adopt.agreement(theirs, theirs) == pytest.approx({"cosine": 1, "correlation of similarities": 1})
    assert adopt.agreement(-theirs, theirs) == pytest.approx({"cosine": -1, "correlation of similarities": 1})
    assert adopt.agreement(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 0])) == {"agreement": 0.5}
