"""One vector for each text, from the hidden states of its tokens; what a model's folder says about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .errors import UserError
from .files import read_json

POOLINGS = ("mean", "cls")
# The names of sentence-transformers for what precedes a document, in its order of preference.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


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

    @classmethod
    def of(cls, folder: Path) -> Pooling:
        """What the folder of a model says; the mean of all tokens, without prompts, if it says nothing."""
        if not (folder / "modules.json").exists():
            return cls()
        modules = read_json(folder / "modules.json")
        kinds = [str(part.get("type", "")).rsplit(".", 1)[-1] for part in modules if isinstance(part, dict)]
        if other := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
            raise UserError(
                f"{folder / 'modules.json'} has a module {other[0]!r}, which only sentence-transformers runs"
            )
        mode, include_prompt = "mean", True
        for path in sorted(folder.glob("*_Pooling/config.json")):
            settings = read_json(path)
            mode, include_prompt = _mode(settings, path), settings.get("include_prompt", True) is not False
        path, default = folder / "config_sentence_transformers.json", None
        prompts: dict[str, str] = {}
        if path.exists():
            settings = read_json(path)
            prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
            if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
                raise UserError(f"{path} is damaged: its prompts must be texts by name")
            if default is not None and default not in prompts:
                raise UserError(f"{path} is damaged: its default_prompt_name {default!r} is not one of its prompts")
        return cls(mode, include_prompt, prompts, default)

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


def _mode(settings: dict[str, object], path: Path) -> str:
    """The mode in a file of sentence-transformers, before and from 5.4 on."""
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    modes = [name.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens") for name in modes]
    if "pooling_mode" in settings:
        modes = [str(settings["pooling_mode"])]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise UserError(f"{path} has the pooling {' and '.join(modes) or 'none'!r}, expected one of {POOLINGS}")
    return modes[0]
