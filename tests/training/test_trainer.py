"""An interrupted and resumed run equals an uninterrupted one, bit for bit."""

import functools
import io
import math
import os
import random
import shutil
import signal
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import TrainerCallback

from linformers.training import checkpoints, pretrain, rows
from linformers.training.corpus import Corpus
from linformers.training.trainer import SIGNALS, ExactTrainer, read_metrics

from ..modes import refused
from . import small

SETTINGS = [
    {"precision": "float32"},
    {"precision": "float32", "workers": 2},
    {"precision": "bf16", "rows_at_once": 2},
    {"precision": "bf16", "rows_at_once": 4, "workers": 1, "gradient_checkpointing": True},
    {"precision": "float32", "optimizer": "muon", "schedule": "wsd", "mask_share": 0.3, "final_mask_share": 0.15},
]


@contextmanager
def interrupted(step, number=signal.SIGTERM):
    """Runs receive a signal within the given step."""

    class Signal(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                os.kill(os.getpid(), number)

    original = ExactTrainer.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.add_callback(Signal())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExactTrainer, "__init__", init)
        yield


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """The uninterrupted run of a setting."""

    @functools.cache
    def run(number):
        out = tmp_path_factory.mktemp("straight")
        assert small.train(small.recipe(corpus, out, **SETTINGS[number])) == 0
        return out

    return lambda setting: run(SETTINGS.index(setting))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values())))
def test_interrupted_at_ten_steps(corpus, straight, setting, tmp_path):
    steps = sorted(random.Random(repr(setting)).sample(range(23), 9))
    for step in (*steps, 23):  # the last one
        with interrupted(step):
            assert small.train(small.recipe(corpus, tmp_path, **setting)) == 128 + signal.SIGTERM
        assert (tmp_path / f"checkpoint-{step + 1}").exists()
    assert small.train(small.recipe(corpus, tmp_path, **setting)) == 0
    small.assert_same_run(tmp_path, straight(setting))


def test_another_seed_is_another_run(corpus, straight, tmp_path):
    """The comparison can fail."""
    small.train(small.recipe(corpus, tmp_path, **SETTINGS[0], seed=1))
    with pytest.raises(AssertionError):
        small.assert_same_run(tmp_path, straight(SETTINGS[0]))


def test_intervals_may_change(corpus, tmp_path):
    """After losing work, here to an interrupt from the keyboard, users want more frequent checkpoints."""
    with interrupted(2, signal.SIGINT):
        assert small.train(small.recipe(corpus, tmp_path, steps=9, save_every=1000, log_every=1000)) == 130
    assert small.train(small.recipe(corpus, tmp_path, steps=9, save_every=2, keep=9, log_every=1)) == 0
    assert sorted(map(checkpoints.step_of, checkpoints.list_checkpoints(tmp_path))) == [3, 4, 6, 8, 9]
    assert [record["step"] for record in read_metrics(tmp_path) if "loss" in record] == [4, 5, 6, 7, 8, 9]


def test_a_signal_is_acknowledged_before_the_step_ends(corpus, tmp_path, monkeypatch):
    console, said, original = Console(file=io.StringIO(), width=200), [], ExactTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        said.append("stopping after this step" in console.file.getvalue())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ExactTrainer, "compute_loss", compute_loss)
    with interrupted(1, signal.SIGINT):
        assert pretrain.run(small.recipe(corpus, tmp_path, eval_every=100), console, "test") == 130
    assert said == [False, True]


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows")
def test_a_closed_terminal_saves_except_under_nohup(corpus, straight, tmp_path, monkeypatch):
    setting = {**SETTINGS[0], "save_every": 100}
    with interrupted(4, signal.SIGHUP):
        assert small.train(small.recipe(corpus, tmp_path, **setting)) == 128 + signal.SIGHUP
        assert (tmp_path / "checkpoint-5").exists()
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            shutil.rmtree(tmp_path / "checkpoint-5")
            assert small.train(small.recipe(corpus, tmp_path, **setting)) == 0
        finally:
            signal.signal(signal.SIGHUP, before)


def test_a_signal_after_the_last_step_stops_the_command(corpus, tmp_path, monkeypatch):
    original = ExactTrainer.train

    def train(self, **options):
        original(self, **options)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ExactTrainer, "train", train)
    assert small.train(small.recipe(corpus, tmp_path, steps=2)) == 143
    assert (tmp_path / "checkpoint-2").exists()
    assert not (tmp_path / "model").exists()


def test_several_gpus_without_torchrun_are_one(corpus, straight, tmp_path, monkeypatch):
    """Transformers would multiply the batch size by the number of GPUs."""
    expected, original = straight(SETTINGS[0]), pretrain.training_arguments

    def with_two_gpus(recipe):
        arguments = original(recipe)
        assert arguments.device.type  # which counts them
        arguments._n_gpu = 2
        return arguments

    monkeypatch.setattr(pretrain, "training_arguments", with_two_gpus)
    assert small.train(small.recipe(corpus, tmp_path, **SETTINGS[0])) == 0
    small.assert_same_run(tmp_path, expected)


def test_machines_without_a_common_folder(corpus, tmp_path, monkeypatch):
    """A machine that does not see the checkpoints would start from scratch and mix gradients of different steps."""
    monkeypatch.setattr(ExactTrainer, "gather", lambda self, value: [value, 7])
    with refused("they see finished models: {0, 7}"):
        small.train(small.recipe(corpus, tmp_path))


def test_finished_run_is_left_alone(corpus, straight):
    out = straight(SETTINGS[0])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert small.train(small.recipe(corpus, out, **SETTINGS[0])) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_no_pickle_is_written_or_read(corpus, straight, tmp_path, monkeypatch):
    names = ("load", "loads", "dump", "dumps", "Pickler", "Unpickler")
    for name in ("torch.load", "torch.save", *(f"pickle.{name}" for name in names)):
        monkeypatch.setattr(name, Mock(side_effect=AssertionError("pickle")))
    with interrupted(9):
        small.train(small.recipe(corpus, tmp_path, **SETTINGS[0]))
    assert small.train(small.recipe(corpus, tmp_path, **SETTINGS[0])) == 0
    small.assert_same_run(tmp_path, straight(SETTINGS[0]))
    written = [*tmp_path.glob("checkpoint-*/*"), *tmp_path.glob("model/*")]
    assert {path.suffix for path in written if path.name != "linformer_classes.py"} == {".safetensors", ".json", ".md"}


@pytest.fixture
def without_labels(monkeypatch):
    """Some steps, counted from 1, and the first eight rows for validation have nothing to predict."""

    def patch(*steps):
        original = rows.MaskedRows.__getitems__

        def getitems(self, numbers):
            batch = original(self, numbers)
            if (numbers[0] // 8 + 1 in steps) if self.shuffle else numbers[0] == 0:
                batch["labels"].fill_(rows.IGNORED)
            return batch

        monkeypatch.setattr(rows.MaskedRows, "__getitems__", getitems)

    return patch


def test_steps_without_labels_count_for_nothing(corpus, tmp_path, without_labels):
    """They are left out of logged losses, also of those across an interrupt, and so are batches in validation."""
    without_labels(4, 12, 13, 14, 15)
    settings = {**SETTINGS[0], "steps": 18, "eval_rows": 16, "eval_every": 6}
    logs = []
    for every in (1, 3):
        out = tmp_path / str(every)
        assert small.train(small.recipe(corpus, out, **settings, log_every=every)) == 0
        logs.append({own["step"]: own["loss"] for own in read_metrics(out) if "loss" in own})
    each, mean = logs
    assert all(math.isfinite(loss) and loss > 1 for loss in each.values())
    assert list(each) == [step for step in range(1, 19) if step not in (4, 12, 13, 14, 15)]
    assert list(mean) == [3, 6, 9, 12, 18]  # none of 13, 14 and 15 had a loss
    for step, loss in mean.items():
        own = [each[s] for s in range(step - 2, step + 1) if s in each]
        assert loss == pytest.approx(sum(own) / len(own), rel=1e-5)
    for step in (3, 10, 13):
        with interrupted(step):
            assert small.train(small.recipe(corpus, tmp_path / "resumed", **settings)) == 143
    assert small.train(small.recipe(corpus, tmp_path / "resumed", **settings)) == 0
    assert small.final_state(tmp_path / "resumed", 18).keys() == small.final_state(tmp_path / "3", 18).keys()
    assert {own["step"]: own["loss"] for own in read_metrics(tmp_path / "resumed") if "loss" in own} == mean


def test_validation_batches_without_labels_count_for_nothing(corpus, tmp_path, without_labels):
    """The perplexity is that of the other batch."""
    recipe = small.recipe(corpus, tmp_path, eval_rows=16, short_rows=0.0)
    arguments, own = pretrain.training_arguments(recipe), Corpus.open(corpus)
    trainer = pretrain.make_trainer(recipe, own, arguments)
    model = trainer.model.eval()
    batch = trainer.eval_dataset.__getitems__(range(8, 16))
    without_labels()
    expected = model(**batch).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    with refused("nothing to predict"):
        pretrain.make_trainer(small.recipe(corpus, tmp_path, eval_rows=1), own, arguments)


def test_nan_in_validation_stops_the_run(corpus, tmp_path, monkeypatch):
    original = ExactTrainer.compute_loss

    def poisoned(self, *args, return_outputs=False, **kwargs):
        result = original(self, *args, return_outputs=return_outputs, **kwargs)
        return (result[0] * torch.nan, result[1]) if return_outputs else result

    monkeypatch.setattr(ExactTrainer, "compute_loss", poisoned)
    with refused("the validation loss is nan in step 8"):
        small.train(small.recipe(corpus, tmp_path))


POISONS = {
    "nan": lambda loss: loss * torch.nan,
    "inf": lambda loss: loss * torch.inf,
    "nan with finite gradients": lambda loss: loss + torch.nan,
}


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[4]], ids=["adamw", "muon"])
@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_nan_stops_before_the_update(corpus, straight, tmp_path, monkeypatch, poison, setting):
    """In step 13, the weights are those of step 12, and the run can resume from its last checkpoint."""
    original, seen = ExactTrainer.compute_loss, []

    def poisoned(self, *args, **kwargs):
        loss = original(self, *args, **kwargs)
        if not self.model.training or self.state.global_step != 12:
            return loss
        seen.extend((parameter, parameter.detach().clone()) for parameter in self.model.parameters())
        return poison(loss)

    handlers = [signal.getsignal(number) for number in SIGNALS]
    with monkeypatch.context() as patch, refused("not finite in step 13 (rows 96 to 103)") as error:
        patch.setattr(ExactTrainer, "compute_loss", poisoned)
        small.train(small.recipe(corpus, tmp_path, **setting))
    assert "step 10" in str(error.value)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert seen
    assert all(torch.equal(parameter, before) for parameter, before in seen)
    assert small.train(small.recipe(corpus, tmp_path, **setting)) == 0
    small.assert_same_run(tmp_path, straight(setting))


def test_algorithms_are_deterministic_where_asked_for(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "_train", lambda *args: int(torch.are_deterministic_algorithms_enabled()))
    for deterministic in (True, False):
        assert small.train(small.recipe(corpus, tmp_path, deterministic=deterministic)) == deterministic
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler hides from users
def test_compiled_training_is_the_same_training(corpus, tmp_path):
    """Equal layers share a graph or two, and losses are those of uncompiled training."""
    model = {"num_hidden_layers": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    losses = []
    for choice in ("no", "yes"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        own = small.recipe(corpus, tmp_path / choice, compile=choice, model=model, steps=6, precision="float32")
        assert small.train(own) == 0
        losses.append(small.losses(tmp_path / choice))
    # Embeddings, projections, the first layer and those with shifted windows, the head and the loss (twice, since its
    # sizes become dynamic), in training and in evaluation.
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 13
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    plain, compiled = (load_file(tmp_path / choice / "model" / "model.safetensors") for choice in ("no", "yes"))
    assert plain.keys() == compiled.keys()
