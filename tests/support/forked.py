"""Processes that start with everything imported: forks of one that has imported it all.

`Forked([sys.executable, "script.py", …])` is a `subprocess.Popen` of a real process, with its own
pid, signals and exit status, but without the two seconds of imports. It cannot be told from one that
Python started, so it is for every test but those of how a process starts.
"""

import atexit
import ctypes
import gc
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import warnings

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


class Forked(subprocess.Popen):
    """A process of `sys.executable`: `[-P] script`, `[-P] -m module` or `-c code`, with its arguments."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
        restore_signals, gid, gids, uid, umask, start_new_session, *more,
    ):  # fmt: skip
        assert args[0] == sys.executable and not (executable or preexec_fn or pass_fds or shell)
        standard = (p2cread, c2pwrite, errwrite)
        asked = {
            "arguments": [os.fspath(each) for each in args[1:]],
            "cwd": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "session": bool(start_new_session),
        }
        self.pid = _parent().fork(asked, [n if x == -1 else x for n, x in enumerate(standard)])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(command, timeout=None, **how):
    """Returns what `subprocess.run` with `capture_output` and `text` would."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Forked(command, **{**pipes, "text": True, **how}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class _Parent:
    """The process that has imported everything, seen from the one that asks it to fork."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        self.lock = threading.Lock()
        given = {k: v for k, v in os.environ.items() if k == "JAX_PLATFORMS" or k[:4] != "JAX_"}
        for name in ("XLA_FLAGS", "PYTHONUNBUFFERED"):
            given.pop(name, None)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=given,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.end)

    def fork(self, asked, descriptors):
        with self.lock:
            return self._fork(json.dumps(asked).encode(), descriptors)

    def _fork(self, text, descriptors):
        # What is forked loses its parent at once, and becomes a child of the process that asked.
        prctl = ctypes.CDLL(None).prctl
        prctl(_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self.socket, [b"%8d" % len(text)], descriptors)
            self.socket.sendall(text)
            return int(self.socket.recv(64))
        finally:
            prctl(_SUBREAPER, 0, 0, 0, 0)

    def end(self):
        self.socket.close()
        self.process.wait()


_parents = {}


def _parent():
    if os.getpid() not in _parents:
        _parents[os.getpid()] = _Parent()
    return _parents[os.getpid()]


# --- in the process that forks --------------------------------------------------------------------


def import_everything():
    """Imports what scripts and commands need, and starts no backend."""
    import jax  # noqa: F401
    import numpy as np  # noqa: F401
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import programs
    from flax import nnx  # noqa: F401

    from shardwise import _cli, _public  # noqa: F401

    programs.keep()
    gc.collect()
    gc.freeze()  # children do not scan, and copy, what was imported


def fork():
    """Returns as `os.fork` does, without JAX's warning: it has no threads yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def become(arguments, environment):
    """Makes this process one that was started with these arguments and this environment."""
    import jax

    os.environ.clear()
    os.environ.update(environment)
    if "JAX_PLATFORMS" not in environment:
        jax.config.update("jax_platforms", None)
    for name, value in environment.items():
        if name.startswith("JAX_") and hasattr(jax.config, name.lower()):
            now = getattr(jax.config, name.lower())
            kind = type(now) if isinstance(now, int | float) else str
            jax.config.update(name.lower(), kind(float(value)) if kind is not str else value)
    if environment.get("PYTHONUNBUFFERED"):
        # `reconfigure(write_through=True)` alone would leave it in the buffer below the text.
        for name in ("stdout", "stderr"):
            raw = open(getattr(sys, name).fileno(), "wb", 0, closefd=False)
            kept = {"encoding": getattr(sys, name).encoding, "errors": getattr(sys, name).errors}
            setattr(sys, name, io.TextIOWrapper(raw, write_through=True, **kept))
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [*arguments]


def execute():
    """Runs what `sys.argv` has, as Python would."""
    if sys.argv[0] == "-P":
        del sys.argv[0], sys.path[0]
        if sys.argv[0] == "-m":
            del sys.argv[0]
            return runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return runpy.run_path(sys.argv[0], run_name="__main__")
    how = sys.argv[0]
    if how == "-c":
        _, code, *rest = sys.argv
        sys.argv, sys.path[0] = ["-c", *rest], ""
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif how == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(how))
        runpy.run_path(how, run_name="__main__")


def execute_and_exit():
    """Runs it, and exits as Python would, from within any function."""
    status = 0
    try:
        execute()
    except SystemExit as error:
        status = error.code
        # It looks whether anything catches `SystemExit`, and this function does.
        if watching := sys.modules.get("shardwise._processes.peer_watch"):
            for watch in watching.WATCHES:
                watch.status = status
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.last_exc = error
        sys.excepthook(*sys.exc_info())
        status = 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status or 0)


def set_streams(*descriptors):
    """Makes three descriptors stdin, stdout and stderr, and closes all others."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _received(asking):
    """Returns the next request and its descriptors; exits when nobody can ask any more."""
    head, descriptors, _, _ = socket.recv_fds(asking, 8, 3)
    if not head:
        os._exit(0)
    text = b""
    while len(text) < int(head):
        text += asking.recv(int(head) - len(text))
    return json.loads(text), descriptors


def _serve(asking):
    """Forks a process for each request; returns in that process."""
    while True:
        asked, descriptors = _received(asking)
        reading, writing = os.pipe()
        between = fork()
        if not between:
            between = os.getpid()
            child = fork()
            if child:
                os.write(writing, b"%d" % child)
                os._exit(0)
            while os.getppid() == between:  # until it is a child of the process that asked
                time.sleep(0.001)
            if asked["session"]:
                os.setsid()
            set_streams(*descriptors)
            os.chdir(asked["cwd"])
            return become(asked["arguments"], asked["environment"])
        os.close(writing)
        os.waitpid(between, 0)
        asking.send(os.read(reading, 64))
        for descriptor in (reading, *descriptors):
            os.close(descriptor)


if __name__ == "__main__":
    import_everything()
    _asking = socket.socket(fileno=int(sys.argv[1]))
    _serve(_asking)
    _asking.detach()  # it is closed already
    del _asking
    execute()
