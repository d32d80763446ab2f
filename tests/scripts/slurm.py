"""What `slurm_elastic.sh` uses of Slurm, on the hosts of `hosts.py`: srun, scontrol and sinfo.

Arguments: which of them, then its own. SLURM_HOSTS names a file that says which process each host is, and
which of them answers.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

ENTERING = Path(__file__).with_name("enter_host.py")
GRACE_SECONDS = 12


def scontrol(hosts, do, what, *rest):
    if (do, what) == ("show", "hostnames"):
        print("\n".join(rest[0].split(",")))
    else:
        print(f"{do} {what}", file=sys.stderr)


def sinfo(hosts, *arguments):
    (node,) = [a.partition("=")[2] for a in arguments if a.startswith("--nodes=")]
    print("allocated" if answers(hosts, node) else "down*")


def answers(hosts, name):
    """Returns whether a host is reached over the network: it refuses a connection."""
    probe = (
        "import socket, sys; s = socket.socket(); s.settimeout(1); "
        f"sys.exit(s.connect_ex(({hosts[name]['address']!r}, 9)) != 111)"
    )
    enter = ["nsenter", "--target", str(hosts["switch"]["pid"]), "--net"]
    return not subprocess.run([*enter, sys.executable, "-S", "-c", probe]).returncode


def srun(hosts, *arguments):
    """Starts the tasks, and when one fails ends the others; returns the highest exit code."""
    options = {}
    command = [*arguments]
    while command[0].startswith("--"):
        name, _, value = command.pop(0)[2:].partition("=")
        options[name] = value
    nodes = options.get("nodelist", os.environ["SLURM_JOB_NODELIST"]).split(",")
    if command[0] != sys.executable:  # such as `rm`: on the hosts that are left
        for node in nodes:
            enter = ["nsenter", "--target", str(hosts[node]["pid"]), "--mount"]
            if Path(f"/proc/{hosts[node]['pid']}").exists():
                subprocess.run([*enter, *command])
        return 0
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from forked import Forked

    count = int(options["ntasks"])
    each = count // len(nodes)
    given = {
        "SLURM_STEP_NODELIST": ",".join(nodes),
        "SLURM_NTASKS": str(count),
        "SLURM_STEP_NUM_TASKS": str(count),
    }
    tasks = []
    for number in range(count):
        own = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number % each)}
        host = str(hosts[nodes[number // each]]["pid"])
        tasks.append(
            Forked(
                [sys.executable, str(ENTERING), host, *command[1:]],
                env=os.environ | given | own,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    for number, task in enumerate(tasks):
        threading.Thread(target=show, args=(nodes[number // each], task), daemon=True).start()
    deadline = None
    while any(task.poll() is None for task in tasks) and time.monotonic() < (deadline or 1e18):
        if deadline is None and any(task.poll() for task in tasks):
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(0.05)
    for number, task in enumerate(tasks):
        if task.poll() is None:
            print(f"srun: {nodes[number // each]} is given up", flush=True)
            task.kill()
    return max(task.wait() % 256 for task in tasks)


def show(node, task):
    print(f"{node}: pid {task.pid}", flush=True)
    for line in task.stdout:
        print(f"{node}: {line}", end="", flush=True)


if __name__ == "__main__":
    _, name, *given = sys.argv
    known = json.loads(Path(os.environ["SLURM_HOSTS"]).read_text())
    sys.exit({"srun": srun, "scontrol": scontrol, "sinfo": sinfo}[name](known, *given))
