"""Damage files, plant malicious ones and type wrong commands: is the mistake named, and does nothing else happen?

    python -m benchmarks.attack                              # all parts
    python -m benchmarks.attack flips truncations --count 50 # fewer cases of two of them
    python -m benchmarks.attack flips --only 371             # one case again, with what it printed

Each case is a command in a process of its own, forked from one that has imported the package, on a copy of what the
command reads. A case passes if the command ends with exit code 2 and one sentence. Unless it must be refused, it also
passes if its result is, bit for bit, that of the undamaged files; after a malicious file, any result passes. It fails
after a traceback, a crash, 30 seconds of CPU time or 1 GiB of extra memory, if a planted payload has run, or if a wrong
command has left a file.
Linux only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import transformers
import typer
import yaml
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from tests.forks import Command, Forked
from tests.training import small

from linformers.checks import check_choice, make_folder
from linformers.progress import steps
from linformers.provenance import commit, environment
from linformers.training import checkpoints, finetune, tasks
from linformers.training.prepare import prepare
from linformers_cli import run_script

SECONDS, MEMORY = 30, 2**30
PATIENCE = 2  # times as much, since other processes take time, too
ADDRESS_SPACE = 6 * 2**30  # a bomb ends in MemoryError instead of using up the machine's memory
MARKER = "marker"  # the file that a payload creates
FINE = ("named", "harmless")

PRETRAIN = "pretrain {kit}/recipe.yaml"
FINETUNE = "finetune {kit}/train.csv --test {kit}/test.csv --text sentence --label kind --learning-rate 0.003"
TUNE = f"{FINETUNE} --model {{kit}}/run/model --out {{target}} --seeds 1 --epochs 2"
MLM = {
    "predict": "predict {kit}/masked.txt --model {target}",
    "evaluate": "evaluate --model {target} --data {kit}/corpus --rows 8",
    "finetune": f"{FINETUNE} --model {{target}} --out {{case}}/out --seeds 1 --epochs 1",
    "start": f"{PRETRAIN} start={{target}} steps=4 out={{case}}/out",
    "load": "load {target} MaskedLM",
}
CLASSIFIER = {
    "predict": "predict {kit}/lines.txt --model {target}",
    "evaluate": "evaluate --model {target} --task {kit}/test.csv --text sentence --label kind",
    "load": "load {target} SequenceClassification",
}
# The folders under attack, and the commands that use each.
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "model": ("run/model", MLM),
    "checkpoint": ("run/checkpoint-24", MLM),
    "classifier": ("tuned/model", CLASSIFIER),
    "corpus": (
        "corpus",
        {
            "pretrain": f"{PRETRAIN} data={{target}} steps=4 out={{case}}/out",
            "evaluate": "evaluate --model {kit}/run/model --data {target} --rows 8",
        },
    ),
    "killed run": ("killed", {"resume": f"{PRETRAIN} out={{target}}"}),
    "finished run": ("run", {"again": f"{PRETRAIN} out={{target}}"}),
    "killed fine-tuning": ("half", {"resume": TUNE}),
    "finished fine-tuning": ("tuned", {"again": TUNE}),
}


@dataclass(frozen=True)
class Case:
    """A command, and what is done to its files first; with `refused`, the command must end in a sentence."""

    part: str
    name: str
    kind: str  # of the folder under attack, which is copied to `target`; "": an empty one
    use: str  # a use of that kind, or a command
    spoil: Callable[[Path], object]
    refused: bool = False

    @property
    def command(self) -> str:
        return KINDS[self.kind][1].get(self.use, self.use) if self.kind else self.use


@dataclass(frozen=True)
class Outcome:
    """What a case came to."""

    verdict: str
    seconds: float
    mebibytes: int  # peak memory minus memory at the start
    said: str
    result: str | None = None


@dataclass
class Attempt:
    """A command within limits; `load` stands for `from_pretrained`."""

    arguments: Sequence[str]
    folder: Path  # to run it in
    report: Path

    def __call__(self) -> None:
        os.chdir(self.folder)
        mapped, resident = (int(pages) * resource.getpagesize() for pages in _statm()[:2])
        resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, mapped + ADDRESS_SPACE))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        try:
            load(*self.arguments[1:]) if self.arguments[0] == "load" else Command(self.arguments)()
        finally:
            used = resource.getrusage(resource.RUSAGE_SELF)
            self.report.write_text(json.dumps([used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss - resident]))


def _statm() -> list[str]:
    return Path("/proc/self/statm").read_text().split()


def load(folder: str, kind: str) -> None:
    """Print what a model from `from_pretrained` computes.

    It raises errors of transformers, safetensors and Python that say what is wrong with a file. Others are bugs.
    """
    import torch

    import linformers

    transformers.utils.logging.disable_progress_bar()
    try:
        model = getattr(linformers, f"LinformerFor{kind}").from_pretrained(folder)
        with torch.no_grad():
            logits = model.eval()(torch.arange(5, 45).view(2, 20)).logits
    except (ValueError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        print(f"error: {error}".splitlines()[0], file=sys.stderr)
        sys.exit(2)
    print(logits.numpy().tobytes().hex())


# What commands read.


def build(kit: Path) -> None:
    """A corpus, runs of pretraining and fine-tuning, finished and killed, and text for their models."""
    text = str(small.corpus(kit / "source").parent / "text.jsonl")
    prepare([text], kit / "corpus", vocab_size=300, validation_share=0.1, shard_tokens=3000, console=small.QUIET)
    recipe = small.recipe(kit / "corpus", kit / "run", keep=3)
    (kit / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    draw = random.Random(0)
    for name, count in (("train", 160), ("test", 40)):
        texts = [" ".join(draw.choices(small.WORDS[6 * (i % 2) :][:6], k=12)) for i in range(count)]
        rows = [{"sentence": text, "kind": ("dogs", "trees")[i % 2]} for i, text in enumerate(texts)]
        small.write_table(kit / f"{name}.csv", rows)
    (kit / "lines.txt").write_text("the quick brown fox\na tree and a dog\n")
    (kit / "masked.txt").write_text("the quick <mask> fox\na <mask> and a dog\n")
    small.train(recipe)
    task = tasks.load(str(kit / "train.csv"), test=kit / "test.csv", text="sentence", label="kind")
    settings = finetune.Settings(seeds=1, epochs=2, learning_rate=0.003)
    for name in ("tuned", "half"):
        with mock.patch.object(checkpoints, "remove_old"):
            finetune.run(task, kit / "run" / "model", kit / name, settings, small.QUIET, "linformers finetune")
    shutil.copytree(kit / "run", kit / "killed")
    seed = kit / "half" / "seed-0"
    newest = [checkpoints.list_checkpoints(run)[0] for run in (kit / "killed", seed)]
    for folder in (*newest, kit / "killed" / "model", kit / "half" / "model", seed / "best"):
        shutil.rmtree(folder)
    (kit / "half" / "results.json").unlink()


def files_of(folder: Path) -> list[Path]:
    """The files below a folder that hold something, without TensorBoard's."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(path for path in files if path.parts[0] != "runs" and path.suffix != ".png")


def places(kit: Path) -> dict[str, list[Path]]:
    return {kind: files_of(kit / folder) for kind, (folder, _) in KINDS.items()}


# The parts.


def flips(kit: Path, count: int, seed: int) -> Iterator[Case]:
    """A random bit of a random file flips."""
    for draw, kind, file, use in _random_places(kit, count, seed):
        place = draw.random()

        def flip(target: Path, file: Path = file, place: float = place) -> None:
            content = bytearray((target / file).read_bytes())
            bit = int(place * 8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
            (target / file).write_bytes(content)

        yield Case("flips", f"bit {place:.6f} of {file}", kind, use, flip)


def truncations(kit: Path, count: int, seed: int) -> Iterator[Case]:
    """A random file ends early."""
    for draw, kind, file, use in _random_places(kit, count, seed):
        place = draw.random()

        def truncate(target: Path, file: Path = file, place: float = place) -> None:
            os.truncate(target / file, int(place * (target / file).stat().st_size))

        yield Case("truncations", f"{file} at {place:.6f}", kind, use, truncate)


def _random_places(kit: Path, count: int, seed: int) -> Iterator[tuple[random.Random, str, Path, str]]:
    known = places(kit)
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        kind = draw.choice(list(known))
        yield draw, kind, draw.choice(known[kind]), draw.choice(list(KINDS[kind][1]))


def missing(kit: Path, count: int, seed: int) -> Iterator[Case]:
    """Each file is missing, for each use of its folder."""
    for kind, files in places(kit).items():
        for file in files:
            for use in KINDS[kind][1]:
                yield Case("missing", str(file), kind, use, lambda target, file=file: (target / file).unlink())


def malicious(kit: Path, count: int, seed: int) -> Iterator[Case]:
    """A file or folder that someone made to do harm."""
    from benchmarks import attack_cases

    for row in attack_cases.malicious():
        yield Case("malicious", *row)


def invocations(kit: Path, count: int, seed: int) -> Iterator[Case]:
    """A command that cannot work."""
    from benchmarks import attack_cases

    for command, files in attack_cases.invocations():

        def write(target: Path, files: dict[str, bytes] = files) -> None:
            for name, content in files.items():
                (target / name).write_bytes(content)

        yield Case("invocations", command, "", command, write, refused=True)


PARTS = {part.__name__: part for part in (flips, truncations, missing, malicious, invocations)}
COUNTS = {"flips": 1000, "truncations": 300}


# Running them.


def run(case: Case, kit: Path, folder: Path) -> Iterator[Any]:
    """Run a case in a folder of its own: yields the process, then the outcome."""
    target = folder / "target"
    shutil.copytree(kit / KINDS[case.kind][0], target) if case.kind else target.mkdir(parents=True)
    case.spoil(target)
    filled = [part.format(kit=kit, target=target, case=folder) for part in shlex.split(case.command)]
    before = set(folder.rglob("*"))
    log, report = kit.parent / f"{folder.name}.log", kit.parent / f"{folder.name}.peak"
    log.touch()  # also if the process ends before it prints
    process = Forked(Attempt(filled, folder, report), log)
    yield process
    late = process.returncode is None
    if late:
        process.kill()
    code = process.wait()
    late = late or code == -signal.SIGXCPU
    said = log.read_text(errors="replace")
    seconds, peak = json.loads(report.read_text()) if report.exists() else (SECONDS * late, 0)
    new = sorted(path for path in set(folder.rglob("*")) - before if path.is_file() and path.name != ".lock")
    written = [str(path.relative_to(folder)) for path in new]
    result = result_of(case, folder, said) if code == 0 else None
    errors = [line for line in said.splitlines() if line.startswith(("error: ", "Usage: "))]
    if (folder / MARKER).exists():
        verdict = "code ran"
    elif late or peak > MEMORY:
        verdict = "hang" if late else "memory"
    elif code == 0:
        verdict = "harmless"  # if the result is right
    elif code != 2:
        verdict = "traceback" if "Traceback" in said else "crash"
    else:
        verdict = "named" if len(errors) == 1 and "Traceback" not in said else "noisy"
    if case.part == "invocations" and written and verdict in FINE:
        verdict, said = "left files", f"{said}{written}"
    yield Outcome(verdict, round(seconds, 2), max(0, peak) >> 20, said, result)


def result_of(case: Case, folder: Path, said: str) -> str:
    """Identifies what a command computed: what it printed, or the model and the scores that it wrote."""
    out = next((out for out in (folder / "out", folder / "target") if (out / "run.json").exists()), None)
    if out is None:
        return "\n".join(line for line in said.splitlines() if "━" not in line)  # progress bars show times
    files = [out / "model" / name for name in ("config.json", "tokenizer.json", "model.safetensors")]
    parts: list[Any] = [path.read_bytes().hex() if path.exists() else None for path in files]
    if (out / "results.json").exists():
        parts.append({**json.loads((out / "results.json").read_text()), "made_with": None})
    elif case.use != "again":  # a finished run has no use for its metrics
        kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
        parts.append([{name: record.get(name) for name in kept} for record in small.read_metrics(out)])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def attempt(
    cases: Sequence[Case], kit: Path, at_once: int, on_case: Callable[[str], None]
) -> Iterator[tuple[Case, Outcome]]:
    """The outcome of each case, `at_once` at a time; a result is compared with that of the undamaged files."""
    uses = dict.fromkeys((case.kind, case.use) for case in cases if case.kind and case.use in KINDS[case.kind][1])
    sound = [Case("undamaged", kind, kind, use, lambda target: None) for kind, use in uses]
    expected: dict[tuple[str, str], str | None] = {}
    waiting, running = [*cases[::-1], *sound[::-1]], dict[Any, tuple[Case, Path, Iterator[Any], float]]()
    number = 0
    while waiting or running:
        # What the results are compared with comes first.
        while waiting and len(running) < at_once and (len(expected) == len(sound) or waiting[-1].part == "undamaged"):
            case, folder = waiting.pop(), kit.parent / f"case-{number}"
            number += 1
            on_case(f"{case.part}: {case.name}"[:60])
            work = run(case, kit, folder)
            process = next(work)
            running[process.sentinel] = case, folder, work, time.monotonic() + PATIENCE * SECONDS
        deadline = min(end for *_, end in running.values())
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        for sentinel in ended or [own for own, (*_, end) in running.items() if end <= time.monotonic()]:
            case, folder, work, _ = running.pop(sentinel)
            outcome = next(work)
            for path in (folder, folder.with_suffix(".log"), folder.with_suffix(".peak")):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            if case.part == "undamaged":
                if outcome.verdict != "harmless":
                    raise RuntimeError(f"{case.command} fails on undamaged files: {outcome.said}")
                expected[case.kind, case.use] = outcome.result
                continue
            # Whoever makes a file and its hash decides what it computes: only damage must change nothing.
            differs = case.part != "malicious" and outcome.result != expected.get((case.kind, case.use))
            if outcome.verdict == "harmless" and (case.refused or differs):
                outcome = dataclasses.replace(outcome, verdict="silent")
            yield case, outcome


def main(
    parts: Annotated[list[str] | None, typer.Argument(help="Parts to run.", show_default=", ".join(PARTS))] = None,
    count: Annotated[
        int, typer.Option(min=0, help="Cases per part; 0 for 1,000 flips, 300 truncations and all others.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Random seed for the places of damage.")] = 0,
    at_once: Annotated[int, typer.Option(min=1, help="Commands at once.")] = 2,
    only: Annotated[str, typer.Option(help="Only the cases whose number or name is this; print their output.")] = "",
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("results/attack"),
) -> None:
    """Attack the commands, and report what was not refused in one sentence."""
    for part in parts or ():
        check_choice("parts", part, PARTS)
    make_folder("out", out)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    began_at = commit()
    console, cells, failures = Console(), list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        kit = Path(folder) / "kit"
        build(kit)
        for part in parts or PARTS:
            made = enumerate(PARTS[part](kit, count or COUNTS.get(part, 0), seed))
            numbers = {case: i for i, case in made if not count or i < count}
            cases = [own for own, i in numbers.items() if only in ("", str(i)) or (len(only) > 4 and only in own.name)]
            found: list[Outcome] = []
            with steps(console, len(cases)) as begin:
                for case, outcome in attempt(cases, kit, at_once, begin):
                    found.append(outcome)
                    if outcome.verdict in FINE and not only:
                        continue
                    where = {"part": part, "number": numbers[case], "verdict": outcome.verdict}
                    where |= {"kind": case.kind, "use": case.use, "name": case.name}
                    said = re.sub(re.escape(folder), "", outcome.said).strip()[-1500:]
                    console.print(*where.values(), markup=False, highlight=False, soft_wrap=True)
                    console.print("  ", said if only else said.split("\n")[-1], markup=False, soft_wrap=True)
                    failures += [{**where, "said": said}] if outcome.verdict not in FINE else []
            cell = {"part": part, "cases": len(found), "verdicts": dict(Counter(own.verdict for own in found))}
            most = {name: max(getattr(own, name) for own in found) for name in ("seconds", "mebibytes")}
            cells.append({**cell, **most})
    record = {"command": shlex.join(["python", "-m", "benchmarks.attack", *sys.argv[1:]]), "commit": began_at}
    record |= {**environment(), "seed": seed, "parts": cells, "failures": failures}
    (out / "attack.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(table_of(cells))
    if failures:
        raise typer.Exit(1)


def table_of(cells: Sequence[dict[str, Any]]) -> Table:
    table = Table("part", "cases", *FINE, "failures", "slowest, s of a core", "most memory, MiB")
    for cell in cells:
        fine = [cell["verdicts"].get(name, 0) for name in FINE]
        others = {name: number for name, number in cell["verdicts"].items() if name not in FINE}
        bad = ", ".join(f"{number} {name}" for name, number in others.items()) or "0"
        most = [f"{cell['seconds']:.1f}", str(cell["mebibytes"])]
        table.add_row(cell["part"], str(cell["cases"]), *map(str, fine), bad, *most)
    return table


if __name__ == "__main__":
    run_script(lambda: typer.run(main))
