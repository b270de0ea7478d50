"""The decoder-only Transformer."""

import math
from functools import partial

import pytest
import torch

from lightning_gradcomp.app.models import gpt_mini, gpt_small
from lightning_gradcomp.app.models.gpt import GPT, Rope
from lightning_gradcomp.app.muon import blocks

small = partial(GPT, vocabulary=50, context=12, layers=2, width=16, heads=2)


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_later_token_does_not_change_earlier_logits(positions, tied):
    torch.manual_seed(0)
    model, tokens = small(positions=positions, tied=tied), torch.randint(50, (3, 12))
    before = model(tokens)
    assert before.shape == (3, 12, 50)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    after = model(changed)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.isclose(before[:, 7:], after[:, 7:]).all(-1).any()
    assert torch.allclose(model(tokens[:, :5]), before[:, :5], atol=1e-6)
    before.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_the_order_of_tokens_matters(positions):
    torch.manual_seed(0)
    model, tokens = small(positions=positions, tied=False), torch.randint(50, (1, 12))
    swapped = tokens[:, [1, 0, *range(2, 12)]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-6)


def test_rotated_products_depend_on_the_distance_alone():
    rope, (q, k) = Rope(20, 8), torch.randn(2, 8)
    products = rope(q.expand(20, 8)) @ rope(k.expand(20, 8)).T
    for distance in (-3, 0, 5):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert torch.allclose(rope(q.expand(20, 8)).norm(dim=1), q.norm().expand(20))


@pytest.mark.parametrize(
    ("make", "options", "parameters"),
    [
        (gpt_small, {"vocabulary": 50_257, "context": 1024}, 124_439_808),  # GPT-2's
        (gpt_small, {"vocabulary": 256, "context": 1024}, 86_039_040),
        (gpt_mini, {"vocabulary": 256, "context": 64}, 236_928),
    ],
)
def test_sizes(make, options, parameters):
    with torch.device("meta"):
        model = make(**options)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert len(list(blocks(model))) == len(model.blocks)


def test_weights_are_initialised_as_in_gpt_2():
    torch.manual_seed(0)
    block = GPT(vocabulary=50, context=12, layers=8, width=128, heads=2, positions="learned", tied=False).blocks[3]
    for layer in (block.attention.qkv, block.mlp.into):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05) and not layer.bias.any()
    for layer in (block.attention.out, block.mlp.out):
        assert layer.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05) and not layer.bias.any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layers": 0}, r"^model\.layers: got 0, allowed: a whole number from 1"),
        ({"heads": 3}, r"^model\.heads: got 3, allowed: a divisor of model\.width=16$"),
        ({"heads": 16, "positions": "rope"}, r"^model\.heads: got 16, allowed: .*, with an even share each"),
        ({"positions": "none"}, r"^model\.positions: got 'none', allowed: learned, rope"),
    ],
)
def test_options_out_of_range_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        small(**{"positions": "learned", "tied": False, **options})
