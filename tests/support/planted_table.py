"""The table of planted faults in the plugin's README, and the results that it is made from.

    export GRAPHENGINE_PLANTED_FAULTS=tests/testing/planted_faults.json
    pytest -k is_caught tests/testing/test_planted_faults.py         # writes this machine's results
    PYTHONPATH=tests/support python tests/support/planted_table.py   # writes the README's table

A run replaces the rows of the devices that it used: without a GPU those of the CPU alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planted_cases import CPU_CASES, Case
from planted_gpu_cases import GPU_CASES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "testing" / "planted_faults.json"
README = ROOT / "graphengine" / "testing" / "README.md"
BEGIN = "<!-- planted faults: made by tests/support/planted_table.py -->\n"
END = "<!-- end of planted faults -->\n"

VARIABLE = "GRAPHENGINE_PLANTED_FAULTS"
"""The environment variable that names the file into which a run of the tests writes its results."""

CASES = {"CPU": CPU_CASES, "GPU": GPU_CASES}


def by_name(cases: Sequence[Case]) -> dict[tuple[str, str], Case]:
    return {(case.check, case.fault): case for case in cases}


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """{device: {"environment": text, "rows": [[check, fault, result], ...]}}."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_results(path: Path, found: dict[str, Any]) -> None:
    """Write what was found, in the order of the cases; keeps what `path` has of other devices."""
    results = read_results(path)
    for device, made in found.items():
        order = list(by_name(CASES[device]))
        rows = sorted(made["rows"], key=lambda row: order.index((row[0], row[1])))
        results[device] = {"environment": made["environment"], "rows": rows}
    results = {device: results[device] for device in CASES if device in results}
    lines = ",\n".join(
        f"  {json.dumps(device)}: {{\n"
        f'    "environment": {json.dumps(made["environment"])},\n    "rows": [\n      '
        + ",\n      ".join(map(json.dumps, made["rows"]))
        + "\n    ]\n  }"
        for device, made in results.items()
    )
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def render(results: dict[str, Any]) -> str:
    """Markdown: what ran where, what has no result yet, and a row for each fault."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    for device, cases in CASES.items():
        if device in results:
            rows = results[device]["rows"]
            caught = sum(row[2] == "caught" for row in rows)
            where = results[device]["environment"]
            yield f"- {device} ({where}): {caught} of {len(rows)} faults caught"
        else:
            yield f"- {device}: {len(cases)} faults, which have not been run yet"
    yield ""
    yield "| check | planted fault | on | result |"
    yield "| --- | --- | --- | --- |"
    for device, made in results.items():
        for check, fault, result in made["rows"]:
            yield f"| `{check}` | {fault} | {device} | {result} |"


def table_of_readme() -> str:
    """What stands between the marks."""
    return README.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def main() -> None:
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    README.write_text(before + BEGIN + render(read_results()) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
