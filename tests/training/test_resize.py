"""`linformers resize`: a folder for longer input."""

import json

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from linformers import LinformerForMaskedLM, LinformerForSequenceClassification, files
from linformers.training import resize
from linformers.training.embed import Embedder

from ..modes import refused
from . import small
from .test_embed import sentence_folder


def run(model, out, **options):
    resize.resize(model, out, console=small.QUIET, command="linformers resize", **options)
    return out


@pytest.mark.parametrize("head", ["masked", "labels"])
def test_a_longer_model(head, model, tuned, tmp_path):
    """At the same n/k, what it could read before gives the same; its tokenizer knows the new length."""
    folder, kind = (
        (model, LinformerForMaskedLM)
        if head == "masked"
        else (
            tuned / "model",
            LinformerForSequenceClassification,
        )
    )
    out = run(folder, tmp_path / "out", length=64, projected=16)
    before, after = (kind.from_pretrained(own).eval() for own in (folder, out))
    ids = torch.randint(5, 300, (2, 32))
    torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=0, atol=1e-5)
    assert after(torch.randint(5, 300, (1, 64))).logits.isfinite().all()
    assert after.config.id2label == before.config.id2label
    assert AutoTokenizer.from_pretrained(out).model_max_length == 64
    assert files.damage(out) is None
    assert "which has n = 32 and k = 8" in (out / "README.md").read_text()


def test_the_layout_of_sentence_transformers_comes_along(random, tmp_path):
    folder = sentence_folder(random, tmp_path / "in", "cls", {"query": "the "})
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    out = run(folder, tmp_path / "out", length=100)
    assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == 100
    embedder = Embedder(out)
    assert (embedder.mode, embedder.encoder.max_length, embedder.said.prompts) == ("cls", 100, {"query": "the "})


def test_what_it_prints(model, tmp_path, capsys):
    for name, options, said in (
        ("same", {"length": 64, "projected": 16}, "; up to 32 tokens, it computes what it computed before\n"),
        ("other", {"length": 64}, f"train the result, as with linformers finetune --model {tmp_path / 'other'}\n"),
    ):
        out = tmp_path / name
        resize.resize(model, out, console=Console(width=500), command="", **options)
        printed = capsys.readouterr().out
        assert printed.startswith(f"model for n=64 in {out}; ")
        assert printed.endswith(said)


def test_wrong_arguments(model, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for folder, options, message in [
        (model, {"out": tmp_path / "full"}, "is not an empty folder: choose a new one"),
        (model, {"length": 0}, "length=0 must be a positive integer"),
        (model, {"length": 4}, "max_length=4 is below k=8: pass projected_length=4 or less"),
        (model, {"projected": 65}, "projected_length=65 exceeds max_position_embeddings=64"),
        (tmp_path, {}, "contains no model"),
    ]:
        with refused(message):
            run(folder, **{"out": tmp_path / "out", "length": 64, **options})
    assert not (tmp_path / "out").exists()
