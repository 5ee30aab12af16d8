"""Jobs run once, in order, several at a time; jobs that fail or are stopped run again."""

import shutil
import signal
import time
from pathlib import Path

import pytest
from paper.jobs import Job, Records
from rich.console import Console

from paper import jobs

SLEEP = """
signal.signal(signal.SIGTERM, lambda *_: ((root / "stopped").touch(), sys.exit(143)))
(root / "ready").touch()
"""


def job(folder: Path, name: str, script: str = "model.write_text('7')", after=None, **description) -> Job:
    """A job whose command is a Python script, which writes a number to the file `model`."""
    out = folder / "runs" / name
    start = f"import os, pathlib, signal, sys, time; root = pathlib.Path({str(folder)!r})"
    return Job(
        name=f"test/{name}",
        arguments=["-c", f"{start}; model = root / 'runs' / {name!r} / 'model'\n{script}"],
        out=out,
        description=description,
        collect=lambda: {"number": int((out / "model").read_text())},
        steps=1,
        steps_done=lambda: int((out / "model").exists()),
        after=after,
    )


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    """Commands are Python scripts instead of those of linformers."""
    popen = jobs.subprocess.Popen
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda command, **rest: popen([command[0], *command[3:]], **rest))


def run(every, folder, console=None, **options):
    return jobs.run(every, Records(folder), folder / "logs", console or Console(quiet=True), **options)


def record(folder, name):
    return Records(folder).read(f"test/{name}")


def test_a_job_is_run_once(tmp_path):
    one = job(tmp_path, "one", seed=1)
    assert run([one, one], tmp_path) == 0
    found = Records(tmp_path).find(one)
    assert found["result"] == {"number": 7}
    assert found["description"] == {"seed": 1}
    assert found["command"].startswith("linformers -c")
    assert {"key", "commit", "device", "torch", "transformers"} <= found.keys()
    records = Records(Path("results"), Path("/mnt/x"))  # which do not say where the data are
    assert list(map(records.public, ("/mnt/x", "/mnt/x/wiki", "/mnt/xy"))) == ["DIR", "DIR/wiki", "/mnt/xy"]
    assert run([job(tmp_path, "one", "raise SystemExit(1)", seed=1)], tmp_path) == 0  # nothing is run


def test_a_folder_belongs_to_one_job(tmp_path, monkeypatch):
    """Neither another recipe nor other code continues a run, until its folder is deleted."""
    assert run([job(tmp_path, "one", seed=1)], tmp_path) == 0
    other = job(tmp_path, "one", seed=2)
    assert run([other], tmp_path) == 1
    (tmp_path / "runs" / "one" / jobs.NOTE).unlink()
    assert run([other], tmp_path) == 1  # nor a run that nobody started
    shutil.rmtree(tmp_path / "runs")
    assert run([other], tmp_path) == 0
    monkeypatch.setattr(jobs, "CODE_VERSION", jobs.CODE_VERSION + 1)
    newer = job(tmp_path, "one", seed=2)
    assert Records(tmp_path).find(newer) is None
    assert run([newer], tmp_path) == 1


def test_a_record_names_the_commit_at_which_a_run_started(tmp_path, monkeypatch):
    one = job(tmp_path, "one", seed=2)
    for commit, own in (("broken", job(tmp_path, "one", "raise SystemExit(1)", seed=1)), ("first", one)):
        monkeypatch.setenv("LINFORMERS_COMMIT", commit)
        run([own], tmp_path)
    (tmp_path / "test" / "runs.json").unlink()
    monkeypatch.setenv("LINFORMERS_COMMIT", "second")
    assert run([one], tmp_path) == 0
    assert record(tmp_path, "one")["commit"] == "first"


def test_a_job_waits_for_its_pretraining(tmp_path):
    first = job(tmp_path, "first", "time.sleep(0.5); model.write_text('1')")
    second = job(tmp_path, "then", "model.write_text(2 * (root / 'runs/first/model').read_text())", after=first)
    assert run([first, second], tmp_path, at_once=4) == 0
    assert record(tmp_path, "then")["result"] == {"number": 11}


def test_a_deleted_model_is_trained_again(tmp_path):
    first = job(tmp_path, "first")
    assert run([first], tmp_path) == 0
    before = record(tmp_path, "first")
    first.model.unlink()
    assert jobs.missing([first], Records(tmp_path)) == []
    second = job(tmp_path, "then", after=first)
    assert jobs.missing([first, second], Records(tmp_path)) == [first, second]
    assert run([first, second], tmp_path) == 0
    assert first.model.exists()
    assert record(tmp_path, "first") == before  # which others may have cited
    assert record(tmp_path, "first-repeated")["key"] == before["key"]


def test_after_a_failure_only_independent_jobs_continue(tmp_path, capsys):
    """A model of another recipe does not replace a failed one: its result would be recorded under the wrong name."""
    assert run([job(tmp_path, "first", seed=1)], tmp_path) == 0
    first = job(tmp_path, "first", seed=2)
    second = job(tmp_path, "then", after=first)
    bad = job(tmp_path, "bad", "raise SystemExit('the disk is full')")
    assert run([first, second, bad, job(tmp_path, "good")], tmp_path, Console()) == 1
    output = capsys.readouterr().out
    assert "test/then failed: test/first failed" in output
    assert "test/bad failed: the disk is full" in output
    assert record(tmp_path, "then") is None
    assert record(tmp_path, "good") is not None
    assert jobs.missing([second], Records(tmp_path)) == [first, second]
    third = job(tmp_path, "at last", after=second)
    assert jobs.missing([third], Records(tmp_path)) == [first, second, third]


def test_jobs_run_at_the_same_time_and_an_error_stops_them(tmp_path):
    slow = job(tmp_path, "slow", f"{SLEEP}\ntime.sleep(60)")
    empty = job(tmp_path, "empty", "while not (root / 'ready').exists(): time.sleep(0.01)")
    with pytest.raises(FileNotFoundError):  # the second job writes no number
        run([slow, empty], tmp_path, at_once=2)
    assert (tmp_path / "stopped").exists()


def test_time_runs_out(tmp_path):
    slow, start = job(tmp_path, "slow", f"{SLEEP}\ntime.sleep(60)"), time.monotonic()
    assert run([slow], tmp_path, deadline=start + 1) == 1
    assert time.monotonic() - start < 20
    assert record(tmp_path, "slow") is None


def test_a_signal_reaches_running_jobs(tmp_path):
    slow = job(tmp_path, "slow", f"{SLEEP}\nos.kill(os.getppid(), signal.SIGINT); time.sleep(60)")
    assert run([slow], tmp_path) == 128 + signal.SIGINT
    assert (tmp_path / "stopped").exists()
