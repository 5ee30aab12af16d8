"""Pretraining by masked-language modeling (section 5.1): from a recipe and a corpus to a model with its card."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from .. import LinformerConfig, LinformerForMaskedLM, files, plots
from ..checks import check_model, make_folder
from ..errors import UserError, counted
from ..provenance import sentence
from . import checkpoints
from .corpus import Corpus, tokenizer_hash
from .recipe import FREE, Recipe, read
from .rows import IGNORED, MaskedRows, Vocabulary, already_batched
from .trainer import ExactTrainer, common_arguments, compile_model, metrics_of, train

# All runs have the same masks in validation, so that perplexities are comparable.
VALIDATION_SEED = 2**40


def pretrain(recipe: Path, changes: Sequence[str] = (), *, console: Console, command: str) -> int:
    """Pretrain by the recipe in a file; see `run`."""
    return run(read(recipe, changes), console, command)


def run(recipe: Recipe, console: Console, command: str) -> int:
    """Pretrain by a recipe, from its newest checkpoint if there is one; returns an exit code, see `trainer.train`."""
    out, corpus = Path(recipe.out), Corpus.open(Path(recipe.data))
    make_folder("out", out)
    arguments = training_arguments(recipe)
    writes = arguments.should_save  # of several processes, the first
    with _deterministic(recipe.deterministic), checkpoints.locked(out) if writes else nullcontext():
        code = _train(recipe, corpus, arguments, console if writes else Console(quiet=True), command)
    if dist.is_initialized():  # not after an error: this could wait for processes that continue
        dist.destroy_process_group()
    return code


@contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Use only deterministic algorithms, if `enabled`."""
    before = torch.are_deterministic_algorithms_enabled()
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _train(recipe: Recipe, corpus: Corpus, arguments: TrainingArguments, console: Console, command: str) -> int:
    model = Path(recipe.out) / "model"
    if arguments.should_save:
        corpus.verify()
    trainer = make_trainer(recipe, corpus, arguments)
    hashes: dict[str, str] = {}
    if arguments.should_save:
        hashes = {"corpus": corpus.hash, "tokenizer": corpus.tokenizer_hash}
        if recipe.start is not None:
            hashes["start"] = checkpoints.model_hash(Path(recipe.start))
        settings = {"recipe": recipe.to_dict(), "sha256": hashes}
        checkpoints.claim(Path(recipe.out), "pretrain", settings, [f"recipe.{name}" for name in FREE])
    trainer.accelerator.wait_for_everyone()
    if trainer.check_shared("finished models:", int(model.exists())):
        if wrong := files.damage(model):
            remedy = "delete that folder and repeat the command to write it again from the newest checkpoint"
            raise UserError(f"this run is finished, but its model is damaged: {wrong}; {remedy}")
        console.print(f"{model} exists and is intact: this run is finished.", highlight=False)
        return 0
    if recipe.warmup_steps >= recipe.steps:
        few = f"warmup_steps={recipe.warmup_steps} is not below steps={recipe.steps}"
        console.print(f"{few}: the learning rate never reaches its peak", style="yellow", highlight=False)
    if (gpus := torch.cuda.device_count()) > 1 and arguments.world_size == 1:
        console.print(f"using 1 of {gpus} GPUs; torchrun --nproc_per_node={gpus} -m linformers … uses all of them")
    title, units = describe(trainer.model.config), recipe.batch_size * recipe.max_length
    if code := train(trainer, console, title, score="perplexity", unit="tokens", units_per_step=units):
        return code
    weights = trainer.full_weights()  # all processes take part
    if arguments.should_save:
        _save_result(trainer, weights, recipe, corpus, hashes.get("start"), command)
        console.print(f"model in {model}", markup=False)
    trainer.accelerator.wait_for_everyone()
    return 0


def make_trainer(recipe: Recipe, corpus: Corpus, arguments: TrainingArguments) -> ExactTrainer:
    tokenizer = corpus.tokenizer()
    set_seed(recipe.seed)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = recipe.config(vocab_size=corpus.vocab_size, **special)
    model = LinformerForMaskedLM(config) if recipe.start is None else load_start(recipe, config, corpus)
    compile_model(model, recipe.compile)
    if recipe.shard:
        shard(model)
    rows, length = recipe.steps * recipe.batch_size, recipe.max_length
    first, last = recipe.mask_share, recipe.mask_share if recipe.final_mask_share is None else recipe.final_mask_share
    vocabulary, tokens = Vocabulary.of(tokenizer, corpus.vocab_size), corpus.tokens("train")
    training_rows = MaskedRows(
        tokens, vocabulary, rows, length, recipe.seed, first, recipe.short_rows, final_mask_share=last
    )
    return ExactTrainer(
        model,
        arguments,
        data_collator=already_batched,
        eval_dataset=validation_rows(corpus, vocabulary, length, recipe.eval_rows, last),
        train_dataset=training_rows,
        processing_class=tokenizer,
        muon=recipe.optimizer == "muon",
    )


def load_start(recipe: Recipe, config: LinformerConfig, corpus: Corpus) -> LinformerForMaskedLM:
    """Load the model that a recipe starts from; it must have the recipe's size and the corpus's tokenizer.

    Its n may differ, as in a schedule that trains on short rows first: it is resized to the recipe's n and k.
    """
    folder = Path(recipe.start or "")
    check_model("start", folder)
    saved = LinformerConfig.from_pretrained(folder)
    if saved.architectures != ["LinformerForMaskedLM"]:
        raise UserError(f"start={recipe.start!r} is a {saved.architectures}, not a LinformerForMaskedLM")
    if tokenizer_hash(folder) != corpus.tokenizer_hash:
        tokenizers = f"data={recipe.data!r} and start={recipe.start!r} have different tokenizers"
        raise UserError(f"{tokenizers}; prepare the data with --tokenizer {recipe.start}")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if getattr(saved, name) != getattr(config, name):
            raise UserError(f"start={recipe.start!r} has {name}={getattr(saved, name)}, not {getattr(config, name)}")
    start, n = config, saved.max_position_embeddings
    if n != recipe.max_length:
        k = saved.projected_length if saved.projection == config.projection else None  # a new E is resized, too
        start = LinformerConfig(**{**config.to_dict(), "max_position_embeddings": n, "projected_length": k})
    new = "projections." if saved.projection != config.projection else None
    model = checkpoints.load_whole(LinformerForMaskedLM, folder, new, config=start, dtype=torch.float32)
    model.resize_length(recipe.max_length, config.resolved().projected_length)  # to itself, if n is the same
    return model


def shard(model: LinformerForMaskedLM) -> None:
    """Shard the weights of each layer over all processes (FSDP)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        raise UserError("shard=true needs several processes: start the command with torchrun")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model.to(device)
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def validation_rows(corpus: Corpus, vocabulary: Vocabulary, length: int, max_rows: int, share: float) -> MaskedRows:
    """The first rows of the validation set, with the same masks in every run."""
    tokens = corpus.tokens("validation")
    rows = min(max_rows, len(tokens) // length)
    dataset = MaskedRows(tokens, vocabulary, rows, length, VALIDATION_SEED, share, shuffle=False)
    if not any((dataset.__getitems__([row])["labels"] != IGNORED).any() for row in range(rows)):
        raise UserError(f"the first {rows} rows of the validation set hold only special tokens: nothing to predict")
    return dataset


def training_arguments(recipe: Recipe) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    same = ("learning_rate", "warmup_steps", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "seed")
    schedules = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}
    decay = {"num_decay_steps": recipe.decay_steps, "decay_type": "linear"}
    arguments = TrainingArguments(
        **{name: getattr(recipe, name) for name in (*same, "max_grad_norm", "gradient_checkpointing")},
        output_dir=recipe.out,
        max_steps=recipe.steps,
        lr_scheduler_type=schedules.get(recipe.schedule, recipe.schedule),
        lr_scheduler_kwargs=decay if recipe.schedule == "wsd" else None,
        logging_steps=recipe.log_every,
        eval_steps=recipe.eval_every,
        save_steps=recipe.save_every,
        save_total_limit=recipe.keep,
        gradient_checkpointing_kwargs={"use_reentrant": False} if recipe.gradient_checkpointing else None,
        dataloader_num_workers=recipe.workers,
        dataloader_prefetch_factor=4 if recipe.workers else None,
        prediction_loss_only=True,
        ddp_find_unused_parameters=False,
        ddp_backend="gloo" if dist.is_torchelastic_launched() and not on_gpu else None,
        **common_arguments(recipe.precision),
    )
    rows = recipe.rows_per_pass(arguments.world_size)
    arguments.per_device_train_batch_size = arguments.per_device_eval_batch_size = rows
    arguments.gradient_accumulation_steps = recipe.accumulation_steps(arguments.world_size)
    return arguments


def _save_result(
    trainer: ExactTrainer,
    weights: dict[str, Any],
    recipe: Recipe,
    corpus: Corpus,
    start_hash: str | None,
    command: str,
) -> None:
    """Plot the curve, and save the model with its card."""
    model, out, tokenizer = trainer.model, Path(recipe.out), corpus.tokenizer()
    title = describe(model.config)
    tokenizer.model_max_length = model.config.max_position_embeddings
    records, splits = metrics_of(trainer.state), corpus.manifest["splits"]
    held_out = ", ".join(corpus.manifest["validation_sources"]) or "documents held out of the same sources"
    origin = f"- Started from: `{recipe.start}` (sha256 `{start_hash}`)\n" if start_hash else ""
    text = f"""\
An encoder of {model.num_parameters() / 1e6:.1f}M parameters, pretrained by masked-language modeling.

- Validation perplexity after {counted(recipe.steps, "step")}: {records[-1]["perplexity"]:.2f}
{origin}- Training data: {splits["train"]["tokens"]:,} tokens from {", ".join(corpus.manifest["sources"])}
- Validation data: {splits["validation"]["tokens"]:,} tokens from {held_out}

```yaml
{yaml.safe_dump(recipe.to_dict(), sort_keys=False).strip()}
```
"""
    plots.training({title: records}, out / "curve.png")
    card = model_card("fill-mask", title, text, command)
    save_model(out / "model", model, weights, tokenizer, card)  # last: it marks the run as finished


SENTENCES = "sentence-similarity"  # the purpose of models whose folder is one of sentence-transformers


def describe(config: LinformerConfig) -> str:
    config = config.resolved()
    n = config.max_position_embeddings
    if config.projection == "identity":
        return f"Transformer twin, n={n}"
    window = f", w={config.local_window}" if any(config.local_windows) else ""
    return f"Linformer, n={n}, k={config.projected_length}{window}, {config.projection}, {config.sharing}"


def model_card(task: str, title: str, text: str, command: str) -> str:
    """The README.md of a model for a task of transformers' pipelines, question answering or `SENTENCES`."""
    library, code, more = "transformers", ("pipeline", "pipe", f'pipeline("{task}", model=".")'), ""
    if task == "question-answering":
        name = "AutoModelForQuestionAnswering"
        code = (name, "model", f'{name}.from_pretrained(".")')
    elif task == SENTENCES:
        library, code = "sentence-transformers", ("SentenceTransformer", "model", 'SentenceTransformer(".")')
        more = "\n```sh\nlinformers embed DOCUMENTS --model . --out vectors.npy\n```\n"
    return f"""---
library_name: {library}
pipeline_tag: {task}
tags: [linformer]
---

# {title}

```python
import linformers  # registers Linformer (https://arxiv.org/abs/2006.04768) with transformers
from {library.replace("-", "_")} import {code[0]}

{code[1]} = {code[2]}
```
{more}
{text}
{sentence(command)}
"""


def save_model(
    folder: Path,
    model: PreTrainedModel,
    weights: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    card: str,
    add: Callable[[Path], None] = lambda unfinished: None,
    max_file: int = 50 * 10**9,
) -> None:
    """Write the folder of a model, its weights in files of `max_file` bytes; `add` writes further files to it."""

    def fill(unfinished: Path) -> None:
        model.save_pretrained(unfinished, state_dict=weights, max_shard_size=max_file)
        tokenizer.save_pretrained(unfinished)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        add(unfinished)

    files.write_folder(folder, fill)
