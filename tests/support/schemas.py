"""The JSON Schemas that ship with the package, and the rows of docs/reference/json.md they make."""

import json
from importlib.resources import files

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

SCHEMAS = {
    path.name.removesuffix(".json"): json.loads(path.read_text(encoding="utf-8"))
    for path in files("shardwise").joinpath("_cli", "schemas").iterdir()
}
REGISTRY = Registry().with_resources(
    (f"{name}.json", Resource.from_contents(schema)) for name, schema in SCHEMAS.items()
)


def validate(name, found):
    """Raises if what a command printed is not as its schema says."""
    Draft202012Validator(SCHEMAS[name], registry=REGISTRY).validate(found)


def rows(schema, path=""):
    """Yields a row of the page for each field: its path, its type and what it means."""
    for name, field in schema.get("properties", {}).items():
        yield f"| `{path}{name}` | {_type(field)} | {field['description']} |"
        yield from rows(field, f"{path}{name}.")
    if "items" in schema:
        inner = f"{path.removesuffix('.')}[]."
        yield from rows(schema["items"], inner)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from rows(schema["additionalProperties"], f"{path}*.")


def _type(field):
    if "anyOf" in field:
        return " or ".join(_type(part) for part in field["anyOf"])
    if "$ref" in field:
        return "object"
    if "const" in field:
        return json.dumps(field["const"])
    names = field["type"] if isinstance(field["type"], list) else [field["type"]]
    if "array" in names:
        names = [f"list of {_type(field['items'])}" if n == "array" else n for n in names]
    return " or ".join(names)
