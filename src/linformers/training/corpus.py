"""A corpus on disk: shards of token ids and a manifest, as `linformers prepare` writes them."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..checks import is_number
from ..errors import UserError
from ..files import damage, file_damage, parse_json, read_bytes, read_json, write_file

FORMAT = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
MAX_OPEN_SHARDS = 64

# The keys of a manifest and the types of their values: a list has one type, and integers are not negative.
SHARD: dict[str, Any] = {"file": str, "tokens": int, "bytes": int, "sha256": str}
SPLIT: dict[str, Any] = {"documents": int, "tokens": int, "shards": [SHARD]}
SCHEMA: dict[str, Any] = {"format": int, "dtype": str, "vocab_size": int, "tokenizer": str, "eos_token_id": int}
SCHEMA |= {"sources": [str], "validation_sources": [str], "splits": {"train": SPLIT, "validation": SPLIT}}


@dataclass(frozen=True)
class Corpus:
    """A folder that `linformers prepare` wrote: the shards, the tokenizer and the manifest.

    The manifest has the keys of `SCHEMA`; the file also has a `sha256` of them. Its `dtype` is that of a token on disk,
    little-endian; its `tokenizer` is a hash; the `shards` of a split are in order.
    """

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Read and check the manifest, and check that all shards exist and have the right size."""
        path = folder / MANIFEST
        if not path.exists():
            raise UserError(f"data={str(folder)!r} holds no corpus: run linformers prepare")
        content = read_bytes(path)
        manifest = parse_json(content, path)
        if (version := manifest.get("format")) != FORMAT:
            raise UserError(f"{path} has format {version!r}, expected {FORMAT}: prepare the corpus again")
        manifest.pop("sha256", None)
        if content != _sealed(manifest):
            raise UserError(f"{path} is damaged: its sha256 is not that of its content; prepare the corpus again")
        if wrong := _mismatch(manifest, SCHEMA) or _contradiction(manifest):
            raise UserError(f"{path} is damaged: {wrong}")
        corpus = cls(folder, manifest)
        corpus.verify(hashes=False)
        return corpus

    def verify(self, hashes: bool = True) -> None:
        """Check the size of every shard and, with `hashes`, every hash, every token and the tokenizer."""
        for shard in self._shards():
            path = self.folder / shard["file"]
            if path.is_symlink():
                raise UserError(f"data={str(self.folder)!r} is damaged: {path} is a link, expected a file")
            if wrong := file_damage(path, shard["bytes"], shard["sha256"] if hashes else None):
                raise UserError(f"data={str(self.folder)!r} is damaged: {wrong}")
            if hashes and (most := np.memmap(path, self._dtype, mode="r").max()) >= self.vocab_size:
                raise UserError(f"{path} has the token {most}, expected tokens below vocab_size={self.vocab_size}")
        if not hashes:
            return
        if wrong := damage(self.folder / TOKENIZER):
            raise UserError(f"data={str(self.folder)!r} is damaged: {wrong}")
        if (actual := tokenizer_hash(self.folder / TOKENIZER)) != self.tokenizer_hash:
            raise UserError(f"{self.folder / TOKENIZER} has the hash {actual}, expected {self.tokenizer_hash}")

    def tokens(self, split: str) -> TokenStream:
        """All tokens of `train` or `validation`."""
        shards = self.manifest["splits"][split]["shards"]
        paths = [self.folder / shard["file"] for shard in shards]
        return TokenStream(paths, [shard["tokens"] for shard in shards], self._dtype)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer; its vocabulary and end-of-text token must be those of the manifest."""
        tokenizer = open_tokenizer(str(self.folder / TOKENIZER), f"data={str(self.folder)!r}")
        actual = {"vocab_size": vocabulary_size(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        for name, value in actual.items():
            if value != self.manifest[name]:
                expected = f"{name}={value}, expected {self.manifest[name]} as in {MANIFEST}"
                raise UserError(f"{self.folder / TOKENIZER} has {expected}: prepare the corpus again")
        return tokenizer

    @property
    def hash(self) -> str:
        """Identifies the content: the hash of the hashes of all shards."""
        hashes = [shard["sha256"] for shard in self._shards()]
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def tokenizer_hash(self) -> str:
        return self.manifest["tokenizer"]

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(self.manifest["dtype"]).newbyteorder("<")

    def _shards(self) -> list[dict[str, Any]]:
        return [shard for split in self.manifest["splits"].values() for shard in split["shards"]]


class TokenStream:
    """The tokens of several shards, `sizes` in each, as one memory-mapped array of `uint16` or `uint32`."""

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int], dtype: np.dtype):
        self.paths = list(paths)
        self.starts = [0, *accumulate(sizes)]
        self.dtype = dtype
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a pickled memory map would contain the whole shard

    def read(self, start: int, count: int) -> np.ndarray:
        """A copy of the tokens from `start` to `start + count`."""
        if not 0 <= start <= start + count <= len(self):
            raise UserError(f"tokens {start} to {start + count} are out of range: there are {len(self)}")
        parts = [np.empty(0, self.dtype)]
        for shard in range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, start + count)):
            offset = start - self.starts[shard]
            parts.append(self._map(shard)[max(0, offset) : offset + count])
        return np.concatenate(parts)

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            if len(self._maps) == MAX_OPEN_SHARDS:  # each map holds a file descriptor
                del self._maps[next(iter(self._maps))]
            self._maps[shard] = np.memmap(self.paths[shard], self.dtype, mode="r")
        return self._maps[shard]


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest, which makes a folder a corpus."""
    write_file(folder / MANIFEST, _sealed(manifest))


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    return max(tokenizer.get_vocab().values()) + 1


def open_tokenizer(name: str, where: str, **options: Any) -> Any:
    """A tokenizer from a folder or the hub; if it does not load, the error begins with `where`."""
    try:
        # A folder's own code never runs, not even if the first line on standard input answers yes.
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # the tokenizers library raises no class of its own
        reason = str(error).split("\n")[0]
        raise UserError(f"{where}: the tokenizer does not load: {reason}") from error


def tokenizer_hash(folder: Path) -> str:
    """The sha256 of the `tokenizer.json` in a folder, without padding and truncation."""
    content = read_json(folder / "tokenizer.json")
    content |= {"padding": None, "truncation": None}  # transformers saves those of the tokenizer's last call
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with their own hash."""
    sha256 = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": sha256}, indent=1) + "\n").encode()


def _mismatch(value: Any, schema: Any, name: str = "it") -> str | None:
    """Where a value does not have the types of a schema."""
    if isinstance(schema, type):
        right = is_number(value, int) and value >= 0 if schema is int else isinstance(value, schema)
        return None if right else f"{name} has a wrong value, expected {schema.__name__}"
    if not isinstance(value, type(schema)):
        return f"{name} has a wrong value, expected {type(schema).__name__}"
    if isinstance(schema, list):
        parts = [(f"{name}[{number}]", part, schema[0]) for number, part in enumerate(value)]
    elif value.keys() != schema.keys():
        return f"{name} has wrong keys, expected {', '.join(schema)}"
    else:
        parts = [(key if name == "it" else f"{name}.{key}", value[key], part) for key, part in schema.items()]
    return next(filter(None, (_mismatch(part, own, full) for full, part, own in parts)), None)


def _contradiction(manifest: dict[str, Any]) -> str | None:
    """What is wrong with a manifest whose types are right."""
    widths = {"uint16": 2, "uint32": 4}
    if (width := widths.get(manifest["dtype"])) is None:
        return f"dtype is {manifest['dtype']!r}, expected one of {', '.join(widths)}"
    if not 0 < manifest["vocab_size"] <= 256**width:
        return f"vocab_size is {manifest['vocab_size']}, expected 1 to {256**width}"
    if manifest["eos_token_id"] >= manifest["vocab_size"]:
        return f"eos_token_id is {manifest['eos_token_id']}, expected a token below {manifest['vocab_size']}"
    for name, split in manifest["splits"].items():
        if split["tokens"] != sum(shard["tokens"] for shard in split["shards"]):
            return f"splits.{name}.tokens is {split['tokens']}, expected the sum of its shards"
        if not 0 < split["documents"] <= split["tokens"]:
            return f"splits.{name}.documents is {split['documents']}, expected 1 to {split['tokens']}"
        for number, shard in enumerate(split["shards"]):
            if shard["file"] != (expected := shard_name(name, number)):
                return f"splits.{name}.shards[{number}].file is {shard['file']!r}, expected {expected!r}"
            if not 0 < shard["bytes"] == shard["tokens"] * width:
                return f"{shard['file']} has {shard['tokens']} tokens in {shard['bytes']} bytes, expected {width} each"
    return None
