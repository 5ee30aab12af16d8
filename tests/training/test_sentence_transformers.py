"""A Linformer's folder is one of sentence-transformers, also in a process that never imported us."""

import json
import subprocess
import sys

import numpy as np
import pytest

import linformers
from linformers import files

from ..modes import refused
from .test_embed import TEXTS, sentence_folder

pytest.importorskip("sentence_transformers")

# Load, encode, train with a loss, save, load again.
PROGRAM = """
import json, sys
import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss

folder, out, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
assert "linformers" not in sys.modules
model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
before = model.encode(texts, convert_to_numpy=True, normalize_embeddings=True)
data = Dataset.from_dict({"anchor": texts, "positive": texts[::-1]})
arguments = SentenceTransformerTrainingArguments(
    out + "-run", max_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True
)
SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model)).train()
model.save(out)
after = model.encode(texts, normalize_embeddings=True)
again = SentenceTransformer(out, trust_remote_code=True, device="cpu").encode(texts, normalize_embeddings=True)
np.savez(out + ".npz", before=before, after=after, again=again, length=model.max_seq_length)
"""


@pytest.mark.parametrize("layout", ["plain", "mean", "cls"])
def test_a_folder_in_a_fresh_process(layout, random, tmp_path):
    """Vectors are the same as ours, before and after training; a plain folder has the mean of tokens."""
    folder = random if layout == "plain" else sentence_folder(random, tmp_path / "model", layout)
    texts = [own for own in TEXTS if len(own.split()) < 20]
    arguments = [str(folder), str(tmp_path / "out"), json.dumps(texts)]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=200
    )
    assert result.returncode == 0, result.stderr
    found = np.load(tmp_path / "out.npz")
    assert found["length"] == 32
    assert np.abs(found["before"] - linformers.embed(texts, folder)).max() < 1e-5
    assert np.abs(found["after"] - linformers.embed(texts, tmp_path / "out")).max() < 1e-5
    assert np.abs(found["after"] - found["again"]).max() < 1e-6
    assert np.abs(found["after"] - found["before"]).max() > 1e-3
    assert files.damage(tmp_path / "out") is None


def test_a_folder_where_the_package_is_imported(random, tmp_path):
    """Without the flag that allows code beside a model."""
    from sentence_transformers import SentenceTransformer

    folder = sentence_folder(random, tmp_path / "model", "mean", {"query": "the fox "})
    model = SentenceTransformer(str(folder), device="cpu")
    texts = TEXTS[:1]
    for encode, prompt in ((model.encode_query, "query"), (model.encode_document, "document")):
        assert np.abs(encode(texts) - linformers.embed(texts, folder, prompt=prompt)).max() < 1e-5


def test_what_only_sentence_transformers_computes_is_refused(random, tmp_path):
    folder = sentence_folder(random, tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with refused("modules.json has a module 'Dense', which only sentence-transformers runs"):
        linformers.embed(TEXTS, folder)
    other = sentence_folder(random, tmp_path / "other", "max")
    with refused("has the pooling 'max', expected one of ('mean', 'cls')"):
        linformers.embed(TEXTS, other)
