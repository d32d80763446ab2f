"""`shardwise learn`: correct solutions pass, wrong ones get a reason, and bad files are rejected."""

import json
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import solutions
from flax import nnx
from forked import Forked
from jax.sharding import PartitionSpec as P
from mistakes import WRONG

import shardwise as sw
from shardwise import learn
from shardwise._base import load_file
from shardwise.learn import _check, _judge
from shardwise.learn._compare import difference, show

ROOT = Path(__file__).parents[2]
EXERCISES = {
    exercise.name: (lesson, exercise) for lesson in learn.LESSONS for exercise in lesson.exercises
}
FILES = {"mine.txt": ""}


def judged(name, function):
    return learn.judge(EXERCISES[name][1], function)


@pytest.mark.parametrize("name", EXERCISES)
def test_a_correct_solution_passes(name):
    found = judged(name, getattr(solutions, name))
    assert found.status == "passed", found
    assert found.cases >= 2


# Other ways to solve them.
def scattered(w, x):
    whole = jax.lax.all_gather(w, "data", tiled=True)
    local = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(whole)
    return jax.lax.psum_scatter(local, "data", tiled=True)


def by_audit(layout, model):
    return [finding.path for finding in sw.audit(layout, model).errors]


def ring_in_pieces(x, n):
    """An all-reduce as done in practice: a reduce-scatter and an all-gather around the ring."""
    if x.size % n:
        return solutions.ring_sum(x, n)
    shape, pieces, i = x.shape, x.reshape(n, -1), jax.lax.axis_index("ring")
    pairs = [(j, (j + 1) % n) for j in range(n)]
    for k in range(n - 1):
        sent = jax.lax.ppermute(pieces[(i - k) % n], "ring", pairs)
        pieces = pieces.at[(i - k - 1) % n].add(sent)
    for k in range(n - 1):
        sent = jax.lax.ppermute(pieces[(i - k + 1) % n], "ring", pairs)
        pieces = pieces.at[(i - k) % n].set(sent)
    return pieces.reshape(shape)


def varying(w, x):
    own = jax.lax.pcast(w, "data", to="varying")
    return jax.lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(own), "data")


OTHERS = {
    "fsdp_gradient": scattered,
    "init_sharded": sw.init,
    "not_as_planned": by_audit,
    "ring_sum": ring_in_pieces,
    "mean_gradient": varying,
    "abstract_bytes": lambda make: sw.layout(make, sw.mesh("data=1", on="none")).total_bytes,
    "bubble": lambda stages, microbatches, rounds: (
        sw.Timetable(stages, microbatches, rounds).bubble
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_correct_solution_passes(name):
    found = judged(name, OTHERS[name])
    assert found.status == "passed", found


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_solution_gets_a_reason_and_a_hint(case):
    name, function, message, hint = WRONG[case]
    found = judged(name, function)
    assert found.status in ("differs", "raised"), found
    assert message in found.message
    assert hint in found.hint and found.hint
    assert name in found.call
    if found.returned:
        assert found.expected


def test_every_exercise_has_a_wrong_solution():
    assert {name for name, *_ in WRONG.values()} == set(EXERCISES)


def test_bias_specs_are_those_that_check_accepts():
    """The exercise computes its answers; `sw.check` looks at the layout itself."""
    for case in EXERCISES["bias_spec"][1].cases():
        spec, kernel_ndim, bias_ndim = case.arguments
        if (kernel_ndim, bias_ndim) != (2, 1):
            continue
        make = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))  # noqa: E731
        mesh = sw.mesh("data=2,model=4", on="none")
        found = sw.check(sw.layout(make, mesh, {"kernel": spec, "bias": case.expected}))
        assert "SW106" not in {finding.code for finding in found}


DIFFERENCES = [
    (None, 3, "it is None: is a return missing?"),
    (3, None, "it is 3, expected None"),
    ((1, 2), (1, 2), None),
    ([1, 2], (1, 2), None),
    ((1,), (1, 2), "it has 1 item, expected 2"),
    (3, (1, 2), "it is the int 3, expected a tuple"),
    (P("a", "b"), ("a", "b"), "it is the PartitionSpec P('a', 'b'), expected a tuple"),
    (np.int64(3), 3, None),
    (jnp.int32(3), 3, None),
    (True, 1, "it is the bool True, expected the int 1"),
    (0.375, 0.375000001, None),
    (1, 1.0, None),
    (P("a", None), P("a"), None),
    (P(("a",)), P("a"), None),
    ("a", P("a"), "it is the str 'a', expected a PartitionSpec"),
    ({"a": 1}, {"a": 1, "b": 2}, "it has no key 'b'"),
    ({"a": 1, "b": 2}, {"a": 1}, "it has an unexpected key 'b'"),
    ({"a": 1}, {"a": 2}, "the value at 'a' is 1, expected 2"),
    ([], {"a": 2}, "it is the list [], expected a dict"),
    (np.zeros(3, "f4"), np.zeros((3, 1), "f4"), "it has shape (3,), expected (3, 1)"),
    (np.zeros(3, "i4"), np.zeros(3, "f4"), "it has dtype int32, expected float32"),
    ([0.0], np.zeros(1, "f4"), "it is the list [0.0], expected an array of float32[1]"),
    (list(range(99)), np.zeros(1, "f4"), "it is a list, expected an array of float32[1]"),
    (
        np.array([1, 2]),
        np.array([1, 3]),
        "it is 2 at index (1,), expected 3 (1 of 2 numbers differ)",
    ),
    (np.float32(1), np.array(1.00001, "f4"), None),
    (np.array([np.nan, 1]), np.array([np.nan, 1]), None),
    (np.array([np.nan]), np.array([1.0]), "it is nan at index (0,), expected 1"),
    (np.array([-np.inf]), np.array([-np.inf]), None),
    (np.zeros((0, 2)), np.zeros((0, 2)), None),
]


@pytest.mark.parametrize(("returned", "expected", "text"), DIFFERENCES, ids=range(len(DIFFERENCES)))
def test_differences_are_described(returned, expected, text):
    assert difference(returned, expected) == text


def test_long_values_are_shortened():
    class Loud:
        def __repr__(self):
            raise ValueError

    assert show(Loud()) == "a Loud"
    assert show(sw.mesh("data=2,model=4", on="none")) == "mesh of data=2,model=4"
    assert show((P(None, "model"), [1])) == "(P(None, 'model'), [1])"
    assert len(show("x" * 1000)) == 240
    assert "…" in show(list(range(1000)))


def test_values_that_cannot_be_compared_are_reported():
    class Odd(dict):
        def __contains__(self, key):
            raise ValueError("no")

    found = judged("leaf_shapes", lambda model: Odd())
    assert found.message == "it cannot be compared: ValueError: no"


def test_bodies_that_jax_would_reject_are_reported():
    def gathered(w, x):
        whole = jax.lax.all_gather(x, "data", tiled=True)
        own = jax.lax.pcast(w, "data", to="varying")
        return jax.grad(lambda w: jnp.mean((whole @ w) ** 2))(own)

    found = judged("mean_gradient", gathered)
    assert found.status == "differs" and "JAX cannot prove it and will raise" in found.message


def test_functions_that_cannot_be_called_are_reported():
    assert judged("copies", 3).message == "it is the int 3, not a function"
    found = judged("copies", lambda spec: 1)
    assert found.message == "it takes (spec), but is called as copies(spec, mesh)"


def test_parameters_may_have_other_names():
    assert judged("bubble", lambda a, b, c: (a - 1) / (b * c)).status == "passed"


def test_pages_have_the_exercises_of_the_package():
    for lesson in learn.LESSONS:
        text = (ROOT / lesson.page).read_text(encoding="utf-8")
        section = text.partition("\n## Exercises\n")[2]
        found = re.findall(r"^### (\d\.\d) `(.*)`$", section, re.MULTILINE)
        wanted = [(lesson.number_of(e), e.signature) for e in lesson.exercises]
        assert found == wanted
        index = (ROOT / "docs/learn/index.md").read_text(encoding="utf-8")
        assert os.path.basename(lesson.page) in index


def test_importing_shardwise_does_not_import_learn():
    code = "import sys, shardwise; print('shardwise.learn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# The command line.


def test_lessons_are_listed(run):
    code, out, _ = run("learn")
    assert not code
    for lesson in learn.LESSONS:
        assert f"{lesson.number}  {lesson.title}  {lesson.page}" in out
    assert "2.4  held(shape, spec, mesh, device)" in out
    code, out, _ = run("learn", "--format", "json")
    rows = json.loads(out)["lessons"]
    assert [e["name"] for row in rows for e in row["exercises"]] == list(EXERCISES)
    assert rows[1]["exercises"][0]["number"] == "2.1"


def test_a_skeleton_is_written_once(run, folder):
    for lesson in learn.LESSONS:
        code, out, _ = run("learn", "start", str(lesson.number))
        assert not code and f"wrote lesson{lesson.number}.py" in out
        scope = {}
        exec(Path(f"lesson{lesson.number}.py").read_text(), scope)
        for exercise in lesson.exercises:
            found = learn.judge(exercise, scope[exercise.name])
            assert found.status in ("unwritten", "raised") and exercise.task.split()[0] in (
                scope[exercise.name].__doc__
            )
    code, out, err = run("learn", "start", "1")
    assert (code, out) == (2, "")
    assert err == "shardwise: lesson1.py already exists and is not overwritten: name another\n"


BAD = {
    "no such lesson": (("check", "9", "x.py"), "lesson 9 does not exist: lessons are 1 to 5"),
    "no file": (
        ("check", "2", "none.py"),
        "none.py does not exist: shardwise learn start 2 none.py",
    ),
    "a folder": (("check", "2", "."), ". is a folder: name the file with your functions"),
    "no such exercise": (
        ("check", "2", "none.py", "--only", "copy"),
        "lesson 2 has no exercise 'copy': did you mean 'copies'?",
    ),
    "nothing like it": (
        ("check", "2", "none.py", "--only", "q"),
        "it has shard_shape, device_bytes, copies, held, first_spec",
    ),
    "not a module": (
        ("check", "2", "mine.txt"),
        "mine.txt is not a Python module: its name must end in .py",
    ),
    "no time": (
        ("check", "2", "none.py", "--limit", "0"),
        "the time limit must be positive, got 0 s",
    ),
    "not a number": (("check", "two", "x.py"), "lesson must be an integer, got 'two'"),
    "start of none": (("start", "0"), "lesson 0 does not exist"),
    "start without .py": (
        ("start", "1", "mine"),
        "mine is not the name of a Python file: it must end in .py",
    ),
    "start in no folder": (
        ("start", "1", "a/b.py"),
        "a/b.py cannot be written: there is no folder a",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_run_is_one_sentence(case, run, folder):
    arguments, text = BAD[case]
    code, out, err = run("learn", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("shardwise: ") and err.count("\n") == 1 and text in err


IMPORTS = {
    "syntax": ("x = 1\ndef bubble(:\n", "SyntaxError: invalid syntax, at mine.py:2: def bubble(:"),
    "import": (
        "import nothing_of_this_name\n",
        "ModuleNotFoundError: No module named 'nothing_of_this_name', at mine.py:1: import nothing",
    ),
    "exits": ("import sys\nsys.exit(3)\n", "SystemExit: 3, at mine.py:2: sys.exit(3)"),
}


@pytest.mark.parametrize("case", IMPORTS)
def test_an_import_that_fails_names_the_users_own_line(case, folder):
    source, text = IMPORTS[case]
    file = folder / "mine.py"
    file.write_text(source)
    with pytest.raises((Exception, SystemExit)) as caught:
        load_file(str(file))
    told = _judge.one_sentence(caught.value)
    assert f"{told}, at {_judge.own_line(caught.value, str(file))}".startswith(text)
    sys.modules.pop("mine", None)


@pytest.fixture
def forked_workers(monkeypatch):
    """The processes that judge begin with their imports done; `test_a_lesson_passes` starts one."""
    names = {**vars(subprocess), "Popen": Forked}
    monkeypatch.setattr(_check, "subprocess", types.SimpleNamespace(**names))


UNRUN = {
    "raises": (
        "x = [\n  1]\ny = x[3]\n",
        "failed: IndexError: list index out of range, at mine.py:3: y = x[3]",
    ),
    "ends": ("import os\nos._exit(7)\n", "ended the process with status 7"),
}


@pytest.mark.parametrize("case", UNRUN)
def test_a_file_that_cannot_be_imported_is_one_sentence(case, run, folder, forked_workers):
    source, text = UNRUN[case]
    Path("mine.py").write_text(source)
    code, out, err = run("learn", "check", "5", "mine.py", "--only", "bubble")
    assert (code, out, err) == (2, "", f"shardwise: importing mine.py {text}\n")


MIXED = """
import os, time

def shard_shapes(shape, spec, mesh):
    pass

def device_bytes(shape, dtype, spec, mesh):
    print("seen", dtype)
    return undefined_name

def copies(spec, mesh):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass

def held(shape, spec, mesh, device):
    os._exit(5)

def first_spec(shape, specs, mesh):
    return specs[0] if specs else None
"""


def test_each_exercise_is_judged_whatever_the_others_do(run, folder, forked_workers):
    Path("mine.py").write_text(MIXED)
    arguments = ("learn", "check", "2", "mine.py", "--limit", "2")
    code, out, err = run(*arguments)
    assert code == 1
    assert err == "seen float32\n"
    assert out == textwrap.dedent("""\
        lesson 2: PartitionSpec arithmetic, mine.py
        2.1 shard_shape   mine.py has no function 'shard_shape'; it has 'shard_shapes'
        2.2 device_bytes  raised at case 1: NameError: name 'undefined_name' is not defined
              case      device_bytes((8, 16), 'float32', P(None, 'model'), mesh of data=2,model=4)
              at        mine.py:9: return undefined_name
              hint      the size of the shard times jnp.dtype(dtype).itemsize; a scalar has size 1
        2.3 copies        stopped at case 1: it took more than 2 s
              case      copies(P(), mesh of data=2,model=4)
              at        mine.py:14: time.sleep(0.01)
              hint      devices that differ only along axes that the spec does not name hold the same shard
        2.4 held          ended: it ended the process with status 5
        2.5 first_spec    differs at case 2: it is P(None, 'model'), expected P('model')
              case      first_spec((8, 6), [P(None, 'model'), P('model')], mesh of data=2,model=4)
              returned  P(None, 'model')
              expected  P('model')
              hint      6 cannot be split 4 ways, 8 can
        0 of 5 exercises passed; docs/learn/specs.md teaches them
        """)


def test_a_lesson_passes(run):
    arguments = ("learn", "check", "2", str(ROOT / "tests/support/solutions.py"))
    code, out, err = run(*arguments, "--format", "json")
    report = json.loads(out)
    assert code == 0 and report["passed"] == 5 and report["lesson"] == 2
    assert {row["status"] for row in report["exercises"]} == {"passed"}
    assert report["page"] == "docs/learn/specs.md"
    code, out, err = run(
        "learn", "check", "5", str(ROOT / "tests/support/solutions.py"), "--only", "bubble"
    )
    assert code == 0
    assert out.splitlines()[1:] == ["5.3 bubble  passed 7 cases", "1 of 1 exercises passed"]


def test_a_function_that_ignores_the_alarm_is_killed(run, folder, monkeypatch, forked_workers):
    monkeypatch.setattr("shardwise.learn._check._GRACE_SECONDS", 0.5)
    source = "import time\ndef bubble(a, b, c):\n  while True:\n    try: time.sleep(0.01)\n    except BaseException: pass\n"
    Path("mine.py").write_text(source)
    code, out, _ = run("learn", "check", "5", "mine.py", "--only", "bubble", "--limit", "1")
    assert code == 1 and "5.3 bubble  stopped" in out and "it took more than 1 s" in out


def test_a_killed_process_is_reported_with_its_signal():
    assert _check._ended(-9) == "ended the process with SIGKILL"


def test_an_error_names_the_users_own_line():
    """Even under JAX's tracing, the line is the user's, not the library's."""

    def broken(w, x):
        return jax.lax.psum(x.T @ w["down"], "model")

    found = learn.judge(EXERCISES["tensor_mlp"][1], broken, file=__file__)
    assert found.status == "raised" and found.message.startswith("TypeError: dot_general requires")
    assert found.place.endswith('return jax.lax.psum(x.T @ w["down"], "model")')


def test_sizes_of_optimizers_are_live():
    """The optimizers of the exercise give different sizes."""
    cases = list(EXERCISES["training_bytes"][1].cases())
    assert len({case.expected for case in cases}) == len(cases)
