"""How a text becomes a vector: its special tokens, the prompts and the pooling of a sentence-transformers folder."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..files import read_json
from ..pooling import first_real_token, mean_of_real_tokens

# The files of a sentence-transformers folder that say how to make a vector of a text.
PROMPTS = "config_sentence_transformers.json"
SENTENCE_FILES = ("modules.json", PROMPTS, "sentence_bert_config.json")


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    letter = tokenizer("a", return_special_tokens_mask=True)
    ids, is_special = letter["input_ids"], letter["special_tokens_mask"]
    return ids[: is_special.index(0)], ids[len(ids) - is_special[::-1].index(0) :]


class SentencePooling:
    """How a folder of sentence-transformers makes a vector of a text; the mean of all tokens for other folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder if (folder / "modules.json").exists() else None
        self.first_token, self.prompts = False, {}
        if self.folder and (self.folder / PROMPTS).exists():
            prompts = read_json(self.folder / PROMPTS).get("prompts")
            self.prompts = prompts if isinstance(prompts, dict) else {}
        for path in sorted(folder.glob("*_Pooling/config.json")) if self.folder else []:
            modes = read_json(path)
            used = [name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True]
            if "pooling_mode" in modes:  # from sentence-transformers 5.4 on
                used = [f"pooling_mode_{modes['pooling_mode']}"]
            self.first_token = bool(used) and all("cls" in name for name in used)

    def prompt(self, kind: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens that come before each text of a kind, `"document"` or `"query"`."""
        prompts = [self.prompts.get(name) for name in ((kind, "passage") if kind == "document" else (kind,))]
        text = next((prompt for prompt in prompts if isinstance(prompt, str)), "")
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def pool(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        return (first_real_token if self.first_token else mean_of_real_tokens)(hidden_states, mask)

    def write(self, folder: Path, length: int) -> None:
        """Copy the description to the folder of a model that reads `length` tokens."""
        if self.folder is None:
            return
        for name in SENTENCE_FILES:
            if (self.folder / name).exists():
                shutil.copy(self.folder / name, folder / name)
        for module in read_modules(self.folder / "modules.json"):
            path = Path(str(module.get("path", "")))
            if path.name and path.name == str(path) and (self.folder / path / "config.json").exists():
                (folder / path).mkdir()
                shutil.copy(self.folder / path / "config.json", folder / path / "config.json")
        if (folder / "sentence_bert_config.json").exists():
            settings = read_json(folder / "sentence_bert_config.json") | {"max_seq_length": length}
            (folder / "sentence_bert_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def read_modules(path: Path) -> list[dict[str, Any]]:
    """The modules of a sentence-transformers folder."""
    modules = None
    with suppress(UserError):
        modules = read_json(path)
    if modules is None or not all(isinstance(module, dict) for module in modules):
        raise UserError(f"{path} is damaged: it is not a list of modules of sentence-transformers")
    return modules


def write_mean_pooling(folder: Path, length: int, size: int) -> None:
    """Describe vectors of `size` channels, the normalized mean of all tokens, to sentence-transformers."""
    paths = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(paths.items())
    ]
    contents: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
    }
    (folder / "1_Pooling").mkdir()
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
