"""Wording that every room needs."""

import pytest

from shardwise._base import show_type

NAMES = {
    "dict": "a dict",
    "int": "an int",
    "Optimizer": "an Optimizer",
    "MLP": "an MLP",
    "GRU": "a GRU",
    "ndarray": "an ndarray",
    "uint8": "a uint8",
    "UNet": "a UNet",
    "Update": "an Update",
}


@pytest.mark.parametrize(("name", "wanted"), NAMES.items(), ids=list(NAMES))
def test_a_type_has_the_article_that_it_is_read_with(name, wanted):
    assert show_type(type(name, (), {})()) == wanted
