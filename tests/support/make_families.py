"""Writes tests/models/families: tiny checkpoints of each model family by Hugging Face transformers.

Run where PyTorch and transformers are installed: `PYTHONPATH=src python tests/support/make_families.py`. The tests read what it wrote,
and need neither. Each folder has what `save_pretrained` writes, and `expected.npz`: tokens and their
logits, how far transformers' own bfloat16 logits are from those, and prompts of several lengths with
the tokens that `generate` continues them with.

The weights are drawn larger than transformers draws them, so that attention and MLPs matter; their
values are bfloat16's, so that either dtype computes with the same weights.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from shardwise import models

FOLDER = Path(__file__).parents[1] / "models" / "families"
BATCH, LENGTH, NEW = 8, 11, 12
PROMPTS = (3, 9, 6, 5)

COMMON = {"max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}
COMMON["pad_token_id"] = None
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 300.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def sizes(layers, width, hidden, heads, kv_heads, vocab, **more):
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **COMMON,
        **more,
    }


GEMMA3 = {
    "head_dim": 8,
    "sliding_window": 4,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 10,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
FAMILIES = {
    "llama2": transformers.LlamaConfig(**sizes(2, 24, 40, 3, 3, 104)),
    "llama3": transformers.LlamaConfig(
        **sizes(3, 32, 48, 4, 2, 96, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)
    ),
    "qwen2": transformers.Qwen2Config(**sizes(2, 48, 40, 6, 2, 104)),
    "qwen3": transformers.Qwen3Config(
        **sizes(2, 32, 48, 4, 2, 104, head_dim=12, tie_word_embeddings=True)
    ),
    "gemma2": transformers.Gemma2Config(
        **sizes(3, 32, 48, 4, 2, 96, head_dim=12, sliding_window=4, query_pre_attn_scalar=10),
        attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0,
    ),
    "gemma3": transformers.Gemma3TextConfig(**sizes(5, 24, 32, 3, 1, 104, **GEMMA3)),
    "gemma3_vision": transformers.Gemma3Config(
        text_config=sizes(3, 16, 24, 2, 1, 64, **GEMMA3),
        vision_config={
            **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
            **{"num_attention_heads": 1, "image_size": 8, "patch_size": 4},
        },
        mm_tokens_per_image=4,
        image_token_index=63,
    ),
    "mistral": transformers.MistralConfig(
        **sizes(2, 32, 48, 4, 2, 104, head_dim=12, sliding_window=4)
    ),
    "mixtral": transformers.MixtralConfig(
        **sizes(2, 32, 24, 4, 2, 96, num_local_experts=4, num_experts_per_tok=2)
    ),
}


def draw(model, seed):
    """Gives the model random weights whose values bfloat16 has."""
    generator = torch.Generator().manual_seed(seed)
    offset = "Gemma" in type(model).__name__
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1 and "norm" in name:
            values = 0.2 * values + (0.0 if offset else 1.0)
        elif weight.ndim == 1:
            values = 0.3 * values
        elif "embed" not in name:
            values = 1.3 * values / weight.shape[-1] ** 0.5
        weight.data = values.to(torch.bfloat16).to(torch.float32)


def logits_of(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens).logits.float()


def continuation(model, prompt):
    """Returns the tokens that greedy decoding appends, and by how much the closest choice won."""
    with torch.no_grad():
        found = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack([step[0].topk(2).values for step in found.logits])
    return found.sequences[0, len(prompt) :], float((best[:, 0] - best[:, 1]).min())


def write(name, config):
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    vocab = config.get_text_config().vocab_size
    tokens = torch.randint(
        0, vocab - 2, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    for seed in range(50):  # until no choice is so close that rounding could change it
        config._attn_implementation = "eager"
        model = transformers.AutoModelForImageTextToText if "vision" in name else None
        model = (model or transformers.AutoModelForCausalLM).from_config(
            config, dtype=torch.float32
        )
        draw(model.eval(), seed)
        model.generation_config.eos_token_id = None
        pairs = [continuation(model, row[:n]) for row, n in zip(tokens, PROMPTS, strict=False)]
        if min(margin for _, margin in pairs) > 5e-3:
            break
    else:
        raise SystemExit(f"{name}: every seed has a close choice")
    logits = logits_of(model, tokens)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    rough = logits_of(model.to(torch.bfloat16), tokens)
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens.numpy().astype("int32"),
        logits=logits.numpy(),
        bfloat16_error=np.float32((rough - logits).abs().max()),
        prompt_lengths=np.array(PROMPTS, "int32"),
        generated=torch.stack([found for found, _ in pairs]).numpy().astype("int32"),
    )
    total = sum(file.stat().st_size for file in folder.iterdir())
    spread = float(logits.std())
    print(
        f"{name}: seed {seed}, {total:,} bytes, logits ±{spread:.2f}, bfloat16 {float((rough - logits).abs().max()):.3f}"
    )
    reread(name, tokens, logits)


def reread(name, tokens, logits):
    """Checks that transformers computes the same from the config.json that Shardwise writes."""
    if "vision" in name:
        return  # of these, Shardwise writes the text model alone
    folder, read = FOLDER / name, models.config_from_hf(FOLDER / name)
    like = json.loads((folder / "config.json").read_text())
    for written in (models.config_to_hf(read), models.config_to_hf(read, like=like)):
        with tempfile.TemporaryDirectory() as copy:
            shutil.copy(folder / "model.safetensors", copy)
            (Path(copy) / "config.json").write_text(json.dumps(written))
            model = transformers.AutoModelForCausalLM.from_pretrained(
                copy, attn_implementation="eager"
            )
            assert model.dtype == torch.float32
            assert torch.equal(logits_of(model.eval(), tokens), logits), name


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        write(name, FAMILIES[name])
