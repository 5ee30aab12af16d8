"""How a script ends, and what is explained in one sentence."""

from unittest.mock import Mock

import pytest
import torch

from linformers.checks import check_model
from linformers.errors import UserError, explain
from linformers_cli import run_script


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(UserError("steps=0 must be positive"), 2, "error: steps=0 must be positive\n"), (KeyboardInterrupt(), 130, "")],
)
def test_what_needs_no_traceback(error, code, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run_script(Mock(side_effect=error))
    assert ended.value.code == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("error", [ValueError, OSError, KeyError, ArithmeticError, RuntimeError])
def test_a_bug_keeps_its_traceback(error):
    with pytest.raises(error, match="a bug"):
        run_script(Mock(side_effect=error("a bug")))


@pytest.mark.parametrize("reason", ["CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 …", "CUDA out of memory."])
def test_too_little_memory(reason):
    shown = reason.removesuffix(" GPU 0 …").removesuffix(".")
    assert explain(torch.OutOfMemoryError(f"{reason}\nmore")) == shown


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_file_of_a_model_is_named(name, content, tmp_path):
    for own in ("config.json", "tokenizer.json"):
        (tmp_path / own).write_text(content if own == name else "{}")
    with pytest.raises(UserError, match=f"{name} is damaged"):
        check_model("model", tmp_path)


def test_a_model_of_another_type_is_named(tmp_path):
    """Files that nobody reads may hold anything, such as a list."""
    for name, content in {"config.json": '{"model_type": "bert"}', "tokenizer.json": "{}", "data.json": "[1]"}.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="is of the type 'bert', not a Linformer: linformers convert MODEL"):
        check_model("model", tmp_path)
