"""A corpus on disk: shards of tokens with a manifest, written whole or not at all, read as memory maps."""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypedDict, cast

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..checks import check_choice
from ..errors import UserError
from .checkpointing import file_hash

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
OURS = re.compile(r"(train|validation)-\d{5,}\.bin(\.tmp)?|manifest\.json\.tmp")
UINT16_VOCABULARY = 2**16
OPEN_MAPS = 64


class Shard(TypedDict):
    """A file of tokens, little-endian."""

    file: str
    tokens: int
    bytes: int
    sha256: str


class Split(TypedDict):
    """The shards of `train` or `validation`, in order."""

    documents: int
    tokens: int
    shards: list[Shard]


class Manifest(TypedDict):
    """What `manifest.json` holds; without it a folder is no corpus."""

    format: int
    dtype: str
    vocab_size: int
    tokenizer: str
    eos_token_id: int
    sources: list[str]
    validation_sources: NotRequired[list[str]]  # of a corpus that was made before these were noted, unknown
    splits: dict[str, Split]


@dataclass(frozen=True)
class Corpus:
    """A folder that `prepare` has written.

    Args:
        folder: where the shards, the tokenizer and the manifest lie.
        manifest: what the manifest says.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Read the manifest of a corpus; each shard must be there and have its size."""
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise UserError(f"data={str(folder)!r} holds no corpus: run linformers prepare") from None
        except ValueError as error:
            raise UserError(f"{folder / MANIFEST} is damaged: {error}") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else None
            raise UserError(f"{folder / MANIFEST} has format {found!r}, expected {FORMAT}: run linformers prepare anew")
        corpus = cls(folder, cast(Manifest, manifest))
        for shard in corpus._shards():
            path = folder / shard["file"]
            if not path.is_file():
                raise UserError(f"shard {path} is missing, expected {shard['bytes']} bytes")
            if path.stat().st_size != shard["bytes"]:
                raise UserError(f"shard {path} has {path.stat().st_size} bytes, expected {shard['bytes']}")
        return corpus

    def verify(self) -> None:
        """Read all shards, and refuse any that is not what `prepare` wrote."""
        for shard in self._shards():
            path = self.folder / shard["file"]
            found = file_hash(path)
            if found != shard["sha256"]:
                size = f"{path.stat().st_size} bytes, expected {shard['bytes']}"
                raise UserError(f"shard {path} has sha256 {found}, expected {shard['sha256']} ({size})")
        found = tokenizer_hash(self.folder / TOKENIZER)
        if found != self.tokenizer_hash:
            raise UserError(f"{self.folder / TOKENIZER} has the hash {found}, expected {self.tokenizer_hash}")

    def tokens(self, split: str) -> TokenStream:
        """All tokens of `train` or `validation`."""
        check_choice("split", split, self.manifest["splits"])
        shards = self.manifest["splits"][split]["shards"]
        paths = [self.folder / shard["file"] for shard in shards]
        return TokenStream(paths, [shard["tokens"] for shard in shards], self.manifest["dtype"])

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return AutoTokenizer.from_pretrained(self.folder / TOKENIZER)

    @property
    def hash(self) -> str:
        """What tells this corpus from others: the hash of its shards' hashes."""
        hashes = [shard["sha256"] for shard in self._shards()]
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def eos_token_id(self) -> int:
        return self.manifest["eos_token_id"]

    @property
    def tokenizer_hash(self) -> str:
        return self.manifest["tokenizer"]

    def _shards(self) -> list[Shard]:
        return [shard for split in self.manifest["splits"].values() for shard in split["shards"]]


class TokenStream:
    """The tokens of a split as one array over its shards, mapped into memory where they are read.

    Args:
        paths: the shards, in order.
        sizes: how many tokens each holds.
        dtype: the type of a token, `uint16` or `uint32`.
    """

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int], dtype: str):
        self.paths = list(paths)
        self.starts = [0, *accumulate(sizes)]
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a pickled map would carry the whole shard

    def read(self, start: int, count: int) -> np.ndarray:
        """The tokens from `start` to `start + count`, as an array of its own."""
        if not 0 <= start <= start + count <= len(self):
            raise UserError(f"tokens {start} to {start + count} are not all among the {len(self)} of this stream")
        result = np.empty(count, self.dtype)
        done = 0
        while done < count:
            shard = bisect_right(self.starts, start + done) - 1
            offset = start + done - self.starts[shard]
            part = self._map(shard)[offset : offset + count - done]
            result[done : done + len(part)] = part
            done += len(part)
        return result

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            if len(self._maps) == OPEN_MAPS:  # each holds a file descriptor, of which a process has few
                del self._maps[next(iter(self._maps))]
            self._maps[shard] = np.memmap(self.paths[shard], self.dtype, mode="r")
        return self._maps[shard]


def tokenizer_hash(folder: Path) -> str:
    """The sha256 of the `tokenizer.json` in a folder, less padding and truncation.

    These two are not the tokenizer's own: transformers saves what its last call happened to ask for.
    """
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content |= {"padding": None, "truncation": None}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def token_dtype(vocabulary: int) -> np.dtype:
    """The type of a token on disk: two bytes where they suffice, otherwise four."""
    return np.dtype("uint16" if vocabulary <= UINT16_VOCABULARY else "uint32").newbyteorder("<")


def clear_unfinished(folder: Path) -> None:
    """Remove what a run that was killed has left in a folder without a manifest, and nothing else."""
    for path in folder.iterdir():
        if OURS.fullmatch(path.name):
            path.unlink()


class ShardWriter:
    """A split on its way to disk; a shard bears its name only once it is whole.

    Args:
        out: the folder.
        split: the split, with which the names begin.
        dtype: the type of a token on disk.
        shard_tokens: the most tokens in a shard.
    """

    def __init__(self, out: Path, split: str, dtype: np.dtype, shard_tokens: int):
        self.out = out
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.summary: Split = {"documents": 0, "tokens": 0, "shards": []}
        self.file: BinaryIO | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.file is not None:
            if kind is None:
                self._end()
            else:
                self.file.close()

    def write(self, ids: np.ndarray, documents: int) -> None:
        """Append tokens, with which so many documents end."""
        self.summary["documents"] += documents
        self.summary["tokens"] += len(ids)
        while len(ids):
            if self.file is None:
                name = f"{self.split}-{len(self.summary['shards']):05d}.bin"
                self.shard: Shard = {"file": name, "tokens": 0, "bytes": 0, "sha256": ""}
                self.hash = hashlib.sha256()
                self.file = (self.out / f"{name}.tmp").open("wb")
            part, ids = np.split(ids, [self.shard_tokens - self.shard["tokens"]])
            data = part.astype(self.dtype, copy=False).tobytes()
            self.file.write(data)
            self.hash.update(data)
            self.shard["tokens"] += len(part)
            self.shard["bytes"] += len(data)
            if self.shard["tokens"] == self.shard_tokens:
                self._end()

    def _end(self) -> None:
        assert self.file is not None
        _finish(self.file, self.out / self.shard["file"])
        self.summary["shards"].append(self.shard | {"sha256": self.hash.hexdigest()})
        self.file = None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """What makes a folder a corpus, so it is written last."""
    with open(folder / f"{MANIFEST}.tmp", "wb") as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")
        _finish(file, folder / MANIFEST)


def _finish(file: BinaryIO, path: Path) -> None:
    """Give a file its name once all of it is on disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
