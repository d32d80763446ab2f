"""Compares Shardwise with PyTorch on one GPU, in turn, each in its own process.

    python benchmarks/h200/compare.py --rounds 2

Prints a JSON line for each turn, and a table of medians at the end.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TURNS = {
    "torch": ["torch_decoder.py"],
    "shardwise": ["shardwise_decoder.py"],
    "torch, q k v split": ["torch_decoder.py", "--split"],
    "torch, max-autotune": ["torch_decoder.py", "--mode", "max-autotune-no-cudagraphs"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", nargs="+", default=["torch", "shardwise"], choices=TURNS)
    parser.add_argument("--limit", type=int, default=200, help="seconds for one turn")
    args, rest = parser.parse_known_args()
    rows = {}
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for _ in range(args.rounds):
        for name in args.turns:
            script, *options = TURNS[name]
            command = [sys.executable, str(HERE / script), *options, *rest]
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=args.limit
                )
                line = json.loads(done.stdout.splitlines()[-1])
            except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
                print(f"{name}: {error!r}", flush=True)
                if not isinstance(error, subprocess.TimeoutExpired):
                    print(done.stderr[-2000:], flush=True)
                continue
            print(json.dumps(line), flush=True)
            rows.setdefault(name, []).append(line)
    rival = min(
        (statistics.median(r["ms"] for r in rows[n]) for n in rows if "torch" in n), default=None
    )
    print(f"{'':22}{'ms':>8}{'MFU %':>8}{'GiB':>8}{'to torch':>10}  (measured)")
    for name, found in rows.items():
        ms = statistics.median(r["ms"] for r in found)
        ratio = f"{ms / rival:.3f}" if rival else ""
        mfu = statistics.median(r["mfu"] for r in found)
        print(f"{name:22}{ms:8.1f}{mfu:8.2f}{found[0]['gib']:8.1f}{ratio:>10}")


if __name__ == "__main__":
    main()
