"""The bundled English model."""

from pathlib import Path

ENGLISH = Path(__file__).parent / "english"


def pretrained() -> str:
    """The folder of a small English model, for `from_pretrained` of models, Auto classes and tokenizers."""
    return str(ENGLISH)
