"""Models compiled for training, part by part."""

from __future__ import annotations

from typing import Any

import torch

from ..encoder import LinformerPreTrainedModel
from ..heads import LinformerForMaskedLM


def compile_parts(model: LinformerPreTrainedModel, choice: str, *, any_length: bool = False) -> None:
    """Compile one layer for all layers, and what stands before and behind them: in half the time of the whole.

    Args:
        model: whose parts are compiled in place.
        choice: `"yes"`, `"no"`, or `"auto"`: on a GPU.
        any_length: whether inputs have many lengths; one graph then serves all of them.
    """
    if choice == "no" or (choice == "auto" and not torch.cuda.is_available()):
        return
    encoder = model.base_model
    # Layers that differ in a number, as in the shift of their windows, are one graph from the second one on; where
    # lengths are variable from the start, this would make every number of a layer variable, too.
    torch._dynamo.config.allow_unspec_int_on_nn_module = not any_length
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(encoder.layers))
    # Sums over rows and over columns in one kernel, where both are needed, cost more time than they save.
    options: dict[str, Any] = {"dynamic": any_length or None, "options": {"triton.mix_order_reduction": False}}
    for part in (encoder.embeddings, encoder.projections, *encoder.layers):
        part.compile(**options)
    if isinstance(model, LinformerForMaskedLM):
        model.head.compile(**options)
        model.loss_function = torch.compile(model.loss_function, **options)
