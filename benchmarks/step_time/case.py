"""The case of docs/guides/step_time.md: one decoder, its blocks scanned or unrolled.

python benchmarks/step_time/case.py predict      # anywhere, with shardwise[gpu] and cuDNN
python benchmarks/step_time/case.py measure      # on a machine with one H200
"""

import sys

import jax
from measure import batch_of, seconds_of
from recipes import decoder_of

import shardwise as sw

CASES = {
    "scanned": {"scan": True},
    "scanned, saving nothing": {"scan": True, "remat": "nothing_saveable"},
    "unrolled": {},
}

for name, config in CASES.items():
    recipe = decoder_of(16, 1024, 4096, 16, (8, 1024), config=config)
    if sys.argv[1] == "predict":
        layout = sw.layout(recipe.model, sw.mesh("data=1", on="h200:1x1"))
        print(name, sw.compile(recipe, layout).time.verdict)
        continue
    layout = sw.layout(recipe.model, sw.mesh("data=1"))
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    batch = jax.device_put(batch_of(recipe.batch))
    state, _ = step(state, batch)
    found, state = seconds_of(lambda s, step=step, batch=batch: step(s, batch), state)
    print(name, f"{sorted(found)[len(found) // 2] * 1e3:.1f} ms per step (measured)", flush=True)
    del state
