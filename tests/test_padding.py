"""Padding never changes an output or a gradient, whatever it contains and wherever it is."""

import functools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linformers import LinformerAttention, LinformerModel

from . import modes

LAYERS, MAX_LENGTH, EXAMPLES = 2, 12, 25
every_mode = pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)


def seed_with(number):
    """`torch.manual_seed` without its cost of milliseconds on machines without a GPU."""
    torch.default_generator.manual_seed(number)


def same_model_of(mode, attn_implementation, std=0.3, dtype=torch.float32):
    """One model for all examples of a test: building takes longer than running."""
    return _kept(json.dumps(mode), attn_implementation, std, dtype)


@functools.lru_cache(4)
def _kept(mode, attn_implementation, std, dtype):
    seed_with(0)
    config = modes.config(**json.loads(mode), attn_implementation=attn_implementation)
    return modes.randomized(LinformerModel(config), std).to(dtype)


def masks():
    """Masks of 1 to 3 rows in any arrangement, including rows that are all padding."""
    return st.integers(1, MAX_LENGTH).flatmap(
        lambda length: st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=3)
    )


@every_mode
@settings(max_examples=EXAMPLES)
@given(mask=masks(), seed=st.integers(0, 2**20), poison=st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30]))
def test_embeddings_in_padding_do_not_matter_and_poison_no_gradient(mode, mask, seed, poison):
    model = same_model_of(mode, "eager" if seed % 2 else "sdpa")
    seed_with(seed)
    modes.assert_poison_in_padding_does_not_matter(model, torch.tensor(mask), poison)


@every_mode
@pytest.mark.parametrize(
    ("dtype", "std", "tolerance"),
    [
        # Large weights amplify a leak, and float64 shows it; float32 with weights of the size of initial ones.
        (torch.float64, 0.3, 1e-13 * LAYERS),
        (torch.float32, 0.02, 1e-6 * LAYERS),
    ],
    ids=["float64", "float32"],
)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_amount_and_place_of_padding_do_not_matter(mode, dtype, std, tolerance, data, seed):
    """Each sequence alone, without padding, against all of them in one batch, spread out at random."""
    norm_first, attn_implementation = data.draw(st.booleans()), data.draw(st.sampled_from(["eager", "sdpa"]))
    model = same_model_of({**mode, "norm_first": norm_first}, attn_implementation, std, dtype)
    lengths = data.draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=3))
    width = data.draw(st.integers(max(lengths), MAX_LENGTH))
    places = [sorted(data.draw(st.permutations(range(width)))[:length]) for length in lengths]
    seed_with(seed)
    ids, mask = torch.randint(31, (len(lengths), width)), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, place in enumerate(places):
        mask[row, place] = 1
    with torch.no_grad():
        batch = model(ids, mask).last_hidden_state
        captured = model(ids, mask, output_hidden_states=True)
        for row, place in enumerate(places):
            alone = model(ids[row : row + 1, place], output_hidden_states=True)
            pairs = [(result, alone.last_hidden_state) for result in (batch, captured.last_hidden_state)]
            for result, expected in (*pairs, *zip(captured.hidden_states, alone.hidden_states, strict=True)):
                torch.testing.assert_close(result[row, place], expected[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", [m for m in modes.ALL if not m.keys() & modes.MODEL_ONLY], ids=modes.name)
@settings(max_examples=EXAMPLES)
@given(mask=masks(), seed=st.integers(0, 2**20), poison=st.sampled_from([torch.nan, torch.inf]))
def test_layer_alone(mode, mask, seed, poison):
    """The same for `LinformerAttention` and for the mask of its context."""
    mode = dict(mode)
    if "projected_length" in mode:  # one per head; a shared kernel has one size
        shared_kernel = mode["projection"] == "conv" and mode.get("sharing") != "none"
        mode = {**mode, "projected_length": 4 if shared_kernel else [4, 2, 4, 1]}
    if isinstance(mode.get("local_window"), list):
        mode = {**mode, "local_window": max(mode["local_window"])}
    if mode.pop("shifted_windows", False):
        mode["window_shift"] = 1
    seed_with(0)
    layer = LinformerAttention(16, 4, MAX_LENGTH, **{"projected_length": 4, **mode})
    seed_with(seed)
    mask = torch.tensor(mask)
    x, context = torch.randn(*mask.shape, 16), torch.randn(*mask.shape, 16)
    poisoned, poisoned_context = (torch.where(mask[..., None], z, poison) for z in (x, context))
    assert torch.equal(layer(x, mask)[mask], layer(poisoned, mask)[mask])
    layer(poisoned, mask).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    if layer.local_window:
        return
    with_context = layer(x, mask, context=context, context_mask=mask)
    assert torch.equal(with_context[mask], layer(poisoned, mask, context=poisoned_context, context_mask=mask)[mask])
    for row in range(len(mask)):
        if mask[row].any():
            alone = layer(x[row : row + 1], context=context[row : row + 1, mask[row]])
            torch.testing.assert_close(with_context[row, mask[row]], alone[0, mask[row]], rtol=0, atol=1e-6)
    layer(poisoned, mask, context=poisoned_context, context_mask=mask).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@every_mode
def test_row_without_tokens_gives_zeros_before_the_output_layer(mode):
    model = modes.random_model(LinformerModel, **mode)
    mask = torch.tensor([[0] * 7, [1] * 7])
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        attention, seen = model.layers[0].attention, []
        hook = attention.output.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        model(torch.randint(31, (2, 7)), mask)
        hook.remove()
        assert seen[0][0].abs().max() == 0
        assert seen[0][1].abs().max() > 0


def test_masks_of_all_types_mean_the_same():
    model = modes.random_model()
    ids, mask = torch.randint(31, (2, 6)), torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]])
    results = [model(ids, mask.to(dtype)).logits for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64)]
    assert all(torch.equal(results[0], result) for result in results[1:])


@every_mode
def test_attentions_ignore_padding(mode):
    """They sum to 1, are 0 in slots of padding, and elsewhere equal those of the tokens alone.

    They come from eager attention, whatever the implementation.
    """
    model = modes.random_model(LinformerModel, **mode, attn_implementation="sdpa")
    ids, mask = torch.randint(31, (3, 8)), torch.tensor([[0, 0, 1, 1, 1, 0, 1, 0], [1] * 8, [0] * 8]).bool()
    batch = model(ids, mask, output_attentions=True).attentions
    alone = model(ids[:1, mask[0]], output_attentions=True).attentions
    assert len(batch) == len(alone) == LAYERS
    for probs, expected, window in zip(batch, alone, model.config.local_windows, strict=True):
        torch.testing.assert_close(probs.transpose(1, 2)[mask].sum(-1), torch.ones(12, 4))
        assert probs[2].abs().max() == 0
        near = 2 * window + 1 if window else 0
        slots, live = probs.shape[-1] - near, expected.shape[-1] - near
        columns = mask[0].nonzero()[:, 0] if mode["projection"] == "identity" else torch.arange(live)
        padded = torch.zeros(4, 4, slots + near)
        padded[..., [*columns, *range(slots, slots + near)]] = expected[0]
        torch.testing.assert_close(probs[0][:, mask[0]], padded, rtol=0, atol=2e-6)
