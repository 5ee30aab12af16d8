"""The bundled English model: small, loaded offline, and far better than chance."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
from typer.testing import CliRunner

import linformers
from linformers import demo
from linformers.training.finetune import load_encoder, new_classifier
from linformers_cli import app

# The word in braces is masked, and follows from its context: grammar, idiom, topic.
SENTENCES = """
He {was} born in 1902 and died in 1987.
The king and the {queen} lived in a great palace.
The second world {war} ended in 1945.
He was elected president of the United {States}.
She opened the {door} and went into the room.
The film was {directed} by a young American director.
In the north the winters are cold, and in the {south} they are mild.
The album was {released} in May by a small record label.
He studied law at the {University} of Cambridge.
"I do not {know}," he said.
The train left the {station} at noon.
The team {won} the match by two goals to one.
The novel was written in English and translated {into} French.
At the end of the day the sun {set} behind the hills.
The house was {built} in the eighteenth century.
The church was destroyed by {fire} and rebuilt ten years later.
They were married and had three {children}.
The company was {founded} in 1923 by two engineers.
""".strip().splitlines()


@pytest.fixture(scope="module")
def model():
    return linformers.LinformerForMaskedLM.from_pretrained(linformers.pretrained(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(linformers.pretrained())


def masked(sentence, tokenizer):
    """The sentence with its word masked, and the id of the word's token."""
    before, rest = sentence.split("{")
    word, after = rest.split("}")
    (token,) = tokenizer.encode((" " if before.endswith(" ") else "") + word, add_special_tokens=False)
    return before + tokenizer.mask_token + after, token


def test_it_is_small():
    folder = Path(linformers.pretrained())
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16 * 2**20
    for path in folder.glob("*.safetensors"):
        assert path.stat().st_size <= 16e6
        with safe_open(path, "pt") as weights:
            assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    assert {"README.md", "config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


@torch.no_grad()
def ranks(sentences, model, tokenizer):
    """The rank of the right word among all words, from 0."""
    found = []
    for text, token in (masked(sentence, tokenizer) for sentence in sentences):
        inputs = tokenizer(text, return_tensors="pt")
        scores = model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id]
        assert scores.shape == (1, len(tokenizer))
        found.append(int((scores > scores[:, token]).sum()))
    return found


def test_fills_masks_far_better_than_chance(model, tokenizer):
    found = ranks(SENTENCES, model, tokenizer)
    assert sum(rank < 5 for rank in found) >= 2 / 3 * len(SENTENCES)  # by chance: 0.01 sentences
    # A model that knew only word frequencies would not find the others.
    rare = [rank for sentence, rank in zip(SENTENCES, found, strict=True) if "{of}" not in sentence]
    assert sum(rank < 20 for rank in rare) >= 0.8 * len(rare)


def test_auto_classes_and_pipelines_load_it(tokenizer):
    folder = linformers.pretrained()
    loaded = AutoModelForMaskedLM.from_pretrained(folder)
    assert isinstance(loaded, linformers.LinformerForMaskedLM)
    assert loaded.dtype == torch.float32  # for training: most updates are too small for bfloat16
    (best, *_) = pipeline("fill-mask", model=folder)(f"He was elected president of the United {tokenizer.mask_token}.")
    assert best["token_str"] == " States"


@torch.no_grad()
def test_predict_needs_no_model(tmp_path, model, tokenizer):
    text = demo.SENTENCE
    (tmp_path / "lines.txt").write_text(f"{text}\n")
    result = CliRunner().invoke(app, ["predict", str(tmp_path / "lines.txt")], catch_exceptions=False)
    assert result.exit_code == 0
    best = json.loads(result.stdout)["guesses"][0]
    assert best["word"] == "children"
    inputs = tokenizer(text, return_tensors="pt")
    scores = model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id].softmax(-1)
    assert best["score"] == pytest.approx(float(scores.max()), abs=1e-5)  # the weights are stored in 16 bits


def test_fine_tuning_starts_in_32_bits():
    classifier = new_classifier(load_encoder(Path(linformers.pretrained()), 128), ["no", "yes"])
    assert {parameter.dtype for parameter in classifier.parameters()} == {torch.float32}
