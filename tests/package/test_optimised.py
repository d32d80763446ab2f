"""Under `python -O` there are no asserts: what the user gives is checked all the same."""

import os
import subprocess
import sys

CHECKS = """
import jax, optax, shardwise as sw
from flax import nnx
from jax.sharding import PartitionSpec as P
from shardwise._cli.target import load_name, parse_inputs
from shardwise.models import CONFIGS
from shardwise.models._experts import Experts
assert False, "this must not run"

def said(function, *args):
    try:
        function(*args)
    except ValueError as error:
        print(str(error).splitlines()[0])

make = lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))
def batch_spec(spec):
    recipe = sw.Recipe(model=make, loss=lambda m, b: m(b["x"]).mean(), optimizer=optax.sgd(0.1),
                       batch={"x": jax.ShapeDtypeStruct((8, 64), "float32")}, batch_spec=spec)
    sw.train_step(recipe, sw.layout(make, sw.mesh("data=1", on="cpu:1"), "dp"))

said(batch_spec, {"x": "data"})
said(batch_spec, {"y": P("data")})
said(parse_inputs, "float32")
said(parse_inputs, "float99[2]")
said(lambda: nnx.eval_shape(lambda: Experts(CONFIGS["qwen3-0.6b"], rngs=nnx.Rngs(0))))
"""

SAID = """\
batch_spec is {'x': 'data'}: give one PartitionSpec, or a pytree of them like the batch, which has batch['x']
batch_spec is {'y': P
--inputs 'float32' has 'float32': 
--inputs 'float99[2]' has 'float99', which is not a dtype
a config without experts= has no experts to choose from
"""


def test_without_asserts_wrong_arguments_are_refused_in_the_same_words():
    done = subprocess.run(
        [sys.executable, "-O", "-c", CHECKS],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for got, begins in zip(done.stdout.splitlines(), SAID.splitlines(), strict=True):
        assert got.startswith(begins)
