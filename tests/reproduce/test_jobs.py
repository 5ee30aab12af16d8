"""Jobs run once, in order, several at a time; what fails or is stopped is run again."""

import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from linformers.reproduce import jobs
from linformers.reproduce.jobs import Job, Store

QUIET = Console(quiet=True)


def job(folder: Path, name: str, script: str = "", after=None, **decides) -> Job:
    """A job whose command is a Python script, which writes the file of its name."""
    out = folder / name
    default = f"import pathlib; pathlib.Path({str(out)!r}).write_text('7')"
    return Job(
        name=name,
        arguments=["-c", script or default],
        out=folder / "runs" / name,
        decides=decides,
        collect=lambda: {"number": int(out.read_text())},
        steps=(1, lambda: int(out.exists())),
        after=None if after is None else (after, (folder / after.name).exists),
    )


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    """Commands are Python scripts instead of those of linformers."""
    popen = jobs.subprocess.Popen
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda command, **rest: popen([command[0], *command[3:]], **rest))


def run(every, folder, **options):
    return jobs.run(every, Store(folder / "records"), folder / "logs", QUIET, **options)


def test_a_job_is_run_once(tmp_path):
    one = job(tmp_path, "one", seed=1)
    assert run([one, one], tmp_path) == 0
    record = Store(tmp_path / "records").find(one)
    assert record["result"] == {"number": 7}
    assert record["decides"] == {"seed": 1}
    assert record["command"].startswith("linformers -c")
    (tmp_path / "one").write_text("8")
    assert run([job(tmp_path, "one", "raise SystemExit(1)", seed=1)], tmp_path) == 0  # nothing is run


def test_a_folder_is_of_one_job(tmp_path, monkeypatch):
    """Neither another recipe nor other code takes over what it holds, until it is deleted."""
    assert run([job(tmp_path, "one", seed=1)], tmp_path) == 0
    other = job(tmp_path, "one", seed=2)
    assert run([other], tmp_path) == 1
    assert Store(tmp_path / "records").find(other) is None
    shutil.rmtree(tmp_path / "runs")
    assert run([other], tmp_path) == 1  # nor does one take over what nobody began
    (tmp_path / "one").unlink()
    assert run([other], tmp_path) == 0
    monkeypatch.setattr(jobs, "CODE_VERSION", jobs.CODE_VERSION + 1)
    newer = job(tmp_path, "one", seed=2)
    assert run([newer], tmp_path) == 1
    assert Store(tmp_path / "records").find(newer) is None


def test_a_job_that_failed_at_once_begins_again(tmp_path, monkeypatch):
    monkeypatch.setenv("LINFORMERS_COMMIT", "broken")
    assert run([job(tmp_path, "one", "raise SystemExit(1)", seed=1)], tmp_path) == 1
    monkeypatch.setenv("LINFORMERS_COMMIT", "mended")
    assert run([job(tmp_path, "one", seed=2)], tmp_path) == 0
    assert Store(tmp_path / "records").read("one")["commit"] == "mended"


def test_a_record_names_the_commit_that_a_run_began_at(tmp_path, monkeypatch):
    monkeypatch.setenv("LINFORMERS_COMMIT", "first")
    assert run([job(tmp_path, "one")], tmp_path) == 0
    (tmp_path / "records" / "one.json").unlink()
    monkeypatch.setenv("LINFORMERS_COMMIT", "second")
    assert run([job(tmp_path, "one")], tmp_path) == 0
    assert Store(tmp_path / "records").read("one")["commit"] == "first"


def test_other_code_runs_everything_again(tmp_path, monkeypatch):
    assert run([job(tmp_path, "one")], tmp_path) == 0
    monkeypatch.setattr(jobs, "CODE_VERSION", jobs.CODE_VERSION + 1)
    assert Store(tmp_path / "records").find(job(tmp_path, "one")) is None


def test_what_comes_after_waits(tmp_path):
    slow = f"import time, pathlib; time.sleep(0.5); pathlib.Path({str(tmp_path / 'first')!r}).write_text('1')"
    first = job(tmp_path, "first", slow)
    then = f"import pathlib; n = pathlib.Path({str(tmp_path / 'first')!r}).read_text(); "
    then += f"pathlib.Path({str(tmp_path / 'then')!r}).write_text(n + n)"
    second = job(tmp_path, "then", then, after=first)
    assert run([first, second], tmp_path, at_once=4) == 0
    assert Store(tmp_path / "records").find(second)["result"] == {"number": 11}


def test_what_measures_time_runs_alone(tmp_path):
    path = str(tmp_path / "times.txt")

    def timed(name, alone):
        script = f"import time, pathlib; a = time.time(); time.sleep(0.5); open({path!r}, 'a').write("
        script += f"f'{name} {{a}} {{time.time()}}\\n'); pathlib.Path({str(tmp_path / name)!r}).write_text('1')"
        return dataclasses.replace(job(tmp_path, name, script), alone=alone)

    assert run([timed("a", False), timed("b", True), timed("c", False), timed("d", False)], tmp_path, at_once=3) == 0
    lines = (line.split() for line in Path(path).read_text().splitlines())
    spans = {name: (float(begin), float(end)) for name, begin, end in lines}
    begin, end = spans.pop("b")
    assert all(other_end <= begin or other_begin >= end for other_begin, other_end in spans.values())
    assert spans["c"][0] < spans["d"][1]


def test_what_was_left_behind_and_is_gone_is_made_again(tmp_path):
    first = job(tmp_path, "first")
    assert run([first], tmp_path) == 0
    record = Store(tmp_path / "records").read("first")
    (tmp_path / "first").unlink()
    assert [own.name for own in jobs.missing([first], Store(tmp_path / "records"))] == []
    second = job(tmp_path, "then", after=first)
    assert [own.name for own in jobs.missing([first, second], Store(tmp_path / "records"))] == ["first", "then"]
    assert run([first, second], tmp_path) == 0
    assert (tmp_path / "first").exists()
    assert Store(tmp_path / "records").read("first") == record  # what others have cited
    assert Store(tmp_path / "records").read("first-repeated")["key"] == record["key"]


def test_a_failure_is_told_and_the_others_go_on(tmp_path, capsys):
    bad = job(tmp_path, "bad", "raise SystemExit('the disk is full')")
    others = [job(tmp_path, "good"), job(tmp_path, "waits", after=bad)]
    console = Console(width=200)
    code = jobs.run([bad, *others], Store(tmp_path / "records"), tmp_path / "logs", console)
    assert code == 1
    said = capsys.readouterr().out
    assert "bad failed: the disk is full" in said
    assert "waits is missing" in said
    assert Store(tmp_path / "records").find(others[0]) is not None


def test_what_builds_on_a_failure_is_not_run(tmp_path):
    """Not even where something is left of another recipe, which would be recorded under the name of this one."""
    (tmp_path / "first").write_text("1")
    first = job(tmp_path, "first", "raise SystemExit('holds a run of another recipe')", seed=2)
    second = job(tmp_path, "then", after=first)
    assert run([first, second], tmp_path) == 1
    store = Store(tmp_path / "records")
    assert store.read("then") is None
    assert [own.name for own in jobs.missing([second], store)] == ["first", "then"]


def test_an_error_leaves_nothing_running(tmp_path):
    told = tmp_path / "told"
    script = f"import pathlib, signal, sys, time; p = pathlib.Path({str(told)!r})\n"
    script += "signal.signal(signal.SIGTERM, lambda *_: (p.write_text('1'), sys.exit(143)))\n"
    script += f"pathlib.Path({str(tmp_path / 'ready')!r}).write_text('1'); time.sleep(60)"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'ready')!r}).exists(): time.sleep(0.01)"
    with pytest.raises(FileNotFoundError):  # the second leaves no number behind
        run([job(tmp_path, "slow", script), job(tmp_path, "empty", wait)], tmp_path, at_once=2)
    assert told.exists()


def test_jobs_run_side_by_side(tmp_path):
    wait = "import time, pathlib; p = pathlib.Path({0!r}); p.write_text('1')\n"
    wait += "while not pathlib.Path({1!r}).exists(): time.sleep(0.01)"
    names = [str(tmp_path / name) for name in ("a", "b")]
    pair = [job(tmp_path, "a", wait.format(*names)), job(tmp_path, "b", wait.format(*reversed(names)))]
    assert run(pair, tmp_path, at_once=2) == 0


def test_time_runs_out(tmp_path):
    forever = "import time, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(60)"
    began = time.monotonic()
    assert run([job(tmp_path, "slow", forever)], tmp_path, deadline=time.monotonic() + 1) == 1
    assert time.monotonic() - began < 20
    assert Store(tmp_path / "records").read("slow") is None


def test_a_signal_reaches_what_runs(tmp_path):
    told = tmp_path / "told"
    script = f"import pathlib, signal, sys, time; p = pathlib.Path({str(told)!r})\n"
    script += "signal.signal(signal.SIGTERM, lambda *_: (p.write_text('1'), sys.exit(143)))\n"
    script += f"pathlib.Path({str(tmp_path / 'ready')!r}).write_text('1'); time.sleep(60)"

    def interrupt():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run([job(tmp_path, "slow", script)], tmp_path) == 128 + signal.SIGINT
    thread.join()
    assert told.exists()


def test_a_record_does_not_say_where_the_data_are(tmp_path):
    arguments = ["finetune", "imdb", "--data", "/mnt/x", "--text", "/mnt/x/wiki", "/mnt/xy"]
    one = Job("one", arguments, tmp_path, {}, dict, (1, int))
    assert Store(tmp_path, Path("/mnt/x")).command(one) == "linformers finetune imdb --data DIR --text DIR/wiki /mnt/xy"
    assert Store(tmp_path).command(one).startswith("linformers finetune imdb --data /mnt/x ")


def test_a_record_says_where_it_comes_from(tmp_path):
    assert run([job(tmp_path, "one")], tmp_path) == 0
    record = json.loads((tmp_path / "records" / "one.json").read_text())
    assert {"key", "command", "commit", "device", "torch", "decides", "result"} <= record.keys()
