"""Section 5.1: masked-language-model pretraining, from a corpus and a recipe to a model with its card."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from torch import distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed

from .. import plots
from ..checks import check_model, make_folder
from ..config import LinformerConfig
from ..encoder import LinformerModel
from ..errors import UserError
from ..heads import LinformerForMaskedLM
from . import card, checkpointing
from .compiled import compile_parts
from .corpus import Corpus, tokenizer_hash
from .monitor import Monitor, read_metrics
from .recipe import Recipe, differences
from .rows import MaskedRows, Vocabulary, as_it_is
from .trainer import ExactTrainer, arguments_for_all

# The mask of the validation set is the same in every run, so that perplexities can be compared.
VALIDATION_SEED = 2**40


def run(recipe: Recipe, console: Console, command: str) -> int:
    """Carry a recipe out, from its newest checkpoint if it has one.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that stopped the run after saving it.
    """
    with _same_numbers(recipe.deterministic):
        code = _run(recipe, console, command)
    if dist.is_initialized():  # after an error it is left alone: leaving it could wait for processes that went on
        dist.destroy_process_group()
    return code


@contextmanager
def _same_numbers(always: bool) -> Iterator[None]:
    """Let torch use none but deterministic algorithms, if it `always` must give the same numbers."""
    before = torch.are_deterministic_algorithms_enabled()
    if always:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _run(recipe: Recipe, console: Console, command: str) -> int:
    out = Path(recipe.out)
    corpus = Corpus.open(Path(recipe.data))
    make_folder("out", out)
    arguments = training_arguments(recipe)
    if not arguments.should_save:
        return _train(recipe, corpus, arguments, out, Console(quiet=True), command)
    corpus.verify()
    with checkpointing.locked(out):
        return _train(recipe, corpus, arguments, out, console, command)


def _train(
    recipe: Recipe, corpus: Corpus, arguments: TrainingArguments, out: Path, console: Console, command: str
) -> int:
    trainer = make_trainer(recipe, corpus, arguments)
    if arguments.should_save:
        _claim(out, recipe, corpus)
        checkpointing.remove_unfinished(out)
    trainer.accelerator.wait_for_everyone()
    if trainer.same_for_all("finished models:", int((out / "model").exists())):
        console.print(f"{out / 'model'} is there already: this run is finished.", highlight=False)
        return 0

    for warning in warnings(recipe, corpus):
        console.print(warning, style="yellow", highlight=False)
    if (gpus := torch.cuda.device_count()) > 1 and arguments.world_size == 1:
        console.print(f"1 of {gpus} GPUs is used; torchrun --nproc_per_node={gpus} -m linformers … takes all of them")
    n = trainer.model.config.max_position_embeddings
    flops = flops_per_token(trainer.model.config, recipe.mask_share)
    monitor = Monitor(
        trainer,
        out,
        console,
        title=describe(trainer.model.config),
        score="perplexity",
        unit="tokens",
        units_per_step=recipe.batch_size * n,
        flops_per_unit=flops,
    )
    if code := monitor.train():
        return code
    _finish(trainer, recipe, corpus, out, command)
    trainer.accelerator.wait_for_everyone()
    if arguments.should_save:
        last = read_metrics(out)[-1]
        console.print(f"validation perplexity {last['perplexity']:.2f}; model in {out / 'model'}", markup=False)
    return 0


def warnings(recipe: Recipe, corpus: Corpus) -> Iterator[str]:
    """What can be done and is hardly meant."""
    if recipe.warmup_steps >= recipe.steps:
        yield f"warmup_steps={recipe.warmup_steps} is not below steps={recipe.steps}: the rate never reaches its peak"
    rows = corpus.manifest["splits"]["train"]["tokens"] // recipe.max_length
    if recipe.batch_size > rows:
        yield (
            f"batch_size={recipe.batch_size} is more than the {rows} rows of n={recipe.max_length} tokens that "
            f"data={recipe.data!r} has: a step repeats them"
        )


def make_trainer(recipe: Recipe, corpus: Corpus, arguments: TrainingArguments) -> ExactTrainer:
    """Model, rows and trainer of a recipe, ready to train."""
    tokenizer = corpus.tokenizer()
    set_seed(recipe.seed)
    config = recipe.config(
        vocab_size=corpus.vocab_size,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LinformerForMaskedLM(config) if recipe.start is None else started(recipe, config, corpus)
    compile_parts(model, recipe.compile)
    if recipe.shard:
        shard(model)
    return ExactTrainer(
        model,
        arguments,
        data_collator=as_it_is,
        train_dataset=training_rows(recipe, corpus, tokenizer),
        eval_dataset=validation_rows(
            corpus, tokenizer, config.max_position_embeddings, recipe.eval_rows, recipe.mask_share
        ),
        processing_class=tokenizer,
    )


def started(recipe: Recipe, config: LinformerConfig, corpus: Corpus) -> LinformerForMaskedLM:
    """The model that a recipe starts from, if it is one of its size and of the corpus's tokenizer."""
    folder = Path(recipe.start or "")
    check_model("start", folder)
    saved = LinformerConfig.from_pretrained(folder)
    if saved.architectures != [LinformerForMaskedLM.__name__]:
        raise UserError(f"start={recipe.start!r} is a {saved.architectures}, not a {LinformerForMaskedLM.__name__}")
    if tokenizer_hash(folder) != corpus.tokenizer_hash:
        raise UserError(
            f"data={recipe.data!r} was made with another tokenizer than start={recipe.start!r}; prepare it with "
            f"--tokenizer {recipe.start}"
        )
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if getattr(saved, name) != getattr(config, name):
            raise UserError(f"start={recipe.start!r} has {name}={getattr(saved, name)}, not {getattr(config, name)}")
    return LinformerForMaskedLM.from_pretrained(folder, config=config, dtype=torch.float32)


def training_rows(recipe: Recipe, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> MaskedRows:
    return MaskedRows(
        corpus.tokens("train"),
        vocabulary_of(tokenizer, corpus.vocab_size),
        rows=recipe.steps * recipe.batch_size,
        length=recipe.max_length,
        seed=recipe.seed,
        mask_share=recipe.mask_share,
        short_rows=recipe.short_rows,
    )


def validation_rows(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, length: int, most: int, mask_share: float = 0.15
) -> MaskedRows:
    """The first rows of the validation set, with a mask that is the same in every run."""
    tokens, vocabulary = corpus.tokens("validation"), vocabulary_of(tokenizer, corpus.vocab_size)
    if len(tokens) < length:
        raise UserError(
            f"the validation split of {str(corpus.folder)!r} has {len(tokens)} tokens, fewer than a row of {length}; "
            "prepare it with a larger validation share"
        )
    rows = min(most, len(tokens) // length)
    return MaskedRows(
        tokens, vocabulary, rows=rows, length=length, seed=VALIDATION_SEED, mask_share=mask_share, shuffle=False
    )


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
    return Vocabulary(size, tokenizer.mask_token_id, tokenizer.pad_token_id, tuple(tokenizer.all_special_ids))


def training_arguments(recipe: Recipe) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=recipe.out,
        max_steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant_with_warmup" if recipe.schedule == "constant" else recipe.schedule,
        warmup_steps=recipe.warmup_steps,
        adam_beta1=recipe.adam_beta1,
        adam_beta2=recipe.adam_beta2,
        adam_epsilon=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        logging_steps=recipe.log_every,
        eval_strategy="steps",
        eval_steps=recipe.eval_every,
        save_strategy="steps",
        save_steps=recipe.save_every,
        save_total_limit=recipe.keep,
        gradient_checkpointing=recipe.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if recipe.gradient_checkpointing else None,
        dataloader_num_workers=recipe.workers,
        dataloader_prefetch_factor=4 if recipe.workers else None,
        seed=recipe.seed,
        prediction_loss_only=True,
        ddp_find_unused_parameters=False,
        ddp_backend="gloo" if dist.is_torchelastic_launched() and not on_gpu else None,
        **arguments_for_all(recipe.precision),
    )
    arguments.per_device_train_batch_size = recipe.rows_per_pass(arguments.world_size)
    arguments.per_device_eval_batch_size = recipe.rows_per_pass(arguments.world_size)
    arguments.gradient_accumulation_steps = recipe.accumulation(arguments.world_size)
    return arguments


def shard(model: LinformerForMaskedLM) -> None:
    """Spread each layer's weights over all processes (FSDP)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        raise UserError("shard=true needs several processes: start the command with torchrun")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model.to(device)
    for layer in model.linformer.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def flops_per_token(config: LinformerConfig, mask_share: float) -> float:
    """Multiplications and additions of a training step for each token: forward, and twice that backward."""
    n, d = config.max_position_embeddings, config.hidden_size
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        LinformerModel(config)(torch.zeros(1, n, dtype=torch.long))
    head = 2 * d * (d + config.vocab_size) * (mask_share if config.sparse_prediction else 1)
    return 3 * (counter.get_total_flops() / n + head)


def describe(config: LinformerConfig) -> str:
    n = config.max_position_embeddings
    if config.projection == "identity":
        return f"Transformer twin, n={n}"
    window = f", w={config.local_window}" if any(config.local_windows) else ""
    return f"Linformer, n={n}, k={config.projected_length}{window}, {config.projection}, {config.sharing}"


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _claim(out: Path, recipe: Recipe, corpus: Corpus) -> None:
    """Write down what is trained in a folder; refuse another recipe, or another tokenizer, than was begun there."""
    start = None if recipe.start is None else checkpointing.model_hash(Path(recipe.start))
    what = {"recipe": recipe.to_dict(), "tokenizer": corpus.tokenizer_hash, "corpus": corpus.hash, "start": start}
    saved = checkpointing.claim(out, "pretrain", what)
    if changed := differences(recipe, saved["recipe"]):
        listed = "; ".join(changed)
        raise UserError(f"out={recipe.out!r} holds a run of another recipe: {listed}; choose another out")
    if saved["tokenizer"] != corpus.tokenizer_hash:
        raise UserError(f"data={recipe.data!r} was made with another tokenizer than the run in out={recipe.out!r}")
    if saved["corpus"] != corpus.hash:
        raise UserError(f"data={recipe.data!r} is another corpus than that of the run in out={recipe.out!r}")
    if saved.get("start") != start:
        raise UserError(f"start={recipe.start!r} holds other weights than the run in out={recipe.out!r} began with")


def _finish(trainer: ExactTrainer, recipe: Recipe, corpus: Corpus, out: Path, command: str) -> None:
    """The model with its card, and the plot of its curve."""
    weights = trainer.whole_weights()
    if not trainer.args.should_save:
        return
    records = read_metrics(out)

    def fill(folder: Path) -> None:
        trainer.model.save_pretrained(folder, state_dict=weights)
        tokenizer = corpus.tokenizer()
        tokenizer.model_max_length = trainer.model.config.max_position_embeddings
        tokenizer.save_pretrained(folder)
        text = card.pretrained(trainer.model.config, recipe, corpus, records, command, num_parameters(trainer.model))
        (folder / "README.md").write_text(text)

    plots.training({describe(trainer.model.config): records}, out / "curve.png")
    checkpointing.write_whole(out / "model", fill)  # last: a run that has it is finished
