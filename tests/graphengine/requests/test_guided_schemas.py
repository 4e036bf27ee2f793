"""JSON schemas of mixed features: each output is valid and complete, and drafts change none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from engines.speculation import open_plain, open_speculating
from graphengine import Engine, Result, SamplingParams, StructuredOutputsParams
from graphengine.requests.schemas import for_llguidance, read_number, without_null
from graphengine.speculative import MTP, NGram, Speculative
from random_schemas import Schema, is_valid, random_schema

llguidance = pytest.importorskip("llguidance")

COUNTS = {"cpu": 25, "cuda": 200}
"""Schemas of each device: on a CPU 200 take a minute for each drafter."""
DRAFTERS = {"plain": None, "ngram": NGram(k=3), "mtp": MTP(k=3)}
PROMPT = 'config = {"name": "x", "size": 12, "tags": []}\nother = '


def schemas(count: int) -> list[Schema]:
    return [random_schema(random.Random(seed)) for seed in range(count)]


def params(index: int, schema: Schema) -> SamplingParams:
    """Every second one is greedy."""
    asked = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    options: dict[str, Any] = {"seed": index} if index % 2 else {"temperature": 0.0}
    return SamplingParams(max_tokens=None, structured_outputs=asked, **options)


def open_engine(speculative: Speculative | None, device: str, batch: int) -> Engine:
    sizes: dict[str, Any] = {"max_batch": batch, "max_seq_len": 512, "device": device}
    if speculative is None:
        return open_plain(**sizes)
    return open_speculating(speculative, **sizes)


@pytest.fixture(scope="module")
def plain() -> Callable[[str], list[Result]]:
    """What plain decoding says for each schema, on a device, once."""
    known: dict[str, list[Result]] = {}

    def results(device: str) -> list[Result]:
        if device not in known:
            known[device] = served(None, device)
        return known[device]

    return results


def served(speculative: Speculative | None, device: str) -> list[Result]:
    asked = [params(*pair) for pair in enumerate(schemas(COUNTS[device]))]
    with open_engine(speculative, device, batch=8) as engine:
        results: list[Result] = engine.generate([PROMPT] * len(asked), asked)
        assert engine.counters["finished/stop"] == len(asked)
        if speculative is not None:
            assert engine.acceptance.accepted > 0
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_output_is_valid(
    plain: Callable[[str], list[Result]], device: str, name: str
) -> None:
    speculative = DRAFTERS[name]
    expected = plain(device)
    results = expected if speculative is None else served(speculative, device)
    for index, schema in enumerate(schemas(COUNTS[device])):
        result = results[index]
        assert result.finish_reason == "stop", f"{schema}: {result.text}"
        assert is_valid(json.loads(result.text), schema), f"{schema}: {result.text}"
        assert result.token_ids == expected[index].token_ids, f"{schema}"
    texts = {result.text for result in results}
    assert len(texts) > len(results) / 2


def test_the_schemas_have_every_feature() -> None:
    text = json.dumps(schemas(COUNTS["cpu"]))
    for keyword in (
        "$ref", "$defs", "anyOf", "enum", "const", "required", "pattern", "minLength", "maxLength",
        "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "null", "boolean",
        "additionalProperties", "object", "array", "integer",
    ):  # fmt: skip
        assert f'"{keyword}"' in text, keyword


def test_validity_is_that_of_jsonschema() -> None:
    """Instances of one schema under all the others, and small changes to them."""
    jsonschema = pytest.importorskip("jsonschema")
    made = schemas(60)
    values = [_instance(schema, schema, random.Random(index)) for index, schema in enumerate(made)]
    verdicts = set()
    for schema in made:
        validator = jsonschema.Draft202012Validator(schema)
        for value in [*values, {}, {"id": 1}, {"name": "ab"}, {"size": None}, {"tags": [1, "a"]}]:
            expected = validator.is_valid(value)
            assert is_valid(value, schema) == expected, f"{schema}: {value}"
            verdicts.add(expected)
    assert verdicts == {True, False}


def _instance(schema: Schema, root: Schema, dice: random.Random) -> Any:
    """A value that is about what the schema describes."""
    if "$ref" in schema:
        return _instance(root["$defs"][schema["$ref"].rpartition("/")[2]], root, dice)
    for key in ("anyOf", "enum"):
        if key in schema:
            chosen = dice.choice(schema[key])
            return _instance(chosen, root, dice) if key == "anyOf" else chosen
    if "const" in schema:
        return schema["const"]
    match schema["type"]:
        case "object":
            parts = schema["properties"].items()
            return {name: _instance(part, root, dice) for name, part in parts}
        case "array":
            count = dice.randrange(schema["maxItems"] + 2)
            return [_instance(schema["items"], root, dice) for _ in range(count)]
        case "string":
            return dice.choice(["red", "ab", "A-12", "", "abcdef", "Bcd-07"])
        case "integer":
            return dice.randrange(-250, 450)
        case _:
            return dice.choice([True, None])


# What llguidance would break.


def matcher(schema: Schema | str) -> Any:
    """llguidance's, whose tokens are bytes. ValueError for a schema that is refused."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    text, options = for_llguidance(json.loads(text, parse_float=read_number))
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_flexible": False, **options}
    )
    made = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    if made.is_error():
        raise ValueError(made.get_error().partition("\n<state>")[0])
    return made


def allows(schema: Schema | str, text: str) -> bool:
    made, tokens = matcher(schema), list(text.encode())
    return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()


BIG = 2**53 + 1
REFUSED: tuple[tuple[Schema | str, str], ...] = (
    ({"const": BIG}, f"another one than the constant {BIG}; a string could"),
    ({"properties": {"id": {"enum": [7, {"a": [BIG]}]}}}, f"at /properties/id: .* constant {BIG}"),
    ('{"const": 0.12345678901234567891}', "the constant 0.12345678901234567891"),
    ('{"const": 1E400}', r"1E\+400 is beyond what llguidance reads: 1E-308 to 1E\+308"),
    ('{"maximum": 1E-9999999999}', "1E-9999999999 is beyond"),
    # Beyond what Decimal reads.
    ('{"const": 1e99999999999999999999}', "1e99999999999999999999 is beyond what llguidance reads"),
    ({"type": "integer", "minimum": BIG}, f"with minimum {BIG} it would allow {BIG - 1}"),
    ({"exclusiveMinimum": BIG}, f"with exclusiveMinimum {BIG} it would allow {BIG}"),
    ({"items": {"maximum": 9.850868243521303}}, "at /items: .* maximum 9.850868243521303 it would"),
    ({"maximum": 2**64}, f"with maximum {2**64} it would not find a range of them"),
    ({"multipleOf": 429496730}, "multipleOf 429496730 comes to more than 429496728, the point"),
    ({"multipleOf": 600014}, "too long to compile: .* 300007 is above 100000"),
    (
        {"allOf": [{"multipleOf": 86400}, {"multipleOf": 604800}]},
        "multipleOf 86400 and multipleOf 604800 multiply to more than 429496728",
    ),
    (
        {"exclusiveMinimum": 10, "exclusiveMaximum": 10.5},
        "with exclusiveMinimum 10 and exclusiveMaximum 10.5 llguidance would allow 10: it",
    ),
    (
        {"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5},
        "with exclusiveMinimum 0 and maximum 0.5 llguidance would allow 0",
    ),
    (
        {"allOf": [{"$ref": "#/$defs/a%20b"}], "exclusiveMaximum": 0,
         "$defs": {"a b": {"anyOf": [{"minimum": -0.5}, {"type": "null"}]}}},
        "with minimum -0.5 and exclusiveMaximum 0 llguidance would allow 0",
    ),
    (
        # The bounds meet in the second option only, which comes to the definition by another way.
        {"anyOf": [{"$ref": "#/$defs/low"}, {"$ref": "#/$defs/low", "maximum": 0.5}],
         "$defs": {"low": {"exclusiveMinimum": 0}}},
        "with exclusiveMinimum 0 and maximum 0.5",
    ),
    (
        {"patternProperties": {"^a": {}}, "minProperties": 2, "additionalProperties": False},
        "minProperties 2 asks for 2 keys besides the 0 required ones: llguidance would write",
    ),
    ({"minProperties": 3, "required": ["a"]}, "minProperties 3 asks for 2 keys besides the 1"),
    (
        {"prefixItems": [{"type": "integer"}], "additionalItems": False},
        "would not keep the 1 prefixItems beside additionalItems; items says",
    ),
    ({"$ref": "#"}, "^\\$ref '#' leads back to the schema that it stands in, with nothing"),
    (
        {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}},
        "at /\\$defs/x: .*'#/\\$defs/x' leads back",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda each: str(each)[:60])
def test_what_would_break_is_refused(schema: Schema | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matcher(schema)


def test_what_is_kept_is_not_refused() -> None:
    kept: list[tuple[Schema | str, str, str]] = [
        ({"const": 2**60}, str(2**60), str(2**60 + 1)),
        ({"enum": [0.1, -1e-7]}, "-0.0000001", "0.2"),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1), str(2**63)),
        ({"type": "integer", "maximum": BIG}, "5", str(BIG + 1)),
        ({"multipleOf": 0.01}, "1.25", "1.255"),
        ({"multipleOf": 100_000_000}, "300000000", "300000001"),
        ({"allOf": [{"multipleOf": 0.5}, {"multipleOf": 3}]}, "6", "1.5"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5", "0"),
        ({"exclusiveMinimum": 0.5, "maximum": 1}, "0.75", "0.5"),
        # Bounds of two options are not asked of the same number.
        (
            {"anyOf": [{"exclusiveMinimum": 10, "maximum": 20}, {"minimum": 2, "maximum": 3.5}]},
            "3.25",
            "10",
        ),
        ({"minProperties": 2, "required": ["a"]}, '{"a":1,"b":2}', '{"a":1}'),
        (
            {"anyOf": [{"type": "null"}, {"items": {"$ref": "#"}, "type": "array"}]},
            "[[null]]",
            "[1]",
        ),
        # A property may have any name.
        ({"properties": {"$ref": {"const": 1}, "multipleOf": {}}}, '{"$ref":1}', '{"$ref":2}'),
    ]
    for schema, right, wrong in kept:
        assert allows(schema, right), f"{schema}: {right}"
        assert not allows(schema, wrong), f"{schema}: {wrong}"


def test_escapes_name_no_property_again() -> None:
    named = {"type": "object", "properties": {"a": {"const": 1}}}
    assert allows(named, '{"a":1,"b\\n\\"":2}')
    assert not allows(named, '{"b":1,"\\u0061":2}')
    closed = {**named, "additionalProperties": {"const": "\x01"}}
    assert not allows(closed, '{"b":"\\u0001"}')
    assert allows({**named, "additionalProperties": False}, '{"a":1}')
    assert allows({"const": "\x01"}, '"\\u0001"')


def test_classes_are_kept_through_escapes() -> None:
    for pattern, right, wrong in (
        ('^[^"]*$', '"a\\\\\\n"', '"\\""'),
        (r"^[^\\]$", '"\\""', '"\\\\"'),
        (r"^[^\x22]$", '"\\u0001"', '"\\""'),
        (r"^[^]\"]$", '"["', '"\\""'),
        (r"^[\x00-!#-~]$", '"!"', '"\\""'),
        (r"^\P{P}*$", '"a"', '"\\""'),
        (r"^[[:cntrl:]a]$", '"\\t"', '"\\""'),
        (r"^[a-z&&[^q\"]]$", '"a"', '"\\""'),
        (r"^\[[^\"]\]$", '"[a]"', '"[\\"]"'),
    ):
        assert allows({"type": "string", "pattern": pattern}, right), pattern
        assert not allows({"type": "string", "pattern": pattern}, wrong), pattern
        keys = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
        assert not allows(keys, f"{{{wrong}:1}}"), pattern
    assert without_null(r"^\[a\]\w.$") == r"^\[a\]\w.$"


# Schemas of everything that llguidance knows, mixed.

NUMBERS = (0, 1, 2, 10, -1, -10, 10.5, 0.5, -0.5, 3, 1.25, 100, 0.1)
CONSTANTS: tuple[Any, ...] = (0, 1.5, "a", 'a"', True, None, [], ["a", 1], {"a": [1]}, "é\n", 1e-7)
STRINGS = ("^a", "b$", "^[a-c]{1,3}$", "a|b", '^[^"]*$', r"[^\\x]", r"^\S+$", "^.{2}$")


def _mixed(dice: random.Random, depth: int = 2) -> Schema:
    makers = [_numbers, _texts, _constants] + [_members, _elements] * 2 * (depth > 0)
    schema = dice.choice(makers)(dice, depth - 1)
    if depth and dice.random() < 0.3:
        schema[dice.choice(["allOf", "anyOf"])] = [_mixed(dice, 0) for _ in range(2)]
    return schema


def _some(dice: random.Random, chance: float, **makers: Callable[[], Any]) -> Schema:
    return {key: make() for key, make in makers.items() if dice.random() < chance}


def _numbers(dice: random.Random, depth: int) -> Schema:
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    found = {key: lambda: dice.choice(NUMBERS) for key in bounds}
    multiple = _some(dice, 0.2, multipleOf=lambda: dice.choice((2, 0.5, 0.1, 7, 2.5)))
    kind = dice.choice(["number", "integer", ["integer", "null"]])
    return {"type": kind, **_some(dice, 0.4, **found), **multiple}


def _texts(dice: random.Random, depth: int) -> Schema:
    rest = _some(dice, 0.3, minLength=lambda: dice.randrange(3), maxLength=lambda: 4)
    return {"type": "string", "pattern": dice.choice(STRINGS), **rest}


def _constants(dice: random.Random, depth: int) -> Schema:
    return {"enum": dice.sample(CONSTANTS, 3)}


def _members(dice: random.Random, depth: int) -> Schema:
    return {"type": "object"} | _some(
        dice,
        0.5,
        properties=lambda: {key: _mixed(dice, depth) for key in dice.sample("abcé", 2)},
        required=lambda: dice.sample("abc", dice.randrange(3)),
        patternProperties=lambda: {dice.choice(["^a", "b$"]): _mixed(dice, depth)},
        additionalProperties=lambda: dice.choice([False, True, _mixed(dice, depth)]),
        minProperties=lambda: dice.randrange(4),
    )


def _elements(dice: random.Random, depth: int) -> Schema:
    return {"type": "array"} | _some(
        dice,
        0.4,
        items=lambda: dice.choice([False, _mixed(dice, depth)]),
        prefixItems=lambda: [_mixed(dice, depth)],
        additionalItems=lambda: False,
        minItems=lambda: dice.randrange(3),
        maxItems=lambda: dice.randrange(2, 4),
    )


def _said(schema: Schema, dice: random.Random) -> str | None:
    """Random text of the schema's grammar; None if it is not complete after 80 bytes."""
    made, said = matcher(schema), bytearray()
    while len(said) < 80:
        bits = np.frombuffer(made.compute_bitmask(), dtype=np.uint8)
        if made.is_stopped() or (made.is_accepting() and dice.random() < 0.3):
            return said.decode(errors="replace")
        free = [int(each) for each in np.flatnonzero(np.unpackbits(bits, bitorder="little"))]
        plain = [each for each in free if 0x20 <= each < 0x7F]
        closing = [each for each in plain if each in b']}"']
        said.append(dice.choice(closing if closing and dice.random() < 0.4 else plain or free))
        made.consume_token(said[-1])
    return None


def test_mixed_schemas_are_kept_or_refused() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    refused = checked = 0
    for seed in range(80):
        dice = random.Random(seed)
        schema = _mixed(dice)
        try:
            texts = [_said(schema, dice) for _ in range(3)]
        except ValueError:
            refused += 1
            continue
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        validator = jsonschema.Draft202012Validator(exact)
        for text in filter(None, texts):
            validator.validate(json.loads(text, parse_float=Decimal))
            checked += 1
    assert checked > 40 and refused > 5
