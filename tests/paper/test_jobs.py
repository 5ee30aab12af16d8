"""Jobs run once, in order, several at a time; jobs that fail or are stopped run again."""

import dataclasses
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from paper.jobs import Job, Records
from rich.console import Console

from paper import jobs

SLEEP = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({told!r}).write_text('1'), sys.exit(143)))
pathlib.Path({ready!r}).write_text('1'); time.sleep(60)
"""


def job(folder: Path, name: str, script: str = "", after=None, **description) -> Job:
    """A job whose command is a Python script, which writes a number to its model file."""
    out = folder / "runs" / name
    default = f"import pathlib; pathlib.Path({str(out / 'model')!r}).write_text('7')"
    return Job(
        name=f"test/{name}",
        arguments=["-c", script or default],
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


def writes(folder, name, number="'1'"):
    return f"pathlib.Path({str(folder / 'runs' / name / 'model')!r}).write_text({number})"


def test_a_job_is_run_once(tmp_path):
    one = job(tmp_path, "one", seed=1)
    assert run([one, one], tmp_path) == 0
    found = Records(tmp_path).find(one)
    assert found["result"] == {"number": 7}
    assert found["description"] == {"seed": 1}
    assert found["command"].startswith("linformers -c")
    assert {"key", "commit", "device", "torch", "transformers"} <= found.keys()
    assert run([job(tmp_path, "one", "raise SystemExit(1)", seed=1)], tmp_path) == 0  # nothing is run


def test_a_folder_belongs_to_one_job(tmp_path, monkeypatch):
    """Neither another recipe nor other code continues a run, until its folder is deleted."""
    assert run([job(tmp_path, "one", seed=1)], tmp_path) == 0
    other = job(tmp_path, "one", seed=2)
    assert run([other], tmp_path) == 1
    assert Records(tmp_path).find(other) is None
    (tmp_path / "runs" / "one" / jobs.NOTE).unlink()
    assert run([other], tmp_path) == 1  # nor a run that nobody started
    shutil.rmtree(tmp_path / "runs")
    assert run([other], tmp_path) == 0
    monkeypatch.setattr(jobs, "CODE_VERSION", jobs.CODE_VERSION + 1)
    newer = job(tmp_path, "one", seed=2)
    assert Records(tmp_path).find(newer) is None
    assert run([newer], tmp_path) == 1


def test_a_job_that_failed_at_once_starts_again(tmp_path, monkeypatch):
    monkeypatch.setenv("LINFORMERS_COMMIT", "broken")
    assert run([job(tmp_path, "one", "raise SystemExit(1)", seed=1)], tmp_path) == 1
    monkeypatch.setenv("LINFORMERS_COMMIT", "fixed")
    assert run([job(tmp_path, "one", seed=2)], tmp_path) == 0
    assert record(tmp_path, "one")["commit"] == "fixed"


def test_a_record_names_the_commit_at_which_a_run_started(tmp_path, monkeypatch):
    monkeypatch.setenv("LINFORMERS_COMMIT", "first")
    assert run([job(tmp_path, "one")], tmp_path) == 0
    (tmp_path / "test" / "runs.json").unlink()
    monkeypatch.setenv("LINFORMERS_COMMIT", "second")
    assert run([job(tmp_path, "one")], tmp_path) == 0
    assert record(tmp_path, "one")["commit"] == "first"


def test_a_job_waits_for_its_pretraining(tmp_path):
    first = job(tmp_path, "first", f"import time, pathlib; time.sleep(0.5); {writes(tmp_path, 'first')}")
    read = f"pathlib.Path({str(tmp_path / 'runs' / 'first' / 'model')!r}).read_text() * 2"
    second = job(tmp_path, "then", f"import pathlib; {writes(tmp_path, 'then', read)}", after=first)
    assert run([first, second], tmp_path, at_once=4) == 0
    assert record(tmp_path, "then")["result"] == {"number": 11}


def test_a_job_that_measures_time_runs_alone(tmp_path):
    path = str(tmp_path / "times.txt")

    def timed(name, alone):
        script = f"import time, pathlib; a = time.time(); time.sleep(0.5); open({path!r}, 'a').write("
        script += f"f'{name} {{a}} {{time.time()}}\\n'); {writes(tmp_path, name)}"
        return dataclasses.replace(job(tmp_path, name, script), alone=alone)

    assert run([timed("a", False), timed("b", True), timed("c", False), timed("d", False)], tmp_path, at_once=3) == 0
    lines = (line.split() for line in Path(path).read_text().splitlines())
    spans = {name: (float(begin), float(end)) for name, begin, end in lines}
    begin, end = spans.pop("b")
    assert all(other_end <= begin or other_begin >= end for other_begin, other_end in spans.values())
    assert spans["c"][0] < spans["d"][1]


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


def test_other_jobs_continue_after_a_failure(tmp_path, capsys):
    bad = job(tmp_path, "bad", "raise SystemExit('the disk is full')")
    assert run([bad, job(tmp_path, "good"), job(tmp_path, "waits", after=bad)], tmp_path, Console()) == 1
    output = capsys.readouterr().out
    assert "test/bad failed: the disk is full" in output
    assert "test/waits failed: test/bad failed" in output
    assert record(tmp_path, "good") is not None


def test_a_job_whose_pretraining_failed_is_not_run(tmp_path):
    """Not even if a model of another recipe exists, which would be recorded under the wrong name."""
    first = job(tmp_path, "first", seed=1)
    assert run([first], tmp_path) == 0
    first = job(tmp_path, "first", seed=2)
    second = job(tmp_path, "then", after=first)
    assert run([first, second], tmp_path) == 1
    assert record(tmp_path, "then") is None
    assert jobs.missing([second], Records(tmp_path)) == [first, second]


def test_an_error_leaves_nothing_running(tmp_path):
    told, ready = str(tmp_path / "told"), str(tmp_path / "ready")
    wait = f"import pathlib, time\nwhile not pathlib.Path({ready!r}).exists(): time.sleep(0.01)"
    with pytest.raises(FileNotFoundError):  # the second job writes no number
        run(
            [job(tmp_path, "slow", SLEEP.format(told=told, ready=ready)), job(tmp_path, "b", wait)], tmp_path, at_once=2
        )
    assert Path(told).exists()


def test_jobs_run_at_the_same_time(tmp_path):
    def meets(name, other):
        path = str(tmp_path / "runs" / other / "model")
        script = f"import time, pathlib; {writes(tmp_path, name)}\n"
        return job(tmp_path, name, f"{script}while not pathlib.Path({path!r}).exists(): time.sleep(0.01)")

    assert run([meets("a", "b"), meets("b", "a")], tmp_path, at_once=2) == 0


def test_time_runs_out(tmp_path):
    script = SLEEP.format(told=str(tmp_path / "told"), ready=str(tmp_path / "ready"))
    start = time.monotonic()
    assert run([job(tmp_path, "slow", script)], tmp_path, deadline=start + 1) == 1
    assert time.monotonic() - start < 20
    assert record(tmp_path, "slow") is None


def test_a_signal_reaches_running_jobs(tmp_path):
    told, ready = tmp_path / "told", tmp_path / "ready"

    def interrupt():
        while not ready.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    script = SLEEP.format(told=str(told), ready=str(ready))
    assert run([job(tmp_path, "slow", script)], tmp_path) == 128 + signal.SIGINT
    thread.join()
    assert told.exists()


def test_a_record_does_not_say_where_the_data_are():
    records = Records(Path("results"), Path("/mnt/x"))
    assert list(map(records.public, ("/mnt/x", "/mnt/x/wiki", "/mnt/xy"))) == ["DIR", "DIR/wiki", "/mnt/xy"]
