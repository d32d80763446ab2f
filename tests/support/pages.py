"""Code blocks of Markdown files, so that what the docs show is run."""

import contextlib
import io
import re

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path):
    """Yields the language and the code of each fenced block of a file, in order."""
    for match in BLOCK.finditer(path.read_text(encoding="utf-8")):
        yield match[1], match[2]


def run(code, name="<markdown>", scope=None):
    """Returns what `code` prints; blocks that build on each other share a `scope`."""
    scope = {"__name__": "__main__"} if scope is None else scope
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, name, "exec"), scope)
    return out.getvalue()


def run_all(path, name):
    """Runs a file's Python blocks in order and compares what they print with the text that follows.

    Returns how many texts were compared.
    """
    scope, printed, shown = {}, None, 0
    for language, code in blocks(path):
        if language == "python":
            printed = run(code, name, scope)
        elif language == "text":
            assert printed == code
            shown += 1
    return shown


def help_examples(text):
    """Returns the commands that a command's help shows, each on one line."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"^ +(shardwise (?!COMMAND).*)$", joined, re.M)
    return [" ".join(line.split()) for line in found]
