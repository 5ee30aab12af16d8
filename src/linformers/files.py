"""JSON from files, which anyone may have written: what is read is small, shallow and an object, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import UserError

MAX_BYTES = 2**26
MAX_DEPTH = 64  # lists and objects in one another


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; any other content, and a file that cannot be read, raises a `UserError`."""
    return parse_json(read_bytes(path), path)


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a file of at most `most` bytes."""
    if not path.is_file():  # to open a named pipe could wait forever
        raise UserError(f"{path} is missing or not a file")
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise UserError(f"{path} has more than the {most:,} bytes that such a file may have")
    return content


def parse_json(content: str | bytes, where: object) -> dict[str, Any]:
    """The object in a JSON text; `where` names the text in errors."""
    too_deep = f"{where} is damaged: its lists and objects are nested more than {MAX_DEPTH} deep"
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise UserError(f"{where} is damaged: it is not JSON ({error})") from None
    except RecursionError:
        raise UserError(too_deep) from None
    if not isinstance(parsed, dict):
        raise UserError(f"{where} is damaged: it is not a JSON object")
    level: list[Any] = [parsed]
    for _ in range(MAX_DEPTH):
        parts = (part for own in level for part in (own.values() if isinstance(own, dict) else own))
        level = [part for part in parts if isinstance(part, dict | list)]
    if level:
        raise UserError(too_deep)
    return parsed
