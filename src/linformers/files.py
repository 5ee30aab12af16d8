"""Files: JSON that anyone may have written, folders that appear complete or not at all, and manifests of hashes.

A hash beside a file detects damage, not malice: anyone who changes the file can change the hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .errors import UserError

MAX_BYTES = 2**26
MAX_DEPTH = 64  # lists and objects in one another

MANIFEST = "manifest.json"
# The files of a model, and of its tokenizer, that a manifest covers.
MODEL_FILES = ("config.json", "linformer_classes.py", "model*.safetensors", "model*.safetensors.index.json")
TOKENIZER_FILES = ("*token*.json",)


# sentence-transformers writes a list, everyone else an object.
LISTS = ("modules.json",)


def read_json(path: Path) -> Any:
    """The object in a JSON file, or the list in one of `LISTS`; anything else raises a `UserError`."""
    return parse_json(read_bytes(path), path, list if path.name in LISTS else dict)


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


def parse_json(content: str | bytes, where: object, kind: type | tuple[type, ...] = dict) -> Any:
    """The object in a JSON text, or the list; `where` names the text in errors."""
    too_deep = f"{where} is damaged: its lists and objects are nested more than {MAX_DEPTH} deep"
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise UserError(f"{where} is damaged: it is not JSON ({error})") from None
    except RecursionError:
        raise UserError(too_deep) from None
    if not isinstance(parsed, kind):
        raise UserError(f"{where} is damaged: it is not a JSON {'list' if kind is list else 'object'}")
    level: list[Any] = [parsed]
    for _ in range(MAX_DEPTH):
        parts = (part for own in level for part in (own.values() if isinstance(own, dict) else own))
        level = [part for part in parts if isinstance(part, dict | list)]
    if level:
        raise UserError(too_deep)
    return parsed


def write_file(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file atomically."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    _flush(unfinished)
    unfinished.replace(path)


def write_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Create `folder` atomically: a kill at any time leaves either the complete folder or none.

    `fill` writes the files to a temporary folder. They are hashed into a manifest and flushed to disk, and one rename
    puts them in place.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        fill(unfinished)
        write_manifest(unfinished)
        for path in filter(Path.is_file, unfinished.iterdir()):
            path.chmod(0o644)  # safetensors makes files readable for their owner only
            _flush(path)
        _flush(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if folder.exists():  # a damaged one
        remove_folder(folder)
    unfinished.rename(folder)
    _flush(folder.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder under another name, so that a kill never leaves half of it under its own."""
    doomed = folder.with_name(f".{folder.name}.removed.unfinished")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot flush folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, patterns: Sequence[str] = ("*",)) -> None:
    """List the files of a folder that match, with size and hash. Other files remain listed as they were."""
    entries: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        entries = {name: entry for name, entry in read_manifest(folder).items() if (folder / name).exists()}
    for path in folder.iterdir():
        # Model cards are edited, and hidden files belong to others.
        skipped = path.name == MANIFEST or path.suffix == ".md" or path.name.startswith(".")
        if path.is_file() and not skipped and _matches(path.name, patterns):
            entries[path.name] = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    write_file(folder / MANIFEST, json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The files that the manifest of a folder lists, each with its size in `bytes` and its `sha256`."""
    manifest = read_json(path := folder / MANIFEST)
    if not manifest or any(not isinstance(file, dict) or {*file} != {"bytes", "sha256"} for file in manifest.values()):
        raise UserError(f"{path} is damaged: it is not a list of files with their sizes and hashes")
    return manifest


def states(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """The files that the manifest of a folder lists, and what is wrong with each; `None` if it is intact."""
    for name, file in read_manifest(folder).items():
        yield folder / name, file_damage(folder / name, file["bytes"], file["sha256"])


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that has a manifest; `None` if it is intact."""
    try:
        return next((wrong for _, wrong in states(folder) if wrong), None)
    except UserError as error:
        return str(error)


def check_files(folder: Path, patterns: Sequence[str]) -> None:
    """Check the files that match against the manifest of their folder, if it has one.

    Only the files of a tokenizer may be missing in it: a tokenizer is often saved later than its model.
    """
    for path in folder.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):  # such as a pipe, which could be read forever
            raise UserError(f"{path} is neither a file nor a folder")
    if not (folder / MANIFEST).exists():
        return
    manifest = read_manifest(folder)
    for name in sorted({*manifest, *(path.name for path in folder.iterdir())}):
        if not _matches(name, patterns):
            continue
        if name in manifest:
            wrong = file_damage(folder / name, manifest[name]["bytes"], manifest[name]["sha256"])
        else:
            wrong = None if _matches(name, TOKENIZER_FILES) else f"{folder / name} is not listed in {MANIFEST}"
        if wrong:
            raise UserError(f"{wrong}; restore it or, if it was changed on purpose, run: {accepting(folder)}")


def accepting(folder: Path) -> str:
    """The command after which the files of a folder count as intact."""
    return f"linformers verify {shlex.quote(str(folder))} --accept"


def file_damage(path: Path, size: int, sha256: str | None = None) -> str | None:
    """What is wrong with a file of known size and, if given, hash; `None` if it is intact."""
    if not path.is_file():
        return f"{path} is missing, expected {size} bytes"
    if path.stat().st_size != size:
        return f"{path} has {path.stat().st_size} bytes, expected {size}"
    if sha256 is not None and (actual := file_hash(path)) != sha256:
        return f"{path} has sha256 {actual}, expected {sha256}"
    return None


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
