"""Prints, behind the tests, the planted faults that were caught and those that were not tried."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = [
        f"| `{properties['check']}` | {properties['fault']} | {properties['device']} | {outcome} |"
        for status, outcome in (("passed", "caught"), ("failed", "MISSED"))
        for report in terminalreporter.stats.get(status, ())
        if "fault" in (properties := dict(getattr(report, "user_properties", ())))
    ]
    if rows:
        terminalreporter.section("planted faults")
        for row in ["| check | planted fault | device | result |", "| --- " * 4 + "|", *rows]:
            terminalreporter.write_line(row)
