"""A sample of the attacks of `benchmarks/attack.py`; `-m long` runs all of them."""

import dataclasses
import json
import random
import re

import pytest
import typer
from benchmarks import attack

# What once failed, and no other test covers.
FINDINGS = (
    "index of weights that names ../secret.safetensors",
    "model.safetensors is a pipe",
    "weights of a checkpoint: a weight of another shape",
    "training.json: groups",
    "training.json: losses",
    "trainer_state.json: log_history",
    "tokenizer_config.json: nested",
    "tokenizer_config.json: mask_token",
    "tokenizer.json: decoder",
    "bomb.txt.gz",
    "labeled bomb.parquet",
    "pretrain {kit}/recipe.yaml out={case}/out seed=99999999999999999999",
)
SAMPLES = {"flips": 12, "truncations": 6, "missing": 6, "malicious": 12, "invocations": 12}


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attack") / "kit"
    with pytest.MonkeyPatch.context() as patch:  # the cases run in processes with blocks of the usual size
        patch.setattr("linformers.ops.local.SMALLEST_BLOCK", 64)
        attack.build(folder)
    return folder


def attempt(kit, *cases):
    return [(case, outcome) for case, outcome in attack.attempt(cases, kit, 2, lambda name: None)]


@pytest.mark.parametrize("part", SAMPLES)
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.long)], ids=["sample", "all"])
def test_nothing_is_silent_and_nothing_runs(part, everything, kit):
    cases = list(attack.PARTS[part](kit, attack.COUNTS.get(part, 0), 0))
    if not everything:
        quick = [case for case in cases if not re.search("bomb|gigabyte|pipe", case.name)]
        found_before = [case for case in cases if case.name in FINDINGS]
        cases = [*found_before, *random.Random(0).sample(quick, SAMPLES[part])]
    found = attempt(kit, *cases)
    assert len(found) == len(cases)
    assert [(case, own.verdict, own.said) for case, own in found if own.verdict not in attack.FINE] == []


FINE = attack.Case("flips", "nothing", "model", "predict", lambda target: None)


@pytest.mark.parametrize(
    ("changes", "limits", "verdict"),
    [
        ({}, {}, "harmless"),
        ({"refused": True}, {}, "silent"),
        ({"spoil": lambda target: (target / "README.md").write_text("# Mine")}, {}, "harmless"),
        ({"spoil": lambda target: (target.parent / attack.MARKER).touch()}, {}, "code ran"),
        ({"use": "evaluate --model {kit}/run/model --data {kit}/corpus --rows 8"}, {}, "silent"),
        ({"use": "bench --hidden 100"}, {}, "named"),
        ({"use": "--debug bench --hidden 100"}, {}, "traceback"),
        ({"part": "invocations", "use": "pretrain {kit}/recipe.yaml steps=4 out={case}/out"}, {}, "left files"),
        ({"use": "bench --hidden 100"}, {"MEMORY": -1}, "memory"),
        ({"use": "bench --hidden 100"}, {"SECONDS": 0}, "hang"),
    ],
)
def test_each_failure_is_found(changes, limits, verdict, kit, monkeypatch):
    for name, value in limits.items():
        monkeypatch.setattr(attack, name, value)
    case = dataclasses.replace(FINE, **changes)
    ((_, outcome),) = attempt(kit, case)
    assert outcome.verdict == verdict, outcome.said


def test_cases_are_the_same_for_the_same_seed(kit):
    def names(seed):
        return [(case.kind, case.use, case.name) for case in attack.flips(kit, 20, seed)]

    assert names(1) == names(1) != names(2)
    assert names(1)[:5] == [(case.kind, case.use, case.name) for case in attack.flips(kit, 5, 1)]


def test_record(tmp_path, monkeypatch):
    options = {"parts": ["invocations"], "count": 2, "seed": 0, "at_once": 2, "only": "", "out": tmp_path}
    attack.main(**options)
    record = json.loads((tmp_path / "attack.json").read_text())
    assert record["parts"][0] | {"seconds": 0, "mebibytes": 0} == {
        "part": "invocations",
        "cases": 2,
        "verdicts": {"named": 2},
        "seconds": 0,
        "mebibytes": 0,
    }
    assert {"command", "commit", "torch", "seed"} <= record.keys()
    works = attack.Case("invocations", "works", "", "--version", lambda target: None, refused=True)
    monkeypatch.setitem(attack.PARTS, "invocations", lambda kit, count, seed: [works])
    with pytest.raises(typer.Exit):
        attack.main(**options)
    (failure,) = json.loads((tmp_path / "attack.json").read_text())["failures"]
    assert failure["verdict"] == "silent"
