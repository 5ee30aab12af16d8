"""Time, memory and the largest batch of a function."""

import time
from unittest.mock import Mock

import pytest
import torch

from linformers import LinformerConfig, LinformerModel
from linformers.benchmark import measure
from linformers.benchmark.measure import interleaved, make_run, memory_errors, peak_memory


def test_timing_is_of_the_right_function():
    times = interleaved({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, min_seconds=0.05)
    assert times["slow"] >= 0.02
    assert times["fast"] < times["slow"]
    # A function that runs out of memory while it is timed is left out.
    large = Mock(side_effect=[None, torch.OutOfMemoryError("CUDA out of memory")])
    assert interleaved({"large": large, "small": lambda: None}, min_seconds=0.01).keys() == {"small"}


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA"), torch.OutOfMemoryError),
        (MemoryError(), torch.OutOfMemoryError),
        (RuntimeError("can't allocate memory: 1 EiB"), torch.OutOfMemoryError),
        (RuntimeError("wrong shape"), RuntimeError),
        (NotImplementedError("no kernel"), NotImplementedError),
    ],
)
def test_all_ways_to_run_out_of_memory_are_one(error, raised):
    with pytest.raises(RuntimeError) as found, memory_errors():
        raise error
    assert found.type is raised


def test_peak_memory_counts_what_lives_at_once():
    x = torch.ones(1000, 1000)  # 4 MB

    def run():
        a = x + 1  # 4 MB
        b = a + 1  # 8 MB
        del a
        return torch.cat([b, b, b]).sum()  # 4 + 12 MB

    assert peak_memory(run, "cpu") == pytest.approx(16e6, rel=0.01)


def test_training_leaves_no_gradient_behind():
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64}
    model = LinformerModel(LinformerConfig(**sizes, max_position_embeddings=64, projected_length=16))
    run = make_run(model, torch.full((2, 64), 7), "training")
    seen = []
    embeddings = model.get_input_embeddings().weight
    embeddings.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.norm()))
    run()
    assert model.training
    assert seen[0] > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    inference = make_run(model, torch.full((2, 64), 7), "inference")
    assert not inference().requires_grad
    assert not model.training


def test_largest_batch(monkeypatch):
    limits, tried = [], []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * 2**30, 10 * 2**30), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * 2**30)
    monkeypatch.setattr(measure, "release", lambda: None)  # a garbage collection takes a third of a second

    def make(most):
        def run(batch):
            tried.append(batch)
            if batch > most:
                raise torch.OutOfMemoryError("CUDA out of memory")

        return lambda batch: lambda: run(batch)

    assert 88 <= measure.largest_batch(make(90), batch=10) <= 90
    assert tried[:5] == [10, 20, 40, 80, 160]
    tried.clear()
    assert 990 <= measure.largest_batch(make(1000), batch=4000) <= 1000
    assert len(tried) < 12
    assert not limits
    assert measure.largest_batch(make(1), batch=1) == 1
    assert measure.largest_batch(make(0), batch=10, memory=5) == 0
    assert limits == [0.7, 1.0]


def test_padding_gets_no_gradient():
    embeds = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    model = torch.nn.Identity()
    model.forward = lambda x, attention_mask: x + 0 * attention_mask[..., None]
    make_run(model, embeds, "training", mask)()
    assert embeds.grad[mask == 0].abs().sum() == 0
    assert embeds.grad[mask == 1].abs().min() > 0
