"""The script that predicts measured layouts of GPT on A100s, run as a process."""

import csv
import io
import pathlib
import sys

import forked
import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "search" / "a100.py"
HEADER = "devices,global_batch,micro_batch,width,heads,layers,sequence,tensor,data,pipeline"
# Four layouts of one model on one node, and two of another across nodes, as measured by vTrain.
ROWS = """\
8,32,4,2048,16,24,1024,1,4,2,409.74847
8,32,2,2048,16,24,1024,1,8,1,303.755986
8,32,4,2048,16,24,1024,2,4,1,335.421691
8,32,1,2048,16,24,1024,4,2,1,1211.824221
64,512,8,3072,32,30,2048,1,64,1,3566.5
64,512,4,3072,32,30,2048,16,4,1,11960.1
"""


def run(tmp_path, text):
    file = tmp_path / "rows.csv"
    file.write_text(text)
    command = [sys.executable, str(SCRIPT), str(file)]
    return forked.run(command, timeout=120)


def test_predictions_are_near_what_was_measured_and_in_its_order(tmp_path):
    done = run(tmp_path, f"{HEADER},measured_ms\n{ROWS}")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert list(rows[0]) == [*HEADER.split(","), "measured_ms", "predicted_ms"]
    found = [(float(row["predicted_ms"]), float(row["measured_ms"])) for row in rows]
    assert all(0.8 < predicted / measured < 1.25 for predicted, measured in found)
    for some in (found[:4], found[4:]):
        assert sorted(some) == sorted(some, key=lambda pair: pair[1])
    assert "| within one node | 4 |" in done.stderr and "| across nodes | 2 |" in done.stderr
    # A constant MFU cannot tell layouts of one group apart.
    assert "| 6 | 1.000 | 0.500 | 1 | 0.0% |" in done.stderr


def test_rows_of_other_models_without_measurements(tmp_path):
    # Seven stages of 61 layers are unequal; a node of two; more nodes than were ever measured.
    text = "note," + HEADER + "\n"
    text += "a,7,21,3,1536,12,61,512,1,1,7\nb,2,4,1,768,12,12,256,2,1,1\n"
    text += "c,2048,4096,1,16384,128,120,4096,8,16,16\n"
    done = run(tmp_path, text)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["note"] for row in rows] == ["a", "b", "c"]
    assert all(float(row["predicted_ms"]) > 0 for row in rows)
    assert "nothing to compare with" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER.replace("heads,", "") + "\n", "column heads: missing"),
        (
            f"{HEADER}\n8,32,2.5,1024,16,12,1024,2,4,1\n",
            "row 1 (line 2), column micro_batch: got '2.5', want a positive integer",
        ),
        (
            f"{HEADER}\n8,32,2,1024,16,12,1024,2,4,1\n8,32,2,1024,16,12,1024,2,2,1\n",
            "row 2 (line 3), column devices: got 8, but tensor x data x pipeline is 4",
        ),
        (
            f"{HEADER}\n8,12,2,1024,16,12,1024,1,8,1\n",
            "column global_batch: got 12, which is not a multiple of data x micro_batch, 16",
        ),
        (f"{HEADER}\n8,32\n", "row 1 (line 2): the number of cells differs from the header's"),
        (
            f"{HEADER},measured_ms\n8,32,2,1024,16,12,1024,2,4,1,nan\n",
            "column measured_ms: got 'nan', want positive milliseconds",
        ),
    ],
    ids=["column", "integer", "degrees", "batch", "cells", "measured"],
)
def test_bad_input_names_its_row_and_column(tmp_path, text, message):
    done = run(tmp_path, text)
    assert done.returncode == 2
    assert message in done.stderr and not done.stdout
