"""The look of a model: the same in all pictures, and that of no other in the same picture."""

import pytest

from linformers import plots
from linformers.reproduce import overview, quality


@pytest.mark.parametrize(
    "names",
    [
        (
            "k=128 w=32",
            "Linformer k=128 w=32",
            "Linformer, k = 128, local window of 32",
            "Linformer k=128 w=32, compiled",
        ),
        ("k=256", "Linformer k=256", "Linformer, k = 256", "k=256, plain start"),
        (
            "twin",
            "Transformer",
            "Transformer twin",
            "Transformer, fused",
            "Transformer twin, n=512",
            "twin, plain start",
        ),
    ],
)
def test_a_model_looks_the_same_by_all_of_its_names(names):
    looks = {plots._looks(["another", name])[plots._model(name)] for name in names}
    assert len(looks) == 1


@pytest.mark.parametrize("names", [quality.DRAWN, list(overview.ROWS), [f"model {i}" for i in range(20)]])
def test_no_two_models_of_a_picture_look_the_same(names):
    looks = plots._looks(names)
    assert len(set(looks.values())) == len(looks)


def test_the_transformer_is_wide_and_lies_below_what_covers_it():
    figure, axes = plots.plt.subplots()
    points = [(1, 2), (2, 1)]
    plots._draw(axes, {"k=256": points, "twin": points, "twin, plain start": points})
    ours, twin, plain = axes.get_lines()
    assert twin.get_linewidth() > ours.get_linewidth() == plain.get_linewidth()
    assert twin.get_zorder() < ours.get_zorder()
    assert twin.get_color() == plain.get_color() != ours.get_color()
    assert (twin.get_linestyle(), plain.get_linestyle()) == ("-", "--")
    plots.plt.close(figure)
