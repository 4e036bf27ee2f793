"""The form a request's output must have; names as in vLLM's `StructuredOutputsParams`."""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

Spelling = Literal["any", "tokenizer"]

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


class ModelWithSchema(Protocol):
    """A pydantic model: the class, not an instance."""

    def model_json_schema(self) -> Mapping[str, Any]: ...


class AdapterWithSchema(Protocol):
    """A pydantic `TypeAdapter`."""

    def json_schema(self) -> Mapping[str, Any]: ...


HasSchema = ModelWithSchema | AdapterWithSchema
"""An object that gives its own JSON schema. Nothing here imports pydantic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """Give exactly one of these five; it is checked here and compiled when a request is submitted:

    json         JSON that a schema describes: the schema as text or a mapping, or a pydantic model
                 or `TypeAdapter`; the schema is stored as text
    regex        regular expression that the whole text matches, in the syntax of Rust's `regex`
                 crate: no look-around and no back references
    choice       one of these strings
    grammar      a context-free grammar, in llguidance's dialect of Lark
    json_object  True: any JSON object

    With json and json_object you may also give:

    disable_any_whitespace         no whitespace between JSON tokens, which also keeps a model from
                                   an endless run of blanks
    disable_additional_properties  objects of a schema have only the properties that it names,
                                   unless it mentions others
    whitespace_pattern             regular expression of the whitespace allowed between JSON tokens

    With anything but `grammar`:

    spelling  which tokens may spell a text where the grammar allows only that text: "any" allows
              every split into tokens, "tokenizer" only the tokenizer's own, as far as that does not
              depend on what follows. None: "any" in an engine with `grammar_pool_mib`, otherwise
              llguidance's choice. Where the device follows the grammar, only the split into tokens
              changes: both allow the same texts
    """

    json: str | Mapping[str, Any] | HasSchema | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    spelling: Spelling | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs take exactly one of {', '.join(_KINDS)}, not "
                f"{len(given)}{': ' * bool(given)}{', '.join(given)}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if not isinstance(value, str | None):
                raise ValueError(f"{name}={value!r} must be a string")
            if name != "grammar" and value and (len(value) - len(value.rstrip("\\"))) % 2:
                raise ValueError(f"{name}={value!r} ends with a backslash that escapes nothing")
        for name in _JSON_OPTIONS[:2]:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.json_object not in (None, True):
            raise ValueError(f"json_object={self.json_object!r} must be True, or None")
        asked = [name for name in _JSON_OPTIONS if getattr(self, name) not in (False, None)]
        if asked and given[0] not in ("json", "json_object"):
            raise ValueError(f"{asked[0]} is for json and json_object, not for {given[0]}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                f"whitespace_pattern={self.whitespace_pattern!r} contradicts "
                f"disable_any_whitespace=True"
            )
        if self.spelling is not None:
            if self.spelling not in get_args(Spelling):
                raise ValueError(f"spelling={self.spelling!r} must be 'any', 'tokenizer' or None")
            if self.grammar is not None:
                raise ValueError(
                    f"spelling={self.spelling!r} is not for grammar: Lark has an option for it"
                )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def schema(self) -> Any:
        """The JSON schema of `json` or `json_object`, with the options' additions."""
        return self.read_schema(float)

    def read_schema(self, real: Callable[[str], Any]) -> Any:
        """`schema`, where `real` reads the numbers that have a point or an exponent."""
        if self.json is None:
            return {"type": "object"}
        schema = json_text.loads(str(self.json), parse_float=real)
        return _closed(schema) if self.disable_additional_properties else schema


def _schema_text(schema: object) -> str:
    """The text of a JSON schema, given as text, a mapping or a class with a schema; ValueError for
    anything else.
    """
    for method in ("model_json_schema", "json_schema"):
        if callable(tell := getattr(schema, method, None)):
            schema = tell()
            break
    if isinstance(schema, Mapping):
        try:
            return json_text.dumps(dict(schema))
        except RecursionError as error:
            # Its `repr` would raise the same error.
            raise ValueError(f"json is nested too deep: {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"json={schema!r} is no JSON: {error}") from error
    if not isinstance(schema, str):
        raise ValueError(
            f"json={schema!r} must be a JSON schema, as a mapping or as text, or a "
            "pydantic model or TypeAdapter"
        )
    try:
        read = json_text.loads(schema)
    except RecursionError as error:
        raise ValueError(f"json={schema[:50]!r}... is nested too deep: {error}") from error
    except ValueError as error:
        raise ValueError(f"json={schema!r} is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"json={schema!r} is no JSON schema, which is an object")
    return schema


def _choices(choices: object) -> tuple[str, ...]:
    """ValueError unless it is a list of at least one string."""
    if not isinstance(choices, Sequence) or isinstance(choices, str | bytes):
        raise ValueError(f"choice={choices!r} must be a list of strings")
    if not choices:
        raise ValueError(f"choice={choices!r} must hold a string at least")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise ValueError(f"choice={choices!r} must be strings that are not empty")
    return tuple(choices)


def _closed(schema: Any) -> Any:
    """The schema; objects with named properties allow no others unless the schema mentions them."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    names_some = isinstance(schema.get("properties"), dict)
    if names_some and not {"additionalProperties", "unevaluatedProperties"} & schema.keys():
        closed["additionalProperties"] = False
    return closed
