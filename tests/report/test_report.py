"""The report's page, in a real browser: what it shows is what JAX, the layout and the compiler say."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import browser as browsers
import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._mesh.spec import show_spec

# Kept after the run, to be looked at.
PICTURES = Path(__file__).parents[2] / ".screenshots"


class Block(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x)))


class Net(nnx.Module):
    """Arrays of none to four dims, repeated layers, a name that is no HTML, and a leaf left whole."""

    def __init__(self):
        self.blocks = nnx.List([Block() for _ in range(4)])
        self.conv = nnx.Conv(16, 32, (4, 4), use_bias=False, rngs=nnx.Rngs(0))
        self.cube = nnx.Param(jnp.zeros((8, 16, 32)))
        self.scale = nnx.Param(jnp.zeros(()))
        self.whole = nnx.Param(jnp.zeros((64, 64)))
        self.odd = nnx.Dict({"<b>&'</script>": nnx.Param(jnp.zeros((8,)))})

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale[...] @ self.whole[...]


RULES = {
    "**.up.kernel": P("data", "model"),
    "**.down.kernel": P(("model", "data")),
    "**.up.bias": P("model"),
    "conv.kernel": P("model", None, "data"),
    "cube": P("data", None, "model"),
    "odd.*": P("data"),
}
RECIPE = sw.Recipe(
    model=Net,
    loss=lambda model, x: model(x).mean(),
    optimizer=optax.adamw(1e-3),
    batch=jax.ShapeDtypeStruct((16, 64), "float32"),
)


def lay(mesh="data=2,model=4", rules=None, on="cpu:8"):
    return sw.layout(Net, sw.mesh(mesh, on=on), RULES if rules is None else rules)


@pytest.fixture(scope="module")
def compiled():
    return sw.compile(RECIPE, lay())


def picture(page, name):
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


def rows(page, within):
    """Returns a table's cells, as they are read."""
    script = "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    return page.locator(f"{within} tbody tr").evaluate_all(script)


def tree_paths(page):
    # High enough for all of the rows: those out of sight are not there.
    page.evaluate("() => { document.querySelector('.tree').style.maxHeight = 'none'; }")
    page.evaluate("() => { dispatchEvent(new Event('resize')); }")
    return page.locator(".tree .row").evaluate_all("rows => rows.map(row => row.dataset.path)")


def choose(page, path):
    page.fill("#search", path)
    page.click(f'.tree .row[data-path="{path}"]')


# --- the verdict, memory, findings ----------------------------------------------------------------


def test_the_verdict_comes_first_and_memory_is_what_was_compiled(compiled, open_page):
    memory = compiled.memory
    with open_page(compiled.report()) as page:
        assert compiled.verdict in page.inner_text("#verdict")
        first = page.evaluate("document.querySelector('#report').firstElementChild.id")
        assert first == "summary"
        pieces = page.locator("#memory .memory .piece").evaluate_all(
            "all => all.map(one => one.getBoundingClientRect().width)"
        )
        sizes = [memory.parameters, memory.optimizer, memory.batch, memory.temporaries]
        sizes.append(memory.peak - sum(sizes))
        shares = [width / sum(pieces) for width in pieces]
        wanted = [size / memory.peak for size in sizes if size]
        np.testing.assert_allclose(shares, wanted, atol=0.01)
        shown_text = {
            row[0].strip(): row[1:]
            for row in rows(page, "#memory [aria-label='Memory of one device']")
        }
        assert shown_text["temporaries"] == [
            shown(memory.temporaries),
            share(memory, "temporaries"),
            "compiled",
        ]
        assert shown_text["parameters"][2] == "exact" and shown_text["peak"][0] == shown(
            memory.peak
        )
        picture(page, "compiled")


def shown(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError(count)


def share(memory, part):
    ratio = getattr(memory, part) / memory.peak
    return f"{100 * ratio:.{1 if ratio < 0.1 else 0}f}%"


def test_a_capacity_is_a_line_and_what_is_over_it_is_told(open_page):
    class Large(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jnp.zeros((2**19, 2**16)))

    layout = sw.layout(Large, sw.mesh("data=8", on="h100:1x8"), sw.replicate())
    with open_page(layout.report()) as page:
        text = page.inner_text("#verdict")
        fit = page.inner_text("#card-fit")
        assert "Does not fit" in fit and "128.0 GiB of 79.2 GiB" in fit
        assert "48.8 GiB too much on each of 8 devices, before any temporaries" in fit
        assert (
            "does not fit: each of 8 devices holds 128.0 GiB of 128.0 GiB (exact): no leaf is split; h100 has 79.2 GiB, 48.8 GiB too much"
            in text
        )
        assert page.locator("#card-fit.bad .mark").inner_text().strip() == "✗"
        shown_parts = ("#memory .piece", "#memory .limit")
        bar, limit = (page.locator(x).bounding_box() for x in shown_parts)
        assert abs((limit["x"] - bar["x"]) / bar["width"] - 79.2 / 128) < 0.01
        assert "replicated" in page.inner_text(".legend")


def test_findings_have_their_help_and_lead_to_their_leaf(open_page):
    layout = lay(rules={"**.up.kernel": P("modle"), "cube": P(None, None, ("data", "model"))})
    findings = sw.check(layout)
    with open_page(layout.report()) as page:
        title = page.inner_text("#findings-title")
        assert title == "Findings: 4 errors" and not findings.warnings
        assert len(findings.errors) == 4
        text = page.inner_text("#findings")
        first = findings[0]
        assert first.message in text and f"help: {first.help}" in text and first.code in text
        assert "and 3 more like it, up to blocks.3.up.kernel" in text
        page.click("#findings .link >> nth=0")
        assert page.inner_text("#leaf-title") == first.path
        assert "cannot be split this way" in page.inner_text("#leaf")
        flagged = page.locator(".tree .row", has=page.locator(".severity.error"))
        assert flagged.evaluate_all("all => all.map(row => row.dataset.path)") == [
            f.path for f in findings if f.path.startswith("blocks.0.")
        ]
        assert page.locator("#card-fit.bad").count() == page.locator("#card-wrong.bad").count() == 1
        assert f"{len(findings.errors)} errors" in page.inner_text("#card-wrong")
        assert f"Fix {len(findings)} errors" in page.inner_text("#card-do")
        assert first.help in page.inner_text("#card-do")
        picture(page, "findings")


# --- the model ------------------------------------------------------------------------------------


def test_the_tree_folds_searches_and_sorts(open_page):
    layout = lay()
    with open_page(layout.report()) as page:
        assert page.locator(".tree .row", has_text="blocks.{0..3} ×4").count() == 1
        shown_text = page.inner_text("#model .left .status")
        assert (
            shown_text
            == f"{len(layout.leaves)} leaves, {shown(layout.bytes_per_device)} of {shown(layout.total_bytes)} on each device (exact)"
        )

        page.click("text=Open all")
        folded = len(tree_paths(page))
        names = page.locator(".tree .row .name").all_text_contents()
        assert sum("up" in name for name in names) == 1 and sum("×4" in name for name in names) == 5
        assert sum("conv.kernel" in name for name in names) == 1  # no row for a module of one leaf
        page.uncheck("#fold")
        page.click("text=Open all")
        assert len(tree_paths(page)) > folded
        leaves = {leaf.path for leaf in layout.leaves}
        assert leaves <= set(tree_paths(page))

        page.select_option("#sort", "held")
        sizes = [
            layout[path].shard_bytes for path in tree_paths(page) if path.startswith("blocks.0.up.")
        ]
        assert sizes == sorted(sizes, reverse=True) and len(sizes) == 2
        page.click("text=Close all")
        top = tree_paths(page)
        assert top[0] == "blocks" and "whole" in top[:3]

        page.fill("#search", "UP.KER")
        assert [p for p in tree_paths(page) if p in leaves] == [
            f"blocks.{i}.up.kernel" for i in range(4)
        ]
        page.fill("#search", "no such thing")
        assert tree_paths(page) == []
        assert page.inner_text("#model .left .status").startswith("0 leaves of")
        page.fill("#search", "")

        page.click('.key[data-group="whole"]')
        whole = {leaf.path for leaf in layout.leaves if leaf.copies == 8}
        assert {p for p in tree_paths(page) if p in leaves} == whole


def test_the_tree_is_worked_by_keys(open_page):
    with open_page(lay().report()) as page:
        page.click("text=Close all")
        page.focus(".tree")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        assert tree_paths(page)[:3] == ["blocks.0", "blocks.0.down", "blocks.0.up"]
        for _ in range(2):
            page.keyboard.press("ArrowDown")
            page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        row = page.locator(".tree .row.at")
        assert (
            row.get_attribute("aria-level") == "3" and row.get_attribute("aria-selected") == "true"
        )
        assert page.inner_text("#leaf-title") == "blocks.{0..3}.down.kernel"
        assert page.get_attribute(".tree", "aria-activedescendant") == row.get_attribute("id")


def folded(layout):
    """Returns the leaves by the names under which the page shows them, layers as one."""
    found = {}
    for leaf in layout.leaves:
        found.setdefault(re.sub(r"^blocks\.\d", "blocks.{0..3}", leaf.path), []).append(leaf)
    return found


def test_the_map_has_areas_by_bytes_and_shows_what_is_chosen(open_page):
    layout = lay()
    with open_page(layout.report()) as page:
        label = page.get_attribute("#model canvas", "aria-label")
        whole = [leaf for leaf in layout.leaves if leaf.copies == 8]
        assert (
            f"replicated: {shown(sum(x.shard_bytes for x in whole))} in {len(whole)} leaves"
            in label
        )
        # By keys: the largest first.
        page.focus("#model canvas")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        sizes = {
            name: sum(leaf.shard_bytes for leaf in leaves)
            for name, leaves in folded(layout).items()
        }
        assert sizes[page.inner_text("#leaf-title")] == max(sizes.values())
        # By pointing: the part of the map that is clicked is a leaf that is shown, and revealed.
        box = page.locator("#model canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.6)
        shown_text = page.inner_text("#model .map .status")
        path = shown_text.split()[0]
        assert sizes[path] and shown(sizes[path]) in shown_text
        page.mouse.click(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.6)
        assert page.inner_text("#leaf-title") == path
        # A module of the tree fills the map; the crumbs lead back.
        page.click('.tree .row[data-path="cube"]')
        page.click('.tree .row[data-path="blocks.0"]')
        assert "blocks.{0..3}" in page.inner_text(".map .crumbs")
        page.click(".map .crumbs button >> nth=0")
        assert page.locator(".map .crumbs button").count() == 0


def test_colours_of_the_map_are_those_of_the_legend(open_page):
    class Two(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(jnp.zeros((64, 64)))
            self.b = nnx.Param(jnp.zeros((64, 64, 8)))

    layout = sw.layout(Two, sw.mesh("model=8", on="none"), {"b": P("model")})
    script = """() => { const c = document.querySelector('#model canvas'); const pen = c.getContext('2d');
      const seen = {}; const all = pen.getImageData(0, 0, c.width, c.height).data;
      for (let i = 0; i < all.length; i += 4) { const k = [all[i], all[i+1], all[i+2]].join(); seen[k] = (seen[k] || 0) + 1; }
      const style = getComputedStyle(document.documentElement);
      const rgb = (name) => { const h = style.getPropertyValue(name).trim(); const full = h.length === 4 ? '#' + [...h.slice(1)].map(c => c + c).join('') : h; return [1,3,5].map(i => parseInt(full.slice(i, i+2), 16)); };
      const paper = rgb('--paper');
      const tint = (name) => rgb(name).map((v, i) => Math.round(0.36 * v + 0.64 * paper[i])).join();
      return [seen[tint('--axis0')] || 0, seen[rgb('--axis0').join()] || 0, seen[rgb('--cell').join()] || 0, c.width * c.height]; }"""
    with open_page(layout.report()) as page:
        cut, edge, whole, everything = page.evaluate(script)
        # Half of a device's bytes each; the whole one is hatched, so less of it is of its plain colour.
        assert 0.4 < cut / everything < 0.51 and 0.1 < whole / everything < 0.49
        # The edge of the axis that splits its rows.
        assert 0.002 < edge / everything < 0.02
        swatch = page.locator('.key[data-group="model"] .swatch')
        background = "e => getComputedStyle(e).backgroundColor"
        assert swatch.evaluate(background) == page.evaluate(
            """() => { const e = document.body.appendChild(document.createElement('i'));
              e.style.background = 'var(--axis0)'; return getComputedStyle(e).backgroundColor; }"""
        )


# --- one leaf, and the mesh -----------------------------------------------------------------------


def real_slices(leaf, mesh):
    """Returns what each device of a mesh holds, as JAX says it, in the mesh's order."""
    found = NamedSharding(mesh, leaf.spec).devices_indices_map(leaf.shape)
    return [
        [list(one.indices(size)[:2]) for one, size in zip(found[device], leaf.shape, strict=True)]
        for device in mesh.devices.flat
    ]


def titles(page, within):
    return page.locator(f"{within} .device").evaluate_all("all => all.map(one => one.title)")


def slices_of(text):
    found = re.search(r"holds \[(.*?)\]", text)[1]
    return [[int(n) for n in part.split(":")] for part in found.split(", ") if part]


@pytest.mark.parametrize(
    "path", ["conv.kernel", "cube", "blocks.2.up.kernel", "blocks.1.up.bias", "scale"]
)
def test_each_device_s_slice_is_jax_s(path, open_page):
    layout = lay()
    leaf = layout[path]
    with open_page(layout.report()) as page:
        page.uncheck("#fold")
        choose(page, path)
        assert page.inner_text("#leaf-title") == path
        text = page.inner_text("#leaf")
        assert leaf.reason in text and show_spec(leaf.spec) in text
        assert [slices_of(t) for t in titles(page, "#leaf")] == real_slices(leaf, layout.mesh)
        parts = 8 // leaf.copies
        assert page.locator("#leaf .part").count() == parts
        assert f"held by {leaf.copies} device" in page.inner_text("#cut-status")
        dims = rows(page, "#leaf")
        assert [int(row[1]) for row in dims] == list(leaf.shape)
        assert [int(row[5]) for row in dims] == list(leaf.shard_shape)
        page.click('#leaf .device[data-device="5"]')
        held = slices_of(page.inner_text("#cut-status"))
        assert held == real_slices(leaf, layout.mesh)[5]
        assert page.locator("#leaf .device.mate").count() == leaf.copies
        page.locator("#leaf .part").last.click()
        assert f"shard {parts} of {parts}" in page.inner_text("#cut-status")


def test_512_devices(open_page):
    """As many real ones are made in a process of their own, to ask JAX what each holds."""
    spec, shape = P("model", None, ("fsdp", "data"), None), (8, 3, 256, 5)
    script = f"""
import jax, json, numpy as np
from jax.sharding import PartitionSpec as P, NamedSharding
jax.config.update("jax_num_cpu_devices", 512)
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(16, 8, 4), ("data", "fsdp", "model"))
found = NamedSharding(mesh, {spec!r}).devices_indices_map({shape})
print(json.dumps([[x.indices(n)[:2] for x, n in zip(found[d], {shape})] for d in mesh.devices.flat]))
"""
    done = forked.run([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr

    class One(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jnp.zeros(shape))

    layout = sw.layout(One, sw.mesh("data=16,fsdp=8,model=4", on="none"), {"table": spec})
    with open_page(layout.report()) as page:
        assert [slices_of(t) for t in titles(page, "#leaf")] == json.loads(done.stdout)
        assert page.locator("#leaf .part").count() == 512
        picture(page, "512")


def test_a_device_shows_all_that_it_holds(open_page):
    layout = lay()
    with open_page(layout.report()) as page:
        page.click('#mesh .device[data-device="6"]')
        assert page.inner_text("#device-title") == (
            f"data=1,model=2: {len(layout.leaves)} leaves, {shown(layout.bytes_per_device)} (exact)"
        )
        page.focus('#mesh .device[data-device="6"]')
        page.keyboard.press("ArrowUp")
        assert page.inner_text("#device-title").startswith("data=0,model=2:")
        found = page.locator(".held .row").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => cell.innerText))"
        )
        assert [row[0] for row in found] == [leaf.path for leaf in layout.leaves]
        for row, leaf in zip(found, layout.leaves, strict=True):
            assert slices_of(f"holds {row[1]}") == real_slices(leaf, layout.mesh)[2]
            assert row[2] == shown(leaf.shard_bytes)
        page.click(".held .link >> nth=3")
        assert page.inner_text("#leaf-title") == layout.leaves[3].path


# --- collectives ----------------------------------------------------------------------------------


def test_collectives_by_axis_by_line_and_each(compiled, open_page):
    with open_page(compiled.report()) as page:
        wanted = {
            (axes.replace(",", ", "), kind): (f"×{count}", shown(sent))
            for axes, kinds in compiled.by_axis.items()
            for kind, (count, sent) in kinds.items()
        }
        found = rows(page, "#traffic")
        assert {(row[0], row[1]): (row[2], row[3]) for row in found} == wanted
        page.click("#traffic-by-line")
        lines = {row[0] for row in rows(page, "#traffic")}
        places = {row.source.place or "unknown line" for row in compiled.collectives}
        assert lines == places and any("test_report.py:" in line for line in lines)
        page.keyboard.press("ArrowRight")
        times = [int(row[7][1:].replace(",", "")) for row in rows(page, "#traffic")]
        assert sum(times) == sum(row.times for row in compiled.collectives)


def test_what_is_not_compiled_says_so(open_page):
    with open_page(lay().report()) as page:
        assert "Not compiled" in page.inner_text("#traffic")


# --- two side by side -----------------------------------------------------------------------------


def test_two_are_compared(compiled, open_page):
    other = sw.compile(RECIPE, lay("data=8", sw.fsdp("data", min_bytes=1)))
    with open_page(compiled.report(against=other)) as page:
        assert page.locator("#differences canvas").count() == 2
        assert page.locator(".sides-list li").count() == 2
        assert page.locator("#compared-memory .stack").count() == 2
        table = {row[0]: row for row in rows(page, "#differences")}
        row = table["blocks.#.up.kernel ×4"]
        assert row[1:3] == ["P('data', 'model')", "P(None, 'data')"]
        count, sent = other.by_axis["data"]["all-gather"]
        assert table["all-gather over data"][2:5:2] == [f"×{count}", shown(sent)]
        assert not page.is_visible("#report")
        page.click('#sides button[data-side="0"]')
        assert not page.is_visible("#differences")
        assert "mesh: data=2,model=4" in page.inner_text("#mesh-title")
        page.click('#sides button[data-side="1"]')
        assert "mesh: data=8" in page.inner_text("#mesh-title")
        assert page.locator("#mesh .device").count() == 8
        picture(page, "against")


def test_a_compilation_from_a_file_has_no_model(compiled, open_page, tmp_path):
    compiled.save(tmp_path / "saved.json")
    with open_page(sw.load_compiled(tmp_path / "saved.json").report()) as page:
        assert "read from a file" in page.inner_text("#model")
        assert compiled.verdict in page.inner_text("#verdict")
        assert rows(page, "#traffic")


def test_what_cannot_stand_beside_it():
    with pytest.raises(ValueError, match="against is a str: give a layout or a compilation"):
        lay().report(against="another")


# --- everywhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_can_be_read(compiled, open_page, width, scheme):
    how = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with open_page(compiled.report(against=lay("data=8")), **how) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in ("--ink", "--faint", "--accent", "--good", "--bad", "--warn"):
            assert contrast(page, name, "--paper") >= 4.5, name
        for name in ("--whole", "--error", *(f"--cut{i}" for i in range(6))):
            assert contrast(page, name, "#ffffff") >= 4.5, name
        picture(page, f"{scheme}-{width}")
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def contrast(page, one, two):
    """Returns the ratio by which the web's guidelines judge text."""

    def light(name):
        script = "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
        text = page.evaluate(script, name) if name.startswith("--") else name
        text = text if len(text) == 7 else "#" + "".join(2 * c for c in text[1:])
        parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((light(one), light(two)))
    return (high + 0.05) / (low + 0.05)


def unnamed(page):
    """Returns the controls and pictures that a screen reader could not name."""
    script = """() => {
      const named = (e) => (e.getAttribute('aria-label') || e.textContent || '').trim()
        || (e.labels && [...e.labels].map(l => l.innerText).join('').trim());
      const bad = (q) => [...document.querySelectorAll(q)].filter(e => !named(e)).map(e => e.outerHTML.slice(0, 80));
      return [...bad('button, select, input'), ...bad('[role=img], svg, canvas, [role=grid], [role=treegrid]')]; }"""
    return page.evaluate(script)


def test_every_picture_has_words_and_every_control_a_name(compiled, open_page):
    with open_page(compiled.report()) as page:
        assert unnamed(page) == []
        order = []
        for _ in range(60):
            page.keyboard.press("Tab")
            order.append(
                page.evaluate("document.activeElement.id || document.activeElement.className")
            )
        assert "search" in order and any("tree" in one for one in order)


def test_names_are_text_and_nothing_more(open_page):
    with open_page(lay().report()) as page:
        path = "odd.<b>&'</script>"
        assert page.locator(".held", has_text=path).count() == 1
        assert page.locator("b", has_text="script").count() == 0


def test_it_prints(compiled, open_page):
    with open_page(compiled.report()) as page:
        page.emulate_media(media="print")
        assert not page.is_visible("#theme") and not page.is_visible(".tools")
        pdf = page.pdf()
        assert pdf.startswith(b"%PDF") and pdf.count(b"/Type /Page") >= 2


def test_inline_in_a_notebook(browser, tmp_path):
    layout = lay()
    inline = layout._repr_html_()
    assert inline == layout.report()._repr_html_()
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><title>cell</title>{inline}", encoding="utf-8")
    page = browser.new_page()
    page.goto(file.as_uri())
    frame = page.frame_locator("iframe")
    assert "each of 8 devices holds" in frame.locator("#verdict").inner_text()
    assert frame.locator(".tree .row").count() > 3
    page.close()


def test_ten_thousand_leaves_cost_what_is_in_sight(open_page):
    small = lay(on="none")
    one = small["blocks.0.up.kernel"]
    leaves = tuple(
        dataclasses.replace(
            one, path=f"layers.{i // 10}.part{i % 10}.kernel", shape=(64, 128 + 4 * (i % 7))
        )
        for i in range(10_000)
    )
    layout = dataclasses.replace(small, leaves=leaves)
    with open_page(layout.report()) as page:
        page.uncheck("#fold")
        page.click("text=Open all")
        script = "e => { e.scrollTop = e.scrollHeight; return e.scrollHeight / 28; }"
        assert page.locator(".tree").evaluate(script) >= 11_000
        page.wait_for_selector('.tree .row[data-path="layers.999.part9.kernel"]')
        assert page.evaluate("document.querySelectorAll('*').length") < 3_000
        page.fill("#search", "layers.777.part3")
        assert tree_paths(page)[-1] == "layers.777.part3.kernel"
        page.click('.tree .row[data-path="layers.777.part3.kernel"]')
        assert page.inner_text("#leaf-title") == "layers.777.part3.kernel"


# --- the command ----------------------------------------------------------------------------------


DECODER = "shardwise.examples.decoder:make"


def test_the_command(run, tmp_path, browser):
    file = tmp_path / "report.html"
    how = ("--mesh", "data=2,model=4", "--strategy", "fsdp+tensor")
    status, out, err = run("report", DECODER, *how, "-o", str(file))
    assert (status, err) == (0, "") and f"wrote {file}" in out
    assert "no findings: each of 8 devices holds 10.0 MiB of 80.0 MiB (exact)" in out
    with browsers.opened(browser, file) as page:
        assert DECODER in page.inner_text("h1")


def test_the_command_compiles_a_recipe_or_adds_its_state(run, tmp_path):
    target = "shardwise.examples.text:recipe"
    how = ("--mesh", "data=8", "--strategy", "fsdp", "-o", str(tmp_path / "a.html"))
    status, out, _ = run("report", target, *how)
    assert status == 0 and "548.5 KiB of 4.3 MiB (exact), with optimizer and batch 1.6 MiB" in out
    status, out, _ = run("report", target, *how, "--on", "cpu:8", "--compile")
    assert status == 0 and "(compiled)" in out


def test_the_command_compares(run, tmp_path, browser):
    saved = tmp_path / "layout.json"
    how = ("--mesh", "data=2,model=4", "--strategy", "fsdp+tensor")
    assert run("plan", DECODER, *how, "--save", str(saved))[0] == 0
    file = tmp_path / "two.html"
    for more in (
        ("--against", str(saved)),
        ("--against-mesh", "data=8", "--against-strategy", "fsdp"),
    ):
        status, out, _ = run("report", DECODER, *how, *more, "-o", str(file))
        assert status == 0 and out.count("each of 8 devices holds 10.0 MiB") == 2
        with browsers.opened(browser, file) as page:
            same = "Every leaf has the same spec" in page.inner_text("#differences")
            assert same == ("--against" in more)
    assert run("report", str(saved), "-o", str(file))[0] == 0


def test_errors_are_drawn_and_told(run, tmp_path):
    file = tmp_path / "bad.html"
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rules]]\n"**.kernel" = "P(\'modle\')"\n')
    status, out, _ = run(
        "report", DECODER, "--mesh", "data=8", "--rules", str(rules), "-o", str(file)
    )
    assert status == 1 and "cannot run: " in out and file.exists()


@pytest.mark.parametrize(
    ("arguments", "shown_text"),
    [
        ((DECODER, "-o", "a.html"), "--mesh is missing: give axes and sizes"),
        ((DECODER, "--mesh", "data=8"), "Missing option '--output' / '-o'"),
        (
            (DECODER, "--mesh", "data=8", "-o", "no/such/a.html"),
            "--output no/such/a.html cannot be written: there is no folder no/such",
        ),
        ((DECODER, "--mesh", "data=8", "-o", "."), "--output . is a folder: name a file"),
        (
            (DECODER, "--mesh", "data=8", "--compile", "-o", "a.html"),
            "--on none has no devices to compile for",
        ),
        (("nothing.json", "-o", "a.html"), "nothing.json"),
        (
            ("lay.json", "--mesh", "data=4", "-o", "a.html"),
            "--mesh does not apply to lay.json: a saved file is drawn as it is",
        ),
        (
            ("lay.json", "--compile", "-o", "a.html"),
            "--compile does not apply to lay.json: a saved file",
        ),
        ((DECODER, "--mesh", "data=8", "--against", "other.json", "-o", "a.html"), "other.json"),
    ],
    ids=[
        "no mesh",
        "no output",
        "no folder",
        "a folder",
        "nothing to compile for",
        "no file",
        "a file has its own",
        "a file is not compiled",
        "no other file",
    ],
)
def test_wrong_uses(run, tmp_path, monkeypatch, arguments, shown_text):
    monkeypatch.chdir(tmp_path)
    status, out, err = run("report", *arguments)
    assert status == 2 and shown_text in err and len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []
