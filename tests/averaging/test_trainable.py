"""What can be trained, and that a frozen parameter may be of any kind."""

import pytest
import torch
from torch import nn

from lightning_gradcomp.averaging.trainable import check_trainable


def with_parameter(tensor, trains):
    model = nn.Linear(4, 2)
    model.other = nn.Parameter(tensor, requires_grad=trains)
    return model


FROZEN = {
    "complex": lambda: with_parameter(torch.randn(3, dtype=torch.complex64), False),
    "integers": lambda: with_parameter(torch.ones(3, dtype=torch.int64), False),
    "bool": lambda: with_parameter(torch.ones(3, dtype=torch.bool), False),
    "Embedding": lambda: nn.Embedding.from_pretrained(torch.randn(4, 2), sparse=True),
    "EmbeddingBag": lambda: nn.EmbeddingBag.from_pretrained(torch.randn(4, 2), sparse=True),
}
TRAINED = {
    "complex": (
        with_parameter(torch.randn(3, dtype=torch.complex64), True),
        "parameter '0.other': got torch.complex64",
    ),
    "Embedding": (nn.Embedding(4, 2, sparse=True), r"gradients of '0': got 'Embedding\(sparse=True\)'"),
    "EmbeddingBag": (nn.EmbeddingBag(4, 2, sparse=True), r"gradients of '0': got 'EmbeddingBag\(sparse=True\)'"),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_a_frozen_parameter_of_any_kind_passes(kind):
    check_trainable(nn.Sequential(FROZEN[kind](), nn.Embedding(4, 2)))


@pytest.mark.parametrize(("kind", "name"), [("complex", "0.other"), ("Embedding", "0.weight")])
def test_a_parameter_of_any_kind_passes_if_ddp_ignores_it(kind, name):
    model = nn.Sequential(TRAINED[kind][0], nn.Linear(2, 2))
    model._ddp_params_and_buffers_to_ignore = [name]
    check_trainable(model)


@pytest.mark.parametrize("kind", TRAINED)
def test_what_can_not_be_trained_is_refused(kind):
    module, message = TRAINED[kind]
    with pytest.raises(ValueError, match=message):
        check_trainable(nn.Sequential(module, nn.Linear(2, 2)))
