"""Enters a host of `hosts.py`, then runs a script there. Arguments: the pid of the host, the script, its arguments."""

import ctypes
import os
import runpy
import sys

_, pid, *sys.argv = sys.argv
here = os.getcwd()
for kind in ("net", "uts", "mnt"):
    with open(f"/proc/{pid}/ns/{kind}") as namespace:
        if ctypes.CDLL(None).setns(namespace.fileno(), 0):  # Python has it since 3.12
            sys.exit(f"{kind} of {pid} cannot be entered")
os.chdir(here)
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
