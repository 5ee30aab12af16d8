"""The structure of the package: which module imports which, what an import costs, what a forward pass visits."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import linformers
from linformers import LinformerConfig, LinformerForMaskedLM

SOURCE = Path(linformers.__file__).parent
# A module imports only from modules above it; modules in one set do not import each other.
LAYERS = [
    {"errors", "shipped"},
    {"files"},
    {"checks"},
    {"config", "reference", "losses", "pooling"},
    {"ops"},
    {"projections"},
    {"attention", "resizing"},
    {"modeling"},
    {"auto", "convert"},
    {"plots", "progress", "provenance"},
    {"training"},
    {"benchmark", "analysis"},
    {"demo"},
    {"__main__"},
]
PLACE = {name: place for place, names in enumerate(LAYERS) for name in names}


def imports(path: Path, package: str) -> set[str]:
    """The modules directly below the package that a file imports anywhere; a public class counts as `auto`."""
    depth = len(path.relative_to(SOURCE).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level == depth:
                found |= {(node.module or alias.name).split(".")[0] for alias in node.names}
            elif node.level == 0 and (node.module or "").split(".")[0] == package:
                found |= {(node.module or "").partition(".")[2].split(".")[0] or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith(f"{package}.")}
    return {"auto" if name in (*linformers.__all__, "__version__") else name for name in found}


def violations(path: Path) -> list[str]:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return [other for other in imports(path, "linformers") if other != own and PLACE[other] >= PLACE[own]]


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_import_only_from_above(path):
    assert violations(path) == []


def test_a_wrong_import_is_found(monkeypatch, tmp_path):
    (tmp_path / "projections.py").write_text(
        "def f():\n    from .modeling import LinformerModel\n    from . import config, LinformerConfig\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert sorted(violations(tmp_path / "projections.py")) == ["auto", "modeling"]


def test_an_import_registers_the_auto_classes_and_needs_no_cuda_or_triton():
    code = """
import sys
sys.modules["triton"] = None
import linformers, torch
from transformers import AutoConfig, AutoModelForMaskedLM
print(torch.cuda.is_initialized(), "matplotlib" in sys.modules, "typer" in sys.modules)
config = AutoConfig.for_model("linformer", num_hidden_layers=1)
print(type(AutoModelForMaskedLM.from_config(config)).__name__)
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.split() == ["False", "False", "False", "LinformerForMaskedLM"]


def visited(model: LinformerForMaskedLM) -> list[tuple[str, str]]:
    """The file and name of each function of ours, generator expressions and lambdas included, in a forward pass.

    Without what runs inside the operator that attends locally on a CPU: it equals one function of the reference.
    """
    ids = torch.randint(3, model.config.vocab_size, (2, 100))
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    codes = set()

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            codes.add(frame.f_code)

    sys.setprofile(profile)
    try:
        model(ids, mask, labels=ids)
    finally:
        sys.setprofile(None)
    names = {(str(Path(code.co_filename).relative_to(SOURCE)), code.co_qualname) for code in codes}
    return sorted((file, name) for file, name in names if file != "ops/local_cpu.py" or not name.startswith("_"))


@pytest.mark.parametrize(
    ("config", "most", "files"),
    [
        # Rotary positions, samples and a local window add seven functions and three files.
        (LinformerConfig(num_hidden_layers=2), 33, 11),
        (LinformerConfig.paper(num_hidden_layers=2), 26, 8),
        # Its local window adds six functions and two files.
        (LinformerConfig.from_pretrained(linformers.pretrained()), 32, 10),
    ],
    ids=["default", "paper", "bundled"],
)
@pytest.mark.parametrize("training", [False, True])
def test_a_forward_pass_visits_few_functions(config, most, files, training):
    functions = visited(LinformerForMaskedLM(config).train(training))
    listing = "\n".join(" ".join(pair) for pair in functions)
    assert ("modeling.py", "LinformerForMaskedLM.forward") in functions
    assert ("attention.py", "ProjectedAttention.forward") in functions
    assert len(functions) <= most, listing
    assert len({file for file, _ in functions}) <= files, listing
