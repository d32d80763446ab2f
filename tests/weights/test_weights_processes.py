"""Weights on two processes: each reads, moves and writes what its devices have."""

import json
import os
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
from test_loading import write

HERE = Path(__file__).parents[1] / "scripts"


def run(*arguments):
    command = [sys.executable, str(HERE / "launch.py"), "2", "4"]
    command += [sys.executable, str(HERE / "weights.py"), *map(str, arguments)]
    done = forked.run(command, timeout=180)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "up.weight": rng.normal(size=(4096, 16)).astype("float32"),
        "down.weight": rng.normal(size=(16, 4096)).astype("float32"),
    }
    folder = tmp_path / "given"
    folder.mkdir()
    write(folder / "model.safetensors", arrays)
    return folder, arrays


def test_two_processes_read_and_write_their_own_parts(checkpoint, tmp_path):
    folder, arrays = checkpoint
    status, text = run(folder, tmp_path / "saved", "")
    assert status == 0, text
    for process in range(2):
        found = json.loads(Path(f"{tmp_path}/saved.{process}.json").read_text())
        for name, rows in found["rows"].items():
            assert len(rows) == 4
            for index, data in rows:
                part = tuple(slice(*pair) for pair in index)
                assert np.array_equal(arrays[f"{name}.weight"].T[part], np.float32(data))
        # Half of each: the bytes of its own devices, and no others.
        half = sum(x.nbytes for x in arrays.values()) // 2
        assert found["planned"] == {"0": half, "1": half}
        assert found["seen"][-1] == [half, half]
        move = found["move"]
        assert "on one device (compiled), but the limit is 96.0 KiB" in move.pop("refused")
        assert move == {"freed": [True] * 2, "findings": "no findings", "equal": [True] * 2}
    saved = tmp_path / "saved"
    assert len(list(saved.glob("*.safetensors"))) == 2
    listed = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    for key, file in listed.items():
        assert (saved / file).read_bytes().endswith(arrays[key].tobytes())
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


def test_a_process_that_does_not_see_the_files_stops_both(checkpoint, tmp_path):
    status, text = run(checkpoint[0], tmp_path / "saved", "missing")
    assert status != 0 and "SW608" in text
    assert "failed while checking the weights" in text, text
    assert not (tmp_path / "saved").exists()


def test_adapters_are_trained_as_in_one_process(tmp_path):
    pytest.importorskip("qwix")
    found = []
    for processes, devices in ((1, 8), (2, 4)):
        command = [sys.executable, str(HERE / "launch.py"), str(processes), str(devices)]
        place = tmp_path / str(processes)
        command += [sys.executable, str(HERE / "lora.py"), str(tmp_path / "base"), str(place)]
        done = forked.run(command, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.endswith("]"))
        losses = json.loads(line[line.rindex("[") :])
        files = sorted(place.glob("*.safetensors"))
        found.append((losses, [file.stat().st_size for file in files]))
    assert len(found[0][0]) == 2
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-6)
    assert found[0][1] == found[1][1]
