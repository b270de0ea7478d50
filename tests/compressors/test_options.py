"""Options of every registered compressor: what is out of range is refused, with what it got and what it allows."""

from dataclasses import fields

import pytest

from lightning_gradcomp import registry
from lightning_gradcomp.compressors import DGC

NAN, INF = float("nan"), float("inf")
WRONG = {
    "DGC": {"sparsity": [1.0, 1, 2.0], "clip_norm": [0.0, -1.0, NAN, INF]},
    "GradientDropping": {"sparsity": [1.0, 1, 2.0], "scope": ["layer", "", "Global"]},
    "OneBit": {"groups": ["row", "", "Block"], "threshold": ["median", ""], "group_size": [0]},
    "TwoBit": {"threshold": [0, 0.0, -0.5, INF, NAN, "0.5", "Auto", None, True]},
    "TernGrad": {"clip_sigma": [INF], "seed": [2**32]},
    "PowerSGD": {"rank": [0], "min_compression": [0.99, 0, INF, NAN]},
}
"""Values just out of range, beside those that no option of any compressor allows."""


def wrong_options():
    """(class, option, value) for every option that is a number or a word."""
    for entry in registry.entries():
        for field in fields(entry.cls):
            default = getattr(entry.cls(), field.name)
            values = list(WRONG.get(entry.cls.__name__, {}).get(field.name, []))
            if isinstance(default, bool):
                continue
            if isinstance(default, int | float):
                values += [-1, True, "1", None]
            if isinstance(default, int):
                values += [2.5]
            if isinstance(default, float):
                values += [NAN, -0.1]
            if isinstance(default, str):
                values += ["nonsense"]
            if field.name == "min_elements":
                values += [0]
            if field.name == "exclude":
                values += ["head.*", 3]
            for value in values:
                yield pytest.param(entry.cls, field.name, value, id=f"{entry.cls.__name__}.{field.name}={value!r}")


@pytest.mark.parametrize(("cls", "option", "value"), wrong_options())
def test_a_value_out_of_range_is_refused(cls, option, value):
    with pytest.raises(ValueError) as caught:
        cls(**{option: value})
    what, allowed = str(caught.value).split(", allowed: ")
    assert what == f"{cls.__name__}.{option}: got {value!r}"
    assert allowed


@pytest.mark.parametrize("entry", registry.entries(), ids=lambda entry: entry.name)
def test_options_are_keywords(entry):
    with pytest.raises(TypeError):
        entry.cls(0.5)
    with pytest.raises(TypeError):
        entry.cls(min_element=5)


def test_the_message_says_what_was_got_and_what_is_allowed():
    with pytest.raises(ValueError) as caught:
        DGC(sparsity=1.0)
    assert str(caught.value) == "DGC.sparsity: got 1.0, allowed: 0 <= sparsity < 1"
