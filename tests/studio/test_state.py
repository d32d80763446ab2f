"""States of the studio: links in and out, and what the controls offer."""

import dataclasses
import math

import jax
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise._studio.answers import Answers
from shardwise._studio.choices import Abled, axis_names, edited, offered, strategy_for
from shardwise._studio.copies import command_of
from shardwise._studio.opening import notebook_studio
from shardwise._studio.source import Source
from shardwise._studio.state import State, parse_query

FULL = State(
    "llama3-8b", "h100:2x8", (("data", 8), ("model", 2)), "fsdp+tensor",
    (("**.kernel", "P(None, 'model')"), ("a=b & c", "P()")), "32x2048", "save:q,k+offload:input",
    "adafactor", 2, 4, "optimizer", 8, "64KiB",
)  # fmt: skip


def test_a_link_is_the_state_and_back():
    assert parse_query(FULL.query) == parse_query(f"?{FULL.query}") == FULL
    assert (
        parse_query(State("m", "none", (("data", 1),)).query).query
        == "target=m&on=none&mesh=data=1"
    )


GOOD = "target=m&on=none&mesh=data=2"


@pytest.mark.parametrize(
    "query, why",
    [
        ("on=none&mesh=data=2", "no target"),
        ("target=m&on=none", "no mesh"),
        (f"{GOOD}&mesh=data=4", "mesh twice"),
        (f"{GOOD}&path=/etc/passwd", "'path', which is none of its fields"),
        ("target=m&on=none&mesh=data", "write axes as"),
        ("target=m&on=none&mesh=data=0", "at least 1"),
        ("target=m&on=none&mesh=data=99999999999", "at least 1"),
        ("target=m&on=none&mesh=a=1048576,b=1048576", "more devices"),
        ("target=m&on=none&mesh=" + ",".join(f"a{n}=1" for n in range(9)), "at most 8"),
        ("target=m&on=../../x&mesh=data=2", "not a valid name"),
        (f"{GOOD}&remat=$(reboot)", "not a valid name"),
        (f"{GOOD}&strategy=a%00b", "control character"),
        (f"{GOOD}&accumulate=-1", "at least 0"),
        (f"{GOOD}&rule=x=__import__('os')", "not a spec"),
        (f"{GOOD}&rule=x=P({'(' * 300})", "not"),
        (f"{GOOD}&min_bytes=lots", "number of bytes"),
        (f"{GOOD}&strategy={'a' * 40_000}", "characters"),
        ("&".join([GOOD] + ["rule=x=P()"] * 300), "fields"),
    ],
)  # fmt: skip
def test_what_no_state_has_is_refused(query, why):
    with pytest.raises(ValueError, match=why.replace("(", r"\(")):
        parse_query(query)


ABLE = Abled({"model": (32, "attention heads"), "expert": (8, "experts")}, samples=16)


def states(state, able=ABLE):
    for axis in offered(state, able)["axes"]:
        for stop in axis["stops"]:
            yield (
                axis["name"],
                stop,
                edited(state, [["axis", axis["name"], stop["size"]]], lambda _: able),
            )


@pytest.mark.parametrize("mesh, on", [("data=16", "h100:2x8"), ("fsdp=4,model=4", "v5e:4x4")])
def test_every_stop_of_a_slider_is_a_mesh_that_divides(mesh, on):
    state = parse_query(f"target=m&on={on}&mesh={mesh}&strategy=fsdp")
    for name, stop, led in states(state):
        sizes = dict(led.mesh)
        assert math.prod(sizes.values()) == 16 and sizes.get(name, 1) == stop["size"]
        assert 16 % math.prod(sizes.get(n, 1) for n in ("data", "fsdp", "expert", "pipe")) == 0
        assert led.axes == stop["mesh"] and led.strategy == stop.get("strategy", state.strategy)


def test_what_does_not_divide_is_closed_with_its_reason():
    state = parse_query("target=m&on=h100:2x8&mesh=data=8,model=2&strategy=fsdp+tensor")
    axes = {axis["name"]: axis for axis in offered(state, ABLE)["axes"]}
    assert axes["expert"]["closed"] == [{"size": 16, "why": "8 experts cannot be divided by 16"}]
    few = Abled({"model": (32, "attention heads")}, samples=4)
    state = parse_query("target=m&on=h100:2x8&mesh=data=4,model=4&strategy=fsdp+tensor")
    axes = {axis["name"]: axis for axis in offered(state, few)["axes"]}
    assert [row["size"] for row in axes["data"]["closed"]] == [8, 16]
    assert "divides a batch of 4 samples" in axes["data"]["closed"][0]["why"]


def test_there_and_back_is_the_same_state():
    state = parse_query("target=m&on=h100:2x8&mesh=data=16&strategy=fsdp")
    there = edited(state, [["axis", "model", 16]], lambda _: ABLE)
    assert (there.axes, there.strategy) == ("data=1,model=16", "fsdp+tensor")
    assert edited(there, [["axis", "model", 1]], lambda _: ABLE) == state


def test_other_chips_get_the_nearest_mesh():
    state = parse_query("target=m&on=h100:2x8&mesh=data=4,model=4&strategy=fsdp+tensor")
    fewer = edited(state, [["set", "on", "h100:1x8"]], lambda _: ABLE)
    assert (fewer.axes, fewer.strategy) == ("data=2,model=4", "fsdp+tensor")


@pytest.mark.parametrize(
    "edit",
    [["axis", "nobody", 2], ["axis", "data", 3], ["set", "rules", "x"], ["set", "devices", "3"], ["del"], "x",
     ["set", "on", "cpu:8; ls"], ["rules", [["a", "open('x')"]]]],
)  # fmt: skip
def test_no_other_edits(edit):
    state = parse_query("target=m&on=h100:2x8&mesh=data=16&strategy=fsdp")
    with pytest.raises(ValueError):
        edited(state, [edit], lambda _: ABLE)


def test_an_axis_by_another_name_is_not_offered_twice():
    state = parse_query("target=m&on=h100:2x8&mesh=dp=4,tp=4")
    assert axis_names(state, ABLE) == ["dp", "tp", "data", "fsdp", "expert"]
    assert strategy_for("", {"tp": 4}) == ""


def test_a_command_line_is_quoted():
    source = Source(FULL, ("llama3-8b",), lambda state: None)
    line = command_of(FULL, source)
    assert line.startswith("shardwise compile llama3-8b --mesh data=8,model=2 --on h100:2x8 ")
    assert line.endswith(
        "--rules /dev/stdin <<'RULES'\n[[rules]]\n\"**.kernel\" = \"P(None, 'model')\"\n"
        '[[rules]]\n"a=b & c" = "P()"\nRULES'
    )


def make():
    return nnx.Sequential(
        nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.Linear(128, 64, rngs=nnx.Rngs(0))
    )


RECIPE = sw.Recipe(
    model=make, loss=lambda model, x: model(x).mean(), optimizer=optax.adamw(1e-3),
    batch=jax.ShapeDtypeStruct((32, 64), "float32"),
)  # fmt: skip


def test_a_state_is_estimated_once():
    state = parse_query("target=m&on=h100:1x8&mesh=data=8&strategy=fsdp")
    answers = Answers(Source(state, ("m",), lambda state: RECIPE))
    first, again = (answers.estimated(state)["estimate"] for _ in range(2))
    assert again is first
    estimate = sw.estimate(RECIPE, sw.layout(RECIPE, sw.mesh("data=8", on="h100:1x8"), "fsdp"))
    assert first["peak_bytes"] == estimate.peak_bytes
    other = dataclasses.replace(state, strategy="dp")
    assert answers.estimated(other)["estimate"]["peak_bytes"] > estimate.peak_bytes


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "fsdp+tensor"])
def test_a_notebook_begins_with_the_very_layout(strategy):
    layout = sw.layout(RECIPE, sw.mesh("data=2,model=4", on="h100:1x8"), strategy)
    inline = notebook_studio(layout, RECIPE)
    try:
        studio = inline._running.studio
        _, again = studio.answers.laid_out(studio.source.start)
        assert [leaf.spec for leaf in again.leaves] == [leaf.spec for leaf in layout.leaves]
        assert [leaf.moments for leaf in again.leaves] == [leaf.moments for leaf in layout.leaves]
        assert (
            f'src="{inline.address.replace("&", "&amp;").replace(chr(39), "&#x27;")}"'
            in inline._repr_html_()
        )
    finally:
        inline.stop()
    with pytest.raises(ValueError, match="give the sw.Recipe"):
        layout.studio(3)
