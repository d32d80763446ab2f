"""One training step as a pure function: the same for planning, compiling and running."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._base import user_traceback
from .._check import LayoutError, check, matched
from .._jax import (
    Chosen,
    choosing,
    in_host_memory,
    is_in_host_memory,
    known_names,
    on_device,
    on_host,
    show_value,
)
from .._layout import Layout, require_layout
from .._mesh import AnyMesh, chips_of, make_spec, normal_spec, padded
from .._nnx import AbstractModel, Recipe, abstract_model, keyed_leaves, remat_policy, show_path
from .activations import named_activations
from .batch import batch_layout
from .remat import remat_modules
from .scopes import scope_modules
from .state import Arrays, TrainState, named_arrays, show_array

# XLA chooses Triton's matrix products even where cuBLAS's make the whole step faster, since the
# operations around them no longer fuse: benchmarks/h200 measures it.
_COMPILER_OPTIONS = {"gpu": {"xla_gpu_enable_triton_gemm": False}}


@dataclasses.dataclass(frozen=True, eq=False)
class Blueprint:
    """What a recipe's step is built from on one layout, before any array exists.

    Attributes:
        recipe: the recipe.
        layout: the model's layout, with the structure of the recipe's model.
        optimizer: the layout of the optimizer's state.
        model: the recipe's abstract model, traced once.
        trained: the paths of the trained variables, in the order of `parameters`.
        parameters: the tree structure that the optimizer sees.
    """

    recipe: Recipe
    layout: Layout
    optimizer: Layout
    model: AbstractModel
    trained: tuple[str, ...]
    parameters: Any

    @functools.cached_property
    def shardings(self) -> TrainState:
        """A sharding for each array of the state."""
        model, moments = _by_path(self.layout), _by_path(self.optimizer)
        # An average is needed only in the update, so it is split like the optimizer's state.
        ema = {path: self.updates.get(path, model[path]) for path in self.trained}
        if self.recipe.ema is None:
            ema = {}
        if "optimizer" in self.recipe.offloaded:
            # Scalars, such as a count of steps, are not worth a transfer.
            arrays = {leaf.path for leaf in self.optimizer.leaves if leaf.ndim}
            moments = {k: in_host_memory(s) if k in arrays else s for k, s in moments.items()}
        if "ema" in self.recipe.offloaded:
            ema = {path: in_host_memory(sharding) for path, sharding in ema.items()}
        step = NamedSharding(self.layout.mesh, P())
        return TrainState(step=step, model=model, optimizer=moments, ema=ema)

    @functools.cached_property
    def updates(self) -> dict[str, NamedSharding]:
        """The sharding of each trained variable's update, where it is not the variable's own."""
        return self._otherwise({leaf.path: leaf.update_spec for leaf in self.layout.leaves})

    @functools.cached_property
    def gradients(self) -> dict[str, NamedSharding]:
        """The sharding of each trained variable's gradient, where it is not the variable's own."""
        specs = {leaf.path: leaf.gradients for leaf in self.layout.leaves}
        return self._otherwise({path: s for path, s in specs.items() if s is not None})

    def _otherwise(self, specs: Mapping[str, P]) -> dict[str, NamedSharding]:
        mesh = self.layout.mesh
        return {
            path: NamedSharding(mesh, specs[path])
            for path in self.trained
            if path in specs and normal_spec(specs[path]) != normal_spec(self.layout[path].spec)
        }

    @functools.cached_property
    def abstract(self) -> TrainState:
        """The state without its arrays: shapes, dtypes and shardings."""
        shapes = {leaf.path: (leaf.shape, leaf.dtype) for leaf in self.layout.leaves}
        moments = {leaf.path: (leaf.shape, leaf.dtype) for leaf in self.optimizer.leaves}
        bare = TrainState(
            step=((), jnp.dtype("int32")),
            model=shapes,
            optimizer=moments,
            ema={path: shapes[path] for path in self.shardings.ema},
        )
        return jax.tree.map(
            lambda sharding, shape: jax.ShapeDtypeStruct(*shape, sharding=sharding),
            self.shardings,
            bare,
        )

    @functools.cached_property
    def batch(self) -> Any:
        """The batch without its arrays: shapes, dtypes and shardings."""
        return batch_layout(self.recipe, self.layout)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The options that XLA compiles the step with."""
        given = dict(self.recipe.compiler_options or {})
        mesh = self.layout.mesh
        device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else chips_of(mesh)
        platform = device.platform if device is not None else ""
        return {**_COMPILER_OPTIONS.get(platform, {}), **given}

    def jitted(self) -> Any:
        """Returns the jitted step, both for running and for compiling it."""
        here = isinstance(self.layout.mesh, Mesh)
        return jax.jit(
            self.step,
            in_shardings=(self.shardings, jax.tree.map(lambda leaf: leaf.sharding, self.batch)),
            out_shardings=(self.shardings, NamedSharding(self.layout.mesh, P())),
            donate_argnums=0,
            compiler_options=(self.compiler_options or None) if here else None,
        )

    def merge(self, arrays: Arrays) -> nnx.Module:
        """Returns the model with these arrays."""
        flat = [arrays[leaf.path] for leaf in self.layout.leaves]
        return nnx.merge(self.model.graphdef, jax.tree.unflatten(self.layout.treedef, flat))

    def as_parameters(self, arrays: Arrays) -> Any:
        """Returns trained variables, given by path, in the structure that the optimizer sees."""
        return jax.tree.unflatten(self.parameters, [arrays[path] for path in self.trained])

    def flat_optimizer(self, state: Any) -> Arrays:
        """Returns an optimizer's state by path."""
        paths = [leaf.path for leaf in self.optimizer.leaves]
        return dict(zip(paths, jax.tree.leaves(state), strict=True))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after one step, and the metrics; a pure function, to be jitted."""
        with on_mesh(self.layout.mesh), named_activations(self.layout, self.batch):
            return self._step(state, batch)

    def evaluate(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """Returns the metrics of one batch, with the model in evaluation mode; pure, to be jitted."""
        with on_mesh(self.layout.mesh), named_activations(self.layout, self.batch):
            # The average is what one would deploy, so it is what is evaluated.
            ema = self._restored(jax.tree.map(on_device, state.ema))
            model = {**state.model, **ema}
            loss, (metrics, _) = self._loss({}, model, batch, state.step, train=False)
        return {"loss": loss, **metrics}

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        require_planned(state, self.abstract)
        recipe = self.recipe
        trained = {path: state.model[path] for path in self.trained}
        rest = {path: x for path, x in state.model.items() if path not in trained}
        with known_names():
            loss, metrics, rest, grads = self._gradients(trained, rest, batch, state.step)
        # Each device updates the part of the weights that it holds the optimizer's state of.
        grads, trained = reshard(grads, self.updates), reshard(trained, self.updates)
        if recipe.clip is not None:
            # Not `optax.clip_by_global_norm`: it reports no norm, and sums the squares in the dtype
            # of the gradients, where four float16 of 1e4 have the norm inf, and bfloat16 loses
            # all but 8 bits of it.
            norm = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
            scale = jnp.minimum(1.0, recipe.clip / jnp.maximum(norm, 1e-30))
            grads = {path: (g * scale).astype(g.dtype) for path, g in grads.items()}
            if "grad_norm" in metrics:
                raise ValueError(
                    "the recipe's loss returned a metric named 'grad_norm', which clip= reports: "
                    "rename it"
                )
            metrics = {"grad_norm": norm, **metrics}
        parameters = self.as_parameters(trained)
        moments = [on_device(state.optimizer[leaf.path]) for leaf in self.optimizer.leaves]
        update = optax.with_extra_args_support(recipe.optimizer).update
        updates, after = update(
            self.as_parameters(grads),
            jax.tree.unflatten(self.optimizer.treedef, moments),
            parameters,
            # For optimizers that need more than the gradient, such as a line search.
            value=loss,
            grad=self.as_parameters(grads),
            value_fn=lambda p: self._value(p, rest, batch, state.step),
        )
        fresh = jax.tree.leaves(optax.apply_updates(parameters, updates))
        trained = reshard(dict(zip(self.trained, fresh, strict=True)), self.updates)
        ema: Any = state.ema
        if recipe.ema is not None:
            ema = jax.tree.map(on_device, ema)
            newest = {path: trained[path] for path in ema}
            # A number of Python's own: one of NumPy's would make bfloat16 float32.
            ema = optax.incremental_update(newest, ema, 1.0 - float(recipe.ema))
        trained = self._restored(trained)
        model = {path: trained.get(path, rest.get(path)) for path in state.model}
        parts = {"optimizer": self.flat_optimizer(after), "ema": ema}
        for part in recipe.offloaded:
            planned = getattr(self.shardings, part)
            parts[part] = {
                path: on_host(x) if is_in_host_memory(planned[path]) else x
                for path, x in parts[part].items()
            }
        done = TrainState(state.step + 1, model, parts["optimizer"], parts["ema"])
        return done, {"loss": loss, **metrics}

    def _value(self, parameters: Any, rest: Arrays, batch: Any, step: Any) -> Any:
        trained = dict(zip(self.trained, jax.tree.leaves(parameters), strict=True))
        trained = self._restored(trained)
        return self._loss(trained, rest, batch, step)[0]

    def _gradients(
        self, trained: Arrays, rest: Arrays, batch: Any, step: Any
    ) -> tuple[Any, dict[str, Any], Arrays, Arrays]:
        """Returns the loss, the metrics, the untrained state, and the gradients."""
        parts = self.recipe.accumulate
        differentiate = jax.value_and_grad(self._loss, has_aux=True)
        if parts == 1:
            (loss, (metrics, rest)), grads = differentiate(trained, rest, batch, step)
            return loss, metrics, rest, self._as_gradients(grads)

        def one(carry: Any, part: Any) -> Any:
            rest, grads = carry
            index, batch = part
            (loss, (metrics, rest)), new = differentiate(trained, rest, batch, step, index=index)
            new = reshard(new, self.gradients)
            grads = self._as_gradients(jax.tree.map(jnp.add, grads, new))
            return (rest, grads), (loss, metrics)

        zeros = self._as_gradients(jax.tree.map(jnp.zeros_like, trained))
        batches = jax.tree.map(functools.partial(_cut, parts=parts), batch)
        xs = (jnp.arange(parts), batches)
        (rest, grads), (losses, metrics) = jax.lax.scan(one, (rest, zeros), xs)
        mean = functools.partial(jnp.mean, axis=0)
        # Otherwise the compiler splits the sum of zero1 too, and gathers it for each microbatch.
        complete = self._restored({p: g for p, g in grads.items() if p not in self.gradients})
        grads = jax.tree.map(lambda g: g / parts, {p: complete.get(p, g) for p, g in grads.items()})
        return mean(losses), jax.tree.map(mean, metrics), rest, grads

    def _loss(
        self,
        trained: Arrays,
        rest: Arrays,
        batch: Any,
        step: Any,
        *,
        index: Any = None,
        train: bool = True,
    ) -> tuple[Any, tuple[dict[str, Any], Arrays]]:
        recipe = self.recipe
        before = rest
        if recipe.compute_dtype is not None:
            trained, rest, batch = self._cast(trained), self._cast(rest), _cast_all(batch, recipe)
        args: tuple[Any, ...] = ()
        if recipe.rngs is not None:
            key = jax.random.fold_in(jax.random.key(recipe.rngs), step)
            args = (key if index is None else jax.random.fold_in(key, index),)

        def compute(arrays: Arrays, batch: Any, *keys: Any) -> Any:
            arrays = gathered(arrays, self.layout)
            model = self.merge(arrays)
            if not train:
                model.eval()
            if isinstance(recipe.remat, Mapping) and train:
                remat_modules(model, recipe.remat)
            scope_modules(model)
            chosen = Chosen(recipe.loss_chunks)
            with choosing(chosen) if recipe.loss_chunks > 1 else contextlib.nullcontext():
                out = recipe.loss(model, batch, *[nnx.Rngs(key) for key in keys])
            if recipe.loss_chunks > 1 and not chosen.used:
                raise ValueError(
                    f"loss_chunks={recipe.loss_chunks} has no effect, because the recipe's loss makes "
                    f"its own logits: compute it with models.head_loss(hidden, kernel, targets)"
                )
            if not isinstance(out, tuple):
                out = (out, {})
            _require_scalar(*out)
            loss, metrics = out
            after = {show_path(keys): x for keys, x in keyed_leaves(nnx.split(model)[1])}
            after = {path: after[path] for path in rest}
            changed = {path: x for path, x in after.items() if x is not arrays[path]}
            return loss.astype(jnp.float32), (
                metrics,
                _resharded(changed, self.layout, gather=False),
            )

        if recipe.remat is not None and not isinstance(recipe.remat, Mapping) and train:
            compute = jax.checkpoint(compute, policy=remat_policy(recipe.remat))
        loss, (metrics, after) = compute({**rest, **trained}, batch, *args)
        # A value that was only rounded for the loss, and not changed by it, keeps its full precision.
        after = {
            path: _as_stored_dtype(x, before[path])
            if rest[path] is before[path]
            else jnp.where(x == rest[path], before[path], x.astype(before[path].dtype))
            for path, x in after.items()
        }
        return loss, (metrics, {**before, **after})

    def _cast(self, arrays: Arrays) -> Arrays:
        """Returns the arrays, sharded, with floating-point parameters cast to the compute dtype."""
        dtype = self.recipe.compute_dtype
        cast = {
            path: _as_dtype(x, dtype)
            for path, x in arrays.items()
            # The values of an array that is quantised to 8 bits stay so.
            if path in self._parameter_paths
            and jnp.issubdtype(x.dtype, jnp.floating)
            and x.dtype.itemsize > 1
        }
        # Constrained to its own sharding, a parameter is gathered in the smaller dtype.
        return {**arrays, **self._as_stored(cast)}

    @functools.cached_property
    def _parameter_paths(self) -> frozenset[str]:
        state = jax.tree.unflatten(self.layout.treedef, [leaf.path for leaf in self.layout.leaves])
        return frozenset(jax.tree.leaves(nnx.filter_state(state, nnx.Param))) | set(self.trained)

    @functools.cached_property
    def frozen(self) -> frozenset[str]:
        """The paths of the parameters that are not trained."""
        return self._parameter_paths - {*self.trained}

    def _restored(self, arrays: Arrays) -> Arrays:
        """Returns arrays that are split for the update as the variables themselves are."""
        return reshard(arrays, {path: self.shardings.model[path] for path in self.updates})

    def _as_gradients(self, grads: Arrays) -> Arrays:
        split = {path: g for path, g in grads.items() if path in self.gradients}
        rest = {path: g for path, g in grads.items() if path not in self.gradients}
        done = {**reshard(split, self.gradients), **self._as_stored(rest)}
        return {path: done[path] for path in grads}

    def _as_stored(self, arrays: Arrays) -> Arrays:
        mesh = self.layout.mesh
        if any(kind != AxisType.Auto for kind in mesh.axis_types):
            return (
                arrays  # on other axes, types carry the sharding, and a constraint only asserts it
            )
        constrain = jax.lax.with_sharding_constraint
        return {path: constrain(x, self.shardings.model[path]) for path, x in arrays.items()}


def reshard(arrays: Arrays, shardings: Mapping[str, NamedSharding]) -> Arrays:
    """Returns the arrays with these shardings; those without one are unchanged."""
    done = {}
    for path, x in arrays.items():
        if (sharding := shardings.get(path)) is not None:
            explicit = any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)
            move = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
            x = move(x, sharding)
        done[path] = x
    return done


def gathered(arrays: Arrays, layout: Layout) -> Arrays:
    """Returns the arrays as the model computes with them on Explicit axes.

    On Auto axes the compiler gathers what FSDP shards. Explicit axes carry the sharding of the
    storage into the types of every result, where it conflicts with that of the batch.
    """
    return _resharded(arrays, layout, gather=True)


def _resharded(arrays: Arrays, layout: Layout, *, gather: bool) -> Arrays:
    """Returns the arrays that FSDP shards over Explicit axes, gathered or sharded again."""
    mesh = layout.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    done = dict(arrays)
    for leaf in layout.leaves:
        axes = {axis for axis in leaf.gathered if kinds[axis] == AxisType.Explicit}
        if axes and leaf.path in arrays:
            entries = padded(leaf.spec, leaf.ndim)
            used = make_spec([tuple(a for a in entry if a not in axes) for entry in entries])
            done[leaf.path] = jax.sharding.reshard(arrays[leaf.path], used if gather else leaf.spec)
    return done


def make_blueprint(recipe: Recipe, layout: Layout) -> Blueprint:
    """Returns what the recipe's step is built from on this layout.

    Raises:
        LayoutError: the layout has errors, or is not of the recipe's model.
        ValueError: an argument has the wrong type, or nothing would be trained.
    """
    if not isinstance(recipe, Recipe):
        raise ValueError(f"the recipe has type {type(recipe).__name__}: give a sw.Recipe")
    require_layout(layout)
    check(layout).raise_if_errors()
    abstract = abstract_model(recipe.model, layout.mesh)
    own = matched(layout, abstract.state)
    parameters = nnx.filter_state(abstract.state, recipe.wrt)
    trained = tuple(show_path(keys) for keys, _ in keyed_leaves(parameters))
    if not trained:
        kinds = ", ".join(sorted({leaf.kind for leaf in layout.leaves}))
        raise ValueError(
            f"wrt={recipe.wrt!r} selects no variable of the model, so nothing would be trained: "
            f"its variables are of kind {kinds}"
        )
    for leaf in own.leaves:
        if leaf.path in trained and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"{leaf.path} is {leaf.dtype}, which has no gradient, but wrt={show_value(recipe.wrt)} "
                f"trains it: make it an nnx.Variable of another type, or give a wrt= without it, such "
                f"as nnx.All(nnx.Param, lambda path, x: jnp.issubdtype(x.dtype, jnp.floating))"
            )
    optimizer = own.for_optimizer(recipe.optimizer, wrt=recipe.wrt)
    structure = jax.tree.structure(parameters)
    return Blueprint(recipe, own, optimizer, abstract, trained, structure)


@contextlib.contextmanager
def explained_tracing() -> Iterator[None]:
    """Raises what user code raises while a step is traced as a ValueError with the user's lines."""
    try:
        yield
    except LayoutError:
        raise
    except Exception as error:
        raise ValueError(f"the step cannot be traced:\n{user_traceback(error)}") from error


@contextlib.contextmanager
def on_mesh(mesh: AnyMesh) -> Iterator[None]:
    """Makes this mesh the one that a traced model finds, whatever the caller has set."""
    use = jax.sharding.use_abstract_mesh
    inner = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    # The empty mesh comes first, since JAX does not let an active mesh change its size.
    with use(AbstractMesh((), ())), use(inner), nnx.use_eager_sharding(False):
        try:
            yield
        except Exception as error:
            if help := _axis_types_help(error):
                raise ValueError(f"{error}\n{help}") from error
            raise


def _axis_types_help(error: Exception) -> str:
    """Returns help for a model that was written for the other axis type, or an empty text."""
    # JAX raises a plain ValueError, so only the message identifies it.
    if "type Auto" in str(error) and "PartitionSpec" in str(error):
        return (
            "help: the model names the sharding of results (out_sharding=), which needs axes of "
            "type Explicit: make the mesh with sw.mesh(…, explicit=True)"
        )
    if type(error).__name__ == "ShardingTypeError":
        return (
            "help: on axes of type Explicit a model must name the sharding of such a result "
            "(out_sharding=); on Auto axes (sw.mesh without explicit=True) the compiler chooses it"
        )
    return ""


def require_planned(state: TrainState, planned: TrainState) -> None:
    """Rejects a state of other shapes or dtypes; runs during tracing, so a step pays nothing."""
    arrays = named_arrays(state)
    wrong = [
        f"{show_array(name)} is {x.dtype}{list(x.shape)}, wanted {want.dtype}{list(want.shape)}"
        for name, want in named_arrays(planned).items()
        if (x := arrays[name]).shape != want.shape or x.dtype != want.dtype
    ]
    if wrong:
        raise ValueError(f"the state does not match this step: {'; '.join(wrong[:3])}")


def _as_stored_dtype(x: Any, like: Any) -> Any:
    # Even if the dtype is right, since a weak type would make the next step recompile.
    return x if jnp.issubdtype(like.dtype, jax.dtypes.extended) else x.astype(like.dtype)


def _by_path(layout: Layout) -> dict[str, Any]:
    return {leaf.path: NamedSharding(layout.mesh, leaf.spec) for leaf in layout.leaves}


def _cut(x: Any, parts: int) -> Any:
    """Returns `x` in `parts` along a new dim 0; every device splits its own shard."""
    if not x.shape:
        return jnp.broadcast_to(x, (parts,))
    split = x.reshape(x.shape[0] // parts, parts, *x.shape[1:])
    return jnp.moveaxis(split, 1, 0)


def _cast_all(batch: Any, recipe: Recipe) -> Any:
    def cast(x: Any) -> Any:
        return _as_dtype(x, recipe.compute_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, batch)


def _as_dtype(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


def _require_scalar(loss: Any, metrics: Any, *more: Any) -> None:
    shape = getattr(loss, "shape", None)
    got = None
    if more:
        got = f"{2 + len(more)} values"
    elif shape is None:
        got = f"a value of type {type(loss).__name__}"
    elif shape != ():
        got = f"an array of shape {shape}"
    elif not jnp.issubdtype(loss.dtype, jnp.floating):
        got = f"a scalar of dtype {loss.dtype}"
    if got is not None:
        raise ValueError(
            f"the recipe's loss returned {got}: it must return a scalar, or a scalar and a "
            f"dict of metrics; take the mean over samples"
        )
    if not isinstance(metrics, dict):
        shape = getattr(metrics, "shape", None)
        kind = f"type {type(metrics).__name__}" if shape is None else f"shape {shape}"
        raise ValueError(
            f"the recipe's loss returned metrics of {kind}: return a dict of names and values"
        )
    if "loss" in metrics:
        raise ValueError(
            "the recipe's loss returned a metric named 'loss', which is the loss itself: rename it"
        )
