"""Hosts on one machine: each with a network, a name and memory of its own; needs root, and `ip`.

`with Hosts("node0", "node1") as hosts` makes two, joined by a bridge that stands for their switch. They are namespaces of
processes that wait for the end of a pipe, so that nothing is left of them, however this process ends.
`enter_host.py` runs a script there, `hosts.cut("node0")` pulls the cable, `hosts.kill("node0")` ends all of its
processes, and its memory.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def why_not():
    """Returns why hosts cannot be made here, or nothing."""
    if not sys.platform.startswith("linux"):
        return "namespaces are Linux's"
    try:
        with Hosts("node0"):
            return ""
    except (OSError, RuntimeError) as error:
        return str(error)


class Hosts:
    """Hosts that reach each other by name, and by `name.domain`."""

    def __init__(self, *names, domain="cluster"):
        self.names = names
        self.address = {name: f"10.83.0.{i + 1}" for i, name in enumerate(names)}
        self.holders = {}
        rows = [f"{address} {name} {name}.{domain}\n" for name, address in self.address.items()]
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.writelines(["127.0.0.1 localhost\n", *rows])
        self.file = Path(file.name)
        self.file.chmod(0o644)

    def __enter__(self):
        try:
            self._hold(
                "switch",
                "ip link add switch0 type bridge && "
                "ip address add 10.83.0.254/24 dev switch0 && ip link set switch0 up",
            )
            for number, name in enumerate(self.names):
                self._hold(
                    name,
                    f"mount -t tmpfs none /dev/shm && mount -t tmpfs none /run && mount --bind {self.file} /etc/hosts",
                )
                there = str(self.holders[name].pid)
                self._run("switch", "ip", "link", "add", self._port(name), "type", "veth", "peer",
                          "name", "eth0", "netns", there)  # fmt: skip
                self._run(
                    "switch", "ip", "link", "set", self._port(name), "master", "switch0", "up"
                )
                self._run(name, "ip", "address", "add", f"10.83.0.{number + 1}/24", "dev", "eth0")
                self._run(name, "ip", "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        for name in [name for name in self.names if name in self.holders]:
            self.kill(name)
        for holder in self.holders.values():
            holder.kill()
            holder.communicate()
        self.file.unlink(missing_ok=True)

    def _hold(self, name, prepare):
        script = f"hostname {name} && ip link set lo up && {prepare} && echo ready && exec cat"
        holder = self.holders[name] = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError(holder.communicate()[1].strip())

    def _run(self, name, *command):
        enter = ["nsenter", "--target", str(self.holders[name].pid), "--net", "--uts", "--mount"]
        done = subprocess.run([*enter, *command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def _port(self, name):
        return f"to-host{self.names.index(name)}"

    def about(self):
        """Returns what `slurm.py` must know of each host, and of their switch."""
        found = {name: {"pid": holder.pid} for name, holder in self.holders.items()}
        for name, address in self.address.items():
            found[name]["address"] = address
        return found

    def cut(self, name):
        """Pulls the cable of a host: nothing reaches it any more, and nobody is told."""
        self._run("switch", "ip", "link", "set", self._port(name), "down")

    def kill(self, name):
        """Ends all processes of a host at once, and what was in its memory."""
        try:
            there = os.readlink(f"/proc/{self.holders[name].pid}/ns/net")
        except OSError:
            return  # it was killed before
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and os.readlink(entry / "ns" / "net") == there:
                    os.kill(int(entry.name), signal.SIGKILL)
        # Connections that nobody has closed keep its network, which would go on to answer.
        with contextlib.suppress(RuntimeError):  # it is gone already
            self.cut(name)
