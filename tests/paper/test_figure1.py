"""Figure 1: what is measured, and what is kept."""

import json
import shutil
from pathlib import Path

import numpy as np

from paper import figure1

from ..analysis.conftest import folder, text  # noqa: F401


def test_missing_rows_are_measured_and_recorded_rows_are_not(folder, text, tmp_path, monkeypatch):  # noqa: F811
    data, results = tmp_path / "data", tmp_path / "results"
    (data / "models").mkdir(parents=True)
    shutil.copytree(folder("bert"), data / "models" / "minilm")
    shutil.copy(text, data / "text.jsonl")
    monkeypatch.setattr(figure1, "TEXTS", {"own": "text.jsonl"})
    monkeypatch.setattr(figure1, "ROWS", {f"{own}-own": (own, "own") for own in ("minilm", "twin-pretrained")})
    monkeypatch.setattr(figure1, "SMALL", {"length": 24, "sentences": 3, "at": 6})
    arguments = ["--data", str(data), "--results", str(results), "--runs", str(tmp_path / "runs"), "--small"]
    figure1.main(arguments)
    path = results / "figure1" / "figure1.json"
    (own,) = json.loads(path.read_text()).values()
    assert (own["n"], own["at"], own["sentences"]) == (24, 6, 3)
    assert str(tmp_path) not in path.read_text()  # records name no folder of this machine
    page = path.with_suffix(".md").read_text()
    assert f"| minilm-own | 3 | {np.mean(own['cumulative_at']):.3f} |" in page
    assert "twin-pretrained-own" in page  # missing
    assert path.with_suffix(".png").stat().st_size > 1000
    monkeypatch.setattr("linformers.analysis.spectrum.run", None)
    figure1.main(arguments)  # measures nothing


def test_the_records_agree_with_themselves():
    path = Path(__file__).parents[2] / "results" / "figure1" / "figure1.json"
    for record in json.loads(path.read_text()).values():
        at = np.array(record["cumulative"])[:, :, record["at"] - 1]
        np.testing.assert_allclose(at, record["cumulative_at"], atol=5.1e-5)
