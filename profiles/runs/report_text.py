"""A report's document as text for a terminal."""

from __future__ import annotations

from graphengine.profiles.runs.report_sections import (
    Document,
    Section,
    Table,
    comparison,
    facts,
    legend,
    notes,
    sections,
)


def describe_report(document: Document) -> str:
    """All sections that the document has data for."""
    told = [*sections(document), *comparison(document)]
    return "\n\n".join([_heading(document), _stands_out(document), *map(_section, told)])


def _heading(document: Document) -> str:
    said = ", ".join(fact.text for fact in facts(document))
    told = [f"note: {note}" for note in notes(document)]
    return "\n".join([document["file"], said, *legend(facts(document)), *told])


def _stands_out(document: Document) -> str:
    lines = [
        f"- {found['cause']}: {found['text']}\n  what to do: {found['remedy']}"
        for found in document["stands_out"]
    ]
    return "\n".join(["What stands out", *(lines or ["- nothing"])])


def _section(section: Section) -> str:
    shown = [_table(part) if isinstance(part, Table) else part for part in section.parts]
    return "\n".join([section.title, *shown])


def _table(table: Table) -> str:
    """Columns as wide as their cells, and the meanings of their headings."""
    cells = [[column.title for column in table.columns]]
    cells += [[column.cell(row) for column in table.columns] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            f"{cell:<{width}}" if column.left else f"{cell:>{width}}"
            for column, cell, width in zip(table.columns, line, widths, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([*lines, *legend(table.columns)])
