"""Proposing names: a first draft of a map, from shapes, order and similarity. Never applied itself."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._base import public
from .._check import Findings, make_finding
from .._nnx import Recipe, abstract_model, leaves_of
from .files import open_folder
from .naming import Name, names_toml
from .preflight import WeightsError, required_leaves
from .regions import CannotView, view_of

# Words for one thing, and words that say nothing.
_SAME = {
    "weight": "kernel", "w": "kernel", "scale": "kernel", "embedding": "kernel", "b": "bias",
    "attn": "attention", "layernorm": "norm", "ln": "norm", "embed": "embedding", "layers": "block",
    "blocks": "block", "layer": "block", "h": "block", "wte": "embedding", "lm": "head", "ffn": "mlp",
    "ffw": "mlp", "o": "out", "tokens": "token", "embedder": "embedding", "proj": "", "model": "",
    "self": "", "language": "", "input": "1", "final": "",
}  # fmt: skip
_CLOSE = 0.08  # scores that are this near are ambiguous


@public
@dataclasses.dataclass(frozen=True)
class ProposedNames:
    """A proposal of names, to be read and corrected. Made by `sw.propose_names`.

    Its text is TOML, with a comment above what is ambiguous.

    Attributes:
        names: the map, as `sw.load` takes it.
        notes: why a pattern's name is ambiguous, by pattern.
        keys: the keys that no leaf was found for.
        leaves: the paths of the leaves that no key was found for.
    """

    names: Mapping[str, Name]
    notes: Mapping[str, str]
    keys: tuple[str, ...]
    leaves: tuple[str, ...]

    def __str__(self) -> str:
        """Returns it as TOML."""
        lines = [names_toml(self.names, self.notes)]
        lines += [f"# no leaf was found for the key {key}" for key in self.keys]
        lines += [f"# no key was found for the leaf {path}" for path in self.leaves]
        return "\n".join(lines)

    __repr__ = __str__


@public
def propose_names(make: Any, path: str | os.PathLike[str]) -> ProposedNames:
    r"""Returns a proposal of which key of a checkpoint goes to which leaf.

    It is made from shapes, from the order of keys and leaves and from how similar their names are. It
    is a draft: what is ambiguous says so, and nothing is loaded by it until it is passed to
    `sw.load`.

    Args:
        make: a function without arguments that returns the model, a model, or a recipe.
        path: a `.safetensors` file, or a folder of them; only headers are read.

    Raises:
        WeightsError: a file is damaged or missing.

    Example:
        >>> import tempfile, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        >>> folder = tempfile.mkdtemp() + "/weights"
        >>> names = {"fc.weight": sw.Name("kernel", permute=(1, 0)), "fc.bias": "bias"}
        >>> sw.save_weights(make(), folder, names=names)
        >>> print(sw.propose_names(make, folder))
        [names]
        'fc\.bias' = 'bias'
        'fc\.weight' = { path = 'kernel', permute = [1, 0] }
    """
    folder = open_folder(path)
    if folder.faults:
        rows = (make_finding(f.code, f.path, f.fact, f.help) for f in folder.faults)
        raise WeightsError(Findings(tuple(rows)))
    model = abstract_model(make.model if isinstance(make, Recipe) else make)
    leaves = leaves_of(model, {})
    wanted = [leaves[number] for number in sorted(required_leaves(model, leaves))]
    keys = list(_families((t.key, t.shape) for t in folder.tensors.values()))
    paths = list(_families((leaf.path, leaf.shape) for leaf in wanted))
    return _propose(keys, paths)


@dataclasses.dataclass(frozen=True, slots=True)
class _Family:
    """Names that differ in their numbers alone, all of one shape.

    Attributes:
        parts: the text between the numbers.
        numbers: the numbers of each member.
        shape: their shape.
        place: which of all families it is, from 0 to 1.
    """

    parts: tuple[str, ...]
    numbers: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    place: float

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the name, with those that mean the same replaced."""
        # Numbers within a word, such as norm1, tell names apart.
        text = "".join(self.parts)
        found = (_SAME.get(word, word) for word in re.findall(r"[a-z]+|\d+", text.lower()))
        return tuple(word for word in found if word)

    @property
    def first(self) -> str:
        """The first member."""
        return _joined(self.parts, map(str, self.numbers[0]))

    @property
    def pattern(self) -> str:
        """A regular expression of its members."""
        return _joined(tuple(map(re.escape, self.parts)), [r"([0-9]+)"] * len(self.numbers[0]))


def _joined(parts: Sequence[str], between: Iterable[str]) -> str:
    pairs = itertools.zip_longest(parts, between, fillvalue="")
    return "".join(text for pair in pairs for text in pair)


def _families(named: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[_Family]:
    groups: dict[Any, list[tuple[int, ...]]] = {}
    for name, shape in named:
        split = re.split(r"(?:(?<=\.)|^)(\d+)(?=\.|$)", name)
        groups.setdefault((tuple(split[::2]), shape), []).append(tuple(map(int, split[1::2])))
    for place, ((parts, shape), numbers) in enumerate(groups.items()):
        yield _Family(parts, tuple(sorted(numbers)), shape, place / max(1, len(groups) - 1))


def _propose(keys: Sequence[_Family], leaves: Sequence[_Family]) -> ProposedNames:
    fits: dict[tuple[int, int], tuple[float, Name, str]] = {}
    for k, key in enumerate(keys):
        for n, leaf in enumerate(leaves):
            found = _fit(key, leaf)
            if found is not None:
                fits[k, n] = (_score(key, leaf), *found)
    chosen: dict[int, int] = {}
    for k, n in sorted(fits, key=lambda pair: -fits[pair][0]):
        if k not in chosen and n not in chosen.values():
            chosen[k] = n
    names: dict[str, Name] = {}
    notes: dict[str, str] = {}
    for k, n in sorted(chosen.items(), key=lambda pair: pair[0]):
        score, name, note = fits[k, n]
        names[keys[k].pattern] = name
        rivals = [
            leaves[other].first
            for other in range(len(leaves))
            if other != n and (k, other) in fits and fits[k, other][0] > score - _CLOSE
        ]
        rivals += [
            keys[other].first
            for other in range(len(keys))
            if other != k and (other, n) in fits and fits[other, n][0] > score - _CLOSE
        ]
        said = [note] if note else []
        said += [f"ambiguous: as near is {', '.join(rivals[:3])}"] if rivals else []
        if said:
            notes[keys[k].pattern] = "; ".join(said)
    return ProposedNames(
        names,
        notes,
        tuple(key.first for k, key in enumerate(keys) if k not in chosen),
        tuple(leaf.first for n, leaf in enumerate(leaves) if n not in chosen.values()),
    )


def _score(key: _Family, leaf: _Family) -> float:
    one, other = key.words, leaf.words
    shared = len(set(one) & set(other)) / max(1, len(set(one) | set(other)))
    alike = difflib.SequenceMatcher(None, " ".join(one), " ".join(other)).ratio()
    return 0.5 * shared + 0.4 * alike + 0.1 * (1 - abs(key.place - leaf.place))


def _fit(key: _Family, leaf: _Family) -> tuple[Name, str] | None:
    """Returns the name with which all keys of a family fill the leaves of another, and a note."""
    count = len(leaf.numbers[0])
    template = _joined(leaf.parts, (rf"\{g + 1}" for g in range(count)))
    if key.numbers == leaf.numbers:
        shape, stack = leaf.shape, None
    elif len(leaf.numbers) == 1 and count == 0 and len(key.numbers[0]) == 1:
        # Stacked: one leaf, whose leading dim counts the keys.
        if key.numbers != tuple((i,) for i in range(leaf.shape[0] if leaf.shape else 0)):
            return None
        shape, stack = leaf.shape[1:], 1
    else:
        return None
    how = _transform(key.shape, shape, leaf.words)
    if how is None:
        return None
    fields, note = how
    return Name(template, stack=stack, **fields), note


def _transform(
    stored: tuple[int, ...], shape: tuple[int, ...], words: Sequence[str]
) -> tuple[dict[str, Any], str] | None:
    """Returns the fields that make one shape of another, and a note if others do so too."""
    orders: list[tuple[int, ...] | None] = [None]
    if len(stored) == 2:
        orders.insert(0, (1, 0))  # a torch.nn.Linear is stored transposed
    elif len(stored) == 4:
        orders.insert(0, (2, 3, 1, 0))  # a convolution
    found: list[dict[str, Any]] = []
    for order in orders:
        seen = view_of(stored) if order is None else view_of(stored).permute(order)
        fields: dict[str, Any] = {} if order is None else {"permute": order}
        if seen.shape == shape:
            found.append(fields)
        elif _is_grouped(seen.shape, shape):
            try:
                seen.reshape(shape)
            except CannotView:
                continue
            found.append({**fields, "reshape": shape, "stored": stored})
    if not found:
        return None
    # A table of embeddings is stored as it is.
    if len(found) > 1 and "embedding" in words:
        found.reverse()
    note = "ambiguous: the shape fits with and without the permutation" if len(found) > 1 else ""
    return found[0], note


def _is_grouped(short: tuple[int, ...], long: tuple[int, ...]) -> bool:
    """Returns whether dims of one shape are those of the other, multiplied in order."""
    left = list(long)
    for size in short:
        have = 1
        while left and have < size:
            have *= left.pop(0)
        if have != size:
            return False
    return all(size == 1 for size in left)
