"""Flat buffers and named tensors hold the same numbers; chunks and shards cover a buffer."""

import pytest
import torch
from torch import nn

from lightning_gradcomp.compressors.layout import CHUNK, Layout, chunks

CPU = torch.device("cpu")


def conv_and_linear():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(7, 5))
    return Layout.of(model.named_parameters())


def test_parameters_are_end_to_end_in_the_models_order():
    layout = conv_and_linear()
    assert layout.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert layout.sizes == [108, 4, 35, 5]
    assert layout.bounds == [(0, 108), (108, 112), (112, 147), (147, 152)]
    assert layout.n == 152


def test_split_and_join_undo_each_other():
    layout = conv_and_linear()
    flat = torch.arange(152.0)
    parts = layout.split(flat)
    assert tuple(parts) == layout.names
    assert tuple(tuple(part.shape) for part in parts.values()) == layout.shapes
    assert torch.equal(layout.join(parts, CPU), flat)


def test_parts_are_copies_and_views_are_not():
    layout = conv_and_linear()
    flat = torch.zeros(152)
    layout.split(flat)["0.weight"].fill_(1)
    assert not flat.any()
    layout.views(flat)[1].fill_(1)
    assert flat.nonzero().squeeze(1).tolist() == [108, 109, 110, 111]


def test_missing_names_are_zero_and_others_are_left_out():
    layout = conv_and_linear()
    flat = layout.join({"2.bias": torch.ones(5), "elsewhere": torch.ones(9)}, CPU)
    assert torch.equal(flat, torch.cat([torch.zeros(147), torch.ones(5)]))


def test_joined_buffers_are_fp32():
    layout = Layout(("a",), ((2, 2),))
    assert layout.join({"a": torch.ones(2, 2, dtype=torch.bfloat16)}, CPU).dtype == torch.float32


def test_channels_last_parts_keep_their_order():
    layout = Layout(("a",), ((2, 3, 4, 4),))
    part = torch.arange(96.0).view(2, 3, 4, 4)
    assert torch.equal(layout.join({"a": part.to(memory_format=torch.channels_last)}, CPU), torch.arange(96.0))


def test_a_wrong_shape_is_refused_by_name_and_shape():
    with pytest.raises(ValueError, match=r"state of '2.weight': got shape \(7, 5\), allowed: \(5, 7\)"):
        conv_and_linear().join({"2.weight": torch.zeros(7, 5)}, CPU)


def test_scalars_and_no_parameters_have_layouts():
    assert Layout(("s",), ((),)).bounds == [(0, 1)]
    empty = Layout.of([])
    assert (empty.n, empty.bounds, empty.split(torch.zeros(0))) == (0, [], {})


@pytest.mark.parametrize("multiple", [1, 5, 512, 3 * CHUNK])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (7, CHUNK + 7), (3, 2 * CHUNK + 50)])
def test_chunks_cover_a_range(start, stop, multiple):
    parts = chunks(start, stop, CPU, multiple)
    assert [element for a, b in parts for element in (a, b)][1:-1:2] == [a for a, _ in parts[1:]]
    assert (not parts and start == stop) or (parts[0][0], parts[-1][1]) == (start, stop)
    assert all((b - a) % multiple == 0 for a, b in parts[:-1])
    assert all(0 < b - a <= max(CHUNK, multiple) for a, b in parts)
    assert chunks(start, stop, torch.device("cuda"), multiple) == [(start, stop)] * (start < stop)


def test_chunks_end_where_the_rule_changes():
    layout = Layout(tuple("abcdef"), ((5,), (3,), (CHUNK,), (0,), (2, 2), (7,)))
    ends = [(rule, place.start, place.stop) for rule, place in layout.chunks_by("xxyyyx", CPU)]
    assert ends == [("x", 0, 8), ("y", 8, CHUNK + 8), ("y", CHUNK + 8, CHUNK + 12), ("x", CHUNK + 12, CHUNK + 19)]
    assert len(list(layout.chunks_by("xxyyyx", torch.device("cuda")))) == 3
    assert not list(Layout((), ()).chunks_by("", CPU))


@pytest.mark.parametrize("place", [slice(0, 152), slice(107, 109), slice(108, 112), slice(3, 5), slice(111, 150)])
def test_a_chunk_of_several_tensors_is_cut_as_the_flat_buffer(place):
    layout, flat = conv_and_linear(), torch.arange(152.0)
    parts = layout.cut(layout.views(flat), place)
    assert torch.equal(torch.cat(parts), flat[place])
    assert all(len(part) for part in parts)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 8, 30])
def test_shards_are_whole_rows_in_order(number):
    """Each cut is at the row that is nearest to an equal part; what has no row left is empty."""
    layout = Layout(("a", "b"), ((10, 4, 3, 3), (12, 25)))
    shards, flat = layout.slices(number), torch.arange(float(layout.n))
    rows = sorted({*range(0, 360, 36), *range(360, 661, 25), 660})
    assert torch.equal(torch.cat([shard.of(flat) for shard in shards]), flat)
    for part, shard in enumerate(shards):
        assert shard.start in rows
        place = 660 * part // number
        assert abs(shard.start - place) == min(abs(row - place) for row in rows)
        assert len(shard.of(flat)) == shard.layout.n
        for name, shape in zip(shard.layout.names, shard.layout.shapes, strict=True):
            assert shape[1:] == {"a": (4, 3, 3), "b": (25,)}[name]
            assert shape[0] > 0
