"""A model to ship: small files that load as the model they were made of, rounded."""

import json

import torch
from benchmarks import bundle as bundling
from benchmarks.bundle import bundle
from transformers import AutoModel, AutoModelForMaskedLM

from linformers import LinformerForMaskedLM, files
from linformers.pooling import write_mean_pooling
from linformers.training import checkpoints, recipe

from ..modes import refused
from ..training import small
from ..training.test_adopt import tokenizer
from ..training.test_contrast import source
from ..training.test_recipe import RECIPES


def test_a_model_of_32_megabytes_in_files_of_16(tmp_path):
    """The largest variant of the recipe of the bundled model."""
    config = recipe.read(RECIPES / "english-long.yaml", ["variant=deep"]).config(vocab_size=16_384)
    torch.manual_seed(0)
    LinformerForMaskedLM(config).save_pretrained(tmp_path / "in")
    tokenizer().save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "README.md").write_text("# A card\n")
    write_mean_pooling(tmp_path / "in", 8192, 256)
    out = tmp_path / "out"
    bundle(tmp_path / "in", out)
    shards = sorted(out.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(path.stat().st_size <= 16e6 for path in shards)
    assert 30e6 < sum(path.stat().st_size for path in shards) <= 32e6
    assert files.damage(out) is None
    assert {path.name for path in shards} < files.read_manifest(out).keys()
    assert (out / "README.md").read_text() == "# A card\n"
    assert json.loads((out / "1_Pooling" / "config.json").read_text())["word_embedding_dimension"] == 256
    loaded, before = (AutoModelForMaskedLM.from_pretrained(folder) for folder in (out, tmp_path / "in"))
    assert loaded.dtype == torch.float32
    assert loaded.head.decoder.weight is loaded.linformer.embeddings.word_embeddings.weight
    for (name, value), expected in zip(loaded.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(value, expected.bfloat16().float()), name
    encoder = AutoModel.from_pretrained(out)
    assert all(
        torch.equal(own, other) for own, other in zip(encoder.parameters(), loaded.linformer.parameters(), strict=True)
    )
    checkpoints.verify(out, False, small.QUIET)
    small.flip(shards[1])
    with refused(f"{shards[1].name} has sha256"):
        AutoModelForMaskedLM.from_pretrained(out)


def test_what_is_refused(tmp_path, monkeypatch):
    folder = source(tmp_path / "in")
    with refused("is not an empty folder"):
        bundle(folder, folder)
    monkeypatch.setattr(bundling, "MAX_FILE", bundling.HEADER + 100)
    with refused("word_embeddings.weight, which alone takes more than 100,100 bytes"):
        bundle(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
