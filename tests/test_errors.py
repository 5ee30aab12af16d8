"""How a script ends."""

import pytest

from linformers.errors import UserError, run_cli


def fail(error):
    raise error


def test_a_mistake_of_the_user_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        run_cli(lambda: fail(UserError("steps=0 must be positive")))
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: steps=0 must be positive\n"


@pytest.mark.parametrize("error", [ValueError, OSError, KeyError])
def test_a_bug_keeps_its_traceback(error):
    with pytest.raises(error, match="a bug"):
        run_cli(lambda: fail(error("a bug")))


def test_an_interrupt_needs_no_traceback():
    with pytest.raises(SystemExit) as ended:
        run_cli(lambda: fail(KeyboardInterrupt()))
    assert ended.value.code == 130
