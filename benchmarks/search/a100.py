"""Predicts the milliseconds of GPT training steps on A100s, layout by layout.

    python benchmarks/search/a100.py benchmarks/search/a100_layouts.csv > predicted.csv
    python benchmarks/search/a100.py benchmarks/search/a100_layouts.csv --markdown

The file has the columns of `a100_layouts.csv`, in any order; `measured_ms` may be missing or empty.
Its rows are printed as CSV with one more column, `predicted_ms`, and a summary is printed to
stderr: the mean error, how many pairs of layouts are in the right order, and what choosing the
layout that is predicted to be fastest costs, all of them beside those of a constant MFU. Exit
status 2: the file cannot be read, or a row makes no sense; each reason names its row and column.
"""

import argparse
import csv
import dataclasses
import io
import itertools
import math
import pathlib
import statistics
import sys

from a100_model import NODE, Layout, flops, step_seconds

INPUTS = tuple(field.name for field in dataclasses.fields(Layout))
MEASURED = "measured_ms"
PREDICTED = "predicted_ms"


class BadInput(Exception):
    """What is wrong with a file, one line for each reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One layout, with its measured milliseconds if there are any."""

    layout: Layout
    measured: float | None
    text: dict[str, str]

    @property
    def group(self):
        """What layouts have in common that one would choose from."""
        one = self.layout
        return (one.width, one.heads, one.layers, one.sequence, one.devices, one.global_batch)


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """How good predictions are.

    Attributes:
        rows: how many there are.
        error: the mean of `|predicted / measured - 1|`.
        pairs: how many pairs of layouts have the same group and different times.
        order: the share of them in the right order; equal predictions count as half.
        groups: how many groups have several layouts.
        regret: by how much the layout predicted to be fastest is slower than the fastest, as a
            mean over groups; of several, their mean.
        worst: the largest regret of a group.
    """

    rows: int
    error: float
    pairs: int
    order: float
    groups: int
    regret: float
    worst: float


def _positive(text, kind):
    try:
        value = kind(text)
    except ValueError:
        return None
    return value if value > 0 and math.isfinite(value) else None


def _problems(one):
    """Yields what is wrong with a layout: a column, and why."""
    product = one.tensor * one.data * one.pipeline
    if product != one.devices:
        yield "devices", f"got {one.devices}, but tensor x data x pipeline is {product}"
    if one.global_batch % (one.data * one.micro_batch):
        each = f"data x micro_batch, {one.data * one.micro_batch}"
        yield "global_batch", f"got {one.global_batch}, which is not a multiple of {each}"
    if one.width % one.heads:
        yield "heads", f"got {one.heads}, which does not divide the width {one.width}"
    if one.heads % one.tensor:
        yield "tensor", f"got {one.tensor}, which does not divide the {one.heads} heads"
    if one.layers < one.pipeline:
        yield "pipeline", f"got {one.pipeline}, more than the {one.layers} layers"


def _row(where, text, problems):
    """Returns a row of the file, or None and adds why not to `problems`."""
    if None in text or any(value is None for value in text.values()):
        problems.append(f"{where}: the number of cells differs from the header's")
        return None
    found = {name: _positive(text[name], int) for name in INPUTS}
    reasons = [
        (name, f"got {text[name]!r}, want a positive integer")
        for name, value in found.items()
        if value is None
    ]
    given = (text.get(MEASURED) or "").strip()
    measured = _positive(given, float) if given else None
    if given and measured is None:
        reasons.append((MEASURED, f"got {given!r}, want positive milliseconds"))
    layout = None
    if not any(value is None for value in found.values()):
        layout = Layout(**found)  # pyright: ignore[reportArgumentType]
        reasons += _problems(layout)
    problems += [f"{where}, column {name}: {why}" for name, why in reasons]
    return Row(layout, measured, text) if layout is not None else None


def read_rows(path):
    """Returns the rows of a file and its columns.

    Raises:
        BadInput: a column is missing, or cells are wrong.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    reader = csv.DictReader(io.StringIO(content), skipinitialspace=True)
    columns = list(reader.fieldnames or ())
    problems = [f"column {name}: missing" for name in INPUTS if name not in columns]
    problems += [
        f"column {name}: appears {columns.count(name)} times"
        for name in dict.fromkeys(columns)
        if columns.count(name) > 1
    ]
    rows = []
    if not problems:
        rows = [
            _row(f"row {i} (line {reader.line_num})", text, problems)
            for i, text in enumerate(reader, start=1)
        ]
    if problems:
        raise BadInput("\n".join(f"{path}: {problem}" for problem in problems))
    return rows, columns


def score(rows, predicted):
    """Returns how good predictions of measured rows are."""
    error = statistics.mean(abs(p / r.measured - 1) for r, p in zip(rows, predicted, strict=True))
    groups = {}
    for row, guess in zip(rows, predicted, strict=True):
        groups.setdefault(row.group, []).append((row.measured, guess))
    right = pairs = 0
    regrets = []
    for some in groups.values():
        for (slow, at), (fast, by) in itertools.combinations(sorted(some, reverse=True), 2):
            if slow > fast:
                pairs += 1
                right += 0.5 if math.isclose(at, by, rel_tol=1e-9) else float(at > by)
        if len(some) > 1:
            least = min(guess for _, guess in some)
            chosen = [m for m, guess in some if math.isclose(guess, least, rel_tol=1e-9)]
            regrets.append(statistics.mean(chosen) / min(some)[0] - 1)
    return Score(
        len(rows),
        error,
        pairs,
        right / pairs if pairs else math.nan,
        len(regrets),
        statistics.mean(regrets) if regrets else math.nan,
        max(regrets, default=math.nan),
    )


def constant_mfu(rows):
    """Returns what the null model predicts: the median MFU of the same rows, for each of them."""
    work = [flops(row.layout) / row.layout.devices for row in rows]
    usual = statistics.median(w / row.measured for w, row in zip(work, rows, strict=True))
    return [w / usual for w in work]


def summary(rows, predicted):
    """Returns the lines of the summary: on one node, across nodes, and all."""
    known = [i for i, row in enumerate(rows) if row.measured is not None]
    rows, predicted = [rows[i] for i in known], [predicted[i] for i in known]
    if not rows:
        return ["no row has measured_ms: there is nothing to compare with"]
    null = constant_mfu(rows)
    lines = [
        "| rows | | mean error | null | pairs | in order | null | groups | top-1 regret | worst "
        "| null |",
        "| --- " * 11 + "|",
    ]
    sets = (
        ("within one node", lambda one: one.devices <= NODE),
        ("across nodes", lambda one: one.devices > NODE),
        ("all", lambda one: True),
    )
    for name, chosen in sets:
        some = [i for i, row in enumerate(rows) if chosen(row.layout)]
        if not some:
            continue
        ours = score([rows[i] for i in some], [predicted[i] for i in some])
        other = score([rows[i] for i in some], [null[i] for i in some])
        lines.append(
            f"| {name} | {ours.rows} | {ours.error:.1%} | {other.error:.1%} | {ours.pairs} | "
            f"{ours.order:.3f} | {other.order:.3f} | {ours.groups} | {ours.regret:.1%} | "
            f"{ours.worst:.1%} | {other.regret:.1%} |"
        )
    return lines


def markdown(rows, predicted):
    """Returns a table of every row."""
    null = constant_mfu(rows) if all(row.measured is not None for row in rows) else []
    names = [*INPUTS, "measured ms", "predicted ms", "error", "null"]
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    for i, (row, guess) in enumerate(zip(rows, predicted, strict=True)):
        cells = [str(getattr(row.layout, name)) for name in INPUTS]
        cells += [f"{row.measured:.1f}" if row.measured else "", f"{guess:.1f}"]
        cells.append(f"{guess / row.measured - 1:+.1%}" if row.measured else "")
        cells.append(f"{null[i] / row.measured - 1:+.0%}" if null else "")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=pathlib.Path, metavar="ROWS.csv")
    parser.add_argument("--markdown", action="store_true", help="print a table of every row")
    options = parser.parse_args(arguments)
    try:
        rows, columns = read_rows(options.file)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    predicted = [1e3 * step_seconds(row.layout) for row in rows]
    if options.markdown:
        print("\n".join(markdown(rows, predicted)))
    else:
        others = [name for name in columns if name != PREDICTED]
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([*others, PREDICTED])
        for row, guess in zip(rows, predicted, strict=True):
            writer.writerow([*(row.text[name] for name in others), f"{guess:.3f}"])
    print("\n".join(summary(rows, predicted)), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
