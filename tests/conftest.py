import gc
import os

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
    # The compiler's own processes would import torch for many seconds, to compile C++ on cores that are busy.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Fixed cases in CI, so that a red run can be repeated; `HYPOTHESIS_PROFILE=search` looks for new ones.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# What compilers allocate lives long: by default a tenth of their time goes into looking for garbage among it.
gc.set_threshold(10_000, 10, 10)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """What has been imported, or left by other modules, is not looked through by each collection of garbage.

    That takes a second where compilers have left much, and benchmarks collect after each model.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    # Without a GPU, `torch.manual_seed` takes milliseconds to keep the stack for the day that there is one.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Short inputs make several blocks of a local window, too."""
    monkeypatch.setattr("linformers.ops.local.SMALLEST_BLOCK", 16)
