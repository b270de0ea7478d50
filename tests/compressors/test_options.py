"""Options of every registered compressor: what is out of range is refused, with what it got and what it allows."""

from dataclasses import fields

import pytest

from lightning_gradcomp import registry

NAN, INF = float("nan"), float("inf")
WRONG = {
    "DGC": {"sparsity": [1.0, 1, 2.0], "clip_norm": [0.0]},
    "GradientDropping": {"sparsity": [1.0, 1, 2.0], "scope": ["layer", "", "Global"]},
    "OneBit": {"groups": ["row", "", "Block"], "threshold": ["median", ""], "group_size": [0, 2.5]},
    "TwoBit": {"threshold": [0, 0.0, -0.5, INF, NAN, "0.5", "Auto", None, True]},
    "TernGrad": {"clip_sigma": [INF], "seed": [2**64]},
    "PowerSGD": {"rank": [0, 1.5], "min_compression": [0.99, 0, INF]},
}
"""Values at the edge of what is allowed, beside those that no option of any compressor allows."""


def wrong_options():
    """(class, option, value) for every option that is a number or a word."""
    for entry in registry.entries():
        for field in fields(entry.cls):
            default = getattr(entry.cls(), field.name)
            values = list(WRONG.get(entry.cls.__name__, {}).get(field.name, []))
            if isinstance(default, bool):
                continue
            if isinstance(default, int | float):
                values += [-1]
            if isinstance(default, float):
                values += [NAN, -0.1]
            if isinstance(default, str):
                values += ["nonsense"]
            if field.name == "min_elements":
                values += [0]
            if field.name == "exclude":
                values += ["head.*"]
            for value in values:
                yield pytest.param(entry.cls, field.name, value, id=f"{entry.cls.__name__}.{field.name}={value!r}")


@pytest.mark.parametrize(("cls", "option", "value"), wrong_options())
def test_a_value_out_of_range_is_refused_with_what_it_got_and_what_it_allows(cls, option, value):
    with pytest.raises(ValueError) as caught:
        cls(**{option: value})
    what, allowed = str(caught.value).split(", allowed: ")
    assert what == f"{cls.__name__}.{option}: got {value!r}"
    assert allowed


@pytest.mark.parametrize("entry", registry.entries(), ids=lambda entry: entry.name)
def test_options_are_named_and_a_misspelt_one_is_refused(entry):
    with pytest.raises(TypeError):
        entry.cls(0.5)
    with pytest.raises(TypeError):
        entry.cls(min_element=5)
    with pytest.raises(AttributeError):
        entry.cls().min_element = 5
