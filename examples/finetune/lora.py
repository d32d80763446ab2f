r"""LoRA, from a Hugging Face folder to a Hugging Face folder, on eight devices; then text.

pip install "shardwise[qwix]"
python examples/finetune/lora.py            writes its own small folder first: there is nothing to download
python examples/finetune/lora.py --int4     the same with the base quantised to four bits (QLoRA)

shardwise check examples/finetune/lora.py:recipe --mesh data=2,model=4 --on cpu:8 --strategy fsdp+tensor
shardwise train examples/finetune/lora.py:recipe --mesh data=2,model=4 --on cpu:8 --strategy fsdp+tensor \
    --steps 20 --weights FOLDER --checkpoints runs/lora --trained-only
"""

import functools
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx

import shardwise as sw
from shardwise import models

# A Llama in small. `models.config_from_hf(folder / "config.json")` reads that of a real one.
CONFIG = models.Config(
    layers=2, width=64, hidden=128, heads=4, kv_heads=2, vocab=128, scan=True, rope_theta=10_000.0
)
TEXT = b"a rose is a rose is a rose is a rose is a rose is a rose is a rose is a rose is a rose is "


def base(seed=0):
    return models.Decoder(CONFIG, rngs=nnx.Rngs(seed))


def adapted(**quantised):
    """The decoder with adapters in its blocks, as qwix makes them: the model's code stays as it is."""
    rule = qwix.LoraRule(module_path="blocks/.*", rank=8, alpha=16.0, **quantised)
    tokens = jnp.ones((1, 8), "int32")  # qwix calls the model once, to see which kernels it has
    return qwix.apply_lora_to_model(base(), qwix.LoraProvider([rule]), tokens, rngs=nnx.Rngs(1))


def make_recipe(**quantised):
    return sw.Recipe(
        model=functools.partial(adapted, **quantised),
        loss=models.next_token_loss,
        optimizer=optax.adam(1e-2),
        batch=jax.ShapeDtypeStruct((16, 32), "int32"),
        wrt=nnx.LoRAParam,  # no gradients, and no moments, of anything else
    )


recipe = make_recipe()


def data():
    """Samples of 32 tokens; a token is a byte."""
    tokens = np.frombuffer(TEXT, np.uint8).astype("int32")
    return sw.data(np.stack([np.roll(tokens, -i)[:32] for i in range(64)]))


def main(folder, *, steps=100, quantised=False, show=True):
    """Returns the losses, and what the tuned model writes."""
    folder = Path(folder)
    mesh = sw.mesh("data=2,model=4", on="cpu:8")
    if not (folder / "base").exists():
        sw.save_weights(base(seed=7), folder / "base")

    given = make_recipe(weight_qtype="int4", tile_size=16) if quantised else recipe
    layout = sw.layout(given, mesh, "fsdp+tensor")
    sw.check(layout).raise_if_errors()
    print(layout.explain("blocks.0.attention.q_lora_b"))

    # The base from the folder, quantised in its shards if it is to be; the adapters start anew.
    model = sw.load(given.model, layout, folder / "base")
    checkpoints = sw.Checkpoints(folder / "run", trained_only=True)
    state = sw.fit(
        given, layout, data(), steps=steps, model=model, checkpoints=checkpoints, show=show,
        logs=folder / "logs", log_every=1,
    )  # fmt: skip
    rows = map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    print(
        f"loss {losses[0]:.2f}, after {steps} steps {losses[-1]:.2f}; a checkpoint has "
        f"{checkpoints.about()['bytes']:,} bytes, the model {layout.total_bytes:,}"
    )

    # A plain decoder again, which transformers reads, and which generates.
    merged = sw.merge_adapters(state.to_model(given.model), base)
    sw.save_weights(merged, folder / "tuned")
    return losses, write(folder / "tuned", mesh, TEXT[:16])


def write(folder, mesh, prompt, tokens=24):
    """Returns the prompt and what a model of this folder writes after it."""

    def make():
        model = base()
        model.init_cache(batch=2, length=len(prompt) + tokens)  # one for each part of the data axis
        return model

    layout = sw.layout(make, mesh, logical={"heads": "model", "mlp": "model", "vocab": "model"})
    model = sw.load(make, layout, folder)
    found = models.generate(model, [list(prompt)] * 2, tokens=tokens, layout=layout)
    return prompt + bytes(int(step[0]) for step in found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(main(place, quantised="--int4" in sys.argv)[-1].decode(errors="replace"))
