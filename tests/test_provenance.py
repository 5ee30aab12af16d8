"""The commit that results are reported with."""

import subprocess

from linformers import provenance


def test_the_commit_is_that_of_this_code(monkeypatch, tmp_path):
    """Not that of a project that it is installed in; without git there is none."""
    monkeypatch.delenv("LINFORMERS_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "lib" / "provenance.py"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "provenance.py").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    assert provenance.commit() is None
    subprocess.run([*git, "add", "lib"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    assert len(provenance.commit()) == 40
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit() is None
    monkeypatch.setenv("LINFORMERS_COMMIT", "0123abc")  # a copy of the code is given its commit
    assert provenance.commit() == "0123abc"
    assert "`linformers bench` at commit 0123abc" in provenance.sentence("linformers bench")
