"""The modes that every property must hold in, and small models in each of them."""

from linformers import LinformerConfig

SHARINGS = ("none", "headwise", "key-value", "layerwise")
PROJECTIONS = ("linear", "mean", "max", "conv", "identity")

# All sharing × projection modes, E from a Gaussian, and projected lengths that differ by head and layer.
UNIFORM = [{"projection": p, "sharing": s} for p in PROJECTIONS for s in SHARINGS]
GAUSSIAN = [{"projection": "linear", "sharing": s, "projection_init": "gaussian"} for s in SHARINGS]
NON_UNIFORM = [
    {"projection": "linear", "sharing": "layerwise", "projected_length": [[4, 2, 4, 1], [2, 2, 2, 2]]},
    {"projection": "linear", "sharing": "headwise", "projected_length": [[4, 2, 4, 1], [2, 2, 2, 2]]},
    {
        "projection": "linear",
        "sharing": "key-value",
        "projected_length": [[4, 2, 4, 1], [2, 2, 2, 2]],
        "projection_init": "gaussian",
    },
    # 6 does not divide 4, so heads cannot share projected tokens, only the 12 columns of E.
    {"projection": "linear", "sharing": "layerwise", "projected_length": [[4, 6, 6, 4], [12, 12, 12, 12]]},
    {"projection": "linear", "sharing": "none", "projected_length": [[4, 5, 4, 1], [2, 3, 2, 7]]},
    {"projection": "mean", "projected_length": [[4, 3, 4, 1], [6, 6, 6, 6]]},
    {"projection": "max", "projected_length": [4, 3]},
    {"projection": "conv", "sharing": "none", "projected_length": [[4, 3, 4, 1], [6, 6, 6, 6]]},
    {"projection": "conv", "sharing": "key-value", "projected_length": [4, 3]},
]
ALL = UNIFORM + GAUSSIAN + NON_UNIFORM


def name(mode: dict) -> str:
    return "-".join(str(value).replace(" ", "") for value in mode.values())


def config(**mode) -> LinformerConfig:
    """Two layers, four heads, n = 12, k = 4 and no dropout, unless `mode` says otherwise."""
    fields = {
        "vocab_size": 31,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 12,
        "projected_length": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return LinformerConfig(**{**fields, **mode})
