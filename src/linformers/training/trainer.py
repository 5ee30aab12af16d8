"""transformers' Trainer with exact resume: whole checkpoints without pickle, and no update from what is not finite."""

from __future__ import annotations

import functools
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerState
from transformers.trainer_utils import SaveStrategy

from ..errors import UserError
from . import checkpointing

MODEL, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.safetensors", "random.safetensors"
NUMBERS, STATE = "training.json", "trainer_state.json"


class NotFiniteError(ArithmeticError):
    """A loss or a gradient was NaN or infinite; the weights are as they were before that step."""


class CannotSaveError(OSError):
    """A checkpoint could not be written; the ones before it are as they were."""


class ExactTrainer(Trainer):
    """A Trainer that loses at most the steps since the last checkpoint, whatever happens.

    - A checkpoint appears whole or not at all (`checkpointing.write_whole`), and one that was damaged later is found
      by its hash. It holds safetensors and json alone.
    - A resumed run equals an uninterrupted one bit for bit: random states, the loss since the last log and the
      optimiser are restored, and rows are a function of their number (`rows.MaskedRows`).
    - SIGTERM and SIGINT save at the end of the step and stop.
    - A NaN or an infinity in loss or gradients stops the run before the weights change.

    The optimiser must be one of torch's fused ones (`optim="adamw_torch_fused"`).
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, **kwargs: Any) -> None:
        if args.n_gpu > 1:  # transformers would multiply the batch by it
            args._n_gpu = 1
        super().__init__(model, args, **kwargs)
        assert self.args.optim == "adamw_torch_fused", (
            "the update is called off on the device, which only fused ones can"
        )
        self.stopped_by: int | None = None
        self.seconds_waiting, self.seconds_aside = 0.0, 0.0
        self._flag: tuple[int, Later] | None = None
        self._restored: dict[str, Any] | None = None
        self.is_sharded = any(hasattr(parameter, "device_mesh") for parameter in self.model.parameters())
        if self.is_sharded:  # gradients are reduced where weights are sharded; another wrapper would do it twice
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.remove_callback(PrinterCallback)  # whoever trains shows what is logged
        self._signals = _Signals(self)
        self.add_callback(self._signals)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as transformers does; signals mean what they meant before when it ends, however it does."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._signals.let_go()

    # Saving.

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        began = time.perf_counter()
        self._refuse_not_finite()
        run = Path(self.args.output_dir)
        folder = run / f"checkpoint-{self.state.global_step}"
        self.store_flos()
        weights = self.whole_weights()
        optimizer, numbers = checkpointing.optimizer_state(self.model, self.optimizer.optimizer)
        scheduler = self.lr_scheduler.state_dict()
        scheduler.pop("lr_lambdas", None)
        numbers |= {
            "scheduler": scheduler,
            "losses": [loss.item() for loss in self._of_all_processes(self._tr_loss)],
            "last_logged": self._globalstep_last_logged,
        }
        randoms = {
            f"{name}/{process}": tensor
            for name, own in checkpointing.random_state().items()
            for process, tensor in enumerate(self._of_all_processes(own))
        }
        best = self.state.best_global_step
        if best and self.args.save_strategy != SaveStrategy.NO:
            self.state.best_model_checkpoint = str(run / f"checkpoint-{best}")

        def fill(unfinished: Path) -> None:
            # As `save_pretrained` of a model notes it: a checkpoint is a model, too.
            self.model.config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
            self.model.config.save_pretrained(unfinished)
            save_file(weights, unfinished / MODEL, metadata={"format": "pt"})
            save_file(optimizer, unfinished / OPTIMIZER)
            save_file(randoms, unfinished / RANDOM)
            (unfinished / NUMBERS).write_text(json.dumps(numbers))
            self.state.save_to_json(str(unfinished / STATE))
            if self.processing_class is not None:
                self.processing_class.save_pretrained(unfinished)

        if self.args.should_save and checkpointing.damage(folder) is not None:
            try:
                checkpointing.write_whole(folder, fill)
            except Exception as error:  # safetensors has errors of its own for a full disk
                raise CannotSaveError(self._cannot_save(folder, error)) from error
            best_folder = self.state.best_model_checkpoint
            keep = self.args.save_total_limit or 1
            checkpointing.remove_old(run, keep, Path(best_folder) if best_folder else None)
        self.accelerator.wait_for_everyone()
        self.seconds_aside += time.perf_counter() - began

    def _cannot_save(self, folder: Path, error: Exception) -> str:
        before = checkpointing.checkpoints(folder.parent)
        rest = (
            f"the checkpoint of step {checkpointing.step_of(before[0])} is still there"
            if before
            else "there is none yet"
        )
        return f"the checkpoint {folder} could not be written ({error}); {rest}: make room and run the command again"

    def whole_weights(self) -> dict[str, Tensor]:
        """Copies of them on the CPU; every process of a sharded model must call it."""
        return {name: checkpointing.whole(tensor) for name, tensor in self.model_weights().items()}

    def model_weights(self) -> dict[str, Tensor]:
        """The model's tensors under their names, each of several names for one tensor but the first left out."""
        seen: set[int] = set()
        weights = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                weights[name] = tensor
        return weights

    def same_for_all(self, what: str, number: int) -> int:
        """A number that every process has read from the run's folder, if it is the same."""
        numbers = {int(own) for own in self._of_all_processes(torch.tensor(number))}
        if len(numbers) > 1:
            raise UserError(
                f"the processes see {what} {' and '.join(map(str, sorted(numbers)))} in out={self.args.output_dir!r}; "
                "it must be a folder that all machines share"
            )
        return number

    def _of_all_processes(self, tensor: Tensor) -> list[Tensor]:
        if self.args.world_size == 1:
            return [tensor]
        gathered = self.accelerator.gather(tensor[None].to(self.args.device))
        return [part.cpu().clone() for part in gathered]

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Of equal ones the later is best: where few rows decide, the first step may have all of them by chance."""
        better = super()._determine_best_metric(metrics=metrics, trial=trial)
        name = self.args.metric_for_best_model
        if name is not None and metrics[f"eval_{name}"] == self.state.best_metric:
            self.state.best_global_step = self.state.global_step
        return better

    # Resuming.

    @torch.no_grad()
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        own = self.model_weights()
        for name, value in load_file(Path(resume_from_checkpoint) / MODEL).items():
            own[name].copy_(checkpointing.like(value, own[name]))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        numbers = json.loads((folder / NUMBERS).read_text())
        checkpointing.load_optimizer_state(self.model, self.optimizer.optimizer, load_file(folder / OPTIMIZER), numbers)
        self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), **numbers["scheduler"]})
        self._restored = numbers

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        states = load_file(Path(checkpoint) / RANDOM)
        suffix = f"/{self.args.process_index}"
        own = {key.removesuffix(suffix): tensor for key, tensor in states.items() if key.endswith(suffix)}
        if own:  # another process than were there before goes on with its own
            checkpointing.load_random_state(own)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing to load: bfloat16 needs no scaling."""

    def restore_loss(self) -> None:
        """Take up the loss since the last log where it was, so that what is logged next is what would have been."""
        if self._restored is not None:
            losses = self._restored["losses"]
            own = losses[self.args.process_index] if len(losses) == self.args.world_size else sum(losses) / len(losses)
            self._tr_loss = torch.tensor(own, device=self.args.device)
            self._globalstep_last_logged = self._restored["last_logged"]
            self._restored = None

    # Steps.

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay, but E does not: its rate is its own."""
        return [name for name in super().get_decay_parameter_names(model) if "projections." not in name]

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted here: it would walk through all parameters in each step."""
        return 0

    def get_train_dataloader(self) -> Any:
        """Workers leave signals to the training process: one that died of SIGTERM would take the run with it."""
        loader = super().get_train_dataloader()
        for own in (loader, getattr(loader, "base_dataloader", None)):
            if own is not None:
                own.worker_init_fn = functools.partial(_ignore_signals, own.worker_init_fn)
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        began = time.perf_counter()
        batches = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.seconds_waiting += time.perf_counter() - began
        return batches

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        began = time.perf_counter()
        metrics = super().evaluate(*args, **kwargs)
        self.seconds_aside += time.perf_counter() - began
        return metrics

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm of all gradients; unless it is finite, the update that follows is called off on the device."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        not_finite = ~torch.isfinite(torch.as_tensor(norm))
        self._refuse_not_finite()
        step = self.state.global_step + 1
        if self.is_sharded:
            self._refuse(step, bool(not_finite))
        else:
            # A fused optimiser leaves out an update that is said to be infinite, as a gradient scaler would say it. The
            # host learns of it a step later, so that it never waits for the device.
            self.optimizer.optimizer.found_inf = not_finite.float()
            self._flag = (step, Later(not_finite))
        return norm

    def _refuse_not_finite(self) -> None:
        if self._flag is not None:
            (step, flag), self._flag = self._flag, None
            self._refuse(step, bool(flag.value()))

    def _refuse(self, step: int, not_finite: bool) -> None:
        if not not_finite:
            return
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        saved = checkpointing.checkpoints(Path(self.args.output_dir))
        kept = f"the checkpoint of step {checkpointing.step_of(saved[0])} is kept" if saved else "no checkpoint yet"
        raise NotFiniteError(
            f"loss or gradients are not finite in step {step} (rows {(step - 1) * rows} to {step * rows - 1}); "
            f"the weights were not changed, and {kept}"
        )


def _ignore_signals(then: Any, worker: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if then is not None:
        then(worker)


def arguments_for_all(precision: str) -> dict[str, Any]:
    """Training arguments that every run of an `ExactTrainer` has; bf16 by default where the hardware has it."""
    on_gpu = torch.cuda.is_available()
    return {
        "optim": "adamw_torch_fused",
        "bf16": precision == "bf16" or (precision == "auto" and on_gpu and torch.cuda.is_bf16_supported()),
        "train_sampling_strategy": "sequential",  # rows are in random order by themselves
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,  # what is not finite stops the run instead
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "accelerator_config": {"non_blocking": on_gpu},  # copying a batch must not wait for the step before
    }


class Later:
    """A number that is on its way from the device, while the host goes on."""

    def __init__(self, tensor: Tensor) -> None:
        self.copy = tensor.to("cpu", non_blocking=True)
        self.arrived = torch.cuda.Event() if tensor.is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def value(self) -> float:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.copy.item()


class _Signals(TrainerCallback):
    """SIGTERM and SIGINT set a flag; the step that is under way is finished and saved."""

    def __init__(self, trainer: ExactTrainer) -> None:
        self.trainer = trainer
        self.received = 0
        self.told: Later | None = None
        self.before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.trainer.restore_loss()
        state.compute_steps(args, state.max_steps)  # a checkpoint has the intervals that it was made with
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self.receive)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """One that came too late for a step must not be lost on whoever has more to do."""
        if args.world_size > 1:
            self.received = int(self._of_all().value())
        if self.received:
            self.trainer.stopped_by = self.received

    def let_go(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        received = self.received
        if args.world_size > 1:  # all processes stop after the same step, one after the first of them was told
            told, self.told = self.told, self._of_all()
            received = 0 if told is None else int(told.value())
        if received:
            self.trainer.stopped_by = received
            control.should_save = control.should_training_stop = True

    def _of_all(self) -> Later:
        """What any of the processes received."""
        flag = torch.tensor([self.received], device=self.trainer.args.device)
        return Later(self.trainer.accelerator.gather(flag).max())
