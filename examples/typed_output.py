"""Output that fits a type: a pydantic model where pydantic is installed, else a JSON schema.

    pip install '.[guided]' pydantic
    python examples/typed_output.py

The mask of each step lets through only tokens that the schema allows, so that the text can always
be parsed unless `max_tokens` ends it.
"""

from __future__ import annotations

import json
from typing import Any

from graphengine import Engine, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "action": {"enum": ["move", "grip", "wait"]},
        "centimetres": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["action", "centimetres"],
    "additionalProperties": False,
}


def ask(engine: Engine, prompt: str, schema: Any) -> dict[str, Any]:
    """The reply as an object. `schema` is a mapping, text, a pydantic model or a TypeAdapter."""
    asked = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=48, structured_outputs=asked)
    found: dict[str, Any] = json.loads(engine.generate(prompt, params).text)
    return found


def main() -> dict[str, Any]:
    with Engine.from_pretrained("demo", max_batch=1, max_seq_len=128) as engine:
        command = ask(engine, "The next command as JSON: ", SCHEMA)
    print(command)
    return command


if __name__ == "__main__":
    main()
