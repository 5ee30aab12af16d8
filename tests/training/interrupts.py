"""Send SIGINT, SIGTERM and SIGHUP to commands at random moments of their lives, and check what is left.

`python -m tests.training.interrupts SIGNALS` prints counts. The processes are new ones, so that a signal may come while
Python starts, during the imports, in the work, or at the end.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from linformers.training import checkpoints

from . import small
from .kills import last_logged

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE_EVERY = 8
# Python sets up its own handling of Ctrl-C before any code of ours can run.
START = 0.3


def commands(folder: Path) -> dict[str, list[str]]:
    """Arguments by name; each writes to `{out}`, if anywhere."""
    recipe = small.recipe(small.corpus(folder), folder / "model", save_every=SAVE_EVERY, steps=120, log_every=1)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    assert small.train(small.recipe(folder / "corpus", folder / "model", steps=2)) == 0
    table, model = str(small.labeled(folder) / "train.csv"), str(folder / "model" / "model")
    (folder / "lines.txt").write_text("the quick<mask>\n" * 200)
    labeled = ["--model", model, "--text", "sentence", "--label", "kind", "--batch-size", "8", "--seeds", "2"]
    return {
        "pretrain": ["pretrain", str(folder / "recipe.yaml"), "out={out}"],
        "finetune": ["finetune", table, *labeled, "--out", "{out}"],
        "prepare": ["prepare", str(folder / "text.jsonl"), "--vocab-size", "300", "--out", "{out}"],
        "predict": ["predict", str(folder / "lines.txt"), "--model", model],
        "evaluate": ["evaluate", "--model", model, "--data", str(folder / "corpus")],
    }


def run(arguments: list[str], out: Path, number: int = 0, delay: float = 0) -> tuple[int, str, float]:
    """Send a signal to a command after a delay; returns its exit code, its errors and the seconds it took."""
    full = [sys.executable, "-m", "linformers", *(argument.replace("{out}", str(out)) for argument in arguments)]
    began = time.monotonic()
    process = subprocess.Popen(full, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if number:
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, number)
    errors = process.communicate(timeout=300)[1]
    return process.returncode, errors, time.monotonic() - began


def main(signals: int, names: Sequence[str] | None = None) -> dict[str, int]:
    names_of_counts = ("signals", "too early", "too late", "no 130", "saved", "lost steps at most")
    chance, counts = random.Random(0), dict.fromkeys(names_of_counts, 0)
    with tempfile.TemporaryDirectory() as folder:
        known = {name: arguments for name, arguments in commands(Path(folder)).items() if name in (names or [name])}
        # Half of the signals go to training, where there is something to lose.
        chosen = [*known, *({"pretrain", "finetune"} & known.keys()), *({"pretrain"} & known.keys())]
        seconds = {}
        for name, arguments in known.items():
            code, errors, seconds[name] = run(arguments, Path(folder) / f"{name}-straight")
            assert code == 0, errors
        while counts["signals"] < signals:
            name = chance.choice(chosen)
            number = NUMBERS[counts["signals"] % len(NUMBERS)]
            out, delay = Path(folder) / f"{name}-{counts['signals']}", chance.uniform(START, seconds[name])
            code, errors, _ = run(known[name], out, number, delay)
            where = f"{name} with {number.name} after {delay:.2f} of {seconds[name]:.2f} seconds: {code}\n{errors}"
            # On a busy machine, the signal may come while Python itself still starts, before any code of ours can run.
            early = number == signal.SIGINT and "Traceback" in errors and "linformers" not in errors
            assert early or ("Traceback" not in errors and "Error" not in errors), where
            # Outside of training, SIGTERM and SIGHUP simply end a process; so does SIGINT once Python has shut down.
            assert code in (0, 128 + number, -number), where
            counts["signals"] += 1
            counts["too early"] += early
            counts["too late"] += code == 0
            counts["no 130"] += code == -signal.SIGINT
            if name == "pretrain" and out.exists():
                saved = checkpoints.list_checkpoints(out)
                lost = last_logged(out) - (checkpoints.step_of(saved[0]) if saved else 0)
                assert lost <= SAVE_EVERY, where
                counts["saved"] += code == 128 + number and bool(saved)
                counts["lost steps at most"] = max(lost, counts["lost steps at most"])
    return counts


if __name__ == "__main__":
    for number in NUMBERS:  # started in the background or under nohup, commands would ignore some
        signal.signal(number, signal.SIG_DFL)
    print(json.dumps(main(int(sys.argv[1]))))
