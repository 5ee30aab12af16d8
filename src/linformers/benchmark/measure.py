"""Time and peak memory of a function, on a GPU or a CPU."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[[], Any]

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise `torch.OutOfMemoryError` for every way to run out of memory, after freeing what was allocated."""
    try:
        yield
        return
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        error.__traceback__ = None  # its frames hold tensors
        reason = torch.OutOfMemoryError(str(error).partition("\n")[0])
    release()
    raise reason


def release() -> None:
    """Free unused memory, so that one measurement does not affect the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_run(model: nn.Module, inputs: Tensor, task: str, mask: Tensor | None = None) -> Run:
    """A pass to measure: forward in `"inference"`, forward and backward in `"training"`.

    `mask` is 0 at padding, whose outputs get no gradient.
    """

    def forward() -> Tensor:
        output = model(inputs) if mask is None else model(inputs, attention_mask=mask)
        return getattr(output, "last_hidden_state", output)

    def step() -> None:
        forward().backward(gradient)
        model.zero_grad(set_to_none=True)

    model.train(task == "training")
    if task == "inference":
        return torch.no_grad()(forward)
    gradient = torch.randn_like(forward())
    if mask is not None:
        gradient *= mask[..., None]
    return step


def interleaved(
    runs: Mapping[Any, Run], min_seconds: float = 0.3, rounds: int = 3, queued: float = 0.15
) -> dict[Any, float]:
    """Median seconds of each function, timed in turn so that a slow moment affects all of them alike.

    On a GPU, runs of about `queued` seconds are queued together, as in a loop over batches: the CPU's time counts only
    where the GPU waits for it. The result leaves out functions that run out of memory.
    """
    counts: dict[Any, int] = {}
    times: dict[Any, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    while times and (time.perf_counter() - start < min_seconds * len(times) or rounds > 0):
        rounds -= 1
        for name in list(times):
            try:
                with memory_errors():
                    if name not in counts:
                        counts[name] = runs_at_once(runs[name], queued)
                    times[name].append(_seconds(runs[name], counts[name]))
            except torch.OutOfMemoryError:
                del times[name]
    return {name: statistics.median(values) for name, values in times.items()}


def runs_at_once(run: Run, seconds: float, most: int = 10) -> int:
    """The number of runs that fill so many seconds on a GPU; 1 on a CPU, which queues nothing."""
    if not torch.cuda.is_available() or _seconds(run) >= seconds:
        return 1
    return max(1, min(most, round(seconds / _seconds(run))))


def _seconds(run: Run, count: int = 1) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(count):
        run()
    wait()
    return (time.perf_counter() - start) / count


def peak_memory(run: Run, device: str | torch.device) -> int:
    """Peak bytes of the tensors that `run` allocates on `device`."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler reports its own start and end
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True, acc_events=True) as profile:
        run()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))


def largest_batch(make: Callable[[int], Run], batch: int, memory: int | None = None) -> int:
    """The largest batch whose pass fits into the GPU, or into `memory` GiB of it, to within 3%; 0 if none fits.

    `make` returns a pass over a batch of the given size, and `batch` is the size to try first.
    """
    release()
    if memory is not None:
        limit = torch.cuda.memory_reserved() + memory * 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
    most, too_many, guess = 0, None, batch
    while too_many is None or too_many - most > max(1, most // 33):
        try:
            with memory_errors():
                make(guess)()
                torch.cuda.synchronize()
            most = guess
        except torch.OutOfMemoryError:
            too_many = guess
        guess = 2 * most if too_many is None else (most + too_many) // 2
    if memory is not None:
        torch.cuda.set_per_process_memory_fraction(1.0)
    release()
    return most
