"""The page of a search, in a real browser: what it shows is what was found."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from test_report import picture, rows, unnamed

import shardwise as sw
from shardwise._base import show_bytes, show_seconds


class Tower(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(1024, 1024, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return x


RECIPE = sw.Recipe(
    model=Tower,
    loss=lambda model, x: jnp.mean(model(x) ** 2),
    optimizer=optax.adam(1e-3),
    batch=jax.ShapeDtypeStruct((4096, 1024), "float32"),
)


@pytest.fixture(scope="module")
def found():
    """With a capacity between the layouts, so that some of them do not fit."""
    whole = sw.search(RECIPE, "h100:1x4", compile=0, prices={"h100": 3.0})
    peaks = sorted(c.peak_bytes for c in whole.candidates)
    limit = peaks[len(peaks) // 2]
    small = [
        dataclasses.replace(c, estimate=dataclasses.replace(c.estimate, capacity=limit))
        for c in whole.candidates
    ]
    ranked = sorted(small, key=lambda c: (not c.fits, c.seconds))
    return dataclasses.replace(whole, candidates=tuple(ranked), notes=("a note",))


def points(page):
    """Returns the points in the order of the candidates: whether each fits, and where it is."""
    script = """all => all.map(one => ({ number: Number(one.dataset.number), label: one.getAttribute('aria-label'),
      fits: !!one.querySelector('.dot'), box: one.querySelector('.halo').getBoundingClientRect().toJSON() }))"""
    return sorted(page.locator(".plot .point").evaluate_all(script), key=lambda p: p["number"])


def test_every_layout_is_a_point_at_its_time_and_memory(found, open_page):
    with open_page(found.report()) as page:
        seen = points(page)
        assert [p["fits"] for p in seen] == [c.fits for c in found.candidates]
        assert not all(p["fits"] for p in seen)
        line = page.locator(".plot line.limit").bounding_box()["x"]
        for point, candidate in zip(seen, found.candidates, strict=True):
            centre = point["box"]["x"] + point["box"]["width"] / 2
            assert candidate.fits == (centre <= line + 1.5)
            assert show_seconds(candidate.seconds) in point["label"]
            assert candidate.fits != point["label"].endswith("does not fit")
        by_memory = sorted(zip(found.candidates, seen, strict=True), key=lambda p: p[0].peak_bytes)
        lefts = [point["box"]["x"] for _, point in by_memory]
        assert lefts == sorted(lefts)
        by_time = sorted(zip(found.candidates, seen, strict=True), key=lambda p: p[0].seconds)
        tops = [point["box"]["y"] for _, point in by_time]
        assert tops == sorted(tops, reverse=True)
        assert page.locator(".plot .front").count() == (len(found.front) > 1)
        assert unnamed(page) == []
        picture(page, "search")


def test_the_best_is_chosen_first_and_the_table_has_all(found, open_page):
    with open_page(found.report()) as page:
        assert str(found.best) in page.inner_text("#verdict")
        assert "(the fastest" in page.inner_text("#chosen h2")
        table = rows(page, "#candidates")
        assert [row[1] for row in table] == [c.mesh for c in found.candidates]
        assert [row[3] for row in table] == [show_seconds(c.seconds) for c in found.candidates]
        assert [row[4] for row in table] == [show_bytes(c.peak_bytes) for c in found.candidates]
        assert [row[5] == "does not fit" for row in table] == [not c.fits for c in found.candidates]
        assert "a note" in page.inner_text("#notes")


def test_a_click_or_an_arrow_shows_a_layout_against_the_best(found, open_page):
    last = len(found.candidates) - 1
    with open_page(found.report()) as page:
        page.click(f"#candidates tbody tr:nth-child({last + 1}) td:nth-child(2)")
        assert page.inner_text("#chosen .why") == found.explain(found.best, found.candidates[last])
        assert page.inner_text("#chosen .command") == found.candidates[last].command
        assert page.locator("#candidates tr[aria-current]").count() == 1
        page.focus(f'.point[data-number="{last}"]')
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#chosen h2").startswith(f"2: {found.candidates[1].mesh} ")
        assert page.evaluate("document.activeElement.dataset.number") == "1"
        page.hover('.point[data-number="1"] .halo', force=True)
        assert show_bytes(found.candidates[1].peak_bytes) in page.inner_text(".plot .tip")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_has_both_themes(found, open_page, scheme):
    how = {"viewport": {"width": 390, "height": 844}, "color_scheme": scheme}
    with open_page(found.report(), **how) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        script = "() => getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(script)
        page.click("#theme")
        assert page.evaluate(script) != before
        assert len(points(page)) == len(found.candidates)
        picture(page, f"search-{scheme}-390")


def test_when_nothing_fits_the_page_says_what_would(found, open_page):
    nothing = [c for c in found.candidates if not c.fits]
    none = dataclasses.replace(
        found, candidates=tuple(nothing), remedies=(found.best,), stopped="the time limit of 5 s"
    )
    with open_page(none.report()) as page:
        assert "nothing fits on h100:1x4" in page.inner_text("#verdict")
        assert "h100:1x4" in page.inner_text("#remedies")
        assert "the time limit of 5 s" in page.inner_text("#notes")
        assert page.locator(".plot .dot").count() == 0
    with open_page(dataclasses.replace(none, candidates=(), remedies=()).report()) as page:
        assert "nothing was priced" in page.inner_text("#verdict")
