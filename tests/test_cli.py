"""The command line: answers without slow imports, errors, and the whole way from text to predictions."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from huggingface_hub.utils import logging as hub
from transformers import AutoConfig, AutoTokenizer

import linformers
import linformers_cli
from linformers import demo
from linformers.errors import UserError
from linformers.training import adopt


def run_python(*arguments, **environment):
    options = {"capture_output": True, "text": True, "check": False}
    return subprocess.run([sys.executable, *arguments], env={**os.environ, **environment}, **options)


def main(monkeypatch, *arguments):
    """Run the command line in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["linformers", *map(str, arguments)])
    monkeypatch.setattr(linformers_cli, "answer_interrupts", lambda: None)  # this process is not the command
    with pytest.raises(SystemExit) as ended:
        linformers_cli.main()
    return ended.value.code


CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a largest batch")
WITHOUT_IMPORTS = """
import sys, linformers_cli
try:
    linformers_cli.main()
finally:
    print("imported:", {"torch", "transformers", "numpy", "linformers"} & set(sys.modules))
"""


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("--help", 0, "choose-k"),
        ("--version", 0, version("linformers")),
        ("bench --help", 0, "--lengths"),
        ("train", 2, "train"),
        ("contrast . none.txt --out o", 2, "none.txt"),
        ("bench --length 64", 2, "--lengths"),
        ("bench --layers two", 2, "--layers"),
        ("bench --layers 0", 2, "--layers"),
        ("bench --lengths 64,x", 2, "64,x"),
        ("bench --lengths -5", 2, "-5"),
        ("bench --windows [a]", 2, "[a]"),
        *((f"{own} --out=", 2, "'' must be a folder") for own in ("demo", "bench", "spectrum bert", "finetune sst2")),
        *((f"{own} --out=", 2, "'' must be a folder") for own in ("prepare .", "choose-k bert", "contrast . .")),
        ("predict nowhere.txt", 2, "nowhere.txt"),
        ("predict --model nowhere", 2, "nowhere"),
        ("predict --device cpu", 2, "CUDA_VISIBLE_DEVICES= hides it"),
        ("finetune sst2 --lr x", 2, "--lr"),
        ("embed nowhere.txt --out x.npy", 2, "nowhere.txt"),
        ("embed .", 2, "--out"),
        ("search nowhere.npy words", 2, "nowhere.npy"),
        ("resize nowhere --length 8 --out x", 2, "nowhere"),
        ("pretrain nowhere.yaml", 2, "nowhere.yaml"),
        ("prepare nowhere.txt --out x", 2, "nowhere.txt"),
        ("prepare . --out x --validation nowhere.csv", 2, "nowhere.csv"),
        ("finetune nowhere.csv --out x", 2, "nowhere.csv"),
        ("finetune sst2 --out x --data nowhere", 2, "nowhere"),
        ("evaluate --model . --task nowhere.csv", 2, "nowhere.csv"),
        ("verify nowhere", 2, "nowhere"),
        ("spectrum bert --text nowhere", 2, "nowhere"),
        ("choose-k bert --text nowhere", 2, "nowhere"),
    ],
)
def test_parsing_imports_nothing_slow(arguments, code, text):
    result = run_python("-c", WITHOUT_IMPORTS, *arguments.split(), COLUMNS="200")
    assert result.returncode == code
    assert text in (result.stderr if code else result.stdout)
    assert result.stdout.endswith("imported: set()\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench --lengths 64 --projected 64", "--projected 64 leaves nothing to measure"),
        *((f"bench --{name} bert", f"--{name} 'bert' is not one of") for name in ("task", "models", "sharing")),
        ("bench --dropout 2", "dropout_prob=2.0"),
        ("bench --projection identity", "--projection 'identity' is not one of"),
        ("bench --hidden 100", "--hidden 100 must be a multiple of 64"),
        ("bench --memory 2", "--memory 2 has no effect"),
        pytest.param("bench --batches", "--batches needs a GPU", marks=CPU_ONLY),
        *((f"{command} --out {__file__}", f"--out {__file__!r}") for command in ("bench", "demo")),
        (f"evaluate --model {Path(__file__).parent}", "data"),
        (
            f"resize {linformers.pretrained()} --length 9 --out o",
            "--length 9 is below k=128: pass --projected 9 or less",
        ),
        ("finetune sst2 --problem both --out o", "--problem 'both' is not one of 'single', 'multi', 'regression'"),
    ],
)
def test_mistakes_end_in_one_sentence(arguments, message, monkeypatch, capsys):
    assert main(monkeypatch, *arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("embed {} --out {}.npy", "one with --text"),
        ("predict {} --out {}.csv", "one with --text"),
        ("finetune {} --out {}", "them with --text, --label"),
        ("prepare {} --out {}", "one with --text-column"),
    ],
)
def test_a_missing_column_is_named_with_the_option_that_chooses_another(
    arguments, options, monkeypatch, tmp_path, capsys
):
    (tmp_path / "a.csv").write_text("id,body\n1,a\n")
    command = arguments.format(tmp_path / "a.csv", tmp_path / "out").split()
    assert main(monkeypatch, *command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"a.csv has no column 'text'; its columns are 'id', 'body'; choose {options}")


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("resize", ": use a smaller --length"),
        ("pretrain", ": use a smaller rows_at_once=… in the recipe"),
        ("demo", ""),
    ],
)
def test_too_little_memory_names_options_of_the_command(command, remedy):
    parameters = typer.main.get_command(linformers_cli.app).commands[command].params
    assert linformers_cli._remedy(MemoryError(), parameters) == remedy


def test_the_traceback_of_a_bug_reaches_the_terminal():
    program = (
        "import linformers_cli\nfrom linformers.benchmark import efficiency\n"
        "efficiency.run = lambda *args, **options: {}['a bug']\nlinformers_cli.main()"
    )
    result = run_python("-c", program, "bench")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("KeyError: 'a bug'\n")


def test_debug_shows_every_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["linformers", "--debug", "bench", "--hidden", "100"])
    with pytest.raises(UserError, match="hidden=100"):
        linformers_cli.main()


@pytest.mark.parametrize(("option", "code"), [("--version", 0), ("--verbose", 2)])
@pytest.mark.parametrize("environment", [{}, {"TORCHELASTIC_RUN_ID": "1"}])
def test_under_torchrun_the_interpreter_is_not_shut_down(option, code, environment):
    """Threads that still hold tensors during shutdown would abort the process, about once in twenty runs."""
    program = "import atexit; from linformers_cli import main; atexit.register(print, 'shut down'); main()"
    result = run_python("-c", program, option, **environment)
    assert result.returncode == code
    assert version("linformers") in result.stdout if code == 0 else option in result.stderr
    assert ("shut down" in result.stdout) == (not environment)


INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    ("module", "content"),
    [
        ("typer", INTERRUPT),
        ("torch", INTERRUPT),
        ("torch", "try:\n    import half\nexcept BaseException as error:\n    raise ImportError from error"),
        ("torch", "class Deleted:\n    def __del__(self):\n        import half\nDeleted()"),
    ],
    ids=["before the command", "plain", "turned into another error", "lost in a destructor"],
)
@pytest.mark.parametrize("start", [["-c", "from linformers_cli import main; main()"], ["-m", "linformers"]])
def test_an_interrupt_during_the_imports_needs_no_traceback(tmp_path, module, content, start):
    (tmp_path / f"{module}.py").write_text(content)
    (tmp_path / "half.py").write_text(INTERRUPT)
    path = os.pathsep.join([str(tmp_path), str(Path(linformers_cli.__file__).parent)])
    result = run_python(*start, "bench", PYTHONPATH=path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_closed_output_ends_a_command_quietly(tmp_path):
    command = [sys.executable, "-m", "linformers", "predict", "--tokens", "1"]
    closed = subprocess.run([*command, __file__], stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1))
    assert (closed.returncode, closed.stderr.count("\n")) == (2, 1)
    assert closed.stderr.startswith("error: standard output is closed")
    (tmp_path / "lines.txt").write_text(f"{demo.SENTENCE}\n" * 200)
    process = subprocess.Popen([*command, tmp_path / "lines.txt"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline()
    process.stdout.close()  # as head does
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize("command", ["predict", "verify"])
def test_a_full_disk_behind_the_output_is_named(command, tmp_path):
    (tmp_path / "lines.txt").write_text(f"{demo.SENTENCE}\n")
    argument = tmp_path / "lines.txt" if command == "predict" else linformers.pretrained()
    with open("/dev/full", "w") as full:
        process = [sys.executable, "-m", "linformers", command, str(argument)]
        result = subprocess.run(process, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "error: cannot write the output: No space left on device\n")


def test_an_argument_that_the_locale_cannot_decode_is_named():
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "linformers", "prepare", "a.txt", "--out", "café"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: 'caf\\udcc3\\udca9' is not text in the encoding of your locale; set PYTHONUTF8=1\n"


def test_predictions_are_utf_8_in_every_locale():
    command = [sys.executable, "-m", "linformers", "predict", "--best", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0"}
    text = "un café très <mask>."
    result = subprocess.run(command, input=text.encode(), env=environment, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert json.loads(result.stdout.decode("utf-8"))["text"] == text
    assert "café".encode() in result.stdout


def test_an_interrupt_while_python_shuts_down_needs_no_traceback():
    program = f"import atexit\natexit.register(exec, {INTERRUPT!r}, {{}})\nfrom linformers_cli import main; main()"
    result = run_python("-c", program, "--version")
    assert (result.returncode, result.stderr) == (130, "")


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def closed_terminal():
    terminal, own = os.openpty()
    os.close(terminal)
    return own


@pytest.mark.skipif(os.name == "nt", reason="Windows has other terminals")
@pytest.mark.parametrize("closed", [closed_pipe, closed_terminal])
def test_a_command_outlives_the_reader_of_its_output(closed, monkeypatch):
    """As in `linformers pretrain … | head -1`, and after a terminal was closed."""
    with open(closed(), "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        console = linformers_cli._console()
        for i in range(100):
            console.print(f"step {i} " * 1000)
        assert os.fstat(output.fileno()).st_rdev == os.stat(os.devnull).st_rdev


def test_a_file_gets_no_control_characters(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = linformers_cli._console()
    with console.status("working"):
        console.print("[bold]done[/bold]")
    assert capsys.readouterr().out.strip() == "done"


def test_an_unreachable_hub_is_reported_in_one_sentence(monkeypatch, tmp_path, capsys):
    client, logged = hub.get_logger("huggingface_hub.utils._http"), []

    def unreachable(name, **options):
        client.warning("Name or service not known, thrown while requesting HEAD")
        raise OSError("no connection")

    monkeypatch.setattr(client, "handle", logged.append)
    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    hub.set_verbosity_warning()
    assert main(monkeypatch, "spectrum", "some/model", "--text", __file__, "--out", tmp_path) == 2
    assert not logged
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: model='some/model' ")
    hub.set_verbosity_warning()
    with pytest.raises(OSError, match="no connection"):
        AutoConfig.from_pretrained("some/model")
    assert logged  # outside of our commands


@pytest.mark.parametrize(
    "command",
    [
        f"prepare {__file__} --tokenizer org/name",
        f"spectrum org/name --text {__file__}",
        f"choose-k org/name --budget 8 --text {__file__}",
    ],
)
def test_a_revision_reaches_the_hub(command, monkeypatch, tmp_path):
    asked = []

    def load(name, **options):
        asked.append((name, options["revision"], options["trust_remote_code"]))
        raise OSError("offline")

    for auto_class in (AutoConfig, AutoTokenizer):
        monkeypatch.setattr(auto_class, "from_pretrained", load)
    assert main(monkeypatch, *command.split(), "--out", tmp_path / "out", "--revision", "abc123") == 2
    assert asked == [("org/name", "abc123", False)]


def test_each_training_of_convert_has_options_of_its_own(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(adopt, "adopt", lambda model, out, **options: given.update(options) or 0)
    command = ["convert", "bert", "--out", tmp_path, "--distill", __file__, "--contrast", __file__]
    assert main(monkeypatch, *command) == 0
    assert given["settings"] is given["contrast_settings"] is None
    assert given["projected_length"] is given["local_window"] is None  # what fits the length
    options = ["--steps", 7, "--learning-rate", 0.1, "--contrast-steps", 8, "--contrast-batch-size", 9]
    assert main(monkeypatch, *command, *options) == 0
    assert given["settings"] == adopt.Settings(steps=7, learning_rate=0.1)
    assert given["contrast_settings"] == adopt.Contrast(steps=8, batch_size=9)


def test_text_to_predictions(tmp_path, monkeypatch, capsys):
    """The whole way by commands alone: prepare, pretrain, finetune, predict, evaluate."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(words, size=30)) for _ in range(120)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    rows = (f"{line},{('short', 'long')[len(line) > 140]}" for line in lines)
    (tmp_path / "labeled.csv").write_text("\n".join(["text,label", *rows]))
    (tmp_path / "recipe.yaml").write_text(
        f"data: {tmp_path / 'corpus'}\nout: {tmp_path / 'run'}\nsteps: 4\nbatch_size: 4\nworkers: 0\neval_rows: 4\n"
        "model: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16, "
        "max_position_embeddings: 32, projected_length: 8}\n"
    )

    def run(*arguments):
        assert not main(monkeypatch, *arguments)
        return capsys.readouterr().out

    corpus, model, tuned = (tmp_path / name for name in ("corpus", "run/model", "tuned"))
    run("prepare", tmp_path / "text.jsonl", "--out", corpus, "--vocab-size", 300, "--validation-share", 0.2)
    run("pretrain", tmp_path / "recipe.yaml", "seed=3")
    task = tmp_path / "labeled.csv"
    run("finetune", task, "--model", model, "--out", tuned, "--seeds", 1, "--epochs", 1, "--batch-size", 8)
    assert json.loads((tuned / "results.json").read_text())["seeds"][0]["seed"] == 0
    (tmp_path / "lines.txt").write_text("the fox\na dog\n", encoding="utf-8-sig")
    answers = run("predict", "--model", tuned / "model", tmp_path / "lines.txt").splitlines()
    assert [json.loads(answer)["text"] for answer in answers] == ["the fox", "a dog"]
    written = run("predict", task, "--model", tuned / "model", "--out", tmp_path / "answers.csv", "--tokens", 64)
    assert written.splitlines()[-1] == f"120 rows in {tmp_path / 'answers.csv'}"
    assert (tmp_path / "answers.csv").read_text().startswith("text,label,predicted_label,predicted_score,predicted_")
    vectors = tmp_path / "vectors.npy"
    assert "120 vectors of 120 documents" in run("embed", tmp_path / "text.jsonl", "--model", model, "--out", vectors)
    assert np.load(vectors).shape == (120, 16)
    assert run("search", vectors, "a lazy dog", "--best", 2).startswith(f"1. {tmp_path / 'text.jsonl'}:")
    run("resize", model, "--length", 64, "--out", tmp_path / "longer")
    assert AutoConfig.from_pretrained(tmp_path / "longer").max_position_embeddings == 64
    assert main(monkeypatch, "search", vectors, "a dog", "--model", tmp_path / "longer") == 2
    assert "was made with another model" in capsys.readouterr().err
    assert json.loads(run("evaluate", "--model", model, "--data", corpus))["perplexity"] > 1
    assert run("verify", model).count(" is intact\n") == len(list(model.iterdir())) - 2  # not the card and the manifest
    assert 0 <= json.loads(run("evaluate", "--model", tuned / "model", "--task", task))["accuracy"] <= 100
    assert main(monkeypatch, "evaluate", "--model", tuned / "model", "--task", task, "--data", tmp_path) == 2
    assert "--data" in capsys.readouterr().err
