"""Transformers' Trainer with exact resume, atomic checkpoints without pickle, a stop at NaN, and progress."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerState

from .. import LinformerForMaskedLM, files
from ..checks import to_builtin
from ..errors import UserError, counted
from ..progress import progress
from . import checkpoints
from .optimizer import MuonAdamW, parameter_groups

MODEL, OPTIMIZER, TRAINING, STATE = "model.safetensors", "optimizer.safetensors", "training.json", "trainer_state.json"
METRICS = "metrics.jsonl"
# The last one tells that the terminal was closed; Windows has none.
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class ExactTrainer(Trainer):
    """A Trainer that never loses more than the steps since the last checkpoint.

    - A checkpoint appears complete or not at all (`files.write_folder`), and later damage is detected by hash.
      It contains only safetensors and JSON.
    - A resumed run equals an uninterrupted one bit for bit (on a GPU, with deterministic algorithms): it restores
      random states, the optimizer, and the loss since the last log. Rows must depend on their number alone, as those of
      `rows.py` do.
    - SIGTERM, SIGINT and SIGHUP end the run after the current step, with a checkpoint.
    - A loss or gradient that is not finite ends the run before the weights change.
    - A step whose labels are all ignored has no gradient and does not count in logged losses.

    With `muon`, the optimizer is `MuonAdamW`, otherwise AdamW.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, *, muon: bool = False, **kwargs: Any) -> None:
        if args.n_gpu > 1:  # without torchrun, transformers would use all GPUs and multiply the batch size
            args._n_gpu = 1
        super().__init__(model, args, **kwargs)
        assert self.args.optim == "adamw_torch_fused", "only fused optimizers can skip an update on the device"
        self.muon = muon
        self.stopped_by: int | None = None  # the signal that ended the run
        self._labels: Tensor | None = None  # the number of labels in the current step, if they can be ignored
        self._flags: tuple[int, AsyncScalar] | None = None  # of the last step; see `_get_grad_norm`
        self._restored: dict[str, Any] | None = None
        self.is_sharded = any(hasattr(parameter, "device_mesh") for parameter in self.model.parameters())
        if self.is_sharded:  # FSDP reduces gradients; another wrapper would do so twice
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.remove_callback(PrinterCallback)
        self.signals = _SignalCallback(self)
        self.add_callback(self.signals)

    # Saving.

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        run, best = Path(self.args.output_dir), self.state.best_global_step
        folder = run / f"checkpoint-{self.state.global_step}"
        # All processes take part in gathering; the first one writes.
        weights = self.full_weights()
        optimizer = checkpoints.optimizer_tensors(self.model, self.optimizer.optimizer)
        training = {
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
            "scheduler": {k: v for k, v in self.lr_scheduler.state_dict().items() if k != "lr_lambdas"},
            "last_logged": self._globalstep_last_logged,
            "losses": self.gather(self._tr_loss.item()),
            "random": self.gather(checkpoints.random_state()),
        }

        def fill(unfinished: Path) -> None:
            # A checkpoint is also a model that `from_pretrained` loads.
            self.model.config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
            self.model.config.resolved().save_pretrained(unfinished)
            save_file(weights, unfinished / MODEL, metadata={"format": "pt"})
            save_file(optimizer, unfinished / OPTIMIZER)
            (unfinished / TRAINING).write_text(json.dumps(training))
            self.state.save_to_json(str(unfinished / STATE))
            if self.processing_class is not None:
                self.processing_class.save_pretrained(unfinished)

        if self.args.should_save and files.damage(folder) is not None:
            try:
                files.write_folder(folder, fill)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{folder} could not be written ({error}); {self._last_checkpoint()}") from error
            checkpoints.remove_old(run, self.args.save_total_limit or 1, run / f"checkpoint-{best}")
        self.accelerator.wait_for_everyone()

    def _last_checkpoint(self) -> str:
        saved = checkpoints.list_checkpoints(Path(self.args.output_dir))
        return f"the last checkpoint is of step {checkpoints.step_of(saved[0])}" if saved else "there is no checkpoint"

    def full_weights(self) -> dict[str, Tensor]:
        """Copies of the weights on the CPU; with a sharded model, every process must call this."""
        return {name: checkpoints.full_tensor(tensor) for name, tensor in self._weights().items()}

    def _weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, tied ones once."""
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            unique.setdefault(id(tensor), (name, tensor))
        return dict(unique.values())

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes."""
        return gather_object([value]) if self.args.world_size > 1 else [value]

    def check_shared(self, what: str, number: int) -> int:
        """Check that all processes found the same number in the folder of the run."""
        if len(numbers := set(self.gather(number))) > 1:
            raise UserError(f"out={self.args.output_dir!r} is not shared by all processes: they see {what} {numbers}")
        return number

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Of equally good models, prefer the later: on few rows, an early one may be right by chance."""
        better = super()._determine_best_metric(metrics=metrics, trial=trial)
        name = self.args.metric_for_best_model
        if name is not None and metrics[f"eval_{name}"] == self.state.best_metric:
            self.state.best_global_step = self.state.global_step
        return better

    # Resuming.

    @torch.no_grad()
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        weights = self._weights()
        with _reading(resume_from_checkpoint):
            saved = load_file(Path(resume_from_checkpoint) / MODEL)
            shapes = ({name: value.shape for name, value in tensors.items()} for tensors in (saved, weights))
            if next(shapes) != next(shapes):
                raise ValueError("its weights are those of another model")
            for name, value in saved.items():
                weights[name].copy_(checkpoints.shard_like(value, weights[name]))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _reading(checkpoint):
            tensors = load_file(Path(checkpoint) / OPTIMIZER)
            restored = files.read_json(Path(checkpoint) / TRAINING)
            losses, last_logged = [float(loss) for loss in restored["losses"]], int(restored["last_logged"])
            self._restored = {**restored, "losses": losses, "last_logged": last_logged}
            checkpoints.load_optimizer_tensors(self.model, self.optimizer.optimizer, tensors)
            for group, saved in zip(self.optimizer.param_groups, self._restored["groups"], strict=True):
                types = [
                    {name: type(to_builtin(own[name])) for name in own if name != "params"} for own in (group, saved)
                ]
                if types[0] != types[1]:
                    raise ValueError("its optimizer has other settings")
                group.update(saved)
            self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), **self._restored["scheduler"]})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _reading(checkpoint):
            states = files.read_json(Path(checkpoint) / TRAINING)["random"]
            if self.args.process_index < len(states):  # additional processes keep their own
                checkpoints.load_random_state(states[self.args.process_index])

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing to load: bfloat16 needs no scaling, and transformers would unpickle a file."""

    def restore_loss(self) -> None:
        """Restore the loss since the last log, so that the next log entry is that of an uninterrupted run."""
        if self._restored is None:
            return
        losses, self._globalstep_last_logged = self._restored["losses"], self._restored["last_logged"]
        same = len(losses) == self.args.world_size
        loss = losses[self.args.process_index] if same else sum(losses) / len(losses)
        self._tr_loss, self._restored = torch.tensor(loss, device=self.args.device), None

    # Steps.

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay, except E, which has its own learning rate."""
        return [name for name in super().get_decay_parameter_names(model) if "projections." not in name]

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if self.muon:
            groups = parameter_groups(self.model, self.get_decay_parameter_names(self.model))
            _, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer: Any = MuonAdamW(groups, weight_decay=self.args.weight_decay, **options)
        return super().create_optimizer(model)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # transformers would iterate over all parameters in each step

    def get_train_dataloader(self) -> Any:
        """Loading processes ignore signals: if SIGTERM killed one, the run could not save."""
        loader = super().get_train_dataloader()
        for wrapped in (loader, getattr(loader, "base_dataloader", None)):
            if wrapped is not None:
                wrapped.worker_init_fn = functools.partial(_ignore_signals, wrapped.worker_init_fn)
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = super().get_eval_dataloader(eval_dataset)
        self.accelerator._dataloaders.remove(loader)  # which would keep one of each validation
        return loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self._labels = num_items_in_batch
        return super().training_step(model, inputs, num_items_in_batch)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm of the gradients; if it or the loss is not finite, the update that follows is skipped."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        not_finite = ~torch.isfinite(torch.as_tensor(norm) + self._tr_loss)
        unlabeled = torch.zeros_like(not_finite) if self._labels is None else self._labels == 0
        self._check_step()
        if not self.is_sharded:
            # Like a gradient scaler, this makes a fused optimizer skip the update. The host reads the flags a step
            # later, so that it never waits for the device.
            self.optimizer.optimizer.found_inf = not_finite.float()
        self._flags = (self.state.global_step + 1, AsyncScalar(not_finite + 2 * unlabeled))
        if self.is_sharded:
            self._check_step()
        return norm

    def _check_step(self) -> None:
        """End the run if the last loss or gradient was not finite; do not count a step without labels."""
        if self._flags is None:
            return
        (step, flags), self._flags = self._flags, None
        if flags.value() % 2:
            rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            raise UserError(
                f"the loss or a gradient is not finite in step {step} (rows {(step - 1) * rows} to {step * rows - 1}); "
                f"the weights are unchanged, and {self._last_checkpoint()}; lower the learning rate"
            )
        if flags.value():
            self._globalstep_last_logged += 1  # the logged loss is divided by the number of steps since then

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_save:  # both wait for the device
            self._check_step()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A batch whose labels are all ignored does not count in the validation loss."""
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        counts = self._get_num_items_in_batch([inputs], self.args.device) != 0
        return loss if counts else None, logits, labels


class AsyncScalar:
    """A number that is copied from the device while the host continues."""

    def __init__(self, tensor: Tensor) -> None:
        self.copy = tensor.to("cpu", non_blocking=True)
        self.arrived = torch.cuda.current_stream().record_event() if tensor.is_cuda else None

    def value(self) -> float:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.copy.item()


class _SignalCallback(TrainerCallback):
    """On a signal, finish the current step, save and stop."""

    def __init__(self, trainer: ExactTrainer) -> None:
        self.trainer, self.received = trainer, 0
        self.known: AsyncScalar | None = None  # what any process had received one step earlier

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.trainer.restore_loss()
        state.compute_steps(args, state.max_steps)  # the checkpoint has the intervals of the earlier run

    def receive(self, number: int, frame: Any) -> None:
        self.received = number

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        received = self.received
        if args.world_size > 1:  # all processes stop after the same step
            known, self.known = self.known, self._of_all_processes()
            received = 0 if known is None else int(known.value())
        if received:
            self.trainer.stopped_by = received
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """A signal during the last step must still stop the command."""
        received = int(self._of_all_processes().value()) if args.world_size > 1 else self.received
        self.trainer.stopped_by = received or self.trainer.stopped_by

    def _of_all_processes(self) -> AsyncScalar:
        flag = torch.tensor([self.received], device=self.trainer.args.device)
        return AsyncScalar(self.trainer.accelerator.gather(flag).max())


def _ignore_signals(then: Any, worker: int) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if then is not None:
        then(worker)


@contextlib.contextmanager
def _reading(checkpoint: str | Path) -> Iterator[None]:
    """Name a checkpoint whose hashes are right and whose content is not that of the run."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (SafetensorError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint} is damaged, or of another run: {str(error).splitlines()[0]}") from error


def common_arguments(precision: str) -> dict[str, Any]:
    """Training arguments that every run of an `ExactTrainer` has."""
    on_gpu = torch.cuda.is_available()
    return {
        "optim": "adamw_torch_fused",
        "eval_strategy": "steps",
        "bf16": precision == "bf16" or (precision == "auto" and on_gpu and torch.cuda.is_bf16_supported()),
        "train_sampling_strategy": "sequential",  # the rows are already shuffled
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,
        "report_to": ["tensorboard"] if find_spec("tensorboard") else [],
        "disable_tqdm": True,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "accelerator_config": {"non_blocking": on_gpu},
    }


def compile_model(model: PreTrainedModel, choice: str, *, any_length: bool = False) -> None:
    """Compile a model in place, layer by layer, which takes half the time of compiling it as a whole.

    `choice` is `"yes"`, `"no"`, or `"auto"`: on a GPU. With `any_length`, inputs of all lengths share one graph.
    """
    if choice == "no" or (choice == "auto" and not torch.cuda.is_available()):
        return
    encoder = model.base_model
    # Layers that differ only in an integer, such as the shift of their windows, share a graph from the second on.
    # With dynamic lengths this would make all integers of a layer dynamic.
    torch._dynamo.config.allow_unspec_int_on_nn_module = not any_length
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(encoder.layers))
    # Fusing row and column sums into one kernel costs more time than it saves.
    options: dict[str, Any] = {"dynamic": any_length or None, "options": {"triton.mix_order_reduction": False}}
    for part in (encoder.embeddings, encoder.projections, *encoder.layers):
        part.compile(**options)
    if isinstance(model, LinformerForMaskedLM):
        model.head.compile(**options)
        model.loss_function = torch.compile(model.loss_function, **options)


def train(trainer: ExactTrainer, console: Console, title: str, *, score: str, unit: str, units_per_step: int) -> int:
    """Train from the newest intact checkpoint, if there is one, and write the log to `metrics.jsonl`.

    Validation gives a `score`: `"perplexity"`, `"accuracy"`, or `"error"`, its loss. Speed is in `unit`, `"tokens"` or
    `"rows"`. Returns the exit code: 0, or 128 plus the number of the signal that stopped the run.
    """

    def say(message: str) -> None:
        console.print(f"{title}: {message}", highlight=False, markup=False)

    resume = checkpoints.newest_intact(Path(trainer.args.output_dir), say)
    step = trainer.check_shared("checkpoints of steps", checkpoints.step_of(resume) if resume else 0)
    if resume is not None:
        files.read_json(resume / STATE)  # transformers reads it without bounds
        with _reading(resume):
            if not all(
                isinstance(entry, dict) for entry in TrainerState.load_from_json(str(resume / STATE)).log_history
            ):
                raise ValueError("its log has a wrong entry")
    say(f"resuming from step {step}" if resume else counted(trainer.args.max_steps, "step"))
    monitor = _Monitor(console, title, score, unit, units_per_step)
    trainer.add_callback(monitor)
    # A signal that is ignored from the start, as under nohup, stays ignored.
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def receive(number: int, frame: Any) -> None:
        trainer.signals.receive(number, frame)
        with contextlib.suppress(OSError, RuntimeError):  # no terminal, or the signal came during a write
            say("stopping after this step")

    handlers = {number: signal.signal(number, receive) for number in heeded}
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        monitor.bars.stop()
    stopped_by = trainer.stopped_by or trainer.signals.received  # perhaps after the last step
    if not stopped_by:
        return 0
    say(f"stopped by a signal; saved step {trainer.state.global_step}")
    return 128 + stopped_by


class _Monitor(TrainerCallback):
    """Completes log entries with speed and score, writes and shows them."""

    def __init__(self, console: Console, title: str, score: str, unit: str, units_per_step: int) -> None:
        self.console, self.title, self.score, self.unit = console, title, score, unit
        self.units_per_step, self.bars = units_per_step, progress(console)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.units, self.seconds, self.clock = 0, 0.0, time.perf_counter()
        self.task = self.bars.add_task(self.title, total=state.max_steps, completed=state.global_step)
        if self.console.is_terminal and self.console.file.isatty():  # a forced terminal may be a file
            self.bars.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            control.should_log = control.should_evaluate = control.should_save = True
        now = time.perf_counter()
        self.units, self.seconds, self.clock = self.units + self.units_per_step, self.seconds + now - self.clock, now
        self.bars.update(self.task, completed=state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock = time.perf_counter()  # validation and saving do not count for the speed

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "loss" in logs:
            logs[f"{self.unit}_per_second"] = self.units / self.seconds
            self.units, self.seconds = 0, 0.0
            self.bars.update(self.task, detail=f"loss {logs['loss']:.3f}")
            if torch.cuda.is_available():
                logs["peak_bytes"] = torch.cuda.max_memory_allocated()
        elif "eval_loss" in logs:
            if not math.isfinite(logs["eval_loss"]):
                step = f"in step {state.global_step}"
                raise UserError(f"the validation loss is {logs['eval_loss']} {step}; lower the learning rate")
            perplexity = math.exp(min(logs["eval_loss"], 700))
            scores = {"perplexity": perplexity, "error": logs["eval_loss"]}
            logs[self.score] = scores[self.score] if self.score in scores else logs[f"eval_{self.score}"]
        if not state.is_world_process_zero or not {"loss", "eval_loss"} & logs.keys():
            return
        state.log_history[-1] |= logs
        lines = [json.dumps(entry) + "\n" for entry in metrics_of(state)]
        files.write_file(Path(args.output_dir) / METRICS, "".join(lines))
        shown = {"loss": ".3f", self.score: ".4g", "learning_rate": ".2e", f"{self.unit}_per_second": ",.0f"}
        parts = [f"{name.replace('_', ' ')} {logs[name]:{form}}" for name, form in shown.items() if name in logs]
        self.console.print(f"step {state.global_step:,}  " + "  ".join(parts), highlight=False)


def metrics_of(state: TrainerState) -> list[dict[str, Any]]:
    """The log entries of training and validation."""
    return [entry for entry in state.log_history if "loss" in entry or "eval_loss" in entry]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The log entries of a run; a last line that is cut off is dropped."""
    path, entries = run / METRICS, []
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict) and "step" in entry:
            entries.append(entry)
        elif number < len(lines):
            raise UserError(f"{path} has {line[:80]!r} in line {number}, which is not a log entry; delete it")
    return entries
