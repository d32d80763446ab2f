"""The report's page as a reader uses it: its first screen, its links, its keys, and its looks."""

import itertools

import pytest
from jax.sharding import PartitionSpec as P
from test_report import RECIPE, folded, lay, picture, rows, shown, unnamed

import shardwise as sw
from shardwise._report.summary import spare_bytes

LONG = "a" * 45  # a label that nobody wants to read again and again


@pytest.fixture(scope="module")
def compiled():
    return sw.compile(RECIPE, lay())


@pytest.fixture(scope="module")
def files(tmp_path_factory, compiled):
    """Returns the pages of this module, each written once."""
    from shardwise._compile import Plan
    from shardwise._report import report_of_plans

    folder = tmp_path_factory.mktemp("pages")
    other = lay("data=8", sw.fsdp("data", min_bytes=1))
    reports = {
        "one": compiled.report(),
        "two": report_of_plans(
            [(f"{LONG} A", Plan(compiled.layout, compiled)), (f"{LONG} B", Plan(other))]
        ),
    }
    for name, report in reports.items():
        report.save(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in reports}


@pytest.fixture(scope="module")
def shared(browser, files):
    """Returns a function that shows a page anew; there is one page for all tests."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(20_000)
    told = []
    page.on("console", lambda one: told.append(one.text) if one.type != "log" else None)
    page.on("pageerror", lambda error: told.append(str(error)))

    def show(name="one", fragment="", width=1400, scheme="light"):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto("about:blank")
        page.goto(files[name].as_uri() + fragment)
        return page

    yield show
    page.close()
    assert told == []


def section_in_view(page):
    return page.locator("#sections a[aria-current]").inner_text()


# --- the first screen -----------------------------------------------------------------------------


def test_what_could_be_split_further_is_what_the_best_spec_saves():
    layout = lay()
    for leaf in layout.leaves:
        free = [a for a in ("data", "model") if a not in str(leaf.spec)]
        smallest = leaf.shard_bytes
        for dims in itertools.product(range(-1, leaf.ndim), repeat=len(free)):
            spec = [list(leaf.spec[d : d + 1]) for d in range(leaf.ndim)]
            spec = [
                [] if s == [None] else [*(s[0] if isinstance(s[0], tuple) else s)] if s else []
                for s in spec
            ]
            for axis, dim in zip(free, dims, strict=True):
                if dim >= 0:
                    spec[dim].append(axis)
            tried = sw.layout(
                {"x": 0} and lay_one(leaf), layout.mesh, {"x": P(*(tuple(s) or None for s in spec))}
            )
            if not tried["x"].faults:
                smallest = min(smallest, tried["x"].shard_bytes)
        assert leaf.shard_bytes - smallest == spare_bytes(leaf), leaf.path


def lay_one(leaf):
    import jax.numpy as jnp
    from flax import nnx

    class One(nnx.Module):
        def __init__(self):
            self.x = nnx.Param(jnp.zeros(leaf.shape, leaf.dtype))

    return One


def test_the_first_screen_has_the_figures_of_the_library(compiled, shared):
    page = shared()
    assert shown(compiled.memory.peak) in page.inner_text("#card-fit")
    # Of a CPU no limit is known, so nothing fits, and there is no tick.
    assert page.locator(".card.good, .mark, .verdict-line.good").count() == 0
    assert "no limit is known" in page.inner_text("#card-fit")
    facts = dict(
        page.locator(".facts .fact").evaluate_all(
            "all => all.map(one => [one.querySelector('dt').firstChild.data.trim(), one.querySelector('dd').innerText])"
        )
    )
    sent = {}
    for row in compiled.collectives:
        sent[row.source.place] = sent.get(row.source.place, 0) + row.total_bytes
    place = max(sent, key=sent.get)
    assert facts["Most traffic"].startswith(shown(sent[place])) and place in facts["Most traffic"]
    spare = {leaf.path: spare_bytes(leaf) for leaf in compiled.layout.leaves}
    assert facts["Largest waste"].startswith(shown(sum(spare.values())))
    largest = max(spare, key=spare.get)
    assert largest in facts["Largest waste"]
    waste = page.locator(".facts .fact", has_text="Largest waste").locator("button")
    waste.click()
    assert page.inner_text("#leaf-title") == largest
    page.locator(".facts .fact", has_text="Most traffic").locator("button").click()
    assert page.get_attribute("#traffic-by-line", "aria-selected") == "true"
    assert section_in_view(page) == "Collectives"


def test_without_a_compilation_it_says_what_is_not_known_and_what_tells_it(
    open_page, run, tmp_path
):
    layout = lay(on="h100:1x8")
    with open_page(layout.report()) as page:
        fit = page.inner_text("#card-fit")
        held = shown(layout.bytes_per_device)
        assert "Not known" in fit and f"at least {held} of 79.2 GiB" in fit and "exact" in fit
        assert "Not known" in page.inner_text("#card-speed")
        assert "Compile it" in page.inner_text("#card-do")
        assert page.inner_text("#card-do .command") == "sw.compile(recipe, layout).report()"
        assert page.locator(".card.good").count() == 0
    out = tmp_path / "it's.html"
    how = ("--on", "h100:1x8", "--mesh", "data=8", "--strategy", "fsdp", "-o", str(out))
    assert run("report", "shardwise.examples.text:recipe", *how)[0] == 0
    assert (
        "shardwise report shardwise.examples.text:recipe --on h100:1x8 --mesh data=8 --strategy fsdp"
        " --compile -o " in out.read_text()
    )
    # A bare model has no batch of its own, and without chips there is nothing to compile for.
    how = ("--mesh", "data=8", "--strategy", "fsdp", "-o", str(out))
    assert run("report", "shardwise.examples.decoder:make", *how)[0] == 0
    assert "--strategy fsdp --on CHIPS --inputs SHAPES --compile -o " in out.read_text()


# --- links, keys ----------------------------------------------------------------------------------


def test_a_reload_keeps_what_was_chosen(shared):
    page = shared()
    page.uncheck("#fold")
    page.fill("#search", "kernel")
    page.select_option("#sort", "held")
    page.click('.key[data-group="data × model"]')
    page.click('.tree .row[data-path="blocks.2"]')
    page.click('.tree .row[data-path="blocks.2.up.kernel"]')
    page.click("#traffic-each")
    page.click("#sections a >> text=Collectives")

    def seen():
        return {
            "rows": page.locator(".tree .row").evaluate_all("all => all.map(e => e.dataset.path)"),
            "leaf": page.inner_text("#leaf-title"),
            "crumbs": page.inner_text(".map .crumbs"),
            "query": page.input_value("#search"),
            "sort": page.input_value("#sort"),
            "fold": page.is_checked("#fold"),
            "pressed": page.get_attribute('.key[data-group="data × model"]', "aria-pressed"),
            "tab": page.get_attribute("#traffic-each", "aria-selected"),
            "section": section_in_view(page),
        }

    before = seen()
    assert before["leaf"] == "blocks.2.up.kernel" and before["section"] == "Collectives"
    assert before["pressed"] == before["tab"] == "true" and "blocks › 2" in before["crumbs"]
    page.reload()
    assert seen() == before
    top = page.locator("#traffic").bounding_box()["y"]
    assert top < 300
    # Back goes to where one was; a bare word is a section.
    page.go_back()
    assert "at=traffic" not in page.url and page.inner_text("#leaf-title") == before["leaf"]
    page = shared(fragment="#mesh")
    assert section_in_view(page) == "Mesh"


def test_it_is_worked_by_keys_alone(shared):
    page = shared()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("up.kernel /")
    assert page.input_value("#search") == "up.kernel /"
    page.keyboard.press("Escape")
    assert page.input_value("#search") == ""
    # From the top: the link that skips, the list of sections, and a card's link.
    page = shared()
    order = []
    for _ in range(30):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.textContent"))
        if order[-1] == "Model":
            page.keyboard.press("Enter")
            break
    assert order[0] == "Skip to the summary" and order[1] == "Summary"
    assert page.evaluate("document.activeElement.id") == "model-title"
    assert "at=model" in page.url
    # The map: to the smallest module, into it, and out.
    page.focus("#model canvas")
    page.keyboard.press("ArrowRight")
    for _ in range(8):
        if "blocks" in page.inner_text(".map .status"):
            break
        page.keyboard.press("ArrowRight")
    page.keyboard.press("+")
    assert "blocks.{0..3}" in page.inner_text(".map .crumbs b")
    page.keyboard.press("-")
    assert page.inner_text(".map .crumbs b") == "the model"
    assert unnamed(page) == []


# --- tree and map ---------------------------------------------------------------------------------


def test_the_tree_and_the_map_show_the_same(compiled, shared):
    layout = compiled.layout
    page = shared()
    canvas = page.locator("#model canvas")

    def drawn():
        return int(canvas.get_attribute("data-leaves")), int(canvas.get_attribute("data-areas"))

    # Folded, repeated layers are one area; unfolded, each has its own.
    assert drawn()[0] <= len(layout.leaves) and drawn()[1] <= len(folded(layout))
    areas = drawn()[1]
    page.uncheck("#fold")
    assert drawn()[1] > areas
    page.check("#fold")
    # The search and the legend filter both.
    page.fill("#search", "up.kernel")
    assert drawn() == (4, 1)
    page.fill("#search", "")
    whole = [leaf for leaf in layout.leaves if leaf.copies == 8]
    page.click('.key[data-group="whole"]')
    assert f"{len(whole)} leaves of {len(layout.leaves)}" in page.inner_text("#model .left .status")
    assert shown(sum(leaf.shard_bytes for leaf in whole)) in page.inner_text(".map .crumbs")
    page.click('.key[data-group="whole"]')
    # What one points at lights the other.
    page.hover('.tree .row[data-path="blocks.0"]')
    assert page.get_attribute(".spot.lit", "data-view") == "blocks.{0..3}"
    page.click("text=Open all")
    page.hover('.tree .row[data-path="cube"]')
    lit, box = page.locator(".spot.lit").bounding_box(), canvas.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.move(lit["x"] + lit["width"] / 2, lit["y"] + lit["height"] / 2)
    assert page.get_attribute(".tree .row.lit", "data-path") == "cube"
    page.mouse.click(lit["x"] + lit["width"] / 2, lit["y"] + lit["height"] / 2)
    assert page.get_attribute(".tree .row.chosen", "data-path") == "cube"
    assert page.get_attribute(".spot.chosen", "data-view") == "cube"
    # A click on a module's title fills the map with it.
    page.hover('.tree .row[data-path="blocks.0"]')
    title = page.locator(".spot.lit").bounding_box()
    page.mouse.click(title["x"] + 30, title["y"] + 8)
    assert page.inner_text(".map .crumbs b") == "blocks.{0..3}"
    assert drawn()[0] == sum(leaf.path.startswith("blocks.") for leaf in layout.leaves)


# --- looks ----------------------------------------------------------------------------------------

CONTRAST = """() => {
  const parse = (text) => { const n = (text.match(/[\\d.]+/g) || []).map(Number);
    const rgb = /^color\\(/.test(text) ? n.slice(0, 3).map((v) => v * 255) : n.slice(0, 3);
    return { rgb, a: n.length > 3 ? n[3] : 1 }; };
  const over = (top, under) => top.rgb.map((v, i) => v * top.a + under[i] * (1 - top.a));
  const ground = (e) => { if (!e) return [255, 255, 255];
    const b = parse(getComputedStyle(e).backgroundColor);
    return b.a === 1 ? b.rgb : over(b, ground(e.parentElement)); };
  const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    if (e.closest("script, style, svg, .hidden") || !e.offsetParent) continue;
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const back = ground(e), [a, b] = [light(over(parse(getComputedStyle(e).color), back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push([e.className, e.textContent.slice(0, 30), ratio.toFixed(2)]);
  }
  return found; }"""
CUT = """() => [...document.querySelectorAll("td, th, .card, .fact, .finding, h1, h2, .big, .second, .scroll")]
  .filter((e) => e.offsetParent && !e.classList.contains("hidden") && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline")
  .map((e) => [e.tagName, e.className, e.textContent.slice(0, 40), e.scrollWidth, e.clientWidth])"""


@pytest.mark.parametrize("width", [1400, 390])
def test_nothing_is_cut_and_everything_can_be_read(shared, width):
    for name in ("one", "two"):
        for scheme in ("light", "dark"):
            page = shared(name, width=width, scheme=scheme)
            assert page.evaluate(CONTRAST) == []
            picture(page, f"page-{name}-{scheme}-{width}")
        for tab in ("#traffic-by-line", "#traffic-each") if name == "one" else ():
            page.click(tab)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CUT) == []


def test_on_a_phone_the_sections_are_a_menu(shared):
    page = shared(width=390)
    assert not page.is_visible("#sections")
    page.click("#menu")
    page.click("#sections a >> text=Model")
    assert not page.is_visible("#sections") and page.inner_text("#menu") == "Model"
    # Below the bar that stays.
    bar = page.locator("#side").bounding_box()["height"]
    assert bar - 2 <= page.locator("#model-title").bounding_box()["y"] < 200


# --- two compared ---------------------------------------------------------------------------------


def test_differences_come_first_and_each_report_is_behind_them(compiled, shared):
    page = shared("two")
    assert page.inner_text("h1") == "Two layouts compared"
    text = page.inner_text("body")
    assert text.count(f"{LONG} A") == text.count(f"{LONG} B") == 1
    a, b = compiled.layout, lay("data=8", sw.fsdp("data", min_bytes=1))
    figures = {
        row[0].split("\n")[0]: row[1:] for row in rows(page, "[aria-label='Figures compared']")
    }
    memory = figures["parameters exact"] if "parameters exact" in figures else figures["parameters"]
    assert memory[:2] == [shown(a.bytes_per_device), shown(b.bytes_per_device)]
    change = b.bytes_per_device - a.bytes_per_device
    word = "better" if change < 0 else "worse"
    assert memory[2] == f"{'−' if change < 0 else '+'}{shown(abs(change))} {word}"
    share = 100 * abs(change) / a.bytes_per_device
    assert f"{share:.{1 if share < 10 else 0}f}%" in page.inner_text("#compare-memory")
    assert "A alone: B is not compiled" in page.inner_text(
        "#compare-time, #compare-traffic >> nth=1"
    )
    assert unnamed(page) == []
    differ = page.locator("[aria-label='Leaves that differ'] button").first
    named = differ.get_attribute("title").removeprefix("Show ")
    differ.click()
    assert page.inner_text("#leaf-title") == named and "view=a" in page.url
    page.click('#sides button[data-side="1"]')
    assert page.inner_text("h1").endswith(f"{LONG} B")
    page.reload()
    assert page.inner_text("h1").endswith(f"{LONG} B") and page.is_visible("#summary")
    page.go_back()
    assert page.inner_text("h1").endswith(f"{LONG} A")
