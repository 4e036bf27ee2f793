"""JSON schemas made by a seeded generator, and whether a value is what one describes.

Everything that they describe is short: a request of a few hundred tokens completes it. The check is
written here, so that it needs no package; a test compares it with `jsonschema` if that is
installed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

PATTERNS = ("^[a-f]{1,4}$", "^(red|green|blue)$", "^[A-Z][a-z]{0,3}-[0-9]{2}$")
WORDS = ("id", "name", "size", "left", "right", "tags", "kind", "été")
CONSTANTS: tuple[Any, ...] = ("on", "off", 0, 17, -3, True, False, None, "a b", 'quo"te')


def random_schema(dice: random.Random, depth: int = 3) -> Schema:
    """An object, with definitions that some of its parts refer to."""
    definitions = {f"d{index}": _any(dice, 0, {}) for index in range(dice.randrange(3))}
    schema = _object(dice, depth, definitions)
    return schema | ({"$defs": definitions} if definitions else {})


def _any(dice: random.Random, depth: int, definitions: Schema) -> Schema:
    if definitions and dice.random() < 0.2:
        return {"$ref": f"#/$defs/{dice.choice(sorted(definitions))}"}
    makers: list[Callable[..., Schema]] = [_string, _integer, _enum, _constant, _simple]
    if depth:
        makers += [_object, _array, _any_of] * 2
    return dice.choice(makers)(dice, depth, definitions)


def _object(dice: random.Random, depth: int, definitions: Schema) -> Schema:
    names = dice.sample(WORDS, dice.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(dice, depth - 1, definitions) for name in names},
        "required": [name for name in names if dice.random() < 0.6],
        "additionalProperties": False,
    }


def _array(dice: random.Random, depth: int, definitions: Schema) -> Schema:
    least = dice.randrange(3)
    items = {"minItems": least, "maxItems": least + dice.randrange(2)}
    return {"type": "array", "items": _any(dice, depth - 1, definitions), **items}


def _any_of(dice: random.Random, depth: int, definitions: Schema) -> Schema:
    return {"anyOf": [_any(dice, depth - 1, definitions) for _ in range(dice.randrange(2, 4))]}


def _string(dice: random.Random, depth: int, definitions: Schema) -> Schema:
    if dice.random() < 0.5:
        return {"type": "string", "pattern": dice.choice(PATTERNS)}
    least = dice.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randrange(4)}


def _integer(dice: random.Random, depth: int, definitions: Schema) -> Schema:
    least = dice.randrange(-200, 200)
    most = least + dice.randrange(300)
    if dice.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": least - 1, "exclusiveMaximum": most + 1}
    return {"type": "integer", "minimum": least, "maximum": most}


def _enum(dice: random.Random, depth: int, definitions: Schema) -> Schema:
    return {"enum": dice.sample(CONSTANTS, dice.randrange(1, 5))}


def _constant(dice: random.Random, depth: int, definitions: Schema) -> Schema:
    return {"const": dice.choice(CONSTANTS)}


def _simple(dice: random.Random, depth: int, definitions: Schema) -> Schema:
    return {"type": dice.choice(["boolean", "null", ["boolean", "null"]])}


TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def is_valid(value: Any, schema: Schema, root: Schema | None = None) -> bool:
    """Whether `value` is valid by the schema, with the keywords above."""
    root = schema if root is None else root
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    kinds = schema.get("type", list(TYPES))
    if not any(TYPES[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if "anyOf" in schema and not any(is_valid(value, each, root) for each in schema["anyOf"]):
        return False
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if isinstance(value, str):
        in_range = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return in_range and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, int) and not isinstance(value, bool):
        least = max(schema.get("minimum", value), schema.get("exclusiveMinimum", value - 1) + 1)
        most = min(schema.get("maximum", value), schema.get("exclusiveMaximum", value + 1) - 1)
        return bool(least <= value <= most)
    if isinstance(value, list):
        in_range = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        items = schema.get("items", {})
        return in_range and all(is_valid(item, items, root) for item in value)
    if isinstance(value, dict):
        named = schema.get("properties", {})
        if schema.get("additionalProperties") is False and value.keys() - named.keys():
            return False
        has_all = all(name in value for name in schema.get("required", ()))
        parts = ((item, named.get(name, {})) for name, item in value.items())
        return has_all and all(is_valid(item, part, root) for item, part in parts)
    return True


def _same(value: Any, constant: Any) -> bool:
    """True is not 1."""
    return value == constant and isinstance(value, bool) == isinstance(constant, bool)
