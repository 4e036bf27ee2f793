"""README.md and docs/: their links, their code, and what a page must not become."""

from __future__ import annotations

import ast
import asyncio
import json
import pydoc
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphengine
from checkpoints.adapters import write_adapter
from checkpoints.policies import save_policy
from engines.forked_ranks import ranks_are_forked
from graphengine import Engine, EngineConfig, SamplingParams
from graphengine.demo import checkpoint_path
from graphengine.options.table import rows
from graphengine.testing import poison_padding
from pages import PAGES, READER, ROOT, code_of, module_of, name_of, write_modules

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


def test_the_site_names_what_exists() -> None:
    """The site is built elsewhere, with packages that tests do without."""
    pages = runpy.run_path(str(ROOT / "docs" / "site.py"))["API"]
    names = [f"graphengine.{name}" for page in pages.values() for name in page]
    assert names and [name for name in names if pydoc.locate(name) is None] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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


# Code.

CODE = {
    name_of(page): blocks
    for page in PAGES
    if page.parent.name != "testing" and (blocks := code_of(page.read_text("utf-8")))
}
"""The Python blocks of each page; the plugin's page has tests of its own."""
NEEDS = {
    "docs/grammars.md": "llguidance",
    "docs/experts.md": "transformers",
    "docs/robots.md": "transformers",
    "docs/speech.md": "transformers",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", device="cpu", max_batch=2, max_seq_len=320) as engine:
        yield engine


def moe_checkpoint(folder: Path) -> Path:
    """A model with experts that `record_routing` has something to say about."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder)
    return folder


def talker_inputs() -> dict[str, torch.Tensor]:
    """What a talker is given."""
    prompt, text = torch.randn(5, 72), torch.randn(4, 72)
    return {"talker_prompt": prompt, "trailing_text": text, "text_pad": text[-1]}


def moshi_inputs() -> dict[str, torch.Tensor]:
    """What Moshi with three codes of sound is given."""
    from checkpoints.moshi_models import beginning

    silence = torch.arange(3)
    return {
        "nothing": torch.tensor(beginning(3)[0]),
        "silence": silence,
        "said_now": silence + 4,
        "conversation": torch.arange(28).view(4, 7),
    }


def shortened(generate: Callable[..., Any]) -> Callable[..., Any]:
    """`Engine.generate`, where an answer without a limit is not as long as the engine can hold."""

    def call(engine: Engine, prompts: Any, params: Any = None, **options: Any) -> Any:
        return generate(engine, prompts, params or SamplingParams(max_tokens=12), **options)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("page", CODE)
def test_the_code_of_a_page_runs(
    page: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block after block, with what the page's reader has: an engine, a prompt, ..."""
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Engine, "generate", shortened(Engine.generate))
    names: dict[str, Any] = {
        "engine": engine, "path": "demo", "prompt": "def f(",
        "params": SamplingParams(max_tokens=4),
        "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
        "serve_for_a_while": lambda engine: engine.generate("x", SamplingParams(max_tokens=2)),
        "talker_path": "demo", "moshi_path": "demo", **talker_inputs(), **moshi_inputs(),
    }  # fmt: skip
    assert names.keys() == READER.keys(), "what is run and what is type-checked differ"
    names |= {"Engine": Engine, "SamplingParams": SamplingParams}
    if page == "docs/robots.md":
        positions = {"max_position_embeddings": 2048}
        save_policy(tmp_path / "pi0", text=positions, expert=positions)
        names["path"] = "pi0"
    if not torch.cuda.is_available():  # Several ranks want a GPU each.
        names["__name__"] = "__main__"
    if page in ("docs/experts.md", "docs/tensor_parallel.md"):
        names |= {"path": moe_checkpoint(tmp_path), "prompt": [1, 2, 3]}
    if page == "docs/speech.md":
        from checkpoints.csm_models import write_csm
        from checkpoints.higgs_models import BEGIN, write_higgs
        from checkpoints.moshi_models import write_moshi
        from checkpoints.talker_models import write_talker

        write_csm(tmp_path, codebooks=4)
        write_higgs(tmp_path / "higgs-audio", codebooks=4)
        names |= {"path": tmp_path, "prompt": [1, 2, 3, BEGIN]}
        write_talker(tmp_path / "talker", 4)
        write_moshi(tmp_path / "moshi", 3)
        names |= {"talker_path": tmp_path / "talker", "moshi_path": tmp_path / "moshi"}
    if page == "docs/adapters.md":
        for seed, name in enumerate(("sql", "prose")):
            write_adapter(tmp_path / "adapters" / name, checkpoint_path(), rank=2, seed=seed)
    with ranks_are_forked():
        for block in CODE[page]:
            exec(compile(block, page, "exec"), names)
    if "answer" in names:
        asyncio.run(names["answer"]("def f("))
    for name, test in list(names.items()):
        if name.startswith("test_"):
            test(poison_padding)
    if names["engine"] is not engine:
        names["engine"].close()


def test_most_pages_have_code() -> None:
    assert {"README.md", "docs/sessions.md", "docs/requests.md", "docs/profiling.md"} < {*CODE}


def test_pages_become_modules_with_the_lines_of_the_page(tmp_path: Path) -> None:
    page = "# Title\n\n```python\na = prompt\n```\ntext\n```python\nb = a\n\nc = b\n```\n"
    first, *lines = module_of(page).splitlines()
    assert "; prompt: str; " in first and "from graphengine import Engine" in first
    assert lines == ["", "", "a = prompt", "", "", "", "b = a", "", "c = b"]
    (tmp_path / "gone.py").touch()
    written = write_modules(tmp_path)
    assert {*tmp_path.iterdir()} == {*written} and tmp_path / "docs_sessions.py" in written
    for module in written:
        compile(module.read_text("utf-8"), module.name, "exec")


SHAPE_ROW = re.compile(
    r"^\| ([\w.-]+)(?: \(\w+\))? ((?:\| (?:[\d.]+, \d+%|-) )+)\| ([\d.]+) \|$", re.M
)


def measured(shape: str) -> tuple[dict[tuple[int, int], set[str]], set[str]]:
    """What the result files of a shape have, as a table writes it: steps by (live rows, slots),
    and times of the first token after 1,024.
    """
    steps: dict[tuple[int, int], set[str]] = {}
    first = set()
    results = ROOT / "profiles" / "results"
    for name in (f"bench-{shape}-h200.json", f"bench-{shape}-tuned-h200.json"):
        if not (results / name).is_file():
            continue
        for row in json.loads((results / name).read_text("utf-8"))["rows"]:
            step = f"{row['ms_per_step']:.2f}, {row['share']:.0%}"
            steps.setdefault((row["live"], row["max_batch"]), set()).add(step)
            first.add(f"{row['ttft_ms'].get('1024', 0):.1f}")
    return steps, first


def test_the_table_of_experts_has_what_the_result_files_have() -> None:
    table = SHAPE_ROW.findall((ROOT / "docs" / "experts.md").read_text("utf-8"))
    assert len(table) == 4
    for shape, cells, token in table:
        steps, first = measured(shape)
        for place, cell in zip(((1, 1), (8, 8), (1, 8)), cells.split("|")[1:], strict=True):
            found = cell.strip()
            assert found in steps.get(place, {"-"}), f"{shape} {place}: {found}, not {steps}"
        assert token in first, f"{shape}: {token}, not {first}"


# Pages that quote the source.


def literals(root: Path) -> set[str]:
    """The texts of all strings of the packages, with "…" where an f-string has a value."""
    found = set()
    for folder in ("graphengine", "kernels", "buckets", "profiles"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", None) for part in node.values]
                    found.add("".join(part if isinstance(part, str) else "…" for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found


def quoted(message: str, texts: set[str]) -> bool:
    """Whether one of the texts has the message's parts between "…", in their order."""
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_messages_on_the_page_of_troubles_are_in_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8").partition("## It runs, but")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    texts = literals(ROOT)
    assert len(messages) >= 25
    assert [message for message in messages if not quoted(message, texts)] == []
    # What is not there is not found, nor are parts in another order.
    assert not quoted("no such message: … at all", texts)
    assert not quoted("would exceed … requests wait already", texts)


PEERS = {"from_vllm.md": 25, "from_transformers.md": 20}


@pytest.mark.parametrize("page", PEERS)
def test_names_for_those_who_come_from_elsewhere_exist(page: str) -> None:
    options = {row.name for table in (SamplingParams, EngineConfig) for row in rows(table)}
    cells = re.findall(
        r"^\|[^|]+\| (.*) \|$", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE
    )
    names = {name for cell in cells for name in re.findall(r"`([A-Za-z_.]+)`", cell)}
    for name in sorted(names):
        owner, _, member = name.partition(".")
        exists = name in options or hasattr(graphengine, owner)
        assert exists and (not member or hasattr(getattr(graphengine, owner), member)), name
    assert len(names) >= PEERS[page]


def test_the_page_of_the_api_is_what_the_docstrings_say() -> None:
    """If it does not: `python docs/api_page.py`."""
    found = runpy.run_path(str(ROOT / "docs" / "api_page.py"))
    shown = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert found["page"]() == shown
    for name in graphengine.__all__:
        assert f"\n### `{name}`\n\n" in shown
    # Every name has words, and nothing that differs from process to process.
    assert not re.search(r"^### `\w+`\n+(```text\n[^`]*```\n+)?(?=#|\Z)", shown, re.MULTILINE)
    assert " at 0x" not in shown
