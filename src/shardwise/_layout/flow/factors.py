"""Which dims are the same dim: union-find over the factors of array dims.

A dim is a list of factors, major first, because a reshape may split it (heads x depth) or merge
it. Two dims that meet in an addition or a contraction are the same; unifying them refines both
to common factors.
"""

from __future__ import annotations

from collections.abc import Iterable


class Factor:
    """One factor of a dim; it may have been merged into another or split in two."""

    __slots__ = ("parent", "parts", "size")

    def __init__(self, size: int):
        """Makes a factor of which only the size is known."""
        self.size = size
        self.parent: Factor | None = None
        self.parts: tuple[Factor, Factor] | None = None


Dim = list[Factor]


def fresh(size: int) -> Dim:
    """Returns a new dim, distinct from all others."""
    return [Factor(size)]


def root(factor: Factor) -> Factor:
    """Returns what `factor` was merged into."""
    while factor.parent is not None:
        if factor.parent.parent is not None:
            factor.parent = factor.parent.parent
        factor = factor.parent
    return factor


def resolve(dim: Iterable[Factor]) -> Dim:
    """Returns the unsplit factors of `dim`, major first, without those of size 1."""
    found: Dim = []
    for factor in dim:
        factor = root(factor)
        if factor.parts is not None:
            found.extend(resolve(factor.parts))
        elif factor.size != 1:
            found.append(factor)
    return found


def split(factor: Factor, major: int) -> tuple[Factor, Factor]:
    """Splits an unsplit root into a major and a minor part."""
    factor.parts = (Factor(major), Factor(factor.size // major))
    return factor.parts


def unify(a: Dim, b: Dim) -> bool:
    """Makes two dims of one size the same; False if their factors do not line up."""
    left, right = resolve(a)[::-1], resolve(b)[::-1]
    while left and right:
        x, y = root(left.pop()), root(right.pop())
        if x is y:
            continue
        if x.parts is not None or y.parts is not None:  # a factor that occurs in both dims
            left.extend(reversed(resolve([x])))
            right.extend(reversed(resolve([y])))
            continue
        if x.size == y.size:
            x.parent = y
        elif x.size % y.size == 0:
            major, minor = split(x, y.size)
            major.parent = y
            left.append(minor)
        elif y.size % x.size == 0:
            major, minor = split(y, x.size)
            major.parent = x
            right.append(minor)
        else:
            return False
    return not left and not right


def regroup(dims: Iterable[Dim], shape: Iterable[int]) -> list[Dim] | None:
    """Returns the dims of `shape` as factors of `dims` (a reshape); None if they do not line up."""
    rest = [factor for dim in dims for factor in resolve(dim)][::-1]
    grouped: list[Dim] = []
    for size in shape:
        dim: Dim = []
        need = size
        while need > 1:
            if not rest:
                return None
            factor = root(rest.pop())
            if factor.parts is not None:
                rest.extend(reversed(resolve([factor])))
                continue
            if need % factor.size == 0:
                dim.append(factor)
                need //= factor.size
            elif factor.size % need == 0:
                major, minor = split(factor, need)
                dim.append(major)
                rest.append(minor)
                need = 1
            else:
                return None
        grouped.append(dim if dim else fresh(1))
    return grouped
