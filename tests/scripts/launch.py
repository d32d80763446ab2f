"""Runs launcher.py like `shardwise launch`: processes, devices (0: unchanged), command.

With `--elastic SECONDS` in front, like `shardwise launch --elastic --as-hosts --back-after SECONDS`.
With `launch` in front, it is that command, with its own options, of a program that is in Python.

If this process was forked with everything imported (`forked.py`), so are those of the command.
"""

import importlib.util
import os
import pathlib
import signal
import sys

HERE = pathlib.Path(__file__)
# Loaded by path: the launcher itself does not need JAX, which takes two seconds to import.
path = HERE.parents[2] / "src" / "shardwise" / "_processes" / "launcher.py"
spec = importlib.util.spec_from_file_location("launcher", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.GRACE_SECONDS = float(os.environ.get("LAUNCH_GRACE", module.GRACE_SECONDS))


class Child:
    """What the launcher uses of a `Popen`."""

    returncode = None

    def __init__(self, pid, out, err):
        self.pid, self.stdout, self.stderr = pid, os.fdopen(out, "rb"), os.fdopen(err, "rb")

    def wait(self):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def start(program, command, environment):
    """As `launcher.start`, by a fork."""
    end_with_parent = module._end_with_parent()
    out, err = os.pipe(), os.pipe()
    pid = forked.fork()
    if pid:
        os.close(out[1])
        os.close(err[1])
        return Child(pid, out[0], err[0])
    os.setsid()
    end_with_parent()
    for number in module._FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, own)
    forked.set_streams(os.open(os.devnull, os.O_RDONLY), out[1], err[1])
    script = [] if command[0] == sys.executable else [program]
    forked.become([*script, *command[1:]], environment)
    forked.execute_and_exit()


def fork_them():
    """Makes the launcher fork what it starts."""
    global forked
    sys.path.insert(0, str(HERE.parents[1] / "support"))
    import forked

    module.start = start


given = sys.argv[1:]
if given[0] == "launch":
    from shardwise import _cli
    from shardwise._processes import launcher as module

    fork_them()
    sys.exit(_cli.main())
elastic = given[1] if given[0] == "--elastic" else None
processes, devices, *command = given if elastic is None else given[2:]
if elastic is not None:
    from shardwise._processes import launcher as module
    from shardwise._processes import supervisor
if "jax" in sys.modules and command[0] == sys.executable:
    fork_them()
if elastic is None:
    sys.exit(module.launch(command, int(processes), int(devices) or None))
sys.exit(
    supervisor.launch_elastic(
        command,
        int(processes),
        int(devices) or None,
        back_seconds=float(elastic),
        as_hosts=True,
    )
)
