"""The style of figures: a model looks the same everywhere, and like no other model of the same figure."""

import pytest

from linformers import plots


def looks(*names):
    """Color, marker, style and width of the line of each name."""
    _, (axes,) = plots.new_figure(1, 3, 3)
    plots.draw(axes, dict.fromkeys(names, ((1, 2), (2, 1))))
    return [(own.get_color(), own.get_marker(), own.get_linestyle(), own.get_linewidth()) for own in axes.get_lines()]


@pytest.mark.parametrize(
    "names",
    [
        ("k=128 w=32", "Linformer k=128 w=32", "Linformer, k = 128, local window of 32", "k=128 w=32, compiled"),
        ("twin", "Transformer", "Transformer twin", "Transformer, fused", "Transformer twin, n=512"),
    ],
)
def test_a_model_looks_the_same_by_all_of_its_names(names):
    assert len({looks("another", name)[1][:2] for name in names}) == 1


@pytest.mark.parametrize(
    "names", [["twin", "k=128", "k=128 w=32", "k=256", "dropout", "mean"], [f"model {i}" for i in range(20)]]
)
def test_no_two_models_of_a_figure_look_the_same(names):
    assert len(set(looks(*names))) == len(names)


def test_a_baseline_is_wide_and_a_variant_is_dashed():
    ours, twin, plain = looks("k=256", "twin", "twin, plain start")
    assert twin[3] > ours[3] == plain[3]
    assert twin[0] == plain[0] != ours[0]
    assert (ours[2], twin[2], plain[2]) == ("-", "-", "--")


def test_small_differences_look_small():
    _, (axes,) = plots.new_figure(1, 3, 3)
    plots.against_length(axes, {"a": [(512, 10.0), (1024, 11.0)]})
    assert axes.get_ylim() == (5, 22)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "1024"]


def test_curves_without_points(tmp_path):
    plots.efficiency({}, {}, tmp_path / "empty.png", "n")
    plots.training({"run": []}, tmp_path / "curve.png")
    assert len(list(tmp_path.iterdir())) == 2
