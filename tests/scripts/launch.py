"""Runs launcher.py like `shardwise launch`: processes, devices (0: unchanged), command."""

import importlib.util
import os
import pathlib
import sys

# Loaded by path: the launcher itself does not need JAX, which takes two seconds to import.
path = pathlib.Path(__file__).parents[2] / "src" / "shardwise" / "_processes" / "launcher.py"
spec = importlib.util.spec_from_file_location("launcher", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.GRACE_SECONDS = float(os.environ.get("LAUNCH_GRACE", module.GRACE_SECONDS))
processes, devices, *command = sys.argv[1:]
sys.exit(module.launch(command, int(processes), int(devices) or None))
