"""The shape of the package: which module may import which, and what importing it costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import linformers

SOURCE = Path(linformers.__file__).parent
# A module imports only from its left; modules in one set do not import each other.
LAYERS = [
    {"errors", "shipped"},
    {"checks"},
    {"config"},
    {"loading", "ops", "reference"},
    {"maps"},
    {"embeddings", "projections"},
    {"attention"},
    {"layer", "encoder"},
    {"heads"},
    {"markdown", "plots", "progress", "provenance"},
    {"convert", "training", "benchmark"},
    {"analysis"},
    {"reproduce"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
PLACE = {name: place for place, names in enumerate(LAYERS) for name in names}


def imports(path: Path, package: str) -> set[str]:
    """The modules of ours, one level below the package, that a file imports anywhere."""
    depth = len(path.relative_to(SOURCE).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level == depth:
                found |= {(node.module or alias.name).split(".")[0] for alias in node.names}
            elif node.level == 0 and (node.module or "").split(".")[0] == package:
                found.add((node.module or "").split(".")[1] if "." in (node.module or "") else "__init__")
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith(f"{package}.")}
    return found


def violations(path: Path) -> list[str]:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return [other for other in imports(path, "linformers") if other != own and PLACE[other] >= PLACE[own]]


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_left(path):
    assert violations(path) == []


def test_a_wrong_import_is_found(monkeypatch, tmp_path):
    (tmp_path / "projections.py").write_text(
        "def f():\n    from .encoder import LinformerModel\n    from . import config\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert violations(tmp_path / "projections.py") == ["encoder"]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_initialises_no_cuda_and_needs_no_triton():
    output = run(
        "import sys; sys.modules['triton'] = None\n"
        "import linformers, torch\n"
        "print(torch.cuda.is_initialized(), 'matplotlib' in sys.modules, 'typer' in sys.modules)"
    )
    assert output.split() == ["False", "False", "False"]


def test_importing_registers_the_auto_classes():
    output = run(
        "import linformers\n"
        "from transformers import AutoConfig, AutoModelForMaskedLM\n"
        "config = AutoConfig.for_model('linformer', num_hidden_layers=1)\n"
        "print(type(AutoModelForMaskedLM.from_config(config)).__name__)"
    )
    assert output.strip() == "LinformerForMaskedLM"


def test_the_order_is_the_one_that_contributors_read():
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    chain = next(line for line in text.splitlines() if line.count("→") > 5)
    told = [set(place.strip("{} ").split(", ")) for place in chain.split("→")]
    assert told == LAYERS[:-1]
