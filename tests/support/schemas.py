"""JSON Schemas, made from the structs of answers: types from fields, words from docstrings."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ckpttool.operations.answer import Answer, Document, Reported

DIALECT = "https://json-schema.org/draft/2020-12/schema"
VERSION = "Version of the document; it grows with a change that breaks readers."
WIDTH = 100
_FIELD = re.compile(r"^(\w+(?:, \w+)*)\n((?: {4}.*\n?)+)", re.MULTILINE)


def make_schema(document: type[Answer]) -> str:
    """Return the JSON Schema of a document, or of a part that others refer to, as text."""
    root, parts = _components(document)
    schema: dict[str, Any] = {"$schema": DIALECT, **root}
    return fold({**schema, "$defs": parts} if parts else schema) + "\n"


def make_schema_of_kinds(title: str, summary: str, kinds: Sequence[type[Answer]]) -> str:
    """Return the JSON Schema of a command that prints one of several documents, as text."""
    made = {kind.__name__: _components(kind) for kind in kinds}
    shared = {name: part for _, parts in made.values() for name, part in parts.items()}
    roots = {name: root for name, (root, _) in made.items()}
    schema = {
        "$schema": DIALECT,
        "title": title,
        "description": summary,
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in roots],
        "$defs": {**roots, **shared},
    }
    return fold(schema) + "\n"


def _components(document: type[Answer]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of a document, and of its parts by name."""
    keys = _without_aside(document)
    structs = {one.__name__: one for one in _structs(keys)}
    _, parts = msgspec.json.schema_components([*structs.values()], schema_hook=_hook)
    described = {name: _describe(parts[name], one) for name, one in structs.items()}
    root = described.pop(document.__name__)
    if issubclass(document, Document):
        version = {"description": VERSION, "const": document.schema}
        root["properties"] = {"schema": version, **root["properties"]}
        root["required"] = ["schema", *root["required"]]
    return root, described


def _without_aside(document: type[Answer]) -> type[msgspec.Struct]:
    """Return a struct of the fields that are keys, with their words."""
    aside = document.aside if issubclass(document, Document) else ()
    fields = [one for one in msgspec.structs.fields(document) if one.name not in aside]
    optional = {one.name: (None,) for one in fields if not one.required}
    made = msgspec.defstruct(
        document.__name__,
        [(one.name, one.type, *optional.get(one.name, ())) for one in fields],
        kw_only=True,
        omit_defaults=True,
    )
    made.__doc__ = document.__doc__
    return made


def _hook(kind: type) -> dict[str, Any]:
    if kind is Reported:
        return {"type": "array", "items": {"$ref": "diagnostic.json"}}
    if kind is range:
        return {"type": "array", "items": {"type": "integer", "minimum": 0}}
    raise NotImplementedError


def _structs(document: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """Return a struct, and those that its fields hold."""
    found: dict[type[msgspec.Struct], None] = {}

    def walk(node: object) -> None:
        if isinstance(node, msgspec.inspect.StructType):
            if node.cls in found or node.cls is Answer:
                return
            found[node.cls] = None
        if isinstance(node, msgspec.Struct):
            for name in node.__struct_fields__:
                walk(getattr(node, name))
            for kind in _kinds(node):
                walk(msgspec.inspect.type_info(kind))
        elif isinstance(node, tuple):
            for one in node:
                walk(one)

    walk(msgspec.inspect.type_info(document))
    return [*found]


def _describe(part: Mapping[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schema of a struct with the words of its docstring."""
    text = inspect.getdoc(struct) or ""
    words = {
        name: " ".join(of.split())
        for kind in reversed(struct.__mro__)
        for names, of in _FIELD.findall(f"{inspect.getdoc(kind)}\n".partition("----------\n")[2])
        for name in names.split(", ")
    }
    infos = {one.encode_name: one for one in msgspec.inspect.type_info(struct).fields}
    assert words.keys() >= infos.keys(), f"{struct.__name__}: {infos.keys() - words.keys()}"
    properties = {}
    for name, one in part["properties"].items():
        is_optional = not infos[name].required and infos[name].default is None
        if kinds := _kinds(infos[name].type):
            one = {
                "type": "array",
                "items": {"oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds]},
            }
        properties[name] = {"description": words[name], **_plain(one, is_optional)}
        properties[name].pop("propertyNames", None)
        kind = infos[name].type
        for mapping in getattr(kind, "types", (kind,)):  # whose keys msgspec 0.21 does not tell
            keys = getattr(mapping, "key_type", None)
            if isinstance(keys, msgspec.inspect.LiteralType):
                properties[name]["propertyNames"] = {"enum": [*keys.values]}
    omits_defaults = struct.__struct_config__.omit_defaults
    summary = " ".join(text.partition("\n\n")[0].split())
    return {
        "title": struct.__name__,
        "description": summary,
        "type": "object",
        "properties": properties,
        "required": part.get("required", []) if omits_defaults else [*properties],
        "additionalProperties": False,
    }


def _kinds(node: msgspec.inspect.Type) -> tuple[type[Answer], ...]:
    """Return the structs of which an item is one, where a type cannot say that."""
    extra = node.extra if isinstance(node, msgspec.inspect.Metadata) else None
    return (extra or {}).get("items", ())


def _plain(node: dict[str, Any], is_optional: bool) -> dict[str, Any]:
    """Return the schema of a value: null as one of its types, and no default."""
    node = {key: value for key, value in node.items() if key != "default"}
    kinds = node.pop("anyOf", ())
    if kinds:
        null = {"type": "null"}
        values = [_with_spelled(kind) for kind in kinds if kind != null]
        value = values[0] if len(values) == 1 else {"anyOf": values}
        if is_optional or null not in kinds:
            return {**node, **value}
        if "type" not in value:
            return (
                {**node, "oneOf": [value, null]}
                if "anyOf" not in value
                else {**node, "anyOf": [*value["anyOf"], null]}
            )
        return {**node, **value, "type": [value["type"], "null"]}
    return _with_spelled(node)


def _with_spelled(node: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a number, or of its name where JSON has no such number."""
    spelled = node.pop("spelled", None)
    return node if spelled is None else {"anyOf": [node, {"enum": spelled}]}


def fold(value: object, indent: str = "", before: int = 0) -> str:
    """Lay out a document: what does not fit on a line has a line for each item."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + before + len(line) < WIDTH or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, list):
        items = [fold(one, inner) for one in value]
        ends = "[]"
    else:
        keys = {key: f"{json.dumps(key)}: " for key in value}
        items = [keys[key] + fold(one, inner, len(keys[key])) for key, one in value.items()]
        ends = "{}"
    lines = f",\n{inner}".join(items)
    return f"{ends[0]}\n{inner}{lines}\n{indent}{ends[1]}"
