"""Muon and AdamW as one optimizer: the steps are torch's, and it behaves as a torch optimizer does."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_gradcomp.app.models import resnet18, swin_mini
from lightning_gradcomp.app.muon import MuonAdamW, hidden_matrices, with_rules
from tests.averaging.workers import HAS_MUON

pytestmark = pytest.mark.skipif(not HAS_MUON, reason="torch 2.8 lacks Muon")


class TinyGPT(nn.Module):
    """A Transformer with a block, positions that are a plain parameter, and a head."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(5, 8))
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)])
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, text):
        return self.head(self.blocks[0](self.tokens(text) + self.places))


def tiny_gpt():
    torch.manual_seed(0)
    return TinyGPT()


def backward(model, step):
    for parameter in model.parameters():
        parameter.grad = None
    text = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))
    model(text).logsumexp(-1).sum().backward()
    if step == 1:  # as of a parameter that is not used in a step
        model.blocks[0].linear1.weight.grad = model.tokens.weight.grad = None


def groups_of(model):
    one_dimensional = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return with_rules([{"params": others}, {"params": one_dimensional, "weight_decay": 0.0}], model)


def combined(model, **options):
    return MuonAdamW(groups_of(model), lr=0.01, **options)


def train(model, optimizer, steps):
    for step in steps:
        backward(model, step)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def assert_same(model, other):
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("fused", [None, True])
def test_a_step_is_one_of_muon_and_one_of_adamw_to_the_bit(fused):
    one, two = tiny_gpt(), tiny_gpt()
    optimizer = combined(one, betas=(0.8, 0.95), momentum=0.9, fused=fused)
    hidden = hidden_matrices(two)
    names = {parameter: name for name, parameter in two.named_parameters()}
    rest = [parameter for parameter in two.parameters() if parameter not in hidden]
    every = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [parameter for parameter in rest if parameter.dim() > 1]},
                {"params": [parameter for parameter in rest if parameter.dim() == 1], "weight_decay": 0.0},
            ],
            **{"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "fused": fused},
        ),
    ]
    for step in range(4):
        train(one, optimizer, [step])
        backward(two, step)
        for single in every:
            single.step()
            for group in single.param_groups:
                group["lr"] *= 0.9
        assert_same(one, two)
    states = {parameter: state for single in every for parameter, state in single.state.items()}
    assert len(states) == len(optimizer.state)
    for parameter, state in states.items():
        own = optimizer.state[one.get_parameter(names[parameter])]
        assert own.keys() == state.keys() and all(torch.equal(own[key], state[key]) for key in state)


def reloaded(optimizer, model, path):
    torch.save(optimizer.state_dict(), path)
    fresh = combined(model)
    fresh.load_state_dict(torch.load(path, weights_only=True))
    return model, fresh


@pytest.mark.parametrize(
    "copied",
    [
        reloaded,
        lambda optimizer, model, path: copy.deepcopy((model, optimizer)),
        lambda optimizer, model, path: pickle.loads(pickle.dumps((model, optimizer))),
    ],
    ids=["state_dict", "deepcopy", "pickle"],
)
def test_a_copy_continues_to_the_bit(copied, tmp_path):
    straight, stopped = tiny_gpt(), tiny_gpt()
    train(straight, combined(straight), range(5))
    optimizer = combined(stopped)
    train(stopped, optimizer, range(3))
    model, resumed = copied(optimizer, stopped, tmp_path / "state.pt")
    train(model, resumed, range(3, 5))
    assert_same(model, straight)
    own = nn.Parameter(torch.ones(2, 2))
    resumed.add_param_group({"params": own, "rule": "muon"})
    own.grad = torch.ones(2, 2)
    resumed.step()
    assert resumed.state[own].keys() == {"momentum_buffer"} and not torch.equal(own, torch.ones(2, 2))


def test_hooks_a_schedule_and_a_closure_work_as_with_any_optimizer():
    model, calls = tiny_gpt(), []
    optimizer = combined(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

    def closure():
        calls.append("closure")
        assert torch.is_grad_enabled()
        backward(model, 0)
        return 5

    assert optimizer.step(closure) == 5
    schedule.step()
    assert calls == ["before", "closure", "after"]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.001] * 3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = optimizer.param_groups[2]["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))


def test_a_group_without_a_rule_is_refused():
    with pytest.raises(ValueError, match=r"the rule of a parameter group of MuonAdamW.*None.*'muon' or 'adamw'"):
        MuonAdamW(tiny_gpt().parameters())
    with pytest.raises(ValueError, match="2D"):
        MuonAdamW([{"params": [torch.ones(3)], "rule": "muon"}])


def hidden_names(model):
    hidden = hidden_matrices(model)
    return [name for name, parameter in model.named_parameters() if parameter in hidden]


def test_muon_gets_the_matrices_of_blocks():
    names = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    assert hidden_names(TinyGPT()) == [f"blocks.0.{name}" for name in names]
    model = TinyGPT()
    model.head.weight = model.tokens.weight
    model.blocks[0].tokens = model.tokens
    assert hidden_names(model) == [f"blocks.0.{name}" for name in names]


def test_convolutions_position_biases_and_the_head_get_adamw():
    found = hidden_names(swin_mini(channels=1, classes=10, size=8))
    assert len(found) == 17
    assert {name.split(".", 3)[-1] for name in found} == {
        *("attn.qkv.weight", "attn.proj.weight", "mlp.0.weight", "mlp.3.weight", "weight")
    }
    with pytest.raises(ValueError, match=r"MuonAdamW.*ResNet.*blocks have no matrices"):
        with_rules([], resnet18(channels=1, classes=10, size=8))
