"""What is public is documented, and every example in any docstring of the package runs.

The examples are found in the source and not on the objects, so that none is missed: `doctest` looks
into no cached property, and skips a class that says that it lives in another module.
"""

import ast
import dataclasses
import doctest
import functools
import inspect
import re
from pathlib import Path

import pytest
from public import public_things

import shardwise as sw


def is_property(member):
    return isinstance(member, property | functools.cached_property)


SOURCE = Path(sw.__file__).parent
PUBLIC = public_things()
METHODS = {
    f"{name}.{member}": vars(thing)[member]
    for name, thing in PUBLIC.items()
    if inspect.isclass(thing)
    for member in vars(thing)
    if not member.startswith("_")
    and (inspect.isroutine(vars(thing)[member]) or is_property(vars(thing)[member]))
}
PROMPT = re.compile(r"^\s*>>> ", re.MULTILINE)


def examples():
    """Returns a doctest for each docstring with an example, by its place in the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if ">>> " not in source:  # every worker collects this, and most files have no example
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                line = 0 if isinstance(node, ast.Module) else node.lineno
                name = f"{path.relative_to(SOURCE)}:{getattr(node, 'name', line)}"
                # In an empty namespace: an example can be pasted as it stands.
                test = doctest.DocTestParser().get_doctest(text, {}, name, str(path), line)
                if test.examples:
                    found[name] = test
    return found


EXAMPLES = examples()


def own_docstring(thing):
    """Returns the docstring that was written for it: no base's, and not a dataclass's signature."""
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    if dataclasses.is_dataclass(thing) and (text or "").startswith(f"{thing.__name__}("):
        return ""
    return text or ""


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_what_is_public_is_documented(name):
    thing = PUBLIC.get(name, METHODS.get(name))
    if inspect.isroutine(thing) or inspect.isclass(thing) or name in METHODS:
        assert own_docstring(thing).strip(), f"{name} has no docstring"


@pytest.mark.parametrize("name", [n for n, thing in PUBLIC.items() if inspect.isfunction(thing)])
def test_a_public_function_has_an_example(name):
    thing = PUBLIC[name]
    path = Path(inspect.getsourcefile(thing)).relative_to(SOURCE)
    assert f"{path}:{thing.__name__}" in EXAMPLES, f"{name} has no example"


def test_no_example_is_missed():
    written = sum(len(PROMPT.findall(p.read_text(encoding="utf-8"))) for p in SOURCE.rglob("*.py"))
    assert written == sum(len(test.examples) for test in EXAMPLES.values())


class Checker(doctest.OutputChecker):
    """Where an exception of ours is defined is no part of what an example shows."""

    def check_output(self, want, got, optionflags):
        got = re.sub(r"^shardwise\.[\w.]*\.(\w+: )", r"shardwise.\1", got)
        return super().check_output(want, got, optionflags)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_prints_what_it_shows(name):
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.NORMALIZE_WHITESPACE)
    told = []
    failed, attempted = runner.run(EXAMPLES[name], out=told.append)
    assert attempted and not failed, "".join(told)
