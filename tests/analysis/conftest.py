"""Small encoders of several kinds, with a tokenizer, in a folder; and a text."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from linformers import LinformerConfig

WORDS = [f"w{i}" for i in range(90)]
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}


def tokenizer(known=WORDS):
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", *known])}
    words = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}  # as BERT's has
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **special)


def encoder(kind):
    torch.manual_seed(0)
    config = {**SIZES, "vocab_size": 100, "max_position_embeddings": 40}
    short = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 16}
    special = {"pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
    configs = {
        "bert": hf.BertConfig(**config),
        "roberta": hf.RobertaConfig(**config),
        "mpnet": hf.MPNetConfig(**config),
        "distilbert": hf.DistilBertConfig(**short, vocab_size=100, max_position_embeddings=40),
        "albert": hf.AlbertConfig(embedding_size=16, **config),
        "twin": LinformerConfig(**config, projection="identity"),
        "linformer": LinformerConfig(**config, projected_length=8),
        "modernbert": hf.ModernBertConfig(**config, **special, local_attention=8),
        "t5": hf.T5Config(vocab_size=100, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2),
        "gpt2": hf.GPT2Config(vocab_size=100, n_embd=16, n_layer=3, n_head=2, n_positions=40),
    }
    model = hf.AutoModel.from_config(configs[kind])
    for parameter in model.parameters():  # far from uniform attention
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture
def folder(tmp_path):
    def save(kind):
        encoder(kind).save_pretrained(tmp_path / kind)
        tokenizer().save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return save


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    documents = [{"text": " ".join(rng.choice(WORDS, rng.integers(10, 200)))} for _ in range(30)]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(map(json.dumps, documents)))
    return str(path)
