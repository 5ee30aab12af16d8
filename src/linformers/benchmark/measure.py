"""Time, memory and energy of a function, on a GPU or a CPU."""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

Run = Callable[[], Any]
P = ParamSpec("P")
T = TypeVar("T")
Name = TypeVar("Name", bound=Hashable)


class OutOfMemoryError(Exception):
    """The device has too little memory for a run."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn the several ways in which torch runs out of memory into one, and give back what was taken."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        error.__traceback__ = None  # it holds the tensors of all frames
        reason = OutOfMemoryError(str(error).splitlines()[0])
    else:
        return
    release()
    raise reason


def fitting(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """What is made, or `None` where the device has too little memory for it."""
    try:
        with memory_errors():
            return make(*args, **kwargs)
    except OutOfMemoryError:
        return None


def release() -> None:
    """Free what nobody holds any more, so that the next measurement starts afresh."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def pass_of(model: nn.Module, forward: Callable[[], Tensor], task: str) -> Run:
    """What is measured: `forward` of a model alone in `"inference"`, with its backward pass in `"training"`."""
    if task == "inference":
        model.eval()
        return torch.no_grad()(forward)
    model.train()
    gradient = torch.randn_like(forward())

    def step() -> None:
        forward().backward(gradient)
        model.zero_grad(set_to_none=True)

    return step


def interleaved(
    runs: Mapping[Name, Run],
    min_seconds: float = 0.3,
    rounds: int = 3,
    queued: float = 0.15,
    *,
    may_run_out: bool = False,
) -> dict[Name, float]:
    """Median seconds of each of several functions, timed in turn so that a slow moment hits all of them alike.

    On a GPU a few runs, of `queued` seconds in all, are queued behind each other, as in any loop over batches: what the
    CPU does meanwhile is part of the time only where the GPU waits for it. A function that finds too little memory
    beside the others is an error or, where it `may_run_out` of memory, left out.
    """
    counts: dict[Name, int] = {}
    times: dict[Name, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    while times and (time.perf_counter() - start < min_seconds * len(times) or rounds > 0):
        rounds -= 1
        for name in list(times):
            try:
                with memory_errors():
                    if name not in counts:
                        counts[name] = _runs_at_once(runs[name], queued)
                    times[name].append(_seconds(runs[name], counts[name]))
            except OutOfMemoryError:
                if not may_run_out:
                    raise
                del times[name]
    return {name: statistics.median(values) for name, values in times.items()}


def _runs_at_once(run: Run, seconds: float, most: int = 10) -> int:
    """How many runs make up so many seconds on a GPU; one run on a CPU, which queues nothing."""
    if not torch.cuda.is_available() or _seconds(run, 1) >= seconds:
        return 1
    return max(1, min(most, round(seconds / _seconds(run, 1))))


def _seconds(run: Run, count: int) -> float:
    began = _now()
    for _ in range(count):
        run()
    return (_now() - began) / count


def device_seconds(run: Run) -> float:
    """Median seconds of a run on the device alone: on a GPU it is replayed from a graph, without the CPU's part."""
    replay, count = captured(run)
    return interleaved({"": replay}, min_seconds=0.05, queued=0)[""] / count


def captured(run: Run) -> tuple[Run, int]:
    """A function that repeats a run, so many times at once, from a graph on the device; on a CPU the run itself."""
    run()  # what is compiled or chosen at the first run cannot be captured
    if not torch.cuda.is_available():
        return run, 1
    count = _runs_at_once(run, seconds=0.01, most=20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()

    def replay(_: Run = run) -> None:  # the graph reads and writes the run's tensors: they must live as long as it
        graph.replay()

    return replay, count


def peak_memory(run: Run, device: str | torch.device) -> int:
    """The most bytes of tensors that live at once on `device` during `run`, beside those that lived before."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports its own start and end otherwise
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def joules(run: Run, seconds: float, at_least: float = 0.5) -> float | None:
    """What the GPU's own counter says that a run of so many seconds takes; `None` where the driver does not tell."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        read = functools.partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        read()
    except pynvml.NVMLError:
        return None
    return joules_by(read, run, seconds, at_least)


def joules_by(read: Callable[[], int], run: Run, seconds: float, at_least: float) -> float | None:
    """The joules of a run by a counter of millijoules that moves in steps: counted from one step to another.

    `None` where it does not move at all.
    """
    at_once = max(1, round(0.02 / seconds))
    runs, readings = 0, [(0, read())]  # the number of runs at which the counter was seen to move
    began = _now()
    while _now() - began < at_least or (len(readings) < 3 and _now() - began < 4 * at_least):
        for _ in range(at_once):
            run()
        _now()
        runs += at_once
        if (value := read()) != readings[-1][1]:
            readings.append((runs, value))
    if len(readings) < 3:
        return None
    (first, start), (last, end) = readings[1], readings[-1]  # what came before the first step is unknown
    return (end - start) / 1000 / (last - first)


def largest_batch(run: Callable[[int], Any], batch: int, peak_bytes: int | None, memory: int | None = None) -> int:
    """The most sequences that go through at once, to 3%: reckoned from what `batch` of them take, then tried.

    Where that is unknown, it is because `batch` of them did not fit, and the search begins there. Where more fit than
    was reckoned, since large batches are computed in parts, more are tried. All of the GPU's memory may be used, or
    `memory` bytes. 0 if not even one sequence fits.
    """
    release()
    free, whole = torch.cuda.mem_get_info()
    if memory is not None:
        # Other tensors of this process stay where they are: what a run may take comes on top of them.
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + memory) / whole))
        free = min(free, memory)

    def fits(count: int) -> bool:
        try:
            with memory_errors():
                run(count)
                torch.cuda.synchronize()
        except OutOfMemoryError:
            return False
        return True

    most, too_many = 0, None
    guess = batch if peak_bytes is None else max(1, int(batch * free / max(1, peak_bytes)))
    while guess > most and guess != too_many:
        if fits(guess):
            most = guess
        else:
            too_many = guess
        if too_many is None:
            guess = most + max(1, most // 4)
        elif most == 0:
            guess = int(guess * 0.97) if guess > 33 else guess - 1
        else:
            guess = most if (too_many - most) * 33 <= most else (most + too_many) // 2
    if memory is not None:
        torch.cuda.set_per_process_memory_fraction(1.0)
    release()
    return most


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
