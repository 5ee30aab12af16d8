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

from ..errors import UserError
from ..files import file_damage

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
MAX_OPEN_SHARDS = 64


@dataclass(frozen=True)
class Corpus:
    """A folder that `linformers prepare` wrote: the shards, the tokenizer and the manifest.

    The manifest has `format`, `dtype` (of a token on disk, little-endian), `vocab_size`, `tokenizer` (its hash),
    `eos_token_id`, `sources`, `validation_sources`, and `splits`. Each of the splits `train` and `validation` has its
    number of `documents` and `tokens` and its `shards`, in order, each with `file`, `tokens`, `bytes` and `sha256`.
    """

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Read the manifest, and check that all shards exist and have the right size."""
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
        except OSError:
            raise UserError(f"data={str(folder)!r} holds no corpus: run linformers prepare") from None
        except ValueError as error:
            raise UserError(f"{folder / MANIFEST} is damaged: {error}") from None
        version = manifest.get("format") if isinstance(manifest, dict) else None
        if version != FORMAT:
            raise UserError(f"{folder / MANIFEST} has format {version!r}, expected {FORMAT}: prepare the corpus again")
        corpus = cls(folder, manifest)
        corpus.verify(hashes=False)
        return corpus

    def verify(self, hashes: bool = True) -> None:
        """Check the size of every shard, and the hash of every shard and of the tokenizer."""
        for shard in self._shards():
            if wrong := file_damage(self.folder / shard["file"], shard["bytes"], shard["sha256"] if hashes else None):
                raise UserError(f"data={str(self.folder)!r} is damaged: {wrong}")
        if hashes and (actual := tokenizer_hash(self.folder / TOKENIZER)) != self.tokenizer_hash:
            raise UserError(f"{self.folder / TOKENIZER} has the hash {actual}, expected {self.tokenizer_hash}")

    def tokens(self, split: str) -> TokenStream:
        """All tokens of `train` or `validation`."""
        shards = self.manifest["splits"][split]["shards"]
        paths = [self.folder / shard["file"] for shard in shards]
        return TokenStream(paths, [shard["tokens"] for shard in shards], self.manifest["dtype"])

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return AutoTokenizer.from_pretrained(self.folder / TOKENIZER)

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

    def _shards(self) -> list[dict[str, Any]]:
        return [shard for split in self.manifest["splits"].values() for shard in split["shards"]]


class TokenStream:
    """The tokens of several shards, `sizes` in each, as one memory-mapped array of `uint16` or `uint32`."""

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int], dtype: str):
        self.paths = list(paths)
        self.starts = [0, *accumulate(sizes)]
        self.dtype = np.dtype(dtype).newbyteorder("<")
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


def tokenizer_hash(folder: Path) -> str:
    """The sha256 of the `tokenizer.json` in a folder, without padding and truncation."""
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content |= {"padding": None, "truncation": None}  # transformers saves those of the tokenizer's last call
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
