"""Kill a training run with SIGKILL again and again, often during a save, and check what is left.

`python -m tests.training.kills KILLS INSIDE_A_SAVE` prints counts. Each run is a fork of this process, which has
imported everything, so that a run starts at once.
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
from linformers.training import checkpoints

from . import small

SAVE_EVERY = 2
STEPS = 24


def start(data: Path, out: Path) -> int:
    """The process of a new run."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = small.train(small.recipe(data, out, save_every=SAVE_EVERY, steps=STEPS))
    finally:
        os._exit(code)


def ended(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG)[0] != 0


def kill_inside_a_save(child: int, out: Path, delay: float) -> bool:
    """Kill a run `delay` seconds after an unfinished checkpoint appears; returns whether it was still being saved."""
    while not ended(child):
        if any(out.glob(".checkpoint-*.unfinished/*")):
            time.sleep(delay)
            inside = any(out.glob(".checkpoint-*.unfinished"))
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


def last_logged(out: Path) -> int:
    """The last step that a run logged."""
    return max((record["step"] for record in small.read_metrics(out)), default=0)


def main(kills: int, inside: int) -> dict[str, int]:
    """Kill runs until there were `kills` kills, at least `inside` of them inside a save."""
    chance = random.Random(0)
    counts = {"kills": 0, "inside a save": 0, "runs": 0}
    with tempfile.TemporaryDirectory() as folder:
        data, straight = small.corpus(Path(folder)), Path(folder) / "straight"
        os.waitpid(start(data, straight), 0)
        assert (straight / "model").exists()
        while counts["kills"] < kills or counts["inside a save"] < inside:
            counts["runs"] += 1
            out = Path(folder) / f"run-{counts['runs']}"
            while not (out / "model").exists():
                known = last_logged(out)
                child = start(data, out)
                more = counts["kills"] < kills or counts["inside a save"] < inside
                if not more:
                    os.waitpid(child, 0)
                elif counts["inside a save"] < inside and chance.random() < 0.6:
                    if kill_inside_a_save(child, out, chance.random() * 3e-3):
                        counts["kills"] += 1
                        counts["inside a save"] += 1
                else:
                    counts["kills"] += kill_after(child, chance.random() * 1.5)
                # In any case, every checkpoint is intact, and little was lost.
                saved = checkpoints.list_checkpoints(out)
                assert all(files.damage(checkpoint) is None for checkpoint in saved)
                newest = checkpoints.step_of(saved[0]) if saved else 0
                assert max(known, last_logged(out)) - newest <= SAVE_EVERY
            small.assert_same_run(out, straight, STEPS)
    return counts


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
