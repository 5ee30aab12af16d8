"""Run transformers' own common model tests against Linformer: `make common`.

The tests come with transformers' source distribution, not with its wheel, so they are fetched in the version that is
installed. What they import from parts of the repository that the distribution lacks is replaced by empty stand-ins.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import transformers

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache"
NAME = f"transformers-{transformers.__version__}"
STAND_INS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {'return_dict': False, 'dtype': 'float16'}\n",
}
MODES = [
    {"PROJECTION": "linear", "SHARING": "layerwise"},
    {"PROJECTION": "linear", "SHARING": "none", "PROJECTION_INIT": "gaussian", "NORM_FIRST": "1"},
    {"PROJECTION": "mean", "SHARING": "layerwise", "NORM_FIRST": "1"},
    {"PROJECTION": "max", "SHARING": "layerwise"},
    {"PROJECTION": "conv", "SHARING": "key-value"},
    {"PROJECTION": "identity", "SHARING": "layerwise"},
    {"PROJECTION": "linear", "SHARING": "layerwise", "WINDOW": "2"},
    {"PROJECTION": "dynamic", "SHARING": "headwise"},
]


def fetch() -> Path:
    """The folder of transformers' tests, with ours among them."""
    source = CACHE / NAME
    if not source.exists():
        CACHE.mkdir(exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "transformers"]
        subprocess.run([*download, "--dest", CACHE, NAME.replace("-", "==")], check=True)
        with tarfile.open(CACHE / f"{NAME}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")
    tests = source / "tests"
    for path, content in STAND_INS.items():
        (tests / path).parent.mkdir(parents=True, exist_ok=True)
        (tests / path).write_text(content)
    ours = tests / "models" / "linformer"
    ours.mkdir(parents=True, exist_ok=True)
    for folder in (tests, tests / "models", ours, *{(tests / path).parent for path in STAND_INS}):
        (folder / "__init__.py").touch()
    shutil.copy(HERE / "modeling_linformer.py", ours / "test_modeling_linformer.py")
    return source


def main() -> None:
    source = fetch()
    for mode in MODES:
        print("\n", mode, flush=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "-p",
            "no:warnings",
            "--tb=short",
            "tests/models/linformer",
        ]
        subprocess.run(command, cwd=source, env={**os.environ, "OMP_NUM_THREADS": "1", **mode}, check=True)


main()
