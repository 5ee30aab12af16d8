"""Commands in processes that start at once: forks of a server that has already imported the package."""

import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["linformers.training.finetune", "linformers.training.predict"])


class Forked(ForkServerProcess):
    """A process that calls `target` and prints to the file `log`, with the methods of `subprocess.Popen`."""

    def __init__(self, target: Callable[[], None], log: Path, environment: dict[str, str] | None = None) -> None:
        super().__init__(target=_start, args=(target, str(log), str(Path.cwd()), environment or {}))
        self.start()

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int:
        self.join()
        return self.exitcode


def _start(target: Callable[[], None], log: str, folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    target()


@dataclass
class Command:
    """`python -m linformers` with the given arguments."""

    arguments: Sequence[str]

    def __call__(self) -> None:
        from linformers.__main__ import main

        sys.argv = ["linformers", *self.arguments]
        main()


def in_two(target: Callable[[], None], log: Path) -> int:
    """Call a function in two processes with torchrun's environment; return the exit code of the first that fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"TORCHELASTIC_RUN_ID": "forks"}
    environments = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(2)]
    left = [Forked(target, log, {name: str(value) for name, value in own.items()}) for own in environments]
    codes = []
    while left:
        multiprocessing.connection.wait([own.sentinel for own in left])
        for own in [own for own in left if own.poll() is not None]:
            left.remove(own)
            codes.append(own.wait())
        if any(codes):  # like torchrun: the other process would wait forever
            for own in left:
                own.kill()
    return next(filter(None, codes), 0)
