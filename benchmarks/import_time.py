"""Measures startup: importing Shardwise, and the help and completion of the command line.

    python benchmarks/import_time.py

The baseline is `from flax import nnx`, which every user of Shardwise imports anyway. Each round
runs every command once, each in its own process, so that a busy moment affects all of them alike.
Ratios are of median processor times.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

PYTHON, SHARDWISE = sys.executable, str(Path(sys.executable).with_name("shardwise"))
COMMANDS = {
    "from flax import nnx": [PYTHON, "-c", "from flax import nnx"],
    "import shardwise": [PYTHON, "-c", "import shardwise"],
    "import shardwise, and use a name": [PYTHON, "-c", "import shardwise; shardwise.layout"],
    "shardwise --help": [SHARDWISE, "--help"],
    "completing shardwise plan --on v": [SHARDWISE],
}
COMPLETION = {
    "_SHARDWISE_COMPLETE": "complete_bash",
    "COMP_WORDS": "shardwise plan --on v",
    "COMP_CWORD": "3",
}


def seconds(name: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if name.startswith("completing"):
        environment |= COMPLETION
    subprocess.run(COMMANDS[name], env=environment, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    for name in COMMANDS:
        seconds(name)  # warms the file cache
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, row in found.items():
            row.append(seconds(name))
    rival = statistics.median(found["from flax import nnx"])
    print(f"Python {sys.version.split()[0]}, {rounds} rounds, medians of processor time (measured)")
    for name, row in found.items():
        middle = statistics.median(row)
        print(f"{name:34} {1e3 * middle:6.0f} ms   {middle / rival:.2f} of flax.nnx")


if __name__ == "__main__":
    main()
