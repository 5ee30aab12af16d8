"""One vector for each text, from the hidden states of its tokens; what a model's folder says about it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import UserError
from .files import read_json

POOLINGS = ("mean", "cls")
# The names of sentence-transformers for what precedes a document, in its order of preference.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# The files of a sentence-transformers folder that say how to make a vector of a text.
MODULES, PROMPTS, SETTINGS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"


def first_real_token(hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """The hidden state (b, d) of the first real token of each row."""
    if mask is None:
        return hidden_states[:, 0]
    first = mask.bool().int().argmax(1).to(hidden_states.device)  # (b,)
    return hidden_states.gather(1, first[:, None, None].expand(-1, 1, hidden_states.shape[2])).squeeze(1)


def mean_of_real_tokens(hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """The mean (b, d) of the hidden states of the real tokens of each row; 0 if there are none."""
    if mask is None:
        return hidden_states.mean(1)
    real = mask.bool().to(hidden_states.device)[:, :, None]  # (b, n, 1)
    total = hidden_states.masked_fill(~real, 0).sum(1, dtype=torch.promote_types(hidden_states.dtype, torch.float32))
    return (total / real.sum(1).clamp(min=1)).to(hidden_states.dtype)


@dataclass(frozen=True)
class Pooling:
    """How a model's folder makes a vector of a text: `of` reads the layout of sentence-transformers."""

    mode: str = "mean"  # "mean" or "cls", the first token
    include_prompt: bool = True  # whether the tokens of the prompt count in the mean
    prompts: dict[str, str] = field(default_factory=dict)  # what precedes a text, by the name of its purpose
    default_prompt: str | None = None  # the name of the prompt where no other fits
    folder: Path | None = None  # which says so, if there is one

    @classmethod
    def of(cls, folder: Path) -> Pooling:
        """What the folder of a model says; the mean of all tokens, without prompts, if it says nothing."""
        if not (folder / MODULES).exists():
            return cls()
        modules = read_json(folder / MODULES)
        if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
            raise UserError(f"{folder / MODULES} is damaged: it is not a list of modules of sentence-transformers")
        kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
        if other := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
            raise UserError(f"{folder / MODULES} has a module {other[0]!r}, which only sentence-transformers runs")
        mode, include_prompt = "mean", True
        for path in sorted(folder.glob("*_Pooling/config.json")):
            settings = read_json(path)
            mode, include_prompt = _mode(settings, path), settings.get("include_prompt", True) is not False
        path, default = folder / PROMPTS, None
        prompts: dict[str, str] = {}
        if path.exists():
            settings = read_json(path)
            prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
            if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
                raise UserError(f"{path} is damaged: its prompts must be texts by name")
            if default is not None and default not in prompts:
                raise UserError(f"{path} is damaged: its default_prompt_name {default!r} is not one of its prompts")
        return cls(mode, include_prompt, prompts, default, folder)

    def pool(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        """The vectors (b, d) of hidden states (b, n, d), not normalized."""
        return (first_real_token if self.mode == "cls" else mean_of_real_tokens)(hidden_states, mask)

    def prompt(self, purpose: str) -> str:
        """What precedes a text: purpose is `"document"`, `"query"`, `"none"`, or the name of one of the prompts."""
        if purpose == "none":
            return ""
        names = DOCUMENT_PROMPTS if purpose == "document" else (purpose,)
        for name in (*names, self.default_prompt):
            if name in self.prompts:
                return self.prompts[name]
        if purpose not in ("document", "query"):
            known = ", ".join(map(repr, ("document", "query", "none", *self.prompts)))
            raise UserError(f"prompt={purpose!r} is not one of {known}")
        return ""

    def write(self, folder: Path, length: int) -> None:
        """Copy the description to the folder of a model that reads `length` tokens."""
        if self.folder is None:
            return
        for name in (MODULES, PROMPTS, SETTINGS):
            if (self.folder / name).exists():
                shutil.copy(self.folder / name, folder / name)
        for path in self.folder.glob("[0-9]*_*/config.json"):
            (folder / path.parent.name).mkdir()
            shutil.copy(path, folder / path.parent.name / path.name)
        if (folder / SETTINGS).exists():
            settings = read_json(folder / SETTINGS) | {"max_seq_length": length}
            (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def write_mean_pooling(folder: Path, length: int, size: int) -> None:
    """Describe vectors of `size` channels, the normalized mean of all tokens, to sentence-transformers."""
    paths = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(paths.items())
    ]
    contents: dict[str, Any] = {
        MODULES: modules,
        "1_Pooling/config.json": {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True},
        SETTINGS: {"max_seq_length": length, "do_lower_case": False},
    }
    (folder / "1_Pooling").mkdir()
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _mode(settings: dict[str, object], path: Path) -> str:
    """The mode in a file of sentence-transformers, before and from 5.4 on."""
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    modes = [name.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens") for name in modes]
    if "pooling_mode" in settings:
        modes = [str(settings["pooling_mode"])]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise UserError(f"{path} has the pooling {' and '.join(modes) or 'none'!r}, expected one of {POOLINGS}")
    return modes[0]
