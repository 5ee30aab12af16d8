"""Progress outside a terminal."""

import io
import signal

import pytest
from rich.console import Console

from linformers.progress import SILENCE, progress, steps, stoppable


def test_without_a_terminal_each_step_is_a_line():
    console = Console(file=io.StringIO(), width=100)
    with steps(console, 2) as begin:
        begin("[a]")
        begin("b")
        assert console.file.getvalue() == "0/2 [a]\n1/2 b\n"  # b has begun and is not done
    assert "2/2" in console.file.getvalue().splitlines()[-1]


def test_without_a_terminal_long_work_reports_now_and_then():
    console, now = Console(file=io.StringIO(), width=100), [0.0]
    with progress(console) as bars:
        bars.get_time = lambda: now[0]
        task = bars.add_task("rows", total=10)
        for _ in range(5):
            bars.advance(task)
            now[0] += SILENCE / 2
        assert console.file.getvalue().split("\n") == ["1/10 rows", "3/10 rows", "5/10 rows", ""]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_ends_the_work_with_a_sentence(number, error):
    console, before = Console(file=io.StringIO()), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(error), stoppable(console, lambda: "half is done"):
        signal.raise_signal(number)
    assert console.file.getvalue() == "half is done\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_line_says_what_a_task_says_about_itself():
    console, now = Console(file=io.StringIO(), width=200), [0.0]
    with progress(console) as bars:
        bars.get_time = lambda: now[0]
        task = bars.add_task("", total=100, amount="", detail="")
        for done in (10, 20, 30):
            bars.update(task, completed=done, amount=f"{done} documents", detail=f"{done} tokens a second")
            now[0] += SILENCE
        lines = console.file.getvalue().splitlines()
    assert lines[0] == "10 documents, 10 tokens a second"
    assert lines[2] == "30 documents, 30 tokens a second, 0:03:30 left"


def test_a_bar_shows_the_time_left_of_steps_that_take_minutes():
    console, now = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None), [0.0]
    with progress(console, get_time=lambda: now[0]) as bars:
        task = bars.add_task("training", total=4, detail="loss 0.5")
        for _ in range(3):
            now[0] += 120
            bars.advance(task)
        bars.refresh()
        assert "3/4 loss 0.5 0:02:00 left" in console.file.getvalue()
        now[0] += 120
        bars.advance(task)
    assert "4/4 loss 0.5 0:08:00" in console.file.getvalue()
