"""Figure 1: what is measured, and what is kept."""

import json
import shutil

import numpy as np
from paper.experiments import Workspace

from paper import figure1, report


def test_missing_rows_are_measured_and_recorded_rows_are_not(folder, text, tmp_path, monkeypatch):
    data, results = tmp_path / "data", tmp_path / "results"
    (data / "models").mkdir(parents=True)
    shutil.copytree(folder("bert"), data / "models" / "minilm")
    shutil.copy(text, data / "text.jsonl")
    monkeypatch.setattr(figure1, "TEXTS", {"own": "text.jsonl"})
    monkeypatch.setattr(figure1, "ROWS", {f"{own}-own": (own, "own") for own in ("minilm", "twin-pretrained")})
    monkeypatch.setattr(figure1, "SMALL", {"length": 24, "sentences": 3, "at": 6})
    arguments = ["--data", str(data), "--results", str(results), "--runs", str(tmp_path / "runs"), "--small"]
    report.main("figure1", arguments)
    path = results / "figure1" / "figure1.json"
    (own,) = json.loads(path.read_text()).values()
    assert (own["n"], own["at"], own["sentences"]) == (24, 6, 3)
    assert str(tmp_path) not in path.read_text()  # records name no folder of this machine
    record = figure1.collect(Workspace(results=results))
    assert record["rows"]["minilm-own"]["mean"] == np.mean(own["cumulative_at"])
    assert record["missing_rows"] == ["twin-pretrained-own"]
    assert path.with_suffix(".png").stat().st_size > 1000
    monkeypatch.setattr("linformers.analysis.spectrum.run", None)
    report.main("figure1", arguments)  # measures nothing
