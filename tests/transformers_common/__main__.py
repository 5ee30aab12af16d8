"""Run transformers' own model tests on the Linformer models: `make common`.

The tests are part of transformers' source distribution, not of its wheel, so pip downloads the source of the installed
version. Parts of the repository that the distribution lacks are replaced by stubs.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache"
STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {'return_dict': False, 'dtype': 'float16'}\n",
}


def download(version: str) -> Path:
    """The folder of the source distribution, which is downloaded once."""
    source = CACHE / f"transformers-{version}"
    if source.exists():
        return source
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        if subprocess.run([*command, "--dest", folder, f"transformers=={version}"], check=False).returncode:
            sys.exit(f"make common needs the source distribution of transformers {version}, which pip cannot download")
        with tarfile.open(Path(folder, f"transformers-{version}.tar.gz")) as archive:
            archive.extractall(folder, filter="data")
        Path(folder, source.name).rename(source)
    return source


def add_linformer(tests: Path) -> None:
    """Put the stubs and our test file among transformers' tests."""
    files = {tests / path: content for path, content in STUBS.items()}
    files[tests / "models" / "linformer" / "test_modeling_linformer.py"] = (HERE / "modeling_linformer.py").read_text()
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for folder in {tests, tests / "models", *(path.parent for path in files)}:
        (folder / "__init__.py").touch()


if __name__ == "__main__":
    source = download(transformers.__version__)
    add_linformer(source / "tests")
    arguments = ["-q", "-n", "2", "--dist", "worksteal", "-p", "no:warnings", "--tb=short"]
    arguments += ["-o", "log_cli=false", "-o", "verbosity_subtests=0"]
    command = [sys.executable, "-m", "pytest", *arguments, "tests/models/linformer", *sys.argv[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sys.exit(subprocess.run(command, cwd=source, env=environment, check=False).returncode)
