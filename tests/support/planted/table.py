"""The table of planted faults in the plugin's README, and the results that it is made from.

    export GRAPHENGINE_PLANTED_FAULTS=tests/graphengine/testing/planted_faults.json
    pytest -k is_caught tests/graphengine/testing   # writes the results of this machine
    PYTHONPATH=tests/support python tests/support/planted/table.py   # writes the README's table

A run replaces the rows of the faults that it ran, and those of their device that another
environment had found. Several runs may do so at the same time. A fault without a result, because it
never ran or because its run could not tell, is "not run".
"""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planted.cases import CPU_CASES, Case
from planted.gpu_cases import GPU_CASES

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "tests" / "graphengine" / "testing" / "planted_faults.json"
README = ROOT / "graphengine" / "testing" / "README.md"
BEGIN = "<!-- planted faults: made by tests/support/planted/table.py -->\n"
END = "<!-- end of planted faults -->\n"

VARIABLE = "GRAPHENGINE_PLANTED_FAULTS"
"""The environment variable that names the file into which a run of the tests writes its results."""

CAUGHT, MISSED, NOT_RUN = "caught", "MISSED", "not run"

CASES = {"CPU": CPU_CASES, "GPU": GPU_CASES}


def by_name(cases: Sequence[Case]) -> dict[tuple[str, str], Case]:
    return {(case.check, case.fault): case for case in cases}


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """{device: {"environment": text, "rows": [[check, fault, result], ...]}}."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_results(path: Path, found: dict[str, Any]) -> None:
    """Add what was found to `path`, with a row for each fault."""
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        results = json.loads(file.read() or "{}")
        for device, made in found.items():
            before = results.get(device, {})
            rows = before["rows"] if before.get("environment") == made["environment"] else []
            known = {(check, fault): result for check, fault, result in [*rows, *made["rows"]]}
            results[device] = {
                "environment": made["environment"],
                "rows": [[*name, known.get(name, NOT_RUN)] for name in by_name(CASES[device])],
            }
        file.truncate(0)
        file.write(_as_text({device: results[device] for device in CASES if device in results}))


def _as_text(results: dict[str, Any]) -> str:
    lines = ",\n".join(
        f"  {json.dumps(device)}: {{\n"
        f'    "environment": {json.dumps(made["environment"])},\n    "rows": [\n      '
        + ",\n      ".join(map(json.dumps, made["rows"]))
        + "\n    ]\n  }"
        for device, made in results.items()
    )
    return f"{{\n{lines}\n}}\n"


def render(results: dict[str, Any]) -> str:
    """Markdown: what ran where, what has no result yet, and a row for each fault."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    for device, cases in CASES.items():
        if device in results:
            rows = results[device]["rows"]
            where = results[device]["environment"]
            yield f"- {device} ({where}): {count(rows)}"
        else:
            yield f"- {device}: {len(cases)} faults, which have not been run yet"
    yield ""
    yield "| check | planted fault | on | result |"
    yield "| --- | --- | --- | --- |"
    for device, made in results.items():
        for check, fault, result in made["rows"]:
            yield f"| `{check}` | {fault} | {device} | {result} |"


def count(rows: Sequence[Sequence[str]]) -> str:
    """A text such as "23 of 24 faults caught, 1 not run"."""
    numbers = Counter(result for _, _, result in rows)
    text = f"{numbers[CAUGHT]} of {len(rows)} faults caught"
    return text + (f", {numbers[NOT_RUN]} not run" if numbers[NOT_RUN] else "")


def table_of_readme() -> str:
    """The text between the marks."""
    return README.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def main() -> None:
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    README.write_text(before + BEGIN + render(read_results()) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
