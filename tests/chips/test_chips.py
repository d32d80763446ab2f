"""The table of chips: names, topologies, and numbers that agree with each other."""

import math

import pytest

from shardwise._chips import CHIPS
from shardwise._chips.chips import parse_chips, tpu_slices


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_every_slice_is_in_order_and_within_a_pod(name):
    slices = tpu_slices(name)
    assert len(set(slices)) == len(slices)
    for sizes in slices:
        target = parse_chips(f"{name}:{'x'.join(map(str, sizes))}")
        assert target.topology == sizes and math.prod(sizes) <= 9216
        assert list(sizes) == sorted(sizes) or sizes == (2, 2, 1)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_the_numbers_of_a_chip_agree(chip):
    """Devices can use almost what the chip has, and links are slower than memory."""
    assert 0.8 < chip.capacity_bytes * chip.devices_per_chip / chip.hbm_bytes < 1
    assert chip.network_bytes_per_second <= chip.link_bytes_per_second
    assert chip.link_bytes_per_second < chip.hbm_bytes_per_second < chip.bf16_flops_per_second
    assert chip.source and chip.kind


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_a_name_is_read_back(chip):
    sizes = (2, 8) if chip.platform == "gpu" else tpu_slices(chip.name)[0]
    text = f"{chip.name}:{'x'.join(map(str, sizes))}"
    chips = parse_chips(text)
    assert str(chips) == text and chips.topology == tuple(sizes) and chips.platform == chip.platform
    assert chips.device_count == math.prod(sizes) * chip.devices_per_chip


def test_several_slices():
    chips = parse_chips("2xtpu7x:4x4x4")
    assert (chips.slices, chips.topology, chips.device_count) == (2, (4, 4, 4), 256)
    assert str(chips) == "2xtpu7x:4x4x4" and str(chips.one_slice) == "tpu7x:4x4x4"
    assert parse_chips("1xv5e:2x2") == parse_chips("v5e:2x2")


@pytest.mark.parametrize(
    ("slices", "sizes", "found"),
    [
        (2, (2, 4), (2, 1)),
        (2, (8,), (2,)),
        (4, (2, 8, 4), (2, 2, 1)),
        (4, (8, 8), (4, 1)),
        (1, (4, 16), (1, 1)),
        (2, (1, 2, 4), (1, 2, 1)),
    ],
)
def test_the_outermost_axes_are_split_over_slices(slices, sizes, found):
    chips = parse_chips(f"{slices}xv5e:2x2")
    assert chips.slices_by_axis(sizes) == found
