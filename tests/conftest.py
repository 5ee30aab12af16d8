import gc
import os
import signal

# Before torch computes anything: some virtual machines advertise AMX and trap on its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# With more threads than cores (pytest -n 2), OpenMP's spinning makes a small operation take 20 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

# Before Triton is imported: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Each process of the compiler would import torch for many seconds.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# In the background and under nohup, signals are ignored, and the commands that are tested would ignore them, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Fixed cases in CI, so that a red run can be repeated; `HYPOTHESIS_PROFILE=search` looks for new ones.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Compilers allocate many objects that live long: by default, a tenth of their time goes into collecting garbage.
gc.set_threshold(10_000, 10, 10)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Each collection of garbage skips what compilers and other modules left, which can take a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    # Without a GPU, `torch.manual_seed` takes milliseconds to record the stack.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True, scope="session")
def small_blocks():
    """Short inputs have several blocks of a local window, too: in all tests, since blocks change the rounding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linformers.ops.local.SMALLEST_BLOCK", 16)
        yield
