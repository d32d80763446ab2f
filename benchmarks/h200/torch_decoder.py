"""Times the training step of a 1.2B decoder in PyTorch on one GPU.

The model is the one `shardwise_decoder.py` times: 16 layers, width 2048, SwiGLU
hidden 8192, 16 heads of 128, rotary embeddings, RMSNorm, 32,000 words, an
untied head; f32 parameters under bf16 autocast, fused AdamW, `torch.compile`.
Prints one JSON line for each requested setting:

    python torch_decoder.py --attention auto cudnn --batch 16
"""

import argparse
import contextlib
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

PEAK = 989e12  # dense bf16, H100/H200 SXM
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def rotate(x, cos, sin):
    """Rotary embedding of x (batch, seq, heads, head_dim), in f32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width, hidden, heads, split):
        super().__init__()
        self.heads, self.hidden, self.split = heads, hidden, split
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        if split:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        else:
            self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        h, shape = self.norm1(x), (b, t, self.heads, d // self.heads)
        if self.split:
            q, k, v = (f(h).view(shape) for f in (self.q, self.k, self.v))
        else:
            q, k, v = self.qkv(h).view(b, t, 3, *shape[2:]).unbind(2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, layers, width, hidden, heads, vocab, seq, split):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, split) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        half = width // heads // 2
        angle = torch.arange(seq)[:, None] * 10000.0 ** -(torch.arange(half) / half)
        self.register_buffer("cos", angle.cos()[:, None, :])
        self.register_buffer("sin", angle.sin()[:, None, :])
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def measure(args, attention, mode):
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        sizes = (args.layers, args.width, args.hidden, args.heads, args.vocab, args.seq)
        model = Decoder(*sizes, args.split)
        tokens = torch.randint(args.vocab, (args.batch, args.seq + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    forward = torch.compile(model, mode=None if mode == "default" else mode)
    backend = BACKENDS.get(attention)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        start = time.perf_counter()
        first = step().item()
        compile_s = time.perf_counter() - start
        for _ in range(args.warmup):
            step()
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
        start = time.perf_counter()
        marks[0].record()
        for mark in marks[1:]:
            loss = step()
            mark.record()
        torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - start) / args.steps * 1e3
    ms = statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))
    words = args.batch * args.seq
    flops = (6 * count + 6 * args.layers * args.seq * args.width) * words
    return {
        "name": f"torch attention={attention} mode={mode} qkv={'split' if args.split else 'fused'}",
        "ms": round(ms, 2),
        "wall_ms": round(wall_ms, 2),
        "mfu": round(flops / ms * 1e3 / PEAK * 100, 2),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "compile_s": round(compile_s, 1),
        "params": count,
        "loss": [round(first, 4), round(loss.item(), 4)],
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", nargs="+", default=["auto"], help="auto, cudnn, flash")
    parser.add_argument("--mode", nargs="+", default=["default"], help="torch.compile modes")
    parser.add_argument("--split", action="store_true", help="three products for q, k and v")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    for mode in args.mode:
        for attention in args.attention:
            try:
                line = measure(args, attention, mode)
            except Exception as error:
                line = {
                    "name": f"torch attention={attention} mode={mode}",
                    "error": repr(error)[:300],
                }
            print(json.dumps(line), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
