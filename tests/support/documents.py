"""The JSON Schemas of the documents, and the check of what a command prints with ``--json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from referencing import Registry, Resource

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SCHEMAS: dict[str, Any] = {
    path.name: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((REFERENCE / "schema").glob("*.json"))
}

OF_OTHERS = {  # command to the schema that it shares with others
    **dict.fromkeys(("merge", "split", "reshard", "convert", "average"), "run"),
    **dict.fromkeys(("strategy convert", "strategy merge"), "strategy-file"),
    **dict.fromkeys(("recipe check", "strategy show"), "inspect"),
}


@cache
def validator(schema: str) -> Draft202012Validator:
    resources = [(name, Resource.from_contents(one)) for name, one in SCHEMAS.items()]
    return Draft202012Validator(SCHEMAS[schema], registry=Registry().with_resources(resources))


def schema_of(command: str, document: dict[str, Any]) -> str:
    if "error" in document:
        return "error.json"
    return f"{OF_OTHERS.get(command, command.replace(' ', '-'))}.json"


def check_document(command: str, printed: str, exit_code: int) -> None:
    document = json.loads(printed)
    name = schema_of(command, document)
    error = best_match(validator(name).iter_errors(document))
    assert error is None, f"{name}: {error.json_path}: {error.message}"
    if "error" in document:
        assert document["error"]["exit_code"] == exit_code > 1, printed


def declared(schema: str) -> set[tuple[str, ...]]:
    """Return the place of each property and alternative of a schema."""

    def walk(node: object, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if isinstance(node, dict):
            for key, child in node.items():
                inner = (*place, key)
                if place[-1:] in (("properties",), ("$defs",)):
                    yield inner
                yield from walk(child, inner)

    return set(walk(SCHEMAS[schema], (schema,)))


def used(schema: str, document: object) -> set[tuple[str, ...]]:
    """Return the places of a schema that a valid document has values for."""

    def follow(reference: str, schema: str) -> tuple[str, ...]:
        file, _, pointer = reference.partition("#/")
        return (file or schema, *filter(None, pointer.split("/")))

    def walk(value: object, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield place
        node = SCHEMAS[place[0]]
        for key in place[1:]:
            node = node[key]
        if "$ref" in node:
            yield from walk(value, follow(node["$ref"], place[0]))
        for one in node.get("oneOf", ()):
            branch = validator(place[0]).evolve(schema=one)
            if "$ref" in one and branch.is_valid(value):
                yield from walk(value, follow(one["$ref"], place[0]))
        if isinstance(value, dict):
            for key in node.get("properties", {}).keys() & value.keys():
                yield from walk(value[key], (*place, "properties", key))
            if isinstance(node.get("additionalProperties"), dict):
                for child in value.values():
                    yield from walk(child, (*place, "additionalProperties"))
        if isinstance(value, list) and isinstance(node.get("items"), dict):
            for one in value:
                yield from walk(one, (*place, "items"))

    return set(walk(document, (schema,)))
