"""Enters a host of `hosts.py`, then runs a script there. Arguments: the pid of the host, the script, its arguments."""

import os
import runpy
import sys

_, pid, *sys.argv = sys.argv
here = os.getcwd()
for kind in ("net", "uts", "mnt"):
    with open(f"/proc/{pid}/ns/{kind}") as namespace:
        os.setns(namespace.fileno(), 0)
os.chdir(here)
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
