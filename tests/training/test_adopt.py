"""`linformers convert`: the folder that it writes, and its report."""

import io
import json
import logging
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from linformers import LinformerConfig, files
from linformers import pooling as pooling_of_texts
from linformers.convert import from_pretrained
from linformers.training import adopt, predict, rows
from linformers.training.contrast import Contrast
from linformers.training.distill import Batch, DistillationTrainer
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
    code = adopt.adopt(str(folder), out, **{**options, **CONFIG, **config})
    return json.loads((out / "conversion.json").read_text()) if code == 0 else code


@pytest.mark.parametrize("head", PIPELINES)
@pytest.mark.parametrize("kind", ["bert", "distilbert", "electra"])
def test_a_converted_folder(kind, head, text, tmp_path, monkeypatch):
    """It has the original's head and tokenizer, is intact, and works in a pipeline."""
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    out = tmp_path / "out"
    report = convert(source(tmp_path / "in", kind, head, id2label={0: "a", 1: "b"}), out, text)
    measure = "cosine" if head == "Model" else "agreement"
    rows = ["converted", "without projected keys", "without the local window"]
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


def test_a_short_model_has_fewer_keys_by_default(text, tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    out = tmp_path / "out"
    convert(source(tmp_path / "in"), out, text, length=40, projected_length=None, local_window=None)
    config = LinformerConfig.from_pretrained(out)
    assert (config.max_position_embeddings, config.projected_length, config.local_window) == (40, 20, 5)
    assert "# Linformer, n=40, k=20, w=5, linear, layerwise" in (out / "README.md").read_text()


def test_with_as_many_keys_as_tokens_nothing_changes(text, tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    folder = source(tmp_path / "in", "bert", "ForMaskedLM")
    options = {"length": 25, "projected_length": 25, "projection_init": "window", "local_window": 0}
    report = convert(folder, tmp_path / "out", text, **options)
    assert report["converted"] == {"agreement": 1.0}
    assert "without the local window" not in report
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


def test_a_fresh_process_computes_the_same(text, tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    out = tmp_path / "out"
    convert(source(tmp_path / "in"), out, text)
    ids = torch.randint(5, 31, (2, 60))
    torch.save(ids, tmp_path / "ids.pt")
    program = "import sys, torch, linformers; from transformers import AutoModel;"
    program += "states = AutoModel.from_pretrained(sys.argv[1])(torch.load(sys.argv[2])).last_hidden_state;"
    program += "torch.save(states.detach(), sys.argv[2])"
    subprocess.run([sys.executable, "-c", program, str(out), str(tmp_path / "ids.pt")], check=True)
    expected = from_pretrained(tmp_path / "in", **CONFIG)(ids).last_hidden_state
    torch.testing.assert_close(torch.load(tmp_path / "ids.pt"), expected.detach(), rtol=0, atol=1e-5)


def test_trainer(text, tmp_path, monkeypatch):
    """Transformers' own Trainer teaches a converted classifier to tell two letters apart."""
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    out = tmp_path / "out"
    convert(source(tmp_path / "in", "bert", "ForSequenceClassification"), out, text)
    model, loaded = AutoModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    examples = [{**loaded("ab"[label] * (30 + i)), "label": label} for i in range(16) for label in (0, 1)]
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=15, learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    options = {"train_dataset": examples, "eval_dataset": examples, "processing_class": loaded}
    trainer = Trainer(model, arguments, **options)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.5 * before
    trainer.save_model(tmp_path / "trained")
    assert len(pipeline("text-classification", model=str(tmp_path / "trained"))("aaaa")) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnx(text, tmp_path, monkeypatch):
    """The exported model computes the same for batches and lengths that it was not exported with."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    out = tmp_path / "out"
    convert(source(tmp_path / "in"), out, text)
    model = AutoModel.from_pretrained(out).eval()
    ids = torch.randint(5, 31, (3, 20))
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=64)}
    names = ["input_ids", "attention_mask"]
    inputs = dict(zip(names, (ids, torch.ones_like(ids)), strict=True))
    torch.onnx.export(
        model, (), tmp_path / "model.onnx", kwargs=inputs, dynamo=True, dynamic_shapes=dict.fromkeys(names, sizes),
        input_names=names, output_names=["last_hidden_state"], verbose=False,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for batch, length in ((1, 64), (4, 33)):
        ids = torch.randint(5, 31, (batch, length))
        mask = (torch.arange(length) < length - torch.arange(batch)[:, None]).long()
        (found,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        expected = model(ids, mask).last_hidden_state.detach()
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-4)


def sentence_folder(folder):
    """The folder of a small model of sentence-transformers."""
    source(folder)
    types = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(types.items())
    ]
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir()
    contents = {"modules.json": modules, "1_Pooling/config.json": pooling}
    contents["sentence_bert_config.json"] = {"max_seq_length": 25, "do_lower_case": False}
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def test_sentence_transformers(text, tmp_path, monkeypatch):
    """Its vectors of a long text are the normalized means of our hidden states."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    out = tmp_path / "out"
    convert(sentence_folder(tmp_path / "in"), out, text)
    card = (out / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card
    assert 'from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer(".")' in card
    assert "linformers embed DOCUMENTS --model . --out" in card
    model = sentence_transformers.SentenceTransformer(str(out), device="cpu")
    texts = ["abc" * 19, "quick fox"]
    ids = AutoTokenizer.from_pretrained(out)(texts, padding=True, return_tensors="pt")
    states = AutoModel.from_pretrained(out).eval()(**ids).last_hidden_state
    vectors = torch.nn.functional.normalize(pooling_of_texts.mean_of_real_tokens(states, ids["attention_mask"]), dim=-1)
    torch.testing.assert_close(torch.tensor(model.encode(texts)), vectors.detach(), rtol=0, atol=1e-5)


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
        pool = getattr(pooling_of_texts, name)
        monkeypatch.setattr(
            pooling_of_texts, name, lambda *inputs, name=name, pool=pool: seen.append(name) or pool(*inputs)
        )
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
        with refused("modules.json is damaged"):
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
    options = {"mixer_steps": 12, "without_window": 0.3, "short": 0.5, "cosine": 1.0}
    distilled(folder, tmp_path / "straight", text, corpus, **options)
    with interrupted(9):
        assert distilled(folder, out, text, corpus, **options) == 128 + signal.SIGTERM
    assert not (out / "config.json").exists()
    with refused("learning_rate was 0.003 and is now 0.1"):
        distilled(folder, out, text, corpus, **options, learning_rate=0.1)
    distilled(folder, out, text, corpus, **options)
    weights = [(own / "model.safetensors").read_bytes() for own in (out, tmp_path / "straight")]
    assert weights[0] == weights[1]
    assert not (tmp_path / "out.distillation").exists()


def contrasted(folder, out, text, corpus, **options):
    settings = Contrast(steps=20, batch_size=4, learning_rate=3e-3)
    return convert(folder, out, text, contrast=[corpus], contrast_settings=settings, **options)


def test_contrastive_training(text, tmp_path, monkeypatch):
    """It lowers the loss on held-out pairs, and its result is a model of its own."""
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    random, letters = np.random.default_rng(0), list("abcdefghijklmnopqrstuvwxyz")
    texts = ["".join(random.choice(random.choice(letters, 5), size=60)) for _ in range(200)]
    corpus = small.write_table(tmp_path / "topics.jsonl", [{"text": own} for own in texts])
    metrics, out = [], tmp_path / "out"
    monkeypatch.setattr(adopt, "clean", lambda run: metrics.extend(read_metrics(run)))
    contrasted(source(tmp_path / "in"), out, text, corpus)
    contrastive = tmp_path / "out-contrastive"
    errors = [entry["error"] for entry in metrics if "error" in entry]
    assert len(errors) == 5
    assert errors[-1] < 0.8 * errors[0]
    reports = [json.loads((folder / "conversion.json").read_text()) for folder in (out, contrastive)]
    assert reports[1]["before contrastive training"] == reports[0]["converted"] != reports[1]["converted"]
    cards = [(folder / "README.md").read_text() for folder in (out, contrastive)]
    assert ["by its title or 40 tokens" in card for card in cards] == [False, True]
    plain = tmp_path / "plain"
    convert(tmp_path / "in", plain, text)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, contrastive, plain)]
    assert weights[0] == weights[2] != weights[1]


def test_interrupted_contrastive_training_resumes_after_distillation(text, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    folder, out = source(tmp_path / "in"), tmp_path / "out"
    options = {"distill": [corpus], "settings": adopt.Settings(steps=3, batch_size=4)}
    contrasted(folder, tmp_path / "straight", text, corpus, **options)
    with interrupted(9 + 3):
        assert contrasted(folder, out, text, corpus, **options) == 128 + signal.SIGTERM
    assert not out.exists()
    with refused("start.hash was"):  # the same without distillation is another run
        contrasted(folder, out, text, corpus)
    contrasted(folder, out, text, corpus, **options)
    for end in ("", "-contrastive"):
        weights = [(tmp_path / f"{own}{end}" / "model.safetensors").read_bytes() for own in ("out", "straight")]
        assert weights[0] == weights[1]
    assert not list(tmp_path.glob("*.contrast")) + list(tmp_path.glob("*.distillation"))


def test_documents_in_chunks():
    ids = torch.tensor([[2, 10, 11, 12, 13, 14, 3, 0], [2, 20, 21, 22, 23, 24, 25, 3]])
    batch = Batch.of(ids, (ids != 0).long(), chunk=5, before=1, after=1, pad=0)
    assert batch.chunks.tolist() == [[2, 10, 11, 12, 3], [2, 13, 14, 3, 0], [2, 20, 21, 22, 3], [2, 23, 24, 25, 3]]
    assert batch.chunk_mask.tolist() == (batch.chunks != 0).long().tolist()
    tokens = [2, 10, 11, 12, 13, 14, 3, 2, *range(20, 26), 3]  # what is at the ends of documents has counterparts
    assert ids.flatten()[batch.places].tolist() == batch.chunks.flatten()[batch.chunk_places].tolist() == tokens
    short = batch.in_chunks()
    assert short.ids.flatten()[short.places].tolist() == batch.chunks[batch.chunks != 0].tolist()


def distillation(folder, tmp_path, steps=1, first_token=False, **settings):
    """A trainer for an identical copy with a window, which computes what the original computes."""
    teacher = AutoModel.from_pretrained(folder).eval()
    options = {"length": 25, "projected_length": 25, "projection_init": "window", "local_window": 3}
    student = from_pretrained(teacher, **options, initial_far_bias=None)
    arguments = TrainingArguments(str(tmp_path / "run"), report_to=[], disable_tqdm=True, use_cpu=True)
    settings = adopt.Settings(steps=steps, **settings)
    return DistillationTrainer(student, teacher, 9, 1, 1, settings, first_token, args=arguments), student


BATCH = {"input_ids": torch.tensor([[2, *range(5, 22), 3], [2, *range(9, 14), 3, *[0] * 12]])}
BATCH["attention_mask"] = (BATCH["input_ids"] != 0).long()


@pytest.mark.parametrize("kind", ["bert", "distilbert", "electra"])
def test_errors_of_a_student_that_equals_its_teacher_are_zero(kind, tmp_path):
    """On chunks, without its window: of mixers, of hidden states and of pooled vectors; not after a change."""
    folder = source(tmp_path / "in", kind)
    for first_token in (False, True):
        options = {"without_window": 1.0, "short": 1.0, "cosine": 1.0}
        losses = [distillation(folder, tmp_path, first_token=first_token, **options, mixer_steps=i) for i in (0, 1)]
        for trainer, student in losses:
            assert trainer.compute_loss(student, BATCH).item() == pytest.approx(0, abs=1e-8)
            assert [layer.attention.local_window for layer in student.layers] == [3] * 3
            torch.nn.init.normal_(student.layers[1].attention.value.weight)
            loss = trainer.compute_loss(student, BATCH)
            loss.backward()
            assert loss.item() > 0.01
    trainer, student = distillation(folder, tmp_path, mixer_steps=1, without_window=1.0, short=1.0)
    torch.nn.init.normal_(student.layers[0].attention.value.weight)
    trainer.compute_loss(student, BATCH).backward()  # later mixers are given the teacher's states
    gradients = [layer.attention.value.weight.grad.abs().sum() for layer in student.layers]
    assert gradients[0] > 1e-3
    torch.testing.assert_close(torch.stack(gradients[1:]), torch.zeros(2), rtol=0, atol=1e-5)


def test_the_window_and_long_documents_are_dropped_at_random(tmp_path):
    trainer, student = distillation(source(tmp_path / "in"), tmp_path, 200, without_window=0.25, short=0.5)
    seen = []
    trainer.error = lambda model, batch, cosine: seen.append((student.layers[0].attention.local_window, len(batch.ids)))
    for step in range(200):
        trainer.state.global_step = step
        trainer.compute_loss(student, BATCH)
    assert set(seen) == {(window, rows) for window in (0, 3) for rows in (2, 4)}
    shares = [sum(own[i] == value for own in seen) / 200 for i, value in ((0, 0), (1, 4))]
    assert shares == pytest.approx([0.25, 0.5], abs=0.1)
    again = list(seen)
    seen.clear()
    for step in (17, 3):
        trainer.state.global_step = step
        trainer.compute_loss(student, BATCH)
    assert seen == [again[17], again[3]]


@pytest.mark.parametrize("settings", [{"mixer_steps": 21}, {"without_window": 1.5}, {"short": -1}, {"cosine": "a"}])
def test_wrong_settings(settings):
    (name,) = settings
    with refused(f"{name}={settings[name]!r} must be a number from 0 to"):
        adopt.Settings(steps=20, **settings)


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
    with refused("--steps, --batch-size and --learning-rate have no effect without --distill"):
        convert(folder, tmp_path / "out", text, settings=adopt.Settings())
    with refused("--contrast-steps, -batch-size and -learning-rate have no effect without --contrast"):
        convert(folder, tmp_path / "out", text, contrast_settings=Contrast())
    head = source(tmp_path / "head", "bert", "ForMaskedLM")
    with refused("contrast trains vectors of texts, but the model is a BertForMaskedLM"):
        convert(head, tmp_path / "out", text, contrast=[text])
    assert not (tmp_path / "out").exists()


def test_the_manual_of_python_is_the_default_text():
    rows = adopt.encode_passages(tokenizer(), adopt.read([]), 512)
    assert len(rows) == adopt.PASSAGES
    assert all((len(row), row[0], row[-1]) == (512, 2, 3) for row in rows)


def test_distillation_that_lowers_the_agreement_is_named(text, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "SECONDS", 0.0)
    folder, console = source(tmp_path / "in"), Console(file=io.StringIO(), width=500)
    settings = adopt.Settings(steps=4, learning_rate=1.0)
    report = convert(folder, tmp_path / "out", text, distill=[corpus], settings=settings, console=console)
    was, now = (report[name]["cosine"] for name in ("before distillation", "converted"))
    assert f"lowered the cosine with the original from {was:.3f} to {now:.3f}: " in console.file.getvalue()
    before = {"cosine": 0.9641, "correlation of similarities": 0.9}
    assert adopt.lowered(before, {"cosine": 0.9638, "correlation of similarities": 0.1}) == ""
    (message,) = adopt.lowered(before, {"cosine": 0.91, "correlation of similarities": 1.0}).splitlines()
    assert message.startswith("Distillation lowered the cosine with the original from 0.964 to 0.910: ")
    assert "--learning-rate" in message


def test_agreement():
    theirs = torch.nn.functional.normalize(torch.randn(5, 8), dim=-1)
    assert adopt.agreement(theirs, theirs) == pytest.approx({"cosine": 1, "correlation of similarities": 1})
    assert adopt.agreement(-theirs, theirs) == pytest.approx({"cosine": -1, "correlation of similarities": 1})
    assert adopt.agreement(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 0])) == {"agreement": 0.5}
