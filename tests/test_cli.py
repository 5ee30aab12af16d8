"""The command line: what it writes, and how it answers a mistake."""

import io
import json
import logging
import os
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from types import ModuleType

import numpy as np
import pytest
import torch
from huggingface_hub.utils import logging as hub
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from linformers import cli, demo, plots
from linformers.__main__ import main
from linformers.benchmark.efficiency import FUSED, UNFUSED
from linformers.cli import app


@pytest.fixture
def small(monkeypatch):
    """A demo of seconds."""
    monkeypatch.setattr(demo, "LENGTHS", (64, 128))
    monkeypatch.setattr(demo, "TOKENS", 256)
    monkeypatch.setattr(demo, "PROJECTED", 16)
    monkeypatch.setattr(demo, "TRAIN_LENGTH", 64)
    monkeypatch.setattr(demo, "VOCABULARY", 400)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    monkeypatch.setattr(demo, "SIZE", size)
    files = demo.standard_library()[:60]
    monkeypatch.setattr(demo, "standard_library", lambda: files)


def test_help_lists_the_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("prepare", "pretrain", "finetune", "predict", "evaluate", "demo", "bench"):
        assert command in result.output


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.output.split() == ["linformers", version("linformers")]


def test_demo(small, tmp_path, monkeypatch):
    shown, figures, save = Console(width=100, file=io.StringIO()), [], plots._save
    monkeypatch.setattr(cli, "console", shown)
    monkeypatch.setattr(plots, "_save", lambda figure, path: (figures.append(figure), save(figure, path)))
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    text = shown.file.getvalue()
    table = {row[0]: row[1:] for row in re.findall(r"│ (\w[\w ]+?) +│ ([\d.]+) +│ ([\d,]*) +│", text)}
    assert table.keys() == {*demo.MODELS, "without context"}
    assert 100 < float(table["Linformer"][0]) < 1000
    assert f"echo '{demo.SENTENCE}' | linformers predict\n" in text
    behind = any(float(table[name][0]) > float(table["without context"][0]) for name in demo.MODELS)
    assert ("3 steps are too few" in text) == behind
    assert f"linformers demo --steps 30 --out {tmp_path}" in text
    looks = [{line.get_label(): line.get_color() for line in axes.get_lines()} for axes in figures[-1].axes]
    colours = looks[0] | looks[2]
    assert all(colours.items() >= own.items() for own in looks)
    assert list(colours) == [UNFUSED, FUSED, "Linformer k=16", "Linformer k=16, local window of 8"]
    assert len(set(colours.values())) == 4
    assert [entry.get_text() for entry in figures[-1].legends[0].get_texts()] == list(colours)
    names = ("linformer-3", "linformer-with-a-window-3", "transformer-3")
    own, local, twin = (json.loads((tmp_path / name / "run.json").read_text())["recipe"] for name in names)
    assert own["model"] | {"local_window": 8} == local["model"]
    assert own["model"] | {"projection": "identity"} == twin["model"]
    assert {**own, "out": "", "model": {}} == {**twin, "out": "", "model": {}} == {**local, "out": "", "model": {}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--lengths", "64,x"], "lengths='64,x' must be positive whole numbers separated by commas"),
        (["bench", "--lengths", "512", "--tokens", "256"], "lengths=512 does not divide tokens=256"),
        (["bench", "--lengths", "[a]"], "lengths='[a]' must be positive whole numbers"),
        (["bench", "--lengths", "64", "--projected", "64"], "projected=64 leaves nothing to measure"),
        (["bench", "--task", "sleeping"], "task='sleeping' is not one of 'inference', 'training'"),
        (["bench", "--sharing", "layer"], "sharing='layer' is not one of"),
        (["bench", "--dropout", "2"], "dropout=2.0 must"),
        (["predict", "--model", "x", "nolines.txt"], "file='nolines.txt' does not exist"),
        (["bench", "--layers", "0"], "layers=0 must be a positive integer"),
        (["bench", "--hidden", "100"], "hidden=100 must be a multiple of 64"),
        (["bench", "--lengths", "64", "--projected", "16", "--windows", "100"], "windows=100 exceeds lengths=64"),
        (["bench", "--lengths", "-5"], "lengths='-5' must be positive whole numbers"),
        (["bench", "--out", __file__], "is no folder that can be written to: File exists"),
        (["demo", "--steps", "0"], "steps=0 must be a positive integer"),
        (["pretrain", "nowhere.yaml"], "recipe 'nowhere.yaml' does not exist"),
        (["prepare", "nowhere.txt", "--out", "x"], "source 'nowhere.txt' does not exist"),
        (["finetune", "sst3", "--model", "x", "--out", "y"], "task='sst3' is not one of 'sst2', 'imdb', 'qnli', 'qqp'"),
        (["theorems", "--epsilon", "0.1,x"], "epsilon='0.1,x' must be numbers separated by commas, such as 0.1,0.5"),
        (["predict", "--model", "nowhere"], "model='nowhere' holds no model"),
        (["evaluate", "--model", "m", "--task", "sst2", "--rows", "5"], "rows=5 has no effect on task='sst2'"),
        (["evaluate", "--model", "m", "--data", "d", "--label", "stars"], "label='stars' has no effect on perplexity"),
        (["evaluate", "--model", "nowhere"], "data is missing"),
        (["demo", "--out", __file__], "is no folder that can be written to: File exists"),
    ],
)
def test_mistakes_end_in_one_sentence(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["linformers", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spectrum", "some/model", "--text"], "error: model='some/model' is no folder, and the hub does not give it"),
        (["prepare", cli.__file__, "--tokenizer", "some/model", "--validation"], "error: tokenizer='some/model'"),
    ],
    ids=["spectrum", "prepare"],
)
def test_a_hub_that_is_out_of_reach_is_told_in_one_sentence(arguments, message, monkeypatch, tmp_path, capsys):
    client, said = hub.get_logger("huggingface_hub.utils._http"), []

    def unreachable(name, **options):
        client.warning("Name or service not known, thrown while requesting HEAD")
        raise OSError("no connection")

    handler = logging.Handler()
    handler.emit = said.append
    hub.set_verbosity_warning()
    monkeypatch.setattr(client, "handlers", [handler])
    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    monkeypatch.setattr(sys, "argv", ["linformers", *arguments, __file__, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert not said
    assert " ".join(capsys.readouterr().err.split()).startswith(message)
    hub.set_verbosity_warning()
    with pytest.raises(OSError, match="no connection"):
        AutoConfig.from_pretrained("some/model")
    assert said  # without our command


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has 139 GiB.\nmore"),
            "error: CUDA out of memory. Tried to allocate 9.00 GiB. Take fewer rows at once",
        ),
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "error: CUDA out of memory. Take fewer rows at once"),
        (BrokenProcessPool("abruptly"), "a worker process was killed, perhaps for want of memory"),
    ],
    ids=["GPU", "GPU, in short", "workers"],
)
def test_too_little_memory(error, message, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()  # the last line of a log says all of it
    assert message in line


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(cli, "app", lambda: [][0])
    with pytest.raises(IndexError):
        cli.main()


@pytest.mark.parametrize(
    ("arguments", "code", "by_torchrun"),
    [(["--version"], 0, True), (["--version"], 0, False), (["pretrain", "no.yaml"], 2, True)],
    ids=["well", "alone", "ill"],
)
def test_a_process_of_torchrun_leaves_the_interpreter_alone(arguments, code, by_torchrun):
    """What its threads still hold when the interpreter is taken down would abort it, about once in twenty runs."""
    program = "import atexit; from linformers.cli import main; atexit.register(print, 'taken down'); main()"
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **({"TORCHELASTIC_RUN_ID": "1"} if by_torchrun else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code
    assert "linformers" in result.stdout if code == 0 else "no.yaml" in result.stderr
    assert ("taken down" in result.stdout) != by_torchrun


INTERRUPTED = "raise KeyboardInterrupt"  # a signal would be ignored where the tests run in the background


@pytest.mark.parametrize("command", [["-m", "linformers"], ["linformers"]], ids=" ".join)
def test_an_interrupt_while_the_package_is_imported_needs_no_traceback(command, tmp_path):
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    (tmp_path / "linformers").write_text("from linformers.__main__ import main; main()")  # as pip writes it
    result = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_an_interrupt_while_the_command_line_is_imported_needs_no_traceback(monkeypatch):
    class Interrupted(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "linformers.cli", Interrupted("linformers.cli"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_an_interrupt_of_another_program_is_its_own(tmp_path):
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    program = "try:\n    import linformers\nexcept KeyboardInterrupt:\n    print('caught')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True)
    assert result.stdout == b"caught\n"


def test_text_to_predictions(tmp_path, monkeypatch, capsys):
    """The whole way by commands alone: prepare, pretrain, finetune, evaluate, predict."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(words, size=30)) for _ in range(120)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    with (tmp_path / "labelled.csv").open("w") as file:
        file.write("text,label\n")
        file.writelines(f"{line},{('short', 'long')[len(line) > 140]}\n" for line in lines)
    (tmp_path / "recipe.yaml").write_text(
        f"data: {tmp_path / 'corpus'}\nout: {tmp_path / 'run'}\nsteps: 4\nbatch_size: 4\nworkers: 0\neval_rows: 4\n"
        "model: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16, "
        "max_position_embeddings: 32, projected_length: 8}\n"
    )

    def run(*arguments):
        monkeypatch.setattr(cli, "console", Console(width=100, file=sys.stdout))
        monkeypatch.setattr(sys, "argv", ["linformers", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return capsys.readouterr().out

    monkeypatch.setattr(cli, "console", Console(width=100, file=sys.stdout))
    run(
        "prepare", tmp_path / "text.jsonl", "--out", tmp_path / "corpus", "--vocab-size", 300, "--validation-share", 0.2
    )
    run("pretrain", tmp_path / "recipe.yaml", "seed=3")
    model = tmp_path / "run" / "model"
    options = ["--model", model, "--out", tmp_path / "tuned", "--seeds", 1, "--epochs", 1, "--batch-size", 8]
    run("finetune", tmp_path / "labelled.csv", *options)
    assert json.loads((tmp_path / "tuned" / "results.json").read_text())["seeds"][0]["seed"] == 0
    (tmp_path / "lines.txt").write_text("the fox\na dog\n", encoding="utf-8-sig")
    answers = run("predict", "--model", tmp_path / "tuned" / "model", tmp_path / "lines.txt").splitlines()
    assert [json.loads(answer)["text"] for answer in answers] == ["the fox", "a dog"]
    assert json.loads(run("evaluate", "--model", model, "--data", tmp_path / "corpus"))["perplexity"] > 1
    for options, message in {("no.csv",): "there is no file", ("a.csv", "--data", "x"): "has no effect on"}.items():
        arguments = ["evaluate", "--model", str(tmp_path / "tuned" / "model"), "--task", *options]
        assert f"{message} task={options[0]!r}" in str(CliRunner().invoke(app, arguments).exception)


def test_lines_that_are_not_utf8(monkeypatch, capsys):
    stdin = io.TextIOWrapper(io.BytesIO(b"They were \xe9 and had three <mask>.\n"), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    cli.predict()
    assert json.loads(capsys.readouterr().out)["text"] == "They were \ufffd and had three <mask>."
