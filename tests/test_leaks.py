"""Forwards and training steps leave no objects, tensors or memory behind."""

import gc
import os
from pathlib import Path

import pytest
import torch
from rich.progress import ProgressSample
from transformers import TrainerCallback

from linformers import LinformerForMaskedLM, LinformerModel
from linformers.training.trainer import ExactTrainer

from .modes import random_model
from .training import small

STATUS = Path("/proc/self/statm")
MEBIBYTE = 2**20


def in_use():
    """Objects, tensors among them, and bytes of memory."""
    gc.collect()
    # Of the steps of a bar, rich keeps the last thousand.
    found = [own for own in gc.get_objects() if type(own) is not ProgressSample]
    # Not isinstance, which some lazy objects answer by importing a module.
    tensors = sum(issubclass(type(own), torch.Tensor) for own in found)
    memory = int(STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATUS.exists() else 0
    return len(found), tensors, memory


def assert_stable(before, after):
    # Caches of Python and torch may still take in a few objects.
    assert after[0] - before[0] < 200
    assert after[1] == before[1]
    assert after[2] - before[2] < 16 * MEBIBYTE


@pytest.mark.parametrize("forwards", [200, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.parametrize("model_class", [LinformerModel, LinformerForMaskedLM])
def test_forwards_leak_nothing(model_class, forwards):
    """Inputs of all lengths, with gradients and without, with attentions and without."""
    model = random_model(model_class)

    def forward(i):
        ids = torch.ones(2, 1 + i % model.config.max_position_embeddings, dtype=torch.long)
        with torch.set_grad_enabled(i % 2 == 0):
            outputs = model(ids, (torch.arange(ids.shape[1]) < 5).long().expand_as(ids), output_attentions=i % 3 == 0)
        if i % 2 == 0:
            outputs[0].sum().backward()
            model.zero_grad()

    for i in range(100):
        forward(i)
    before = in_use()
    for i in range(forwards):
        forward(i)
    assert_stable(before, in_use())


@pytest.mark.parametrize("steps", [40, pytest.param(500, marks=pytest.mark.long)])
def test_training_steps_leak_nothing(tmp_path, monkeypatch, steps):
    """With validation and checkpoints."""
    known, original = {}, ExactTrainer.__init__

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (30, 29 + steps):
                known[state.global_step] = in_use()

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.add_callback(Count())

    monkeypatch.setattr(ExactTrainer, "__init__", init)
    rare = {"steps": 30 + steps, "log_every": 1000, "eval_every": 10, "save_every": 10}
    assert small.train(small.recipe(small.corpus(tmp_path), tmp_path / "run", **rare)) == 0
    assert_stable(*known.values())
