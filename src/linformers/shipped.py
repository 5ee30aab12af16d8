"""The model that comes with the package."""

from pathlib import Path

ENGLISH = Path(__file__).parent / "english"


def pretrained() -> str:
    """The folder of a small English model, for `from_pretrained` of any Linformer, Auto class or tokenizer."""
    return str(ENGLISH)
