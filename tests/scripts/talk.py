"""Writes, waits and exits as told by its arguments; does not need JAX."""

import os
import signal
import subprocess
import sys
import time

index = int(os.environ["SHARDWISE_PROCESS"])
mode = sys.argv[1]
print(f"pid {index} {os.getpid()}")
if mode == "lines":
    print(f"out {index} of {os.environ['SHARDWISE_PROCESSES']}")
    sys.stderr.write(f"err {index}\n")
    for part in range(0, 101, 50):
        sys.stderr.write(f"\rbar {part}%")
    sys.stderr.write("\n")
    for _ in range(200):
        print(str(index) * 1000)
    sys.stdout.write("no newline")
elif mode == "devices":
    print(f"devices {os.environ.get('SHARDWISE_DEVICES')}")
elif mode == "exit" and index == 1:
    sys.exit(7)
elif mode == "killed" and index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
elif mode == "yes":
    while True:
        print("y" * 100)
else:
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "saves":
        signal.signal(signal.SIGTERM, lambda *_: (print(f"saved {index}"), sys.exit(0)))
    # A child of its own, which must not be left running either.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(f"pid {index}+ {child.pid}")
    print("waiting")
    time.sleep(60)
