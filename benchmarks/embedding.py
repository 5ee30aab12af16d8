"""How close `linformers embed` comes to the model's own speed on ready batches of full length.

    python -m benchmarks.embedding MODEL --text papers/train.parquet

Both use the same model, precision and number of tokens in a batch, and are timed in turn. What embedding adds is
tokenizing, padding, pooling and writing; loading and compiling the model do not count.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from linformers.checks import make_folder
from linformers.errors import UserError
from linformers.provenance import commit, environment
from linformers.training.documents import Documents
from linformers.training.embed import Embedder, Settings, embed_documents
from linformers_cli import run_script

SPECIAL = 5  # at most so many ids are those of special tokens, which random batches leave out


def choose(embedder: Embedder, texts: list[Path], column: str, length: int, count: int, folder: Path) -> Path:
    """A file of the first `count` documents of at most `length` tokens."""
    block_of = embedder.encoder.block
    fitting = (own for own in Documents(texts, column, "id") if 0 < len(block_of(0, 0, [own]).tokens[0].ids) <= length)
    chosen = list(islice(fitting, count))
    if len(chosen) < count:
        missing = count - len(chosen)
        raise UserError(f"documents={missing} more were asked for than the texts have of at most {length} tokens")
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"id": own.id, "text": own.text}) + "\n" for own in chosen), encoding="utf-8")
    return path


@torch.inference_mode()
def ready_speed(embedder: Embedder, seconds: float) -> float:
    """Tokens a second of the model alone, on batches of rows of n tokens."""
    n = embedder.encoder.max_length
    ids = torch.randint(SPECIAL, embedder.network.config.vocab_size, (max(1, embedder.batch_tokens // n), n))
    ids, passes, start = ids.to(embedder.device), 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or not passes:
        embedder.network(input_ids=ids).last_hidden_state.sum().item()
        passes += 1
    return passes * ids.numel() / passed


def embedding_speed(embedder: Embedder, documents: Path, out: Path) -> float:
    """Tokens a second from the file of documents to that of vectors."""
    start = time.perf_counter()
    embed_documents(embedder, Documents([documents], "text", "id"), out, Console(quiet=True), "")
    passed = time.perf_counter() - start
    return int(json.loads(out.with_suffix(".json").read_text())["tokens"]) / passed


def main(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a model.")],
    text: Annotated[list[Path], typer.Option(exists=True, help="Documents; can be repeated.")],
    column: Annotated[str, typer.Option(help="Column of a table.")] = "text",
    length: Annotated[int, typer.Option(min=1, help="Longest document, in tokens.")] = 8192,
    documents: Annotated[int, typer.Option(min=1, help="Number of documents.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="How often to measure both.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of a measurement of the model alone.")] = 20,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/embedding"),
) -> None:
    """Compare the speed of embedding with that of the model alone."""
    make_folder("out", out)
    embedder = Embedder(model, Settings(compile="yes" if torch.cuda.is_available() else "no"))
    speeds: dict[str, list[float]] = {"ready batches": [], "embed": []}
    with tempfile.TemporaryDirectory() as folder:
        chosen = choose(embedder, text, column, length, documents, Path(folder))
        for turn in range(rounds + 1):  # compilation does not count
            ready = ready_speed(embedder, seconds if turn else 0.1)
            embedded = embedding_speed(embedder, chosen, Path(folder) / f"{turn}.npy")
            if turn:
                speeds["ready batches"].append(ready)
                speeds["embed"].append(embedded)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    share = medians["embed"] / medians["ready batches"]
    record: dict[str, Any] = {"command": shlex.join(["python", "-m", "benchmarks.embedding", *sys.argv[1:]])}
    record |= {"commit": commit(), **environment(), "documents": documents, "n": embedder.encoder.max_length}
    record |= {"batch_tokens": embedder.batch_tokens, "tokens_per_second": speeds, "share": share}
    (out / "embedding.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, value in medians.items():
        print(f"{name}: {value:,.0f} tokens a second")
    print(f"embed reaches {share:.3f} of the model's speed on ready batches")


if __name__ == "__main__":
    run_script(lambda: typer.run(main))
