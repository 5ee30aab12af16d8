"""Commands in processes that start at once: forks of a server that has already imported the package."""

import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["linformers.training.finetune", "linformers.training.predict"])


class Forked:
    """A process that calls a function, with the part of `subprocess.Popen` that tests need.

    Args:
        target: the function to call.
        log: the file for everything that the process prints.
        environment: additional environment variables.
    """

    def __init__(self, target: Callable[[], None], log: Path, environment: dict[str, str] | None = None) -> None:
        arguments = (target, str(log), str(Path.cwd()), environment or {})
        self.process = CONTEXT.Process(target=_start, args=arguments)
        self.process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()


def _start(target: Callable[[], None], log: str, folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    target()


class Command:
    """`python -m linformers` with the given arguments."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = arguments

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
        multiprocessing.connection.wait([own.process.sentinel for own in left])
        for own in [own for own in left if own.poll() is not None]:
            left.remove(own)
            codes.append(own.wait())
        if any(codes):  # like torchrun: the other process would wait forever
            for own in left:
                own.kill()
    return next(filter(None, codes), 0)
