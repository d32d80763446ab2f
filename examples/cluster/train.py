"""One script for a laptop, for several processes on one machine, and for a cluster.

python examples/cluster/train.py                                  one process
shardwise launch -n 2 --devices 4 -- python examples/cluster/train.py
shardwise launch -n 4 --elastic --devices 2 -- python examples/cluster/train.py
sbatch examples/cluster/slurm.sh
sbatch examples/cluster/slurm_elastic.sh
kubectl apply -f examples/cluster/jobset.yaml
"""

import os

import jax
import numpy as np
import optax

import shardwise as sw
from shardwise.examples import decoder


def main():
    # Call this first: once a backend has started, it can no longer join other processes.
    print(sw.distributed())
    tokens = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.int32)
    recipe = sw.Recipe(
        model=decoder.make,
        loss=decoder.loss,
        optimizer=optax.adamw(1e-3),
        batch=jax.ShapeDtypeStruct((64, 128), "int32"),
    )
    layout = sw.layout(decoder.make, sw.mesh("data=-1"), "fsdp")
    # A directory shared by all processes: an interrupted run resumes from its newest checkpoint.
    checkpoints = sw.Checkpoints("runs/a", every=100)
    # Whether whatever starts the processes starts them again, and as many as are left.
    elastic = "SHARDWISE_ELASTIC_MOST" in os.environ
    data = sw.data(tokens, length=128)
    sw.fit(recipe, layout, data, steps=1000, checkpoints=checkpoints, elastic=elastic)


if __name__ == "__main__":
    main()
