"""The cases of `attack.py` that are made by hand: malicious files and folders, and commands that cannot work."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from linformers import files
from linformers.errors import UserError
from linformers.training import corpus

Spoil = Callable[[Path], object]
Row = tuple[str, str, str, Spoil, bool]

PREPARE = "prepare {target} --out {case}/out --vocab-size 300 --validation-share 0.2"
PREDICT = "predict {{target}}/{} --model {{kit}}/run/model"
LABELED = (
    "finetune {{target}}/{} --out {{case}}/out --model {{kit}}/tuned/model --text sentence --label kind --epochs 1"
)
# Names that torch, transformers or accelerate have for files with pickles.
PICKLES = ["pytorch_model.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "training_args.bin"]
PICKLES += [
    "rng_state.pth",
    "rng_state_0.pth",
    "scaler.pt",
    "random_states_0.pkl",
    "tokenizer.pkl",
    "adapter_model.bin",
]

# Fields of a config that may have any value: we, or transformers, ignore it.
HARMLESS = ("id2label", "torch_dtype", "architectures")


class Payload:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.marker),)


# What is done to the folder `target`.


def pickled(name: str, instead: str = "") -> Spoil:
    """A pickle with a payload, in torch's format, beside a file or instead of it."""

    def spoil(target: Path) -> None:
        torch.save({"weight": Payload(target.parent / "marker")}, target / name)
        if instead:
            (target / instead).unlink()
            seal(target)

    return spoil


def put(name: str, content: str | bytes | Callable[[Path], bytes], sealed: bool = True) -> Spoil:
    """Write a file of a folder, and correct the folder's hashes."""

    def spoil(target: Path) -> None:
        made = content(target) if callable(content) else content
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).unlink(missing_ok=True)
        if isinstance(made, str):
            made = made.replace("{kit}", str(target.parents[1] / "kit")).replace("{case}", str(target.parent)).encode()
        (target / name).write_bytes(made)
        if sealed:
            seal((target / name).parent if name.startswith("checkpoint") else target)

    return spoil


def edit(name: str, path: str, value: Any, code: bool = False) -> Spoil:
    """Set a value in a JSON file, `a.0.b` being the value of b in the first entry of a, and correct the hashes."""

    def spoil(target: Path) -> None:
        content = place = json.loads((target / name).read_text())
        *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
        for part in parents:
            place = place[part]
        place[last] = value
        if code:
            marker = f"open({str(target.parent / 'marker')!r}, 'w')\n"
            (target / "evil.py").write_text(marker)
        put(name, json.dumps(content))(target)

    return spoil


def link(name: str, to: str) -> Spoil:
    """Replace a file with a link."""

    def spoil(target: Path) -> None:
        (target / name).unlink(missing_ok=True)
        (target / name).symlink_to(to.format(target=target))
        if not to.startswith("/dev"):
            seal(target)

    return spoil


def pipe(name: str) -> Spoil:
    """Replace a file with a pipe that nobody writes to."""

    def spoil(target: Path) -> None:
        (target / name).unlink(missing_ok=True)
        os.mkfifo(target / name)

    return spoil


def seal(folder: Path) -> None:
    """Give a folder the sizes and hashes of the files that are in it."""
    if not (folder / corpus.TOKENIZER).is_dir():
        if (folder / files.MANIFEST).exists():
            files.write_manifest(folder)
        return
    files.write_manifest(folder / corpus.TOKENIZER)
    try:
        manifest = json.loads((folder / corpus.MANIFEST).read_bytes())
        manifest.pop("sha256", None)
        manifest["tokenizer"] = corpus.tokenizer_hash(folder / corpus.TOKENIZER)
        for shard in [own for split in manifest["splits"].values() for own in split["shards"]]:
            shard["sha256"] = hashlib.sha256((folder / shard["file"]).read_bytes()).hexdigest()
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, OSError, UserError):
        pass  # then the shards keep their hashes
    else:
        corpus.write_manifest(folder, manifest)


# Contents.


def nested(depth: int = 200_000, key: str = "a") -> str:
    return f'{{"{key}":' * depth + "1" + "}" * depth


def header(tensors: dict[str, Any] | bytes, size: int | None = None, data: bytes = b"") -> bytes:
    """A safetensors file."""
    content = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(content) if size is None else size) + content + data


def tensor(name: str, shape: list[int], offsets: list[int], dtype: str = "F32") -> bytes:
    """A safetensors file with one tensor in four bytes."""
    return header({name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, data=b"0123")


def bomb(compress: Callable[[bytes], bytes], start: bytes = b"", part: bytes = b"a", gibibytes: int = 8) -> bytes:
    """Gibibytes in a few megabytes: the same 64 MiB again and again."""
    return compress(start) + compress(part * (2**26 // len(part))) * (16 * gibibytes)


def parquet(rows: int, text: str, labels: bool = False) -> bytes:
    """Rows that are all equal, which takes a few kilobytes."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), [text])
    columns = {"sentence": column, "kind": column} if labels else {"text": column}
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, compression="zstd")
    return sink.getvalue()


def aliases(levels: int = 30) -> str:
    """A YAML file of 2^levels entries."""
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, levels))]
    return "\n".join([*lines, f"model: {{hidden_act: *a{levels - 1}}}", "data: a", "out: b", "steps: *a29"])


def malicious() -> Iterator[Row]:
    """Name, kind of folder, use, what is done, and whether it must be refused."""
    for name in PICKLES:
        yield f"pickle {name}", "model", "load", pickled(name), False
        yield f"pickle {name} in a checkpoint", "killed run", "resume", pickled(f"checkpoint-20/{name}"), False
    for use in ("predict", "evaluate", "finetune", "start", "load"):
        yield "pickle instead of weights", "model", use, pickled("pytorch_model.bin", "model.safetensors"), True
    index = json.dumps({"metadata": {}, "weight_map": {"weight": "pytorch_model-1.bin"}})

    def sharded(target: Path) -> None:
        pickled("pytorch_model-1.bin", "model.safetensors")(target)
        put("pytorch_model.bin.index.json", index)(target)

    yield "sharded pickles instead of weights", "model", "load", sharded, True
    yield "pickle named model.safetensors", "model", "load", pickled("model.safetensors"), True
    yield "raw pickle named config.json", "model", "load", put("config.json", raw_pickle), True
    yield (
        "raw pickle named training.json",
        "killed run",
        "resume",
        put("checkpoint-20/training.json", raw_pickle),
        False,
    )
    yield "raw pickle named manifest.json", "corpus", "pretrain", put("manifest.json", raw_pickle), True

    # Code that a folder names.
    maps = {"AutoConfig": "evil.C", "AutoModelForMaskedLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    for use in ("predict", "load"):
        yield "auto_map in config.json", "model", use, edit("config.json", "auto_map", maps, code=True), False
        spoil = edit("tokenizer_config.json", "auto_map", maps, code=True)
        yield "auto_map in tokenizer_config.json", "model", use, spoil, False
    yield (
        "auto_map in a corpus",
        "corpus",
        "pretrain",
        edit("tokenizer/tokenizer_config.json", "auto_map", maps, code=True),
        False,
    )
    yield "unknown model_type", "model", "load", edit("config.json", "model_type", "../evil", code=True), True
    yield "remote code", "model", "load", edit("config.json", "trust_remote_code", True, code=True), False
    pipes = {"fill-mask": {"impl": "evil.P", "pt": ["AutoModelForMaskedLM"]}}
    yield "custom pipeline", "model", "predict", edit("config.json", "custom_pipelines", pipes, code=True), False
    yield "tokenizer class", "model", "predict", edit("tokenizer_config.json", "tokenizer_class", "os.system"), False
    for key in ("attn_implementation", "_attn_implementation"):
        for use in ("predict", "load"):
            yield f"{key} from the hub", "model", use, edit("config.json", key, "evil/kernel"), False
    template = "{% for i in range(999999999) %}{% for j in range(999999999) %}a{% endfor %}{% endfor %}"
    yield "chat template", "model", "predict", edit("tokenizer_config.json", "chat_template", template), False
    yield "chat template file", "model", "load", put("chat_template.jinja", template), False
    for key, value in {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "transformers_weights": "../../evil.safetensors",
        "hidden_act": "os.system",
        "torch_dtype": "os.system",
        "dtype": "__class__",
        "architectures": [["LinformerForMaskedLM"]] * 1000,
        "vocab_size": 10**12,
        "max_position_embeddings": 2**31,
        "num_hidden_layers": 10**9,
        "num_labels": 10**9,
        "hidden_size": -1,
        "layer_norm_eps": float("nan"),
        "projected_length": [[10**9] * 1000] * 1000,
        "local_window": 10**6,
        "id2label": "a" * 10**6,
    }.items():
        yield f"{key} in config.json", "model", "load", edit("config.json", key, value), key not in HARMLESS
    yield (
        "base model of an adapter",
        "model",
        "load",
        put("adapter_config.json", '{"base_model_name_or_path": "evil/model", "peft_type": "LORA"}'),
        False,
    )
    generation = '{"transformers_version": "9", "custom_generate": "evil/code"}'
    yield "generation_config.json", "model", "load", put("generation_config.json", generation), False

    # Weights.
    for name, content in {
        "a header of 2^63 bytes": header(b"", 2**63),
        "a header of 99 MB that is not there": header(b"", 99_000_000),
        "a nested header": header(nested().encode()),
        "a shape that overflows": tensor("a", [2**40, 2**40], [0, 4]),
        "an empty shape": tensor("a", [0, 2**62], [0, 0]),
        "a negative shape": tensor("a", [-1], [0, 4]),
        "offsets past the end": tensor("a", [2**30], [0, 2**32]),
        "offsets in reverse": tensor("a", [1], [4, 0]),
        "an unknown type": tensor("a", [1], [0, 4], "O"),
        "a weight of another shape": tensor("linformer.embeddings.norm.weight", [1], [0, 4]),
        "an empty file": b"",
        "zeros": bytes(2**20),
    }.items():
        yield f"weights: {name}", "model", "load", put("model.safetensors", content), True
        yield (
            f"weights of a checkpoint: {name}",
            "killed run",
            "resume",
            put("checkpoint-20/model.safetensors", content),
            True,
        )
    for where in ("../secret.safetensors", "/etc/passwd", "missing.safetensors", 7, None):
        index = json.dumps({"metadata": {}, "weight_map": {"linformer.embeddings.norm.weight": where}})

        def traverse(target: Path, index: str = index) -> None:
            os.rename(target / "model.safetensors", target.parent / "secret.safetensors")
            put("model.safetensors.index.json", index)(target)

        yield f"index of weights that names {where}", "model", "load", traverse, True
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "manifest.json"):
        yield f"{name} is a pipe", "model", "predict", pipe(name), True
        yield f"{name} links to /dev/zero", "model", "predict", link(name, "/dev/zero"), True
    yield "an index of weights that is a pipe", "model", "load", pipe("model.safetensors.index.json"), True
    yield "special_tokens_map.json is a pipe", "model", "predict", pipe("special_tokens_map.json"), False
    yield "chat_template.jinja is a pipe", "model", "predict", pipe("chat_template.jinja"), False
    for name in ("run.json", "metrics.jsonl", "checkpoint-20/manifest.json", "checkpoint-20/training.json"):
        yield f"{name} is a pipe", "killed run", "resume", pipe(name), False

    # JSON of a model and its tokenizer.
    texts = {
        "nested": nested(),
        "nested 900 deep": nested(900),
        "a list": "[]",
        "a number of a million digits": '{"vocab_size": ' + "9" * 10**6 + "}",
        "invalid UTF-8": b'{"a": "\xff\xfe"}',
        "NUL bytes": bytes(1000),
        "a gigabyte of spaces": None,
    }
    places = [("config.json", "model", "load"), ("tokenizer.json", "model", "predict")]
    places += [("tokenizer_config.json", "model", "predict"), ("manifest.json", "model", "load")]
    places += [("manifest.json", "corpus", "pretrain"), ("tokenizer/tokenizer.json", "corpus", "pretrain")]
    places += [("run.json", "killed run", "resume"), ("metrics.jsonl", "killed run", "resume")]
    places += [("seed-0/result.json", "finished fine-tuning", "again")]
    places += [(f"checkpoint-20/{name}", "killed run", "resume") for name in ("training.json", "trainer_state.json")]
    for name, kind, use in places:
        for what, text in texts.items():
            made = text if text is not None else lambda target: b"{" + b" " * 2**30 + b"}"
            sealed = "gigabyte" not in what and name != "manifest.json"
            refused = kind != "killed run" and name != "seed-0/result.json"
            yield f"{name}: {what}", kind, use, put(name, made, sealed), refused
    for path, value in {
        "added_tokens.0.id": 2**32 - 1,
        "model.vocab.the": 2**32 - 1,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Sequence", "decoders": "a"},
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": ["a", 2**32 - 1],
            "cls": ["b", 2**32 - 1],
            "trim_offsets": True,
            "add_prefix_space": False,
        },
        "truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10**9},
        "padding": {
            "strategy": {"Fixed": 10**9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    }.items():
        yield f"tokenizer.json: {path}", "model", "predict", edit("tokenizer.json", path, value), False
    for key, value in {
        "model_max_length": 10**30,
        "pad_token": "evil",
        "mask_token": None,
        "extra": [1],
        "eos_token": {"__type": "AddedToken", "content": 7},
        "added_tokens_decoder": {"x": 1},
    }.items():
        yield f"tokenizer_config.json: {key}", "model", "predict", edit("tokenizer_config.json", key, value), False

    # Checkpoints and corpora whose hashes are right.
    for path, value in {
        "max_steps": 10**18,
        "global_step": -1,
        "global_step.": 0,
        "best_global_step": "a/../..",
        "log_history": [7],
        "epoch": "a",
        "train_batch_size": -1,
    }.items():
        yield (
            f"trainer_state.json: {path}",
            "killed run",
            "resume",
            edit("checkpoint-20/trainer_state.json", path.rstrip("."), value),
            False,
        )
    for path, value in {
        "groups": [],
        "groups.0.lr": "os",
        "scheduler": 7,
        "losses": ["a"],
        "losses.0": 1e400,
        "random.0.cpu": [1],
        "random": {},
        "last_logged": "a",
    }.items():
        yield f"training.json: {path}", "killed run", "resume", edit("checkpoint-20/training.json", path, value), False
    for dtype in ("O", "object", "V8", "S99999999", "float64", "i2", ["<u2"], [["a", "O"]], None, "os.system"):
        yield f"corpus: dtype {dtype!r}", "corpus", "pretrain", edit("manifest.json", "dtype", dtype), True
    for where in ("../text.bin", "/etc/passwd", "train-00000.bin/../../text.bin", "train\0.bin", "", 7, "tokenizer"):
        yield (
            f"corpus: shard {where!r}",
            "corpus",
            "pretrain",
            edit("manifest.json", "splits.train.shards.0.file", where),
            True,
        )
    for path, value in {
        "splits": [],
        "splits.train": None,
        "splits.train.shards": {},
        "splits.train.shards.0.tokens": 10**18,
        "splits.train.shards.0.bytes": -1,
        "splits.train.tokens": 1e400,
        "splits.train.documents": True,
        "eos_token_id": -1,
        "eos_token_id.": 10**6,
        "vocab_size": 10**12,
        "vocab_size.": 5,
        "format": True,
        "sources": {"a": 1},
    }.items():
        yield (
            f"corpus: {path} {value!r}"[:60],
            "corpus",
            "pretrain",
            edit("manifest.json", path.rstrip("."), value),
            True,
        )
    high = put("train-00000.bin", lambda target: b"\xff" * (target / "train-00000.bin").stat().st_size)
    yield "corpus: tokens past the vocabulary", "corpus", "pretrain", high, True
    for to in ("/etc/passwd", "/dev/zero", "{target}/train-00001.bin"):
        yield f"corpus: a shard that links to {to}", "corpus", "pretrain", link("train-00000.bin", to), True
    yield "corpus: a shard that is a pipe", "corpus", "pretrain", pipe("train-00000.bin"), True

    # Text and tables that expand to gigabytes.
    for suffix, compress in (("gz", lambda data: gzip.compress(data, 9)), ("xz", lzma.compress)):
        line = bomb(compress)
        yield (
            f"bomb.txt.{suffix}",
            "model",
            PREDICT.format(f"bomb.txt.{suffix}"),
            put(f"bomb.txt.{suffix}", line, sealed=False),
            True,
        )
        for ending, start in (("jsonl", b'{"text": "'), ("csv", b'text\n"'), ("tsv", b"text\tb\n")):
            yield (
                f"bomb.{ending}.{suffix}",
                "",
                PREPARE,
                put(f"bomb.{ending}.{suffix}", bomb(compress, start), sealed=False),
                True,
            )
    memory = lzma.compress(b"a" * 100, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1536 * 2**20, "preset": 0}])
    yield "xz with a dictionary of 1.5 GiB", "", PREPARE, put("a.txt.xz", memory, sealed=False), True
    yield (
        "bomb.parquet",
        "",
        PREPARE,
        put("a.parquet", lambda target: parquet(200_000, "a" * 10**6), sealed=False),
        True,
    )
    yield (
        "labeled bomb.parquet",
        "",
        LABELED.format("a.parquet"),
        put("a.parquet", lambda target: parquet(200_000, "a" * 10**6, labels=True), sealed=False),
        True,
    )
    yield "parquet that is cut", "", PREPARE, put("a.parquet", lambda t: parquet(99, "a b")[:-9], sealed=False), True
    for what, line in {
        "nested": '{"text": ' + "[" * 10**5,
        "digits": '{"text": ' + "9" * 10**5 + "}",
        "an object": '{"text": {"a": 1}}',
    }.items():
        yield f"jsonl: {what}", "", PREPARE, put("a.jsonl", line, sealed=False), True

    # Recipes.
    base = "data: {kit}/corpus\nout: {case}/out\nsteps: 4\n"
    for what, text in {
        "aliases": aliases(),
        "merged aliases": "\n".join(
            ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12))]
        ),
        "an alias to itself": "steps: &a [*a]\ndata: a\nout: b\n",
        "python/object/apply": base + "steps: !!python/object/apply:os.mknod [marker]\n",
        "python/name": base + "steps: !!python/name:os.system\n",
        "python/object/new": "a: !!python/object/new:type [a, [], {}]\n" + base,
        "nested lists": "a: " + "[" * 10**5,
        "nested tables": "a: " + "{a: " * 3000 + "1" + "}" * 3000,
        "a number of a million digits": base + "steps: " + "9" * 10**6,
        "infinity": base + "learning_rate: .inf\n",
        "not a number": base + "adam_epsilon: .nan\n",
        "binary": base + "steps: !!binary AAAA\n",
        "a set": base + "steps: !!set {1, 2}\n",
        "keys that are lists": "? [1, 2]\n: 3\n" + base,
        "a NUL byte": base + "steps: 4\0\n",
        "a base that is a device": "base: /dev/zero\n" + base,
        "a base that is itself": "base: evil.yaml\n" + base,
        "a base outside": "base: ../../../../../../../etc/passwd\n",
        "variants without end": "variants: ["
        + ", ".join(["{" + ", ".join(f"a{i}: {{}}" for i in range(99)) + "}"] * 9)
        + "]",
        "another directive": "%YAML 9.9\n---\n" + base,
    }.items():
        yield f"recipe: {what}", "", "pretrain {target}/evil.yaml", put("evil.yaml", text, sealed=False), True


def raw_pickle(target: Path) -> bytes:
    return pickle.dumps(Payload(target.parent / "marker"))


def invocations() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Commands, with the files of `target` that they name."""
    yield from ((command, {}) for command in COMMANDS.strip().splitlines())
    for command, made in BAD_FILES:
        for name, content in made.items():
            yield command.replace("FILE", f"{{target}}/{name}"), {name: content}


COMMANDS = """
nothing
--verbose
--debug
prepare
prepare {kit}/source
prepare nowhere.txt --out {case}/out
prepare nowhere --out {case}/out
prepare ../../nowhere --out {case}/out
prepare {kit}/kit.bin --out {case}/out
prepare {target} --out {case}/out
prepare '' --out {case}/out
prepare {kit}/source --out {kit}/corpus
prepare {kit}/source --out {kit}/lines.txt
prepare {kit}/source --out {kit}/lines.txt/a
prepare {kit}/source --out /proc/a
prepare {kit}/source --out {case}/out --vocab-size 5
prepare {kit}/source --out {case}/out --vocab-size -300
prepare {kit}/source --out {case}/out --vocab-size 1e9
prepare {kit}/source --out {case}/out --validation nowhere.txt
prepare {kit}/source --out {case}/out --validation {kit}/source
prepare {kit}/source --out {case}/out --validation-share 0
prepare {kit}/source --out {case}/out --validation-share 1
prepare {kit}/source --out {case}/out --validation-share nan
prepare {kit}/source --out {case}/out --validation-share -0.1
prepare {kit}/source --out {case}/out --text-column words
prepare {kit}/source --out {case}/out --text-column ''
prepare {kit}/source --out {case}/out --tokenizer nowhere
prepare {kit}/source --out {case}/out --tokenizer {target}
prepare {kit}/source --out {case}/out --tokenizer {kit}/lines.txt
prepare {kit}/source --out {case}/out --tokenizer ../../etc
prepare {kit}/source --out {case}/out --tokenizer-documents 0
prepare {kit}/source --out {case}/out --workers 0
prepare {kit}/source --out {case}/out --workers two
pretrain
pretrain nowhere.yaml
pretrain {kit}
pretrain {kit}/lines.txt
pretrain {kit}/corpus/train-00000.bin
pretrain {kit}/recipe.yaml out={case}/out steps
pretrain {kit}/recipe.yaml out={case}/out steps=0
pretrain {kit}/recipe.yaml out={case}/out steps=-1
pretrain {kit}/recipe.yaml out={case}/out steps=ten
pretrain {kit}/recipe.yaml out={case}/out steps=1e30
pretrain {kit}/recipe.yaml out={case}/out steps=99999999999999999999
pretrain {kit}/recipe.yaml out={case}/out steps=[
pretrain {kit}/recipe.yaml out={case}/out step=4
pretrain {kit}/recipe.yaml out={case}/out =4
pretrain {kit}/recipe.yaml out={case}/out model=4
pretrain {kit}/recipe.yaml out={case}/out model.k=4
pretrain {kit}/recipe.yaml out={case}/out model.hidden_size=17
pretrain {kit}/recipe.yaml out={case}/out model.projected_length=99
pretrain {kit}/recipe.yaml out={case}/out model.projection=quadratic
pretrain {kit}/recipe.yaml out={case}/out model.vocab_size=9
pretrain {kit}/recipe.yaml out={case}/out model.hidden_act=os.system
pretrain {kit}/recipe.yaml out={case}/out model.id2label=a
pretrain {kit}/recipe.yaml out={case}/out model.dtype=os
pretrain {kit}/recipe.yaml out={case}/out model.a.b=4
pretrain {kit}/recipe.yaml out={case}/out recipe.steps=4
pretrain {kit}/recipe.yaml out={case}/out learning_rate=nan
pretrain {kit}/recipe.yaml out={case}/out learning_rate=-1
pretrain {kit}/recipe.yaml out={case}/out adam_beta2=1
pretrain {kit}/recipe.yaml out={case}/out mask_share=0
pretrain {kit}/recipe.yaml out={case}/out mask_share=true
pretrain {kit}/recipe.yaml out={case}/out batch_size=8.5
pretrain {kit}/recipe.yaml out={case}/out rows_at_once=3
pretrain {kit}/recipe.yaml out={case}/out schedule=step
pretrain {kit}/recipe.yaml out={case}/out precision=int8
pretrain {kit}/recipe.yaml out={case}/out seed=-1
pretrain {kit}/recipe.yaml out={case}/out seed=99999999999999999999
pretrain {kit}/recipe.yaml out={case}/out shard=true
pretrain {kit}/recipe.yaml out={case}/out shard=maybe
pretrain {kit}/recipe.yaml out={case}/out variant=a
pretrain {kit}/recipe.yaml out={case}/out data={target}
pretrain {kit}/recipe.yaml out={case}/out data={kit}/lines.txt
pretrain {kit}/recipe.yaml out={case}/out data=
pretrain {kit}/recipe.yaml out={case}/out start=nowhere
pretrain {kit}/recipe.yaml out={case}/out start={target}
pretrain {kit}/recipe.yaml out={case}/out start={kit}/run
pretrain {kit}/recipe.yaml out={case}/out start={kit}/tuned/model
pretrain {kit}/recipe.yaml out={case}/out start={kit}/run/model model.hidden_size=32
pretrain {kit}/recipe.yaml out={case}/out start={kit}/run/model model.intermediate_size=16
pretrain {kit}/recipe.yaml out={case}/out model.max_position_embeddings=99999
pretrain {kit}/recipe.yaml out={kit}/lines.txt
pretrain {kit}/recipe.yaml out={kit}/run steps=48
pretrain {kit}/recipe.yaml out={kit}/tuned
pretrain {kit}/recipe.yaml out=
pretrain {kit}/recipe.yaml out=7
finetune
finetune sst2
finetune sst3 --out {case}/out
finetune nowhere.csv --out {case}/out
finetune {kit} --out {case}/out
finetune {kit}/lines.txt --out {case}/out
finetune sst2 --out {case}/out --data nowhere
finetune sst2 --out {case}/out --data {target}
finetune sst2 --out {case}/out --data {kit} --text a
finetune {kit}/train.csv --out {case}/out
finetune {kit}/train.csv --out {case}/out --text sentence
finetune {kit}/train.csv --out {case}/out --text sentence,kind --label kind
finetune {kit}/train.csv --out {case}/out --text a,b,c --label kind
finetune {kit}/train.csv --out {case}/out --text sentence --label sentence
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --model {kit}
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --model {kit}/run
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --model nowhere
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --test nowhere.csv
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --test {kit}/lines.txt
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --data {kit}
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --seeds 0
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --epochs 1.5
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --batch-size 0
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --learning-rate nan
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --learning-rate 0
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --max-length -1
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --max-length 2
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --max-length 1 --model {kit}/run/model
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --precision fp8
finetune {kit}/train.csv --out {case}/out --text sentence --label kind --compile maybe
finetune {kit}/train.csv --out {kit}/run --text sentence --label kind
finetune {kit}/train.csv --out {kit}/tuned --text sentence --label kind
finetune {kit}/train.csv --out {kit}/lines.txt --text sentence --label kind
predict nowhere.txt
predict {kit}
predict {kit}/lines.txt --model nowhere
predict {kit}/lines.txt --model {kit}
predict {kit}/lines.txt --model {kit}/run
predict {kit}/lines.txt --model {kit}/run/model
predict {kit}/lines.txt --model {kit}/half
predict {kit}/lines.txt --model {kit}/tuned/model --pairs
predict {kit}/masked.txt --model {kit}/run/model --pairs
predict {kit}/masked.txt --model {kit}/run/model --best 0
predict {kit}/masked.txt --model {kit}/run/model --best 301
predict {kit}/masked.txt --model {kit}/run/model --batch-size 0
predict {kit}/masked.txt --model {kit}/lines.txt
evaluate
evaluate --model {kit}/run/model
evaluate --model {kit}/run --data {kit}/corpus
evaluate --model {kit}/tuned/model --data {kit}/corpus
evaluate --model {kit}/run/model --data {target}
evaluate --model {kit}/run/model --data {kit}/run/model
evaluate --model {kit}/run/model --data {kit}/corpus --rows 0
evaluate --model {kit}/run/model --data {kit}/corpus --mask-share 0
evaluate --model {kit}/run/model --data {kit}/corpus --mask-share nan
evaluate --model {kit}/run/model --data {kit}/corpus --text a
evaluate --model {kit}/run/model --task {kit}/test.csv
evaluate --model {kit}/tuned/model --task nowhere.csv
evaluate --model {kit}/tuned/model --task sst3
evaluate --model {kit}/tuned/model --task sst2 --data {target}
evaluate --model {kit}/tuned/model --task {kit}/test.csv
evaluate --model {kit}/tuned/model --task {kit}/test.csv --text sentence --label kind --rows 8
evaluate --model {kit}/tuned/model --task {kit}/test.csv --text sentence --label kind --data {kit}
verify
verify nowhere
verify {target}
verify {kit}/lines.txt
verify {kit}/run
verify {kit}/corpus --accept
bench --lengths 0
bench --lengths 64 --projected 64 --out {case}/out
bench --lengths 1e9 --out {case}/out
bench --hidden 100 --out {case}/out
bench --sharing all --out {case}/out
bench --projection quadratic --out {case}/out
bench --models bert --out {case}/out
bench --task sleep --out {case}/out
bench --dropout 1 --out {case}/out
bench --windows a --out {case}/out
demo --steps 0
demo --out {kit}/lines.txt
spectrum
spectrum nowhere --text {kit}/lines.txt --out {case}/out
spectrum {target} --text {kit}/lines.txt --out {case}/out
spectrum {kit}/run/model --text {kit}/lines.txt --out {case}/out
spectrum {kit}/run/model --text nowhere.txt --out {case}/out
choose-k
choose-k nowhere --text {kit}/lines.txt --energy 0.9 --out {case}/out
choose-k {kit}/run/model --text {kit}/lines.txt --out {case}/out
choose-k {kit}/run/model --text {kit}/lines.txt --energy 2 --out {case}/out
choose-k {kit}/run/model --text {kit}/lines.txt --energy 0.9 --budget 4 --out {case}/out
choose-k {kit}/run/model --text {kit}/lines.txt --energy 0.9 --per word --out {case}/out
"""

BAD_FILES: list[tuple[str, dict[str, bytes]]] = [
    (
        "prepare FILE --out {case}/out --vocab-size 300",
        {
            "empty.txt": b"",
            "blank.txt": b" \n" * 100,
            "nul.txt": b"a\0b\n",
            "utf16.txt": "some text".encode("utf-16"),
            "latin.txt": b"caf\xe9 " * 100,
            "empty.jsonl": b"",
            "list.jsonl": b"[1]\n",
            "no-json.jsonl": b"a\n",
            "number.jsonl": b'{"text": 7}\n',
            "other.jsonl": b'{"words": "a"}\n',
            "cut.jsonl": b'{"text": "a"}\n{"text": "b',
            "latin.jsonl": b'{"text": "caf\xe9"}\n',
            "empty.csv": b"",
            "other.csv": b"a,b\n1,2\n",
            "ragged.csv": b"a,text\n1\n2\n",
            "nul.csv": b"text\na\0b\n",
            "quote.csv": b'text\n"a\n',
            "text.csv.gz": b"text\na\n",
            "text.csv.xz": b"text\na\n",
            "cut.txt.gz": gzip.compress(b"some text " * 1000)[:-20],
            "cut.txt.xz": lzma.compress(b"some text " * 1000)[:-20],
            "empty.parquet": b"",
            "text.parquet": b"PAR1 some text PAR1",
            "text.xyz": b"some text",
        },
    ),
    (
        "finetune FILE --out {case}/out --model {kit}/run/model",
        {
            "empty.csv": b"",
            "header.csv": b"text,label\n",
            "one.csv": b"text,label\na,0\n",
            "same.csv": b"text,label\n" + b"a,0\n" * 100,
            "equal.csv": b"text,label\n" + b"a,0\na,1\n" * 100,
            "unlabeled.csv": b"text,label\na,\nb,1\n",
            "short.csv": b"text,label\na\nb,1\n",
            "textless.csv": b"text,label\n,0\n,1\n",
            "nul.csv": b"text,label\na\0,0\n",
            "number.jsonl": b'{"text": 7, "label": 0}\n',
            "object.jsonl": b'{"text": "a", "label": {}}\n',
            "half.jsonl": b'{"text": "a", "label": 0.5}\n',
            "cut.jsonl": b'{"text": "a", "label"',
            "empty.parquet": b"",
            "text.txt": b"a\n",
        },
    ),
    (
        "pretrain FILE",
        {
            "empty.yaml": b"",
            "list.yaml": b"- a\n",
            "text.yaml": b"a",
            "tab.yaml": b"a:\n\tb: 1\n",
            "latin.yaml": b"a: caf\xe9\n",
            "less.yaml": b"steps: 4\n",
            "unknown.yaml": b"data: a\nout: b\nsteps: 4\nsize: 7\n",
            "numbers.yaml": b"data: 1\nout: 2\nsteps: 4\n",
            "base.yaml": b"base: nowhere.yaml\n",
            "variants.yaml": b"data: a\nout: b\nsteps: 4\nvariants: 7\n",
            "twice.yaml": b"data: a\nout: b\nsteps: {a: 1}\n",
            "recipe.json": b'{"data": "a", "out": "b", "steps": "4"}',
        },
    ),
    (
        "predict FILE --model {kit}/run/model",
        {
            "nul.txt": b"a\0 <mask>\n\0\n",
            "unmasked.txt": b"a\n",
            "masks.txt": b"<mask> <mask>\n",
            "latin.txt": b"caf\xe9\n",
            "long.txt": b"a " * 999 + b"<mask>\n",
            "text.gz": b"a <mask>\n",
            "cut.gz": gzip.compress(b"a <mask>\n")[:-5],
        },
    ),
]
