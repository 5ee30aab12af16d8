"""Model cards: what a saved model is, what it was made from, how well it does and how to load it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from ..config import LinformerConfig
from ..provenance import sentence
from .corpus import Corpus
from .metrics import plus_minus, titles
from .recipe import Recipe


def pretrained(
    config: LinformerConfig,
    recipe: Recipe,
    corpus: Corpus,
    records: list[dict[str, Any]],
    command: str,
    parameters: int,
) -> str:
    """The card of a model that `linformers pretrain` made."""
    last = next(record for record in reversed(records) if "perplexity" in record)
    speeds = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    train, validation = (corpus.manifest["splits"][name] for name in ("train", "validation"))
    rows = min(recipe.eval_rows, validation["tokens"] // config.max_position_embeddings)
    kind = "Transformer (projection: identity)" if config.projection == "identity" else "Linformer"
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
tags: [linformer]
---

# A {kind}, n = {config.max_position_embeddings}{_k(config)}

An encoder of {parameters / 1e6:.1f}M parameters, pretrained by masked-language modelling with
[Linformer](https://arxiv.org/abs/2006.04768) (Wang et al., 2020) in the `linformers` library.

```python
import linformers  # registers the model with transformers
from transformers import AutoModelForMaskedLM, AutoTokenizer

model, tokenizer = AutoModelForMaskedLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
```

## Metrics

| | |
|---|---|
| validation perplexity at step {last["step"]:,}, first {rows:,} rows, fixed mask | {last["perplexity"]:.2f} |
| median speed of training | {sorted(speeds)[len(speeds) // 2] if speeds else 0:,.0f} tokens/s |

## Data

{train["documents"]:,} documents of {train["tokens"]:,} tokens from {_few(corpus.manifest["sources"])},
and {validation["tokens"]:,} tokens for validation{_held_out(corpus)};
a byte-level vocabulary of {corpus.vocab_size:,} tokens.

## Recipe

```yaml
{yaml.safe_dump(recipe.to_dict(), sort_keys=False).strip()}
```

{sentence(command)}
"""


def finetuned(task: str, source: str, results: dict[str, Any], command: str, note: str | None) -> str:
    """The card of a model that `linformers finetune` made."""
    rows = "\n".join(f"| {title} | {plus_minus(results[name], 4)} |" for name, title in titles(results).items())
    seeds = len(results["seeds"])
    return f"""---
library_name: transformers
pipeline_tag: text-classification
tags: [linformer]
---

# A Linformer fine-tuned on {task}

From `{source}`; of {seeds} seed{"s" if seeds > 1 else ""}, the model that did best on the validation set.

```python
import linformers  # registers the model with transformers
from transformers import pipeline

classify = pipeline("text-classification", model=".")
```

## Metrics

On {results["rows"]:,} rows that no choice was made on:

| | {"mean ± standard deviation over seeds" if seeds > 1 else "one seed"} |
|---|---|
{rows}
{f"{chr(10)}Note: {note}.{chr(10)}" if note else ""}
{sentence(command)}
"""


def _held_out(corpus: Corpus) -> str:
    """Where the validation set comes from, as far as the corpus knows."""
    files = corpus.manifest.get("validation_sources")
    return "" if files is None else f" from {_few(files)}" if files else ", held out of the same"


def _few(names: Sequence[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + rest


def _k(config: LinformerConfig) -> str:
    return "" if config.projection == "identity" else f", k = {config.projected_length}, {config.sharing} sharing"
