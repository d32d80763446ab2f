"""The time of a step on the report's page, in a real browser: what `compiled.time` says."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from test_report import picture, rows, unnamed

import shardwise as sw
from shardwise._base import show_seconds
from shardwise._chips.chips import parse_chips
from shardwise._hlo.program import parse_hlo
from shardwise._report.timeline import short_op, timeline_data
from shardwise._time import Machine, Timeline, time_of

WIDTH, LAYERS = 512, 8


class Tower(nnx.Module):
    """Two blocks, and a loop over stacked layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.stacked = nnx.Param(jnp.zeros((LAYERS, WIDTH, WIDTH)))

    def __call__(self, x):
        for block in self.blocks:
            x = jax.nn.relu(block(x))
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, self.stacked[...])[0]


RECIPE = sw.Recipe(
    model=Tower,
    loss=lambda model, x: model(x).mean(),
    optimizer=optax.adamw(1e-3),
    batch=jax.ShapeDtypeStruct((4096, WIDTH), "float32"),
)


def lay(rules, on="h100:1x2"):
    return sw.layout(Tower, sw.mesh("data=2", on=on), rules)


@pytest.fixture(scope="module")
def compiled():
    return sw.compile(RECIPE, lay({"blocks.*.kernel": P("data"), "stacked": P(None, "data")}))


def timeline_of(page):
    """Returns the events of the page's data, as those of a timeline."""
    found = json.loads(page.locator("#data").text_content())["sides"][0]["time"]["timeline"]
    return list(unpacked(found))


def unpacked(found):
    texts = found["texts"]
    for stream, slices in found["streams"]:
        for kind, start, seconds, times, exposed, *block in slices:
            name, op, module, line, axes, bound, backward, bytes_, flops = found["kinds"][kind]
            yield {
                "stream": stream,
                "start": start * 1e-9,
                "seconds": seconds * 1e-9,
                "exposed": exposed * 1e-9,
                "times": times,
                **{
                    key: texts[value]
                    for key, value in {
                        "name": name,
                        "op": op,
                        "module": module,
                        "line": line,
                        "axes": axes,
                        "bound": bound,
                    }.items()
                },
                "backward": bool(backward),
                "bytes": bytes_,
                "flops": flops,
                "block": block,
            }


def point(page, event):
    """Returns where the middle of an event is drawn."""
    canvas = page.locator(".lanes canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    start, end = view(page)
    names = re.findall(r"(\w+): [\d,]+ slices?,", canvas.get_attribute("aria-label"))
    middle = event["start"] + event["seconds"] / 2
    x = box["x"] + (middle - start) / (end - start) * box["width"]
    # As LANE in timeline.js: the axis, and for each stream a label, a bar and a gap. Browsers
    # report whole pixels.
    return round(x), box["y"] + 20 + names.index(event["stream"]) * (17 + 28 + 8) + 17 + 14


def view(page):
    canvas = page.locator(".lanes canvas")
    return [float(canvas.get_attribute(f"data-{name}")) for name in ("from", "to")]


def longest(compiled, stream):
    events = [e for e in compiled.timeline().events if e["stream"] == stream and e.get("line")]
    events = [e for e in events if e["flops"] or stream != "compute"]
    return max(events, key=lambda event: event["seconds"])


# --- the numbers ----------------------------------------------------------------------------------


def test_the_verdict_of_the_time_is_on_the_first_screen(compiled, open_page):
    with open_page(compiled.report()) as page:
        speed = page.locator("#card-speed")
        assert show_seconds(compiled.time.seconds) in speed.inner_text()
        assert f"bound by {compiled.time.bound}" in speed.inner_text()
        assert speed.bounding_box()["y"] < 300
        assert page.inner_text("#time .lead") == compiled.time.verdict
        assert len(compiled.report().html) < 400 * 1024
        assert unnamed(page) == []
        picture(page, "time")


def test_the_parts_add_up_to_the_step(compiled, open_page):
    time = compiled.time
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    with open_page(compiled.report()) as page:
        pieces = page.locator(".parts .piece").evaluate_all(
            "all => all.map(one => one.getBoundingClientRect().width)"
        )
        whole = page.locator(".parts").bounding_box()["width"]
        assert sum(pieces) == pytest.approx(whole, abs=2)
        wanted = [whole * seconds / time.seconds for seconds in time.parts.values()]
        np.testing.assert_allclose(pieces, wanted, atol=1.5)
        *parts, step = rows(page, "[aria-label='Parts of a step']")
        assert {row[0].strip(): row[1] for row in parts} == {
            name: show_seconds(seconds) for name, seconds in time.parts.items()
        }
        assert step[:2] == ["step", show_seconds(time.seconds)]
        assert {row[0].strip(): row[3] for row in parts if row[3]} == {
            name: show_seconds(time.gains[name]) for name in time.gains if name in time.parts
        }
        axes = rows(page, "[aria-label='Communication by axis']")
        assert [row[:5] for row in axes] == [
            [
                ", ".join(row.axes),
                row.link,
                *map(show_seconds, (row.seconds, row.exposed, row.overlapped)),
            ]
            for row in time.communication
        ]


def test_modules_of_repeated_layers_are_one_row_and_lines_are_the_user_s(compiled, open_page):
    with open_page(compiled.report()) as page:
        modules = {row[0]: row[1] for row in rows(page, "[aria-label='Time by module']")}
        both = [share for share in compiled.time.modules if share.name.startswith("blocks.")]
        assert len(both) == 2
        assert modules["blocks.# ×2"] == show_seconds(sum(share.seconds for share in both))
        lines = rows(page, "[aria-label='Time by line']")
        assert [row[:2] for row in lines] == [
            [share.name, show_seconds(share.seconds)] for share in compiled.time.lines[:12]
        ]
        assert any("test_report_time.py:" in row[0] for row in lines)


# --- the timeline ---------------------------------------------------------------------------------


def test_the_slices_are_those_of_the_timeline(compiled, open_page):
    with open_page(compiled.report()) as page:
        found = sorted(timeline_of(page), key=lambda e: (e["stream"], e["start"]))
    wanted = sorted(compiled.timeline().events, key=lambda e: (e["stream"], e["start"]))
    assert len(found) == len(wanted) > 20
    assert any("more iterations" in event["name"] for event in wanted)
    for one, event in zip(found, wanted, strict=True):
        for key, value in event.items():
            if isinstance(value, float):
                assert one[key] == pytest.approx(value, abs=1e-9), key
            else:
                assert one[key] == (short_op(value) if key == "op" else value), key


def test_a_slice_shows_its_line_when_it_is_pointed_at_and_chosen(compiled, open_page):
    with open_page(compiled.report()) as page:
        event = longest(compiled, "compute")
        page.mouse.move(*point(page, event))
        tip = page.inner_text(".tip")
        for text in (event["op"], event["line"], f"bound by {event['bound']}"):
            assert text in tip
        assert show_seconds(event["seconds"]) in tip and "FLOP" in tip
        page.mouse.click(*point(page, event))
        box = page.inner_text("#slice")
        for text in (event["line"], event["name"], event["bound"], "of the bfloat16 peak"):
            assert text in box
        page.click("text=Highlight its line")
        assert f"Highlighted: {event['line']}" in page.inner_text("#time")
        picture(page, "timeline")

        link = longest(compiled, "nvlink")
        page.mouse.move(*point(page, link))
        assert "communication over data" in page.inner_text(".tip")
        page.mouse.move(5, 5)
        assert not page.is_visible(".tip")

        # From a slice to the collectives, and to the leaves of its module.
        page.mouse.click(*point(page, link))
        page.click("text=All collectives by line")
        assert page.get_attribute("#traffic-by-line", "aria-selected") == "true"
        inside = [
            e for e in compiled.timeline().events if e.get("module", "").startswith("blocks.")
        ]
        event = max(inside, key=lambda event: (event["stream"] == "compute", event["seconds"]))
        page.mouse.click(*point(page, event))
        page.click("text=Show its leaves")
        assert page.inner_text(".map .crumbs b") == "blocks.{0..1}"
        assert page.evaluate("document.activeElement.id") == "model-title"


def test_the_wheel_zooms_around_the_pointer_and_dragging_pans(compiled, open_page):
    with open_page(compiled.report()) as page:
        x, y = point(page, longest(compiled, "compute"))
        box = page.locator(".lanes canvas").bounding_box()
        share = (x - box["x"]) / box["width"]

        def pointed():
            start, end = view(page)
            return start + share * (end - start)

        whole, before = view(page), pointed()
        page.mouse.move(x, y)
        page.mouse.wheel(0, -300)  # scrolls the page: the timeline is not focused
        page.wait_for_timeout(200)
        assert view(page) == whole
        x, y = point(page, longest(compiled, "compute"))
        page.mouse.click(x, y)
        for _ in range(3):
            page.mouse.wheel(0, -200)
        page.wait_for_timeout(200)
        assert view(page)[1] - view(page)[0] < whole[1] / 2
        assert pointed() == pytest.approx(before, rel=1e-6)

        start, end = view(page)
        page.mouse.down()
        page.mouse.move(x - 100, y, steps=4)
        page.mouse.up()
        moved = 100 / box["width"] * (end - start)
        assert view(page) == pytest.approx([start + moved, end + moved], rel=1e-6)
        page.click("text=Whole step")
        assert view(page) == whole


def test_the_timeline_from_the_keyboard(compiled, open_page):
    events = sorted(compiled.timeline().events, key=lambda event: event["start"])
    compute = [event for event in events if event["stream"] == "compute"]
    with open_page(compiled.report()) as page:
        whole = view(page)
        page.focus(".lanes canvas")
        page.keyboard.press("ArrowRight")
        assert compute[0]["name"] in page.inner_text("#slice")
        page.keyboard.press("ArrowRight")
        assert compute[1]["name"] in page.inner_text("#slice")
        page.keyboard.press("Enter")
        start, end = view(page)
        assert start <= compute[1]["start"] and end - start < (whole[1] - whole[0]) / 2
        page.keyboard.press("End")
        assert view(page)[1] == pytest.approx(whole[1], rel=0.01)
        for _ in compiled.timeline().streams[1:]:
            page.keyboard.press("ArrowDown")
        assert "on nvlink" in page.inner_text("#slice")
        page.keyboard.press("0")
        page.keyboard.press("+")
        assert view(page)[1] - view(page)[0] == pytest.approx((whole[1] - whole[0]) / 2)
        page.keyboard.press("Escape")
        assert "Choose a slice" in page.inner_text("#slice")


def test_operations_that_the_compiler_made_one_have_a_short_name():
    assert short_op("dot_general") == "dot_general"
    assert short_op("(jvp(up)/add:jvp(down)/add:mul)") == "jvp(up)/add and 2 more"


def test_many_short_slices_become_blocks():
    def event(i, seconds, bound="memory"):
        return {
            "name": f"kernel.{i}",
            "op": "add",
            "module": "",
            "line": f"train.py:{i % 7}",
            "axes": "",
            "backward": False,
            "bytes": 10,
            "flops": 1,
            "bound": bound,
            "stream": "compute",
            "start": i * 1e-3,
            "seconds": seconds,
            "times": 1,
            "exposed": 0.0,
        }

    # A long one after every 99 short ones.
    events = [event(i, 1e-3 if i % 100 == 99 else 1e-4 * (1 + i % 2)) for i in range(5000)]
    timeline = Timeline(events, 5.0, "")
    assert len(list(unpacked(timeline_data(timeline, most=5000)))) == 5000
    found = list(unpacked(timeline_data(timeline, most=200)))
    blocks = [one for one in found if one["block"]]
    assert len(found) == 100 and len(blocks) == 50
    assert sum(one["block"][0] for one in blocks) + 50 == 5000
    busy = sum(one["block"][1] * 1e-9 if one["block"] else one["seconds"] for one in found)
    assert busy == pytest.approx(sum(one["seconds"] for one in events))
    assert all(
        a["start"] + a["seconds"] <= b["start"] + 2e-9
        for a, b in zip(found, found[1:], strict=False)
    )
    # As long as it takes, to one block for all.
    assert len(list(unpacked(timeline_data(timeline, most=1)))) == 1


# --- with and without -----------------------------------------------------------------------------


def test_without_a_time_there_is_nothing(open_page):
    compiled = sw.compile(RECIPE, lay("dp", on="cpu:2"))
    assert compiled.time is None
    with open_page(compiled.report()) as page:
        assert not page.is_visible("#time")
        assert page.locator(".lanes").count() == 0
        assert "modelled)," not in page.inner_text("#verdict")
        assert "Not known" in page.inner_text("#card-speed")
        assert "not for cpu" in page.inner_text("#card-speed")


def test_a_step_that_waits_for_the_host_says_so(compiled, open_page):
    """A small model takes as long as the host takes to launch its step."""
    time = dataclasses.replace(compiled.time, seconds=compiled.timeline().seconds + 0.5)
    with open_page(dataclasses.replace(compiled, time=time).report()) as page:
        assert "then idle for 500 ms" in page.inner_text("#timed")
    with open_page(compiled.report()) as page:
        assert "then idle" not in page.inner_text("#timed")


def test_a_saved_compilation_has_its_time_but_no_timeline(compiled, open_page, tmp_path):
    compiled.save(tmp_path / "saved.json")
    with open_page(sw.load_compiled(tmp_path / "saved.json").report()) as page:
        assert page.inner_text("#time .lead") == compiled.time.verdict
        assert "no program to draw a timeline of" in page.inner_text("#time")
        assert page.locator(".lanes").count() == 0
        assert rows(page, "[aria-label='Time by line']")


def test_two_times_are_compared(compiled, open_page):
    # The same program on other chips, which needs no second compilation.
    machine = Machine(parse_chips("h200:1x2"), compiled.mesh)
    time = time_of(parse_hlo(compiled.hlo), machine, compiled.paths, None)
    other = dataclasses.replace(compiled, chips="h200:1x2", machine=machine, time=time)
    assert time.seconds != compiled.time.seconds
    with open_page(compiled.report(against=other)) as page:
        told = page.inner_text("#compared-time")
        assert compiled.time.verdict in told and other.time.verdict in told
        widths = [bar.bounding_box()["width"] for bar in page.locator(".parts").all()]
        assert len(widths) == 2
        table = {row[0]: row[1:] for row in rows(page, "[aria-label='Time compared']")}
        assert table["step"][:2] == [show_seconds(x.time.seconds) for x in (compiled, other)]
        page.click('#sides button[data-side="1"]')
        label = page.locator(".lanes canvas").get_attribute("aria-label")
        assert f"one step of {show_seconds(other.timeline().seconds)}" in label
        picture(page, "times")
    with open_page(compiled.report(against=lay("dp"))) as page:
        assert "A alone: B is not compiled" in page.inner_text("#compare-time")
        page.click('#sides button[data-side="0"]')
        assert page.locator(".lanes").count() == 1
        page.click('#sides button[data-side="1"]')
        assert page.locator(".lanes").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_follows_the_theme(compiled, open_page, scheme):
    how = {"viewport": {"width": 390, "height": 800}, "color_scheme": scheme}
    with open_page(compiled.report(), **how) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.focus(".lanes canvas")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        picture(page, f"time-{scheme}-390")
        script = "() => document.querySelector('.lanes canvas').toDataURL()"
        before = page.evaluate(script)
        page.click("#theme")
        assert page.evaluate(script) != before
