"""Names: the forms of a map, and the way back from a leaf to its key."""

import enum

import pytest

import shardwise as sw
from shardwise._weights.naming import NameMap, names_toml, read_names

LAYER = r"model\.layers\.([0-9]+)\."


class Transform(enum.Enum):
    """As bonsai has them."""

    BIAS = None
    LINEAR = ((1, 0), None, False)
    HEADS = ((2, 0, 1), (4, 8, 32), True)


def found(names, key):
    return [bound for _, bounds in NameMap(names).find(key) for bound in bounds]


FORMS = {
    "a path": ("norm.scale", sw.Name("norm.scale")),
    "a pair without a transform": (("norm.scale", None), sw.Name("norm.scale")),
    "permute and reshape": (
        ("q.w", ((1, 0), (32, 4, 8))),
        sw.Name("q.w", permute=(1, 0), reshape=(32, 4, 8)),
    ),
    "an enum": (("up.kernel", Transform.LINEAR), sw.Name("up.kernel", permute=(1, 0))),
    "an enum of None": (("up.bias", Transform.BIAS), sw.Name("up.bias")),
    "an enum that reshapes first": (
        ("q.kernel", Transform.HEADS),
        sw.Name("q.kernel", view=(4, 8, 32), permute=(2, 0, 1)),
    ),
    "a reshape alone": (("b", (None, (4, 8))), sw.Name("b", reshape=(4, 8))),
    "escaped dots": ((r"a\.b\.scale", None), sw.Name("a.b.scale")),
    "a dict": (
        {"path": "up", "permute": [1, 0], "at": [[], 0]},
        sw.Name("up", permute=(1, 0), at=(None, 0)),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_name(form):
    value, name = FORMS[form]
    (bound,) = found({"key": value}, "key")
    assert bound.name == name and bound.path == name.path


def test_groups_go_into_paths_and_stacks():
    (bound,) = found({LAYER + "w": sw.Name(r"layers.\1.w")}, "model.layers.12.w")
    assert (bound.path, bound.index) == ("layers.12.w", ())
    names = {LAYER + r"experts\.(\d+)\.w1": sw.Name("blocks.0.up", stack=("1//6", 2), at=(None, 0))}
    (bound,) = found(names, "model.layers.13.experts.5.w1")
    assert (bound.path, bound.index) == ("blocks.0.up", (2, 5))
    assert found({"rotary.*": None}, "rotary.inv") == [] == found({"a": "b"}, "c")
    assert len(NameMap({"a.*": "x", ".*b": "y"}).find("ab")) == 2


@pytest.mark.parametrize(
    "names, text",
    [
        (3, "names is an int"),
        ({"(": "a"}, "is not a regular expression"),
        ({"a": 3}, "the name of 'a' is 3"),
        ({"a": ("b", 3)}, "the transform of 'a' is 3"),
        ({"a": {"permute": [1, 0]}}, "has no path"),
        ({"a": {"path": "b", "permut": [1, 0]}}, "unknown field 'permut'"),
        ({"a": r"b.\1"}, "uses group 1, but the pattern has 0"),
        ({"a": {"path": "b", "permute": [1, 1]}}, "give an order of dims"),
        ({"a": {"path": "b", "split": [1]}}, r"give \(dim, start, stop\)"),
        ({"a": {"path": "b", "at": ["x"]}}, "give a tuple of None, indices"),
        ({"a": {"path": "b", "stack": "x"}}, "give the number of a group"),
        ({"a": {"path": "b", "reshape": ["x"]}}, "give a tuple of integers"),
    ],
)
def test_what_is_not_a_map_is_refused(names, text):
    with pytest.raises(ValueError, match=text):
        NameMap(names)


BACK = {
    "no group": ({r"norm\.weight": "norm.scale"}, "norm.scale", (4,), ["norm.weight"]),
    "a group in the path": (
        {LAYER + "w": r"layers.\1.w"},
        "layers.7.w",
        (4,),
        ["model.layers.7.w"],
    ),
    "a stack": (
        {LAYER + "w": sw.Name("w", stack=1)},
        "w",
        (3, 4),
        [f"model.layers.{i}.w" for i in range(3)],
    ),
    "one of a period": (
        {r"layers\.(1|4|7)\.w": sw.Name("blocks.1.w", stack="1//3")},
        "blocks.1.w",
        (3, 4),
        ["layers.1.w", "layers.4.w", "layers.7.w"],
    ),
    "optional parts": (
        {r"^(?:language_model\.)?model\.(?:a|b)\.w$": "w"},
        "w",
        (1,),
        ["model.a.w"],
    ),
    "a value that the group does not match": ({r"l\.([0-4])\.w": r"b.\1.w"}, "b.7.w", (1,), []),
    "another leaf": ({"a": "b"}, "c", (1,), []),
    "tied": ({"a": sw.Name("b", tie=True)}, "b", (1,), []),
}


@pytest.mark.parametrize("case", BACK)
def test_from_a_leaf_to_its_keys(case):
    names, path, shape, keys = BACK[case]
    back = list(NameMap(names).keys_for(path, shape))
    assert [key for key, _ in back] == keys
    for key, bound in back:
        assert bound in found(names, key)


@pytest.mark.parametrize("pattern", [r"l\.\d+\.w", r"l\.[0-9]\.w", r"l\.(a|b)\.w", r"l\.(\w+)\.w"])
def test_what_cannot_be_turned_round_says_so(pattern):
    with pytest.raises(ValueError, match="give like="):
        list(NameMap({pattern: "w"}).keys_for("w", (1,)))


def test_toml_is_read_and_written(tmp_path):
    names = {
        r"norm\.weight": sw.Name("norm.scale"),
        LAYER + "w": sw.Name("w", permute=(1, 0), stack=("1//6", 2), at=(None, 0, (2, 4))),
        "qkv": [sw.Name("q", split=(0, 0, 4)), sw.Name("k", split=(0, 4, 8), stored=(8, 2))],
        "it's": sw.Name("b", tie=True),
        r".*\.inv_freq": None,
    }
    groups = {
        **names,
        LAYER + "w": sw.Name("w", permute=(1, 0), stack="1//6", at=(None, 0, (2, 4))),
    }
    path = tmp_path / "names.toml"
    path.write_text(names_toml(groups, {"qkv": "two\nlines"}))
    again = NameMap(read_names(path))
    assert again.entries is not None
    wanted = NameMap(groups).entries
    assert [(e.pattern.text, e.names) for e in again.entries] == [
        (e.pattern.text, e.names) for e in wanted
    ]
    for text in ("x =", "a = 1", "[names]\n[other]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="names file"):
            read_names(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_names(tmp_path / "no")
