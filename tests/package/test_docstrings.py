"""Every public name has a docstring example that runs."""

import doctest
import inspect

import pytest

import shardwise as sw

PUBLIC = [name for name in dir(sw) if not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    thing = getattr(sw, name)
    if inspect.ismodule(thing):
        return
    assert inspect.getdoc(thing), f"sw.{name} has no docstring"
    if inspect.isfunction(thing):
        assert ">>>" in thing.__doc__, f"sw.{name} has no example"


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_examples_run(name):
    thing = getattr(sw, name)
    finder = doctest.DocTestFinder(recurse=True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    # A public class says `shardwise`: by that its methods would pass for another module's.
    module = None if inspect.ismodule(thing) else False
    for test in finder.find(thing, name, module=module, globs={}):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
