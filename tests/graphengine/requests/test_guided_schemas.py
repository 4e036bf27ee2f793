"""JSON schemas of mixed features: each output is valid and complete, and drafts change none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from engines.speculation import open_plain, open_speculating
from graphengine import Engine, Result, SamplingParams, StructuredOutputsParams
from graphengine.speculative import MTP, NGram, Speculative
from random_schemas import Schema, is_valid, random_schema

pytest.importorskip("llguidance")

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
    """Of instances of one schema under all the others, and of small changes to them."""
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
