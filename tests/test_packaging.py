"""The files around the package agree with each other."""

import itertools
import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import linformers

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
COMMANDS = [line.strip() for step in STEPS for line in step.get("run", "").splitlines()]


def test_one_version():
    assert "version" not in PROJECT
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == linformers.__version__


def test_commands_of_ci_and_of_the_readme_exist():
    texts = ["\n".join(COMMANDS), (ROOT / ".ci" / "run").read_text(), (ROOT / "README.md").read_text()]
    *ci, readme = (set(re.findall(r"^make (\w+)", text, re.MULTILINE)) for text in texts)
    assert set.union(*ci) == {"lint", "test", "common"}
    assert readme
    assert readme.union(*ci) <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_ci_tests_the_lowest_versions():
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", requirement).groups() for requirement in PROJECT["dependencies"])
    lowest, newest = WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert f"torch=={bounds['torch']}.* " in lowest["requirements"]
    assert f"transformers=={bounds['transformers']}.*" in lowest["requirements"]
    assert newest["requirements"] == "--upgrade"
    assert PROJECT["requires-python"] == f">={lowest['python']}"


def test_every_dependency_is_pinned_and_pre_commit_runs_the_same_ruff():
    requirements = itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    names = {re.match(r"[\w-]+", requirement).group() for requirement in requirements} - {"linformers"}
    pinned = dict(re.findall(r"^([\w-]+)==(.*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    seen, queue = set(), [*names]
    while queue:
        seen.add(name := queue.pop())
        for requirement in map(Requirement, requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                queue += {canonicalize_name(requirement.name)} - seen
    # What torch needs beyond that depends on its build.
    assert {name for name in seen if not name.startswith(("nvidia-", "cuda-"))} <= pinned.keys()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]
    assert hooks["rev"] == f"v{pinned['ruff']}"
