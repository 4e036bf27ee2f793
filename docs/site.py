"""Gathers the pages of the documentation site, each file where it is in the repository.

    python docs/site.py build/site-source       # `make docs` does so, then builds with MkDocs

Pages link to files all over the repository. So the site's source is a copy of README.md and of what
can be reached from it by links, at the same relative paths, and each link is one on the site, too.
The API pages are added here: what they show is written in docstrings.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = ("README.md", "CHANGELOG.md")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

API = {
    "Engine": ["engine.Engine", "sessions.Session"],
    "Requests": [
        "sampling_params.SamplingParams",
        "structured_outputs.StructuredOutputsParams",
        "prompts.Chat",
        "requests.request.Request",
        "requests.request.Event",
        "requests.result.Result",
    ],
    "Speculation": ["speculative"],
    "Testing": [
        "testing.checks.parity.assert_replay_matches_eager",
        "testing.checks.poison.poison_padding",
        "testing.checks.outputs.assert_outputs_written",
        "testing.checks.replayed.assert_replayed",
        "testing.checks.dangling.assert_no_dangling_pointers",
        "testing.checks.host_scalars.assert_no_host_scalars",
        "testing.checks.pdl_waits.assert_pdl_waits",
        "testing.checks.pools.no_leaked_pool",
        "testing.checks.invariants",
        "testing.checks.watch",
        "testing.checks.latency.latency_budget",
        "testing.snapshots.snapshot.graph_snapshot",
        "testing.snapshots.keeping.keep_graphs",
        "testing.isolated.run_isolated",
    ],
}
"""The pages of the API: by title, the modules, classes and functions on it."""


def local_links(text: str) -> list[str]:
    """Paths of a page's links and pictures, without those to other sites."""
    found = LINK.findall(FENCED.sub("", text))
    return [
        target.partition("#")[0] for target in found if "://" not in target and target[0] != "#"
    ]


def reachable(first: Sequence[str] = FIRST, root: Path = ROOT) -> list[Path]:
    """The files that links lead to from the `first` ones, with these, relative to `root`.

    FileNotFoundError for a link that leads nowhere.
    """
    pages, found = [root / name for name in first], dict[Path, None]()
    while pages:
        page = pages.pop()
        if page in found:
            continue
        found[page] = None
        if page.suffix == ".md":
            links = local_links(page.read_text("utf-8"))
            pages += [(page.parent / link).resolve(strict=True) for link in links]
    return [page.relative_to(root) for page in found]


def gather(folder: Path) -> None:
    """Write the site's source into `folder`, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in reachable():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    (folder / "api").mkdir()
    for title, names in API.items():
        shown = "\n\n".join(f"::: graphengine.{name}" for name in names)
        (folder / "api" / f"{title.lower()}.md").write_text(f"# {title}\n\n{shown}\n")


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
