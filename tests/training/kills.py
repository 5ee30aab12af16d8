"""Kill a training run with SIGKILL again and again, often during a save, and check what is left.

`python -m tests.training.kills pretrain|finetune KILLS INSIDE_A_SAVE` prints counts. Each run is a fork of this
process, which has imported everything, so that a run starts at once.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from linformers import files
from linformers.training import checkpoints, finetune, tasks

from . import small

SETTINGS = finetune.Settings(seeds=2, epochs=4, batch_size=16, learning_rate=3e-3)


class Pretraining:
    save_every, steps = 2, 24

    def __init__(self, folder: Path) -> None:
        self.data = small.corpus(folder)

    def run(self, out: Path) -> int:
        return small.train(small.recipe(self.data, out, save_every=self.save_every, steps=self.steps))

    def folders(self, out: Path) -> list[Path]:
        return [out]

    def compare(self, out: Path, straight: Path) -> None:
        small.assert_same_run(out, straight, self.steps)


class FineTuning:
    save_every = 9  # an epoch

    def __init__(self, folder: Path) -> None:
        pretraining = Pretraining(folder)
        run(pretraining, folder / "start")
        files = small.labeled(folder)
        self.model = folder / "start" / "model"
        self.task = tasks.load(str(files / "train.csv"), test=files / "test.csv", text="sentence", label="kind")

    def run(self, out: Path) -> int:
        return finetune.run(self.task, self.model, out, SETTINGS, small.QUIET, "test")

    def folders(self, out: Path) -> list[Path]:
        """Those of the unfinished seeds."""
        return [folder for folder in out.glob("seed-*") if not (folder / "best" / "result.json").exists()]

    def compare(self, out: Path, straight: Path) -> None:
        for name in ("seed-0/best/result.json", "seed-1/best/result.json", "model/model.safetensors"):
            assert (out / name).read_bytes() == (straight / name).read_bytes()


def start(job: Pretraining | FineTuning, out: Path) -> int:
    """The process of a new run."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = job.run(out)
    finally:
        os._exit(code)


def run(job: Pretraining | FineTuning, out: Path) -> float:
    """Run to the end; returns the seconds it took."""
    began = time.monotonic()
    assert os.waitpid(start(job, out), 0)[1] == 0
    return time.monotonic() - began


def ended(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG)[0] != 0


def kill_inside_a_save(child: int, out: Path, delay: float) -> bool:
    """Kill a run `delay` seconds after an unfinished checkpoint appears; returns whether it was still being saved."""

    def saving(inside: str) -> bool:
        return any(
            path for pattern in ("", "seed-*/") for path in out.glob(f"{pattern}.checkpoint-*.unfinished{inside}")
        )

    while not ended(child):
        if saving("/*"):
            time.sleep(delay)
            inside = saving("")
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return inside
        time.sleep(1e-4)
    return False


def kill_after(child: int, delay: float) -> bool:
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline:
        if ended(child):
            return False
        time.sleep(1e-3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def last_logged(folder: Path) -> int:
    """The last step that a run logged."""
    return max((record["step"] for record in small.read_metrics(folder)), default=0)


def check(job: Pretraining | FineTuning, out: Path, known: dict[Path, int]) -> None:
    """In any case, every checkpoint is intact, and little was lost."""
    for folder in job.folders(out):
        saved = checkpoints.list_checkpoints(folder)
        assert all(files.damage(checkpoint) is None for checkpoint in saved)
        newest = checkpoints.step_of(saved[0]) if saved else 0
        assert max(known.get(folder, 0), last_logged(folder)) - newest <= job.save_every


def main(kind: str, kills: int, inside: int) -> dict[str, int]:
    """Kill runs until there were `kills` kills, at least `inside` of them inside a save."""
    chance = random.Random(0)
    counts = {"kills": 0, "inside a save": 0, "runs": 0}
    with tempfile.TemporaryDirectory() as folder:
        job = {"pretrain": Pretraining, "finetune": FineTuning}[kind](Path(folder))
        straight = Path(folder) / "straight"
        seconds = run(job, straight)
        while counts["kills"] < kills or counts["inside a save"] < inside:
            counts["runs"] += 1
            out = Path(folder) / f"run-{counts['runs']}"
            while not (out / "model").exists():
                known = {folder: last_logged(folder) for folder in job.folders(out)}
                child = start(job, out)
                more = counts["kills"] < kills or counts["inside a save"] < inside
                if not more:
                    os.waitpid(child, 0)
                elif counts["inside a save"] < inside and chance.random() < 0.6:
                    if kill_inside_a_save(child, out, chance.random() * 3e-3):
                        counts["kills"] += 1
                        counts["inside a save"] += 1
                else:
                    counts["kills"] += kill_after(child, chance.random() * seconds)
                check(job, out, known)
            run(job, out)  # the model is there, but a kill may have come before the end
            job.compare(out, straight)
            assert not list(out.rglob(".*unfinished"))
    return counts


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
