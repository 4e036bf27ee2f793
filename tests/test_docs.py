"""README.md and docs/: their links, and what a page must not become."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "graphengine" / "testing" / "README.md",
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """A page without its fenced code blocks."""
    return FENCED.sub("", text)


def links(text: str) -> list[str]:
    """The targets of a page's links and pictures that lie in this repository."""
    return [target for target in LINK.findall(prose(text)) if "://" not in target]


def anchors(text: str) -> set[str]:
    """What a link to one of a page's headings may have after #, as GitHub and MkDocs make it."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path, text: str) -> list[str]:
    """The links of a page at `page` that lead nowhere."""
    found = []
    for link in links(text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_file() or (
            anchor and anchor not in anchors(text if target == page else target.read_text("utf-8"))
        ):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page, page.read_text("utf-8")) == []


def test_a_broken_link_is_found() -> None:
    text = "# A title, with `code`\n[a](#a-title-with-code) [b](#b) [c](docs/none.md) [d](x://y)\n"
    assert broken(ROOT / "README.md", text) == ["#b", "docs/none.md"]
    assert broken(ROOT / "README.md", "[a](docs/limits.md#latency) [b](docs/limits.md#none)") == [
        "docs/limits.md#none"
    ]
    assert broken(ROOT / "README.md", "```\n[a](b)\n```\n") == []


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 160
    linked = {link.partition("#")[0] for link in links(text)}
    assert {f"docs/{page.name}" for page in PAGES if page.parent.name == "docs"} <= linked
