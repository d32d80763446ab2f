"""Steps on several TPU slices: what runs between them, as the compiler and the estimate say."""

import json

import pytest
from mlp_step import RECIPE

import shardwise as sw
from shardwise._hlo import collective_parts, collectives, parse_hlo, rendezvous

KERNELS = 2 * 1024 * 4096


@pytest.fixture(scope="module")
def two():
    layout = sw.layout(RECIPE.model, sw.mesh("data=2,fsdp=4", on="2xv5e:2x2"), "fsdp")
    return layout, sw.compile(RECIPE, layout, show=False)


def test_gradients_are_reduced_between_slices(two):
    layout, compiled = two
    assert compiled.fits and compiled.chips == "2xv5e:2x2"
    assert parse_hlo(compiled.hlo).partitions == 4  # a program for one slice
    assert set(compiled.by_axis) == {"data", "fsdp"}
    (kind,) = compiled.by_axis["data"]
    # In bfloat16, and of each device its fourth: around a ring of two it is sent once.
    sent = compiled.by_axis["data"][kind][1]
    assert kind == "all-reduce" and sent == pytest.approx(2 * KERNELS / 4, rel=0.01)
    largest = max(
        (c for c in compiled.collectives if c.axes == ("data",)), key=lambda c: c.sent_bytes
    )
    assert largest.hosts == 2 and largest.crosses
    assert "across 2 slices" in str(compiled) and "inside slices" in str(compiled)
    assert largest.devices == 2 and largest.source.place.startswith("tests/support/mlp_step.py")


def test_time_between_slices_is_that_of_the_network(two):
    layout, compiled = two
    links = {row.axes: row.link for row in compiled.time.communication}
    assert links == {("data",): "dcn", ("fsdp",): "ici"}
    (row,) = [row for row in compiled.time.communication if row.link == "dcn"]
    # 3.125 GB/s of each chip, by the datasheet.
    assert 2 * KERNELS / 4 / 3.125e9 < row.seconds < 1.5 * 2 * KERNELS / 4 / 3.125e9
    assert 0 < row.exposed <= row.seconds
    events = [e for e in compiled.timeline().events if e["stream"] == "dcn"]
    assert sum(e["bytes"] for e in events) == pytest.approx(2 * KERNELS / 4, rel=0.01)
    estimated = sw.estimate(RECIPE, layout)
    assert estimated.by_axis.keys() == compiled.by_axis.keys()
    assert estimated.seconds == pytest.approx(compiled.time.seconds, rel=0.35)


def test_weights_split_over_slices_are_gathered_between_them():
    layout = sw.layout(RECIPE.model, sw.mesh("fsdp=8", on="2xv5e:2x2"), "fsdp")
    compiled = sw.compile(RECIPE, layout, show=False)
    links = {row.link: row.axes for row in compiled.time.communication}
    assert links == {"dcn": ("fsdp",), "ici": ("fsdp",)}
    saved = json.loads(json.dumps(compiled.to_dict()))
    assert {row["link"] for row in saved["time"]["communication"]} == {"dcn", "ici"}


@pytest.mark.parametrize(
    ("target", "kind", "pairs"),
    [
        ('"{1,2,3,4}x{0:3}"', "ALL_GATHER", [[0, 4, 8, 12]]),
        ('"{1:2}x{0:3}"', "ALL_REDUCE", [[0, 4]]),
        ("{{100000,300000},{100001,300001},{200000,400000}}", "ALL_TO_ALL", [[0, 8], [4, 12]]),
        ("{{100000->300000},{300000->100000},{100001->300001}}", "", [[0, 8], [8, 0]]),
    ],
)
def test_targets_between_slices_are_read(target, kind, pairs):
    """As both compilers write them for four slices of four devices, `replica=2,data=2,fsdp=4`."""
    said = f',_xla_megascale_transfer_type="{kind}"' if kind else ""
    module = parse_hlo(
        "HloModule m, num_partitions=4\n\nENTRY %main {\n"
        "  %x = f32[256]{0} parameter(0)\n  %t = token[] after-all()\n"
        "  ROOT %s = (f32[256]{0}, u32[], token[]) send(%x, %t), channel_id=2, is_host_transfer=true, "
        f'frontend_attributes={{_xla_host_transfer_rendezvous="psum.7_0",_xla_megascale_target={target}{said}}}\n'
        "}\n"
    )
    mesh = {"replica": 2, "data": 2, "fsdp": 4}
    send = module.by_name["main"]["s"]
    size, groups, axes = collective_parts(module, "main", send, mesh)
    assert groups == pairs and rendezvous(send) == "psum.7_0"
    wanted = {4: ("replica", "data"), 2: ("replica",)}[len(pairs[0])]
    assert axes == (("data",) if pairs == [[0, 4]] else wanted)
    assert size == 4 * 256 * (4 if kind == "ALL_GATHER" else 1)
    (row,) = collectives(module, mesh, ())
    assert row.kind == (kind.lower().replace("_", "-") or "collective-permute")
