"""Memory over the step and the hardware on the report's page, in a real browser."""

import re

import absent_steps
import jax.numpy as jnp
import pytest
from flax import nnx
from test_report import picture, rows, shown, unnamed

import shardwise as sw


@pytest.fixture(scope="module")
def compiled():
    return absent_steps.compiled("scanned", "gpu")[0]


def name_of(owner):
    return " ".join(filter(None, (owner.kind, owner.module, owner.place)))


def listed(page):
    """Returns the owners of the list beside the drawing, with their bytes."""
    script = "all => all.map(one => [one.querySelector('.live-name').innerText, one.querySelector('.right').innerText])"
    found = page.locator(".live-owner").evaluate_all(script)
    return [(" ".join(name.split()), size) for name, size in found]


def wanted(live, moment):
    found = live.at(moment).items()
    return sorted(
        (name_of(o).replace("other", "other, small") if o.kind == "other" else name_of(o), shown(n))
        for o, n in found
    )


# --- memory over the step -------------------------------------------------------------------------


def test_the_list_is_what_is_alive_at_the_peak_and_at_each_moment(compiled, open_page):
    live = compiled.live
    with open_page(compiled.report()) as page:
        assert unnamed(page) == []
        assert page.inner_text(".live-when") == f"Peak: {shown(live.peak_bytes)} alive"
        assert sorted(listed(page)) == wanted(live, live.peak)
        assert f"{shown(live.compiled_bytes)} that the compiler reports" in page.inner_text(
            "#memory"
        )
        slider = page.locator(".live-plot")
        assert slider.get_attribute("aria-valuemax") == str(len(live.places))
        assert slider.get_attribute("aria-valuenow") == str(live.peak + 1)
        assert "the peak" in slider.get_attribute("aria-valuetext")
        slider.focus()
        for key, moment in (
            ("ArrowRight", live.peak + 1),
            ("Home", 0),
            ("ArrowLeft", 0),
            ("End", len(live.places) - 1),
            ("p", live.peak),
        ):
            page.keyboard.press(key)
            assert slider.get_attribute("aria-valuenow") == str(moment + 1)
            total = shown(live.bytes[moment])
            assert page.inner_text(".live-when").endswith(f"{total} alive")
            assert sorted(listed(page)) == wanted(live, moment)
        # Of a loop, one iteration is drawn.
        assert f"in a loop of {live.loops[1].times}" in page.inner_text(".live-runs")
        picture(page, "live")


def test_areas_are_as_large_as_what_is_alive(compiled, open_page):
    live = compiled.live
    with open_page(compiled.report()) as page:
        areas = page.locator(".live-area")
        assert areas.count() == len(live.owners)
        # At the peak, areas stand on one another without a gap, in the ratio of their bytes.
        script = """areas => areas.map(area => {
            const points = area.getAttribute('d').slice(1, -1).split('L').map(p => p.split(' ').map(Number));
            return [Number(area.dataset.owner), points]; })"""
        heights = {}
        for owner, points in areas.evaluate_all(script):
            over, under = points[: len(points) // 2], points[len(points) // 2 :][::-1]
            heights[owner] = under[2 * live.peak][1] - over[2 * live.peak][1]
        whole = sum(heights.values())
        for number, owner in enumerate(live.owners):
            share = owner.bytes[live.peak] / live.peak_bytes
            assert heights[number] / whole == pytest.approx(share, abs=0.01)


def test_pointing_shows_a_moment_and_an_owner_is_followed(compiled, open_page):
    live = compiled.live
    with open_page(compiled.report()) as page:
        page.locator(".live-plot").scroll_into_view_if_needed()
        box = page.locator(".live-plot svg").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 16, box["y"] + 150)
        assert page.locator(".live-plot").get_attribute("aria-valuenow") == str(len(live.places))
        page.mouse.move(2, 2)  # what was chosen comes back
        assert page.inner_text(".live-when").startswith("Peak: ")
        first = page.locator(".live-owner").first
        first.click()
        assert first.get_attribute("aria-pressed") == "true"
        assert page.locator(".live-area.lit").count() == 1
        first.click()
        assert page.locator(".live-area.lit").count() == 0
        # The list is one stop of the Tab key; arrows go through it.
        stops = page.locator(".live-owner[tabindex='0']")
        assert stops.count() == 1
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert page.locator(".live-owner").nth(1).get_attribute("aria-pressed") == "true"
        assert stops.count() == 1


def test_the_same_as_a_table(compiled, open_page):
    live = compiled.live
    with open_page(compiled.report()) as page:
        page.click(".live-table summary")
        found = rows(page, "[aria-label='Live memory by owner']")
        assert [row[3:] for row in found] == [
            [shown(o.bytes[live.peak]), shown(max(o.bytes)), o.label] for o in live.owners
        ]


def test_a_layout_keeps_the_bar(open_page):
    layout = sw.layout(absent_steps.Images, sw.mesh("data=8", on="h100:2x4"), "dp")
    with open_page(layout.report()) as page:
        assert page.locator(".live").count() == 0
        assert page.locator("#memory .piece").count() == 1


def test_a_saved_compilation_has_its_memory(compiled, open_page, tmp_path):
    compiled.save(tmp_path / "a.json")
    with open_page(sw.load_compiled(tmp_path / "a.json").report()) as page:
        assert page.inner_text(".live-when") == f"Peak: {shown(compiled.live.peak_bytes)} alive"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_fit_a_phone(compiled, open_page, scheme):
    how = {"viewport": {"width": 390, "height": 844}, "color_scheme": scheme}
    with open_page(compiled.report(), **how) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for place in ("#memory", "#mesh"):
            wide = page.locator(f"{place} .live, {place} .buffers, {place} .hardware").evaluate_all(
                "all => all.filter(e => e.getBoundingClientRect().right > 391).map(e => e.className)"
            )
            assert wide == []
        # Nothing of the table of temporaries is cut.
        cut = page.locator(".buffers td").evaluate_all(
            "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length"
        )
        assert cut == 0
        picture(page, f"pictures-{scheme}")


# --- the hardware ---------------------------------------------------------------------------------


def axes_shown(page):
    return [" ".join(text.split()) for text in page.locator(".axis-key").all_inner_texts()]


def test_hosts_are_boxes_and_traffic_says_how_far_it_goes(compiled, open_page):
    with open_page(compiled.report()) as page:
        assert "2 hosts each with 4 GPUs on NVLink; the network between them" in page.inner_text(
            "#mesh"
        )
        boxes = page.locator(".wiring-box")
        assert boxes.all_inner_texts() == ["host 0 · NVLink", "host 1 · NVLink"]
        places = boxes.evaluate_all("all => all.map(e => e.getBoundingClientRect().toJSON())")
        cells = page.locator("#mesh .device").evaluate_all(
            "all => all.map(e => [Number(e.dataset.device), e.getBoundingClientRect().toJSON()])"
        )
        for device, cell in cells:  # devices are numbered host by host
            box = places[device // 4]
            assert box["left"] < cell["left"] and cell["right"] < box["right"]
            assert box["top"] < cell["top"] and cell["bottom"] < box["bottom"]
        sent = {axes: sum(b for _, b in kinds.values()) for axes, kinds in compiled.by_axis.items()}
        data, model = axes_shown(page)[:2]
        assert data.startswith(f"data=2 {shown(sent['data'])} ") and "spans 2 hosts" in data
        assert model.startswith(f"model=4 {shown(sent['model'])} ") and "inside a host" in model
        # The links of `data` leave the boxes; those of `model` do not.
        assert page.locator(".wire.trunk[data-axis='0']").count() == 1
        assert page.locator(".wire.trunk[data-axis='1']").count() == 0
        assert page.locator(".wire[data-axis='1']").count() == 1
        picture(page, "hosts")


def test_an_axis_lights_its_links_and_groups_a_device_its_mates(compiled, open_page):
    with open_page(compiled.report()) as page:
        key = page.locator(".axis-key").nth(1)
        key.click()
        assert key.get_attribute("aria-pressed") == "true"
        lit = page.locator(".wire.lit").evaluate_all("all => all.map(e => e.dataset.axis)")
        assert lit == ["1"] and page.locator(".wire.unlit[data-axis='0']").count() == 1
        fills = page.locator("#mesh .device:not([aria-selected=true])").evaluate_all(
            "all => all.map(e => [Number(e.dataset.device), getComputedStyle(e).backgroundColor])"
        )
        groups = {}
        for device, fill in fills:
            groups.setdefault(device // 4, set()).add(fill)
        assert [len(found) for found in groups.values()] == [1, 1] and groups[0] != groups[1]
        page.click('#mesh .device[data-device="6"]')
        mates = page.locator("#mesh .device.mate").evaluate_all(
            "all => all.map(e => e.dataset.device)"
        )
        assert mates == ["4", "5", "7"]
        talks = page.inner_text(".talks")
        assert "data with 1 device on 2 hosts: 2" in talks
        assert "model with 3 devices of its host: 4, 5, 7" in talks
        key.click()
        page.focus('#mesh .device[data-device="6"]')
        page.keyboard.press("ArrowLeft")
        assert page.inner_text("#device-title").startswith("data=1,model=1:")


def test_the_tables_of_collectives_say_which_cross_hosts(compiled, open_page):
    with open_page(compiled.report()) as page:
        found = {(row[0], row[1]): row[2] for row in rows(page, "#traffic")}
        for row in compiled.collectives:
            said = found[", ".join(row.axes), row.kind]
            assert said == ("crosses 2 hosts" if row.crosses else "inside a host")
        assert {row.crosses for row in compiled.collectives} == {True, False}


class One(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.zeros((1024, 512)))


def drawn(open_page, mesh, on):
    return open_page(sw.layout(One, sw.mesh(mesh, on=on), sw.replicate()).report())


def test_a_torus_has_its_neighbours_and_its_rings(open_page):
    with drawn(open_page, "data=4,fsdp=4,model=4", "v5p:4x4x4") as page:
        assert "A torus of 4 × 4 × 4 chips, wrapped around in every dim" in page.inner_text("#mesh")
        counts = page.locator(".wire").evaluate_all(
            "all => all.map(e => (e.getAttribute('d').match(/M/g) || []).length)"
        )
        # Each axis is a dim of the torus: 64 links; a ring, or one between planes, has two ends drawn.
        assert len(counts) == 3 and sorted(counts) == [48 + 2 * 16, 48 + 2 * 16, 2 * 64]
        picture(page, "torus")
    with drawn(open_page, "data=4,model=4", "v5e:4x4") as page:
        assert "A grid of 4 × 4 chips, without wrap-around" in page.inner_text("#mesh")
        counts = page.locator(".wire").evaluate_all(
            "all => all.map(e => (e.getAttribute('d').match(/M/g) || []).length)"
        )
        assert counts == [12, 12]


def test_slices_are_boxes_joined_by_the_network(open_page):
    with drawn(open_page, "slice=2,model=16", "2xv5e:4x4") as page:
        assert page.locator(".wiring-box").all_inner_texts() == ["slice 0", "slice 1"]
        assert axes_shown(page) == ["slice=2 spans 2 slices", "model=16 inside a slice"]
        assert page.locator(".wire.trunk[data-axis='0']").count() == 1


@pytest.mark.parametrize(
    ("mesh", "on", "cells"),
    [
        ("data=64,model=8", "h100:64x8", 512),
        ("data=32,model=16", "v5p:8x8x8", 512),
        ("data=2048,model=8", "h100:2048x8", 1024),
    ],
)
def test_many_devices_stay_readable_and_quick(open_page, mesh, on, cells):
    with drawn(open_page, mesh, on) as page:
        assert page.locator("#mesh .device").count() == cells
        sizes = page.locator("#mesh .device").evaluate_all("all => all.map(e => e.offsetWidth)")
        assert min(sizes) >= 12
        took = page.evaluate(
            "() => { const from = performance.now(); document.querySelector('.axis-key').click();"
            " return performance.now() - from; }"
        )
        assert took < 2000  # milliseconds, on a machine that does much else
        # Cells do not lie on one another.
        places = page.locator("#mesh .device").evaluate_all(
            "all => all.map(e => e.style.left + e.style.top)"
        )
        assert len(set(places)) == cells
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        last = page.locator("#mesh .device").last
        last.click()
        assert re.match(r"data=\d+,model=\d+: 1 leaf", page.inner_text("#device-title"))
