"""Runs launcher.py as `shardwise launch` does: processes, devices (0: as they are), command."""

import importlib.util
import os
import pathlib
import sys

# By its path: the launcher itself needs no JAX, whose import would cost two seconds each time.
path = pathlib.Path(__file__).parents[2] / "src" / "shardwise" / "_processes" / "launcher.py"
spec = importlib.util.spec_from_file_location("launcher", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.GRACE_SECONDS = float(os.environ.get("LAUNCH_GRACE", module.GRACE_SECONDS))
processes, devices, *command = sys.argv[1:]
sys.exit(module.launch(command, int(processes), int(devices) or None))
