"""`sw.estimate`: lowers a step, partitions it with Shardy, and prices what one device runs."""

from __future__ import annotations

import os
from typing import Any

from .._base import public
from .._compile import lowered_step, step_machine, tokens_of
from .._layout import Layout, Method, require_layout
from .._mesh import AnyMesh, show_mesh
from .._time import Calibration, load_calibration
from .estimates import Estimate, estimate_of
from .kernels import placed
from .program import Program, partition, simplified


@public
def estimate(
    recipe: Any,
    layout: Layout,
    *,
    inputs: Any = None,
    method: Method = None,
    calibration: str | os.PathLike[str] | None = None,
) -> Estimate:
    """Returns what a training step would take on the layout's chips, without compiling it (modelled).

    The step of `sw.train_step` is lowered and partitioned by Shardy, the partitioner of both
    compilers: the collectives are those that it inserts. Kernels are grouped as the compilers would
    fuse them, and priced as in `sw.compile(…).time`. It takes a second or two where compiling takes
    minutes (more where many layers that are no scan draw random bits); `sw.compile` has the last word.

    Args:
        recipe: the recipe; or a model, or a function that builds it, for its forward pass.
        layout: its layout, on chips such as `sw.mesh("data=8", on="h100:1x8")`.
        inputs: for a model: the arguments of its call, in the form `sw.layout` takes.
        method: for a model: the method to call with `inputs`, in the form `sw.layout` takes.
        calibration: the file that `shardwise chips measure` wrote, to price the step by what was
            measured instead of by the shipped rates.

    Raises:
        LayoutError: the layout has errors.
        ValueError: the mesh has no chips with known rates, or the loss cannot be traced.

    Example:
        >>> import jax, optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(4096, 4096, use_bias=False, rngs=nnx.Rngs(0))
        >>> recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(),
        ...                    optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((64, 4096), "float32"))
        >>> layout = sw.layout(make, sw.mesh("data=8", on="h100:1x8"), "fsdp")
        >>> sw.estimate(recipe, layout).state_bytes
        8519684
    """
    return partition_step(recipe, layout, inputs, method, calibration=calibration).on(layout.mesh)


class Partitioned:
    """A step as Shardy partitions it, to be priced on meshes with the same axes in any order."""

    def __init__(self, program: Program, tokens: int | None, calibration: Calibration | None):
        """Takes the simplified program."""
        self.program, self.tokens, self.calibration = program, tokens, calibration

    def on(self, mesh: AnyMesh) -> Estimate:
        """Returns what the step takes on a mesh."""
        machine = step_machine(mesh, self.calibration)
        assert machine is not None  # the same chips as before
        return estimate_of(self.program, machine, self.tokens)


def partition_step(
    recipe: Any,
    layout: Layout,
    inputs: Any = None,
    method: Method = None,
    *,
    calibration: str | os.PathLike[str] | None = None,
) -> Partitioned:
    """Returns a step as one device of its mesh runs it; see `estimate`."""
    mesh = require_layout(layout).mesh
    measured = load_calibration(calibration) if calibration is not None else None
    machine = step_machine(mesh, measured)
    if machine is None:
        raise ValueError(
            f"the mesh {show_mesh(mesh)} has no chips with known rates: make it with "
            f"on='h100:8x8' or on='v5p:4x8x8'"
        )
    job, lowered = lowered_step(recipe, layout, inputs, method)
    program = partition(lowered.compiler_ir("stablehlo"), dict(mesh.shape))
    program = simplified(placed(program), gpu=machine.gpu is not None)
    return Partitioned(program, tokens_of(job.batch), measured)
