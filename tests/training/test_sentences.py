"""What the folder of a model says about vectors of texts."""

import json

from linformers.training.sentences import PROMPTS, SentencePooling

from .test_adopt import tokenizer


def test_prompts_of_sentence_transformers(tmp_path):
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / PROMPTS).write_text(json.dumps({"prompts": {"query": "ab", "passage": "c"}}))
    prompts = [SentencePooling(tmp_path).prompt(kind, tokenizer()) for kind in ("query", "document")]
    assert prompts == [tokenizer().convert_tokens_to_ids(list(own)) for own in ("ab", "c")]
    (tmp_path / PROMPTS).unlink()
    assert SentencePooling(tmp_path).prompt("query", tokenizer()) == []
