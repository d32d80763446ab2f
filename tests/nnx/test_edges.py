"""Odd but legal models: bare arrays, numbers, names that clash, factories that are not functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from forward import collectives
from jax.sharding import PartitionSpec as P

import shardwise as sw


def mesh():
    return sw.mesh("data=2,model=4", on="cpu:8")


class Bare(nnx.Module):
    """Arrays that are not variables, Python numbers, and 64-bit NumPy arrays."""

    def __init__(self):
        self.w = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.table = jnp.arange(16.0)
        self.tables = nnx.data({"a": jnp.ones((8, 2))})
        self.step = nnx.Variable(0)
        self.host = nnx.Variable(np.ones((4, 4)))


def test_bare_arrays_and_numbers():
    layout = sw.layout(Bare, mesh(), {"table": P("model"), "host": P("data")})
    kinds = {leaf.path: (leaf.kind, str(leaf.dtype), leaf.shape) for leaf in layout.leaves}
    assert kinds["table"] == ("Array", "float32", (16,))
    assert kinds["tables.a"] == ("Array", "float32", (8, 2))
    assert kinds["step"] == ("Variable", "int32", ())
    assert kinds["host"] == ("Variable", "float32", (4, 4))
    live = sw.layout(Bare(), mesh(), {"table": P("model"), "host": P("data")})
    assert not sw.diff(layout, live)
    for model in (sw.init(Bare, layout), sw.shard(Bare(), layout)):
        assert not sw.audit(layout, model)
        np.testing.assert_array_equal(model.table, np.arange(16.0))
        assert model.table.addressable_shards[0].data.shape == (4,)


class Clash(nnx.Module):
    """Parameters named like fields of an optimizer's state."""

    def __init__(self):
        self.mu = nnx.Param(jnp.zeros((8, 8)))
        self.kernel = nnx.Param(jnp.zeros((8, 8)))
        self.nu = nnx.Linear(8, 8, rngs=nnx.Rngs(0))


def test_parameters_named_like_optimizer_state():
    rules = {"mu": P("model"), "kernel": P(None, "data"), "nu.kernel": P("data", "model")}
    opt = sw.layout(Clash, mesh(), rules).for_optimizer(optax.adam(1e-3))
    for part in ("mu", "nu"):
        assert opt[f"0.{part}.mu"].spec == P("model")
        assert opt[f"0.{part}.kernel"].spec == P(None, "data")
        assert opt[f"0.{part}.nu.kernel"].spec == P("data", "model")


def test_parameters_in_a_list_at_the_root():
    class Listed(nnx.Module):
        def __init__(self):
            self.p = nnx.List([nnx.Param(jnp.zeros((8, 8))), nnx.Param(jnp.zeros((8, 8)))])

    opt = sw.layout(Listed, mesh(), {"p.0": P("model"), "p.1": P("data")}).for_optimizer(
        optax.adam(1e-3)
    )
    assert (opt["0.mu.p.0"].spec, opt["0.nu.p.1"].spec) == (P("model"), P("data"))


def test_an_update_that_cannot_be_traced_leaves_unknown_dims_replicated():
    layout = sw.layout(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)), mesh(), {"kernel": P("data")})
    opt = layout.for_optimizer(optax.lbfgs(memory_size=16))
    stacked = [leaf for leaf in opt.leaves if leaf.shape == (16, 16, 16)]
    assert stacked and {leaf.spec for leaf in stacked} == {P(None, "data")}


def test_an_optimizer_for_a_layout_with_errors_keeps_the_errors():
    rules = {"kernel": P("data", "zz"), "bias": P("model", "data")}
    layout = sw.layout(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)), mesh(), rules)
    opt = layout.for_optimizer(optax.adafactor(1e-3, min_dim_size_to_factor=4))
    assert {f.code for f in sw.check(opt).errors} == {"SW103"}  # the bias has no factors


BAD_FACTORIES = {
    "class": (nnx.Linear, "the model's factory 'Linear' needs the argument 'in_features': give a function of no arguments"),
    "outer rngs": (functools.partial(nnx.Linear, 2, 2, rngs=nnx.Rngs(0)), "the model's factory changes something that was created outside it, such as an nnx.Rngs"),
    "other": (lambda: 3, "the model's factory returned an int: it must return an nnx.Module"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FACTORIES)
def test_bad_factories(case):
    make, message = BAD_FACTORIES[case]
    with pytest.raises(ValueError) as caught:
        sw.layout(make, mesh())
    assert str(caught.value).startswith(message)


def test_prints_in_an_initialiser_are_kept(capsys):
    class Chatty(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((128, 128)))
            jax.debug.print("made {}", self.w[...].sum())

    layout = sw.layout(Chatty, mesh(), {"w": P("data")})
    model = sw.init(Chatty, layout)
    jax.effects_barrier()
    assert "made 16384.0" in capsys.readouterr().out
    assert not sw.audit(layout, model)


def test_identical_layers_are_compiled_once_and_differ_in_value():
    class Deep(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(128, 128, rngs=rngs) for _ in range(6)])

    layout = sw.layout(Deep, mesh(), sw.fsdp("data", min_bytes=0))
    model, full = sw.init(Deep, layout), jax.jit(lambda: nnx.split(Deep())[1])()
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(full), strict=True):
        np.testing.assert_array_equal(a, b)
    kernels = [np.asarray(layer.kernel[...]) for layer in model.layers]
    assert len({k.tobytes() for k in kernels}) == 6


def test_huge_targets_and_counts_answer_at_once():
    with pytest.raises(
        ValueError, match="needs 15 devices, but on='h200:100000000x8' has 800000000"
    ):
        sw.mesh("a=3,b=5", on="h200:100000000x8")
    with pytest.raises(ValueError, match="asks for more than 1024 virtual devices"):
        sw.mesh("a=-1", on="cpu:99999999999999")


def test_contradicting_flax_rules_are_refused():
    kernel_init = nnx.with_metadata(nnx.initializers.zeros_init(), out_sharding=("embed", "mlp"))
    rules = (("mlp", "model"), ("mlp", None))
    with nnx.logical_axis_rules(rules), pytest.raises(ValueError, match="map 'mlp' to both"):
        sw.layout(lambda: nnx.Linear(8, 8, kernel_init=kernel_init, rngs=nnx.Rngs(0)), mesh())


class FusedGlu(nnx.Module):
    """One kernel for gate and value, split in two: its columns cannot be sharded in their order."""

    def __init__(self):
        self.up = nnx.Linear(16, 64, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(32, 16, rngs=nnx.Rngs(1))

    def __call__(self, x):
        gate, value = jnp.split(self.up(x), 2, axis=-1)
        return x + self.down(nnx.silu(gate) * value)


def test_half_a_pair_is_left_alone():
    x = jax.ShapeDtypeStruct((2, 16), "float32")
    layout = sw.layout(FusedGlu, mesh(), sw.tensor("model"), inputs=x)
    assert layout["up.kernel"].spec == P()
    assert "only half of a pair" in layout.explain("down.kernel")
    x = jax.device_put(jnp.ones((2, 16)), jax.sharding.NamedSharding(mesh(), P()))
    assert collectives(sw.init(FusedGlu, layout), (x,)) == {}


def test_inputs_that_are_not_arrays_and_a_mesh_that_the_caller_set():
    class Switch(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
            self.down = nnx.Linear(32, 16, rngs=nnx.Rngs(1))

        def __call__(self, x, *, train):
            h = self.up(x)
            return self.down(nnx.relu(h) if train else h)

    inputs = {"x": jax.ShapeDtypeStruct((2, 16), "float32"), "train": True}
    with jax.set_mesh(sw.mesh("other=8", on="cpu:8")):
        layout = sw.layout(Switch, mesh(), "tensor", inputs=inputs)
    assert layout["up.kernel"].spec == P(None, "model")


def test_fsdp_leaves_alone_what_a_loop_steps_along():
    class Own(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((32, 8, 8)))

        def __call__(self, x):
            return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, self.w[...])[0]

    rule = sw.fsdp("data", min_bytes=0)
    x = jax.ShapeDtypeStruct((2, 8), "float32")
    assert sw.layout(Own, mesh(), rule, inputs=x)["w"].spec == P(None, "data")


def test_a_table_prints_in_a_notebook(monkeypatch):
    import builtins

    class ZMQInteractiveShell:
        pass

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    text = str(sw.layout(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh()))
    assert "kernel" in text and text.count("\n") == 3


BAD_RULES = {
    "glob class": ({"layers.[01].kernel": P()}, {}, "'layers.[01].kernel' is not a path pattern: the only wildcards in a step are * and ?"),
    "opinion of text": (lambda leaf: sw.Opinion("model"), {}, "rule '<lambda>' at 'bias' gave 'model', which is a str"),
    "logical pairs": (None, {"logical": [("mlp", "model")]}, "logical is a list: give a dict"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_RULES)
def test_bad_rules(case):
    rules, kwargs, message = BAD_RULES[case]
    with pytest.raises(ValueError) as caught:
        sw.layout(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh(), rules, **kwargs)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("axes", [(3,), ("",), (None,), ()])
def test_bad_fsdp_axes(axes):
    with pytest.raises(ValueError, match="needs one or more distinct axis names"):
        sw.fsdp(*axes)


def test_a_lockfile_with_a_leaf_twice_is_damaged(tmp_path):
    path = tmp_path / "layout.json"
    sw.layout(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh()).save(path)
    lines = path.read_text().splitlines()
    row = next(line for line in lines if '"kernel"' in line)
    path.write_text("\n".join(lines).replace(row, f"{row},\n{row}"))
    with pytest.raises(ValueError, match="damaged layout: kernel appears twice"):
        sw.load_layout(path)
    with pytest.raises(ValueError, match="cannot be written to"):
        sw.layout(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh()).save(path / "below")


def test_a_target_that_exits_is_not_clean(tmp_path, monkeypatch, capsys):
    from shardwise._cli.app import main

    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["shardwise", "check", "script.py:make", "--mesh", "data=2"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(
        "shardwise: importing script.py called sys.exit(0), at script.py:2, which would end"
    )


def test_recurrent_cells_are_left_alone_for_the_right_reason():
    make = lambda: nnx.RNN(nnx.LSTMCell(8, 16, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))  # noqa: E731
    layout = sw.layout(make, mesh(), "tensor", inputs=jax.ShapeDtypeStruct((2, 4, 8), "float32"))
    assert layout["cell.hi.kernel"].spec == P()
    assert "contracted between two leaves" not in layout.explain("cell.hi.kernel")
