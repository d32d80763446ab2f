"""Real processes on this machine: started, joined, lost and ended."""

import inspect
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
import yaml
from forked import Forked
from jax._src import clusters

from shardwise._processes.joining import distributed
from shardwise._processes.launcher import launch
from shardwise._processes.lost import lost_processes, naming_lost_process
from shardwise._processes.peer_watch import MARGIN_SECONDS
from shardwise._processes.peers import Processes

HERE = Path(__file__).parents[1] / "scripts"
TALK = [sys.executable, str(HERE / "talk.py")]
TRAIN = [sys.executable, str(HERE / "train.py")]
LAUNCH = [sys.executable, str(HERE / "launch.py")]
CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
HOST = socket.gethostname()
TIMEOUT = (
    6  # half of it passes before a silent process is announced: 2 s is too short on a busy machine
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**extra):
    # Do not pass on the eight devices and XLA flags of the tests themselves.
    names = ("SHARDWISE_", "XLA_FLAGS", "SLURM_", "OMPI_", "JAX_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    return kept | {"PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"} | extra


def start(command, **extra):
    # Those that need JAX start with it imported.
    process = Forked if str(HERE / "train.py") in command else subprocess.Popen
    return process(
        command,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_joined(count, *options):
    place = {"SHARDWISE_COORDINATOR": f"127.0.0.1:{free_port()}", "SHARDWISE_PROCESSES": str(count)}
    extra = [place | {"SHARDWISE_PROCESS": str(i), "SHARDWISE_DEVICES": "1"} for i in range(count)]
    return [start([*TRAIN, *options], **e) for e in extra]


def read_until(process, text):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} was never written: {''.join(lines)}")


def pids(text):
    return [int(pid) for pid in re.findall(r"pid [\d+]+ (\d+)", text)]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(numbers, seconds=5):
    deadline = time.monotonic() + seconds
    while not all(map(gone, numbers)):
        assert time.monotonic() < deadline, f"still running: {[n for n in numbers if not gone(n)]}"
        time.sleep(0.05)


def test_lines_are_forwarded_complete_with_their_index(capfd):
    assert launch([*TALK, "lines"], 2) == 0
    out, err = capfd.readouterr()
    for index in (0, 1):
        mine = [line[4:] for line in out.splitlines() if line.startswith(f"[{index}] ")]
        assert mine[1:] == [f"out {index} of 2", *[str(index) * 1000] * 200, "no newline"]
        errors = [line[4:] for line in err.splitlines() if line.startswith(f"[{index}] ")]
        assert errors == [f"err {index}", "bar 100%"]
    assert "\r" not in out + err


@pytest.mark.parametrize("devices", [None, 4])
def test_devices_reach_the_process(devices, capfd, monkeypatch):
    monkeypatch.setenv("SHARDWISE_DEVICES", "3")
    assert launch([*TALK, "devices"], 1, devices) == 0
    assert f"[0] devices {devices}\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    "mode, code, how",
    [("exit", 7, "exited with code 7"), ("killed", 137, "was killed by SIGKILL")],
)
def test_a_failure_is_named_and_ends_the_rest(mode, code, how, capfd):
    assert launch([*TALK, mode], 3) == code
    out, err = capfd.readouterr()
    assert f"shardwise: process 1 {how}; terminating the other 2\n" in err
    # One that was slow to start may have been terminated before it wrote its pid.
    assert pids(out)
    wait_until_gone(pids(out))


def test_a_process_that_ignores_sigterm_is_killed(capfd, monkeypatch):
    monkeypatch.setattr("shardwise._processes.launcher.GRACE_SECONDS", 0.5)
    # It ignores SIGTERM as soon as it waits, long before the other one exits.
    stubborn = (
        "import os, runpy, sys, time;"
        f"sys.argv = ['talk', 'stubborn']; first = os.environ['SHARDWISE_PROCESS'] == '0';"
        f"runpy.run_path({str(HERE / 'talk.py')!r}) if first else (time.sleep(1), sys.exit(3))"
    )
    assert launch([sys.executable, "-c", stubborn], 2) == 3
    out, err = capfd.readouterr()
    assert "process 0 did not exit within 0 s of SIGTERM; sending SIGKILL" in err
    wait_until_gone(pids(out))


@pytest.mark.parametrize(
    "number, mode, code",
    [(signal.SIGTERM, "saves", 0), (signal.SIGINT, "wait", 130), (signal.SIGUSR1, "wait", 138)],
    ids=["SIGTERM", "SIGINT", "SIGUSR1"],
)
def test_signals_are_forwarded(number, mode, code):
    with start([*LAUNCH, "2", "0", *TALK, mode]) as launcher:
        text = read_until(launcher, "waiting") + read_until(launcher, "waiting")
        launcher.send_signal(number)
        rest, _ = launcher.communicate(timeout=10)
        assert launcher.returncode == code
    if mode == "saves":
        assert "[0] saved 0\n" in rest and "[1] saved 1\n" in rest
    else:
        said = [line for line in rest.splitlines() if line.startswith("shardwise: ")]
        assert said == [f"shardwise: stopped by {number.name}"]
    wait_until_gone(pids(text + rest))


def test_a_second_signal_ends_processes_that_ignore_the_first():
    with start([*LAUNCH, "2", "0", *TALK, "stubborn"], LAUNCH_GRACE="0.5") as launcher:
        text = read_until(launcher, "waiting") + read_until(launcher, "waiting")
        launcher.terminate()
        time.sleep(0.5)
        assert launcher.poll() is None
        launcher.terminate()
        rest, _ = launcher.communicate(timeout=5)
    assert launcher.returncode == 143
    assert "shardwise: received a second SIGTERM; terminating all processes\n" in rest
    wait_until_gone(pids(text))


def test_the_processes_end_with_a_launcher_that_is_killed():
    with start([*LAUNCH, "2", "0", *TALK, "wait"]) as launcher:
        text = read_until(launcher, "waiting") + read_until(launcher, "waiting")
        launcher.kill()
        own = [int(pid) for pid in re.findall(r"pid \d (\d+)", text)]
        assert len(own) == 2
        wait_until_gone(own)
        # Their own child processes are out of the launcher's reach by then.
        for pid in set(pids(text)) - set(own):
            os.kill(pid, signal.SIGKILL)


def test_a_reader_that_leaves_ends_the_run():
    command = subprocess.list2cmdline([*LAUNCH, "2", "0", *TALK, "yes"])
    run = subprocess.run(
        ["bash", "-c", f"{command} | head -n 20; exit ${{PIPESTATUS[0]}}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (run.returncode, run.stderr) == (141, "")
    wait_until_gone(pids(run.stdout))


@pytest.mark.parametrize(
    "command, processes, devices, text",
    [
        (["no-such-program"], 1, None, "'no-such-program' is neither on the PATH nor"),
        ([], 1, None, "a non-empty list of a program and its arguments, got []"),
        ("python train.py", 1, None, "got 'python train.py'"),
        (["python"], 0, None, "the number of processes must be a positive integer, got 0"),
        (["python"], 2, 0, "the number of devices must be a positive integer, got 0"),
    ],
)
def test_wrong_inputs(command, processes, devices, text, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name.startswith("no-") else name)
    with pytest.raises(ValueError, match=re.escape(text)):
        launch(command, processes, devices)


def test_sums_are_those_of_one_process(capfd):
    for processes in (1, 2, 4):
        devices, command = 4 // processes, [*TRAIN, "--until", "10"]
        if processes == 2:  # started by the launcher itself; the others are forked by the script
            assert launch(command, processes, devices) == 0
            out = capfd.readouterr().out
        else:
            with start([*LAUNCH, str(processes), str(devices), *command]) as launcher:
                out, _ = launcher.communicate(timeout=60)
            assert launcher.returncode == 0, out
        assert len(re.findall(r"sum \[24.0, 28.0, 32.0, 36.0\]", out)) == processes
        for index in range(processes):
            where = r", coordinator 127.0.0.1:\d+" if processes > 1 else ""
            assert re.search(
                rf"\[{index}\] place process {index} of {processes} \(shardwise launch{where}\): "
                rf"{4 // processes} of 4 cpu devices\n",
                out,
            )


# How many processes, which of them is lost, by what, and why the others say so.
LOSSES = {
    "killed": (4, 2, signal.SIGKILL, "it is no longer running on this host"),
    "killed coordinator": (2, 0, signal.SIGKILL, "it is the coordinator and does not respond"),
    "silent": (3, 1, signal.SIGSTOP, f"it sent no heartbeat for {TIMEOUT} s"),
    "silent coordinator": (2, 0, signal.SIGSTOP, "it is the coordinator and does not respond"),
}


@pytest.fixture(scope="module")
def ended():
    """How runs end that wait for seconds, until a timeout or for each other: all at the same time.

    By case: the processes, since when one is lost, what each printed, and when it ended.
    """
    runs = {case: start_joined(row[0], "--timeout", str(TIMEOUT)) for case, row in LOSSES.items()}
    runs["leaves"] = start_joined(2, "--leave", "1", "--timeout", str(TIMEOUT))
    runs["exits"] = start_joined(2, "--exit", "1", "--timeout", "60")
    for case, more in (("named", []), ("plain", ["--plain"])):
        runs[case] = start_joined(2, "--fail", "1", *more)
    everyone = [process for processes in runs.values() for process in processes]

    def finish(process):
        text, _ = process.communicate(timeout=50)
        return text, time.monotonic()

    since = {}
    try:
        # From here, since starting all takes long on a busy machine.
        before = read_until(runs["leaves"][1], "leaves")
        since["leaves"] = time.monotonic()
        for case in LOSSES:
            for process in runs[case]:
                read_until(process, "sum")
        # A heartbeat or two, so that the processes know each other.
        time.sleep(1)
        for case, (_, victim, number, _) in LOSSES.items():
            since[case] = time.monotonic()
            runs[case][victim].send_signal(number)
        stopped = [runs[case][row[1]] for case, row in LOSSES.items()]
        with ThreadPoolExecutor(len(everyone)) as pool:
            waiting = {p.pid: pool.submit(finish, p) for p in everyone if p not in stopped}
        texts = {pid: future.result() for pid, future in waiting.items()}
        yield runs, since, texts, before
    finally:
        for process in everyone:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("case", LOSSES)
def test_a_lost_process_is_named_by_all_others(case, ended):
    count, victim, _, why = LOSSES[case]
    runs, since, texts, _ = ended
    lost = runs[case][victim]
    for process in (p for p in runs[case] if p is not lost):
        text, end = texts[process.pid]
        assert process.returncode == 75, text
        name = rf"process {victim} of {count} \(pid {lost.pid} on host {re.escape(HOST)}\)"
        assert re.search(rf"{name} was lost( during step \d+)?: {why}.*", text), text
        assert not re.search(rf"process (?!{victim})\d of \d \(pid \d+ on host", text), text
        assert end - since[case] < TIMEOUT + MARGIN_SECONDS


def test_a_process_that_leaves_early_is_named_by_the_other(ended):
    runs, since, texts, before = ended
    processes = runs["leaves"]
    (other, end), (left, last) = (texts[process.pid] for process in processes)
    assert [process.returncode for process in processes] == [75, 75]
    name = rf"process 1 of 2 \(pid {processes[1].pid} on host {re.escape(HOST)}\) ended"
    assert re.search(f"{name}: process 0 is still waiting for it", other), other
    assert re.search(name, left), before + left
    assert max(end, last) - since["leaves"] < 2 * TIMEOUT + MARGIN_SECONDS


@pytest.mark.parametrize("case", ["named", "plain"])
def test_a_process_that_fails_is_named_by_the_other(case, ended):
    runs, _, texts, _ = ended
    (other, _), (failed, _) = (texts[process.pid] for process in runs[case])
    assert [process.returncode for process in runs[case]] == [75, 1]
    assert "ValueError: this process raised an error" in failed
    how = "failed: " if case == "plain" else r"failed during step \d+: "
    assert re.search(
        rf"process 1 of 2 \(pid \d+ on host .*\) {how}ValueError: this process raised", other
    )


def test_a_process_that_exits_with_a_status_is_reported_as_failed_at_once(ended):
    """At once: its timeout of 60 s is longer than what the others are given to end."""
    runs, _, texts, _ = ended
    processes = runs["exits"]
    (other, _), _ = (texts[process.pid] for process in processes)
    assert [process.returncode for process in processes] == [75, 3]
    name = rf"process 1 of 2 \(pid {processes[1].pid} on host {re.escape(HOST)}\)"
    assert re.search(rf"{name} failed( during step 5)?: exit status 3", other), other


def test_the_launcher_names_a_process_that_is_killed():
    with start([*LAUNCH, "2", "1", *TRAIN]) as launcher:
        text = read_until(launcher, "sum") + read_until(launcher, "sum")
        victim = int(re.search(r"\[1\] pid 1 (\d+)", text)[1])
        os.kill(victim, signal.SIGKILL)
        rest, _ = launcher.communicate(timeout=20)
    assert launcher.returncode == 137
    assert "shardwise: process 1 was killed by SIGKILL; terminating the other\n" in rest
    assert re.search(rf"\[0\] .*process 1 of 2 \(pid {victim} on host", rest)
    wait_until_gone(pids(text))


def test_a_failed_start_is_explained():
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = taken.getsockname()[1]
        cases = {
            (0, used): (1, f"ValueError: process 0 cannot listen on port {used} of 127.0.0.1"),
            (0, port): (75, "shardwise: process 0 exits: not all 2 processes joined within 1 s."),
            (1, free_port()): (1, "ValueError: process 1 of 2 could not reach the coordinator"),
        }
        started = {
            (index, port): start(
                [*TRAIN, "--start", "1"],
                SHARDWISE_COORDINATOR=f"127.0.0.1:{port}",
                SHARDWISE_PROCESSES="2",
                SHARDWISE_PROCESS=str(index),
            )
            for index, port in cases
        }
        for case, (code, text) in cases.items():
            output, _ = started[case].communicate(timeout=30)
            assert (started[case].returncode, text in output) == (code, True), output


SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
OMPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
    "OMPI_VERSION": "4.1.6",
    "OMPI_COMM_WORLD_SIZE": "2",
}


@pytest.mark.parametrize(
    "common, own, found",
    [
        (SLURM, ("SLURM_PROCID", "SLURM_LOCALID"), "Slurm, coordinator localhost"),
        (OMPI, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "Open MPI, coordinator 127"),
    ],
    ids=["Slurm", "Open MPI"],
)
def test_two_processes_of_a_cluster(common, own, found):
    common = common | {"JAX_COORDINATOR_PORT": str(free_port())}
    processes = [
        start([*TRAIN, "--until", "10"], **common, **dict.fromkeys(own, str(index)))
        for index in (0, 1)
    ]
    for index, process in enumerate(processes):
        text, _ = process.communicate(timeout=30)
        assert process.returncode == 0, text
        assert f"place process {index} of 2 ({found}" in text
        assert "sum [4.0, 6.0, 8.0, 10.0]" in text


@pytest.fixture
def alone(monkeypatch):
    for name in os.environ:
        if name.startswith(("SHARDWISE_", "SLURM_", "OMPI_", "JAX_COORDINATOR", "PMI_")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    "extra, found",
    [
        ({}, "one process"),
        # JAX needs the kubernetes package to find out more, and must not warn about it in any pod.
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "one process"),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, "Slurm"),
        # The shell of an salloc for four tasks is one step of one task.
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, "Slurm"),
        ({"SLURM_NTASKS": "1"}, "Slurm"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, "Open MPI"),
        ({"SHARDWISE_COORDINATOR": "127.0.0.1:1"}, "shardwise launch"),
    ],
    ids=["nothing", "pod", "one task", "salloc", "older Slurm", "mpirun -n 1", "launch -n 1"],
)
def test_one_process_starts_nothing(extra, found, alone):
    common = {
        "Slurm": SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        "Open MPI": OMPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        "shardwise launch": {"SHARDWISE_PROCESSES": "1", "SHARDWISE_PROCESS": "0"},
    }.get(found, {})
    for name, value in (common | extra).items():
        alone.setenv(name, value)
    if "SLURM_STEP_NUM_TASKS" not in extra:
        alone.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    assert distributed() == distributed() == Processes(0, 1, found)
    assert not jax.distributed.is_initialized()
    count = jax.device_count()
    assert str(distributed()) == f"process 0 of 1 ({found}): {count} of {count} cpu devices"


LAUNCHED = {
    "SHARDWISE_COORDINATOR": "127.0.0.1:1",
    "SHARDWISE_PROCESSES": "2",
    "SHARDWISE_PROCESS": "0",
}


@pytest.mark.parametrize(
    "extra, text",
    [
        (
            {"SHARDWISE_PROCESS": "0"},
            "set, but SHARDWISE_COORDINATOR and SHARDWISE_PROCESSES are not",
        ),
        (LAUNCHED | {"SHARDWISE_PROCESS": "x"}, "SHARDWISE_PROCESS must be an integer of"),
        (LAUNCHED | {"SHARDWISE_PROCESS": "2"}, "SHARDWISE_PROCESS must be less than"),
        (LAUNCHED | {"SHARDWISE_PROCESSES": "0"}, "must be an integer of at least 1, got '0'"),
        (LAUNCHED | {"SHARDWISE_COORDINATOR": "here"}, "must be host:port, got 'here'"),
        (LAUNCHED, "a JAX backend has already started, so processes can no longer be joined: call"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is 2, but JAX "),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "so the number of processes is unknown"),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "?"}, "JAX detected"),
    ],
    ids=["partial", "word", "beyond", "none", "address", "late", "MPICH", "JAX", "Slurm"],
)
def test_inconsistent_environments_are_refused(extra, text, alone):
    jax.devices()
    for name, value in extra.items():
        alone.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(text)):
        distributed()


@pytest.mark.parametrize("name", ["timeout_seconds", "start_seconds"])
def test_timeouts_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be a finite number of at least 1, got 0"):
        distributed(**{name: 0})


def test_one_process_loses_nobody_and_keeps_its_errors():
    assert lost_processes() == []
    with pytest.raises(ValueError, match="UNKNOWN: Gloo"), naming_lost_process("step 1"):
        raise ValueError("UNKNOWN: Gloo all-reduce failed")


def test_the_slurm_job_file_is_a_script():
    file = CLUSTER / "slurm.sh"
    assert subprocess.run(["bash", "-n", file], capture_output=True).returncode == 0
    text = file.read_text(encoding="utf-8")
    assert {"--requeue", "--signal=TERM@120"} <= set(re.findall(r"^#SBATCH (\S+)", text, re.M))
    read = {name for name in re.findall(r"JAX_[A-Z_]+", text)}
    assert read == {"JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_PORT"}
    assert all(name in _sources() for name in read)


def test_the_jobset_has_what_jax_reads():
    documents = list(yaml.safe_load_all((CLUSTER / "jobset.yaml").read_text(encoding="utf-8")))
    kinds = {document["kind"]: document for document in documents}
    assert {"ServiceAccount", "Role", "RoleBinding", "JobSet"} <= kinds.keys()
    job = kinds["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    [container] = pod["containers"]
    port = {entry["name"]: entry["value"] for entry in container["env"]}["JAX_COORDINATOR_PORT"]
    assert container["ports"] == [{"containerPort": int(port)}]
    kubernetes = inspect.getsource(clusters.K8sCluster)
    for name in ("KUBERNETES_SERVICE_HOST", "HOSTNAME", "JOB_COMPLETION_INDEX"):
        assert f"'{name}'" in kubernetes
    for call in ("list_namespaced_pod", "read_namespaced_job", "list_namespaced_service"):
        resource = f"{call.rpartition('_')[2]}s"
        assert any(resource in rule["resources"] for rule in kinds["Role"]["rules"])
    assert "JAX_COORDINATOR_PORT" in _sources()


def _sources():
    return "".join(map(inspect.getsource, (clusters.cluster, jax._src.distributed)))


ABORT = """
import os, threading
from shardwise._processes import Processes, peer_watch
watch = peer_watch.PeerWatch(Processes(1, 2, "test"), 5.0)
watch.guard()
watch._loss = peer_watch.Loss((0,), "was lost", "for a test")
peer_watch._store = lambda: 1 / 0  # JAX's locks may be held: it must not be queried
locked = threading.Event()
def hold():
    with watch._naming:
        locked.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
locked.wait()
os.abort()
"""


def test_abort_ends_the_process_even_if_another_thread_holds_the_lock():
    done = subprocess.run(
        [sys.executable, "-c", ABORT],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    message = "process 0 of 2 was lost: for a test. Resume from the last checkpoint."
    assert done.stderr == f"shardwise: {message} Process 1 exits with code 75.\n"
    assert done.returncode == 75
