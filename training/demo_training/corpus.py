"""The demo model's text: the standard library, its documentation, and permissive packages.

    python -m demo_training.corpus --out corpus.jsonl.xz [--heldout heldout.txt] [--stdlib-only]

The first line of the archive describes the sources, each further line is one document.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import json
import lzma
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = "graphengine-demo-corpus-1"
END_OF_TEXT = "<|endoftext|>"
HELDOUT_BYTES = 64 * 1024

# Numbers of hash buckets out of 1000: the first are for choosing the best weights, the next only
# for reports.
VALIDATION_BUCKETS = 10
HELDOUT_BUCKETS = 20

NOTICE = """\
# Notice: the rest of this text is whole source files of CPython {version}'s standard library and
# sections of its documentation, unchanged, separated by {separator!r}.
# Copyright (c) 2001 Python Software Foundation; All Rights Reserved.
# Licensed under the PSF License Agreement (PSF-2.0), see PSF-LICENSE.txt beside this file.
# None of it was in the training text of the demo model.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One file or documentation section; `path` starts with the name of its source."""

    path: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A source of text. `size` is UTF-8 bytes."""

    name: str
    version: str
    licence: str
    files: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    sources: tuple[Source, ...]
    documents: tuple[Document, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Whole documents in three parts; no text is in two of them."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    heldout: tuple[Document, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A distribution whose own files (without vendored ones) are under `licence`."""

    distribution: str
    folders: tuple[str, ...]
    licence: str
    skip: tuple[str, ...] = ()


# Packages that a machine running this project has anyway. Left out on purpose: hypothesis, tqdm and
# pathspec (MPL-2.0), transformers (its model files are copies of one another).
PACKAGES = (
    Package(distribution="anyio", folders=("anyio",), licence="MIT"),
    Package(distribution="click", folders=("click",), licence="BSD-3-Clause"),
    Package(distribution="fsspec", folders=("fsspec",), licence="BSD-3-Clause"),
    Package(distribution="huggingface_hub", folders=("huggingface_hub",), licence="Apache-2.0"),
    Package(distribution="jinja2", folders=("jinja2",), licence="BSD-3-Clause"),
    Package(distribution="mpmath", folders=("mpmath",), licence="BSD-3-Clause"),
    Package(distribution="mypy", folders=("mypy", "mypyc"), licence="MIT"),
    Package(distribution="networkx", folders=("networkx",), licence="BSD-3-Clause"),
    Package(distribution="numpy", folders=("numpy",), licence="BSD-3-Clause"),
    Package(distribution="packaging", folders=("packaging",), licence="Apache-2.0 OR BSD-2-Clause"),
    Package(distribution="pydantic", folders=("pydantic",), licence="MIT"),
    Package(
        distribution="pygments",
        folders=("pygments",),
        licence="BSD-2-Clause",
        skip=("pygments/lexers/", "pygments/unistring"),
    ),
    Package(distribution="pytest", folders=("_pytest",), licence="MIT"),
    Package(distribution="rich", folders=("rich",), licence="MIT", skip=("rich/_emoji",)),
    # Its copy of distutils is the standard library's.
    Package(
        distribution="setuptools",
        folders=("setuptools",),
        licence="MIT",
        skip=("setuptools/_distutils/",),
    ),
    Package(
        distribution="sympy",
        folders=("sympy",),
        licence="BSD-3-Clause",
        skip=("sympy/parsing/latex/_antlr/", "sympy/parsing/autolev/"),
    ),
    # Only the parts that people read, to limit the archive's size.
    Package(
        distribution="torch",
        folders=(
            "torch/autograd",
            "torch/cuda",
            "torch/distributions",
            "torch/nn",
            "torch/optim",
            "torch/utils",
        ),
        licence="BSD-3-Clause",
    ),
    Package(distribution="typer", folders=("typer",), licence="MIT"),
)

EXCLUDED_FOLDERS = frozenset(
    [
        "__pycache__",
        "_bundled",
        "_vendor",
        "data",
        "dist-packages",
        "encodings",
        "site-packages",
        "test_data",
        "typeshed",
    ]
)
# Handled as documentation, below.
TOPICS = "pydoc_data/topics.py"


def readable(text: str) -> bool:
    """True for text written by a person; False for stubs, tables and encoded data."""
    if not 200 <= len(text) <= 1_000_000 or END_OF_TEXT in text:
        return False
    lines = text.splitlines()
    letters = sum(character.isalpha() or character.isspace() for character in text)
    plain = sum(character.isascii() for character in text)
    return (
        max(map(len, lines)) <= 1000
        and len(text) / len(lines) <= 90
        and letters / len(text) >= 0.55
        and plain / len(text) >= 0.95
    )


def python_files(root: Path, folder: Path, skip: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(path relative to root, text) of each readable UTF-8 *.py below `folder`, sorted."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(tuple(skip)) or EXCLUDED_FOLDERS.intersection(name.split("/")):
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except (UnicodeDecodeError, OSError):
            continue
        if readable(text):
            yield name, text


def documentation(path: Path) -> Iterator[tuple[str, str]]:
    """The reStructuredText sections that pydoc carries as one dictionary of strings."""
    if not path.is_file():
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(node.value).items()):
                if readable(text):
                    yield f"pydoc_data/topics/{topic}.rst", text.strip() + "\n"


def collect_stdlib(root: Path) -> list[Document]:
    found = [*python_files(root, root, (TOPICS,)), *documentation(root / TOPICS)]
    return [Document(path=f"stdlib/{name}", text=text) for name, text in found]


def collect_package(package: Package) -> tuple[str, list[Document]]:
    """(version, documents), or ("", []) if the distribution is not installed."""
    try:
        distribution = importlib.metadata.distribution(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return "", []
    root = Path(str(distribution.locate_file("")))
    found: list[tuple[str, str]] = []
    for folder in package.folders:
        found += python_files(root, root / folder, package.skip)
    documents = [Document(path=f"{package.distribution}/{name}", text=text) for name, text in found]
    return distribution.version, documents


def collect(*, stdlib_only: bool = False) -> Corpus:
    """Reads this machine's standard library and, unless told not to, the packages above."""
    root = Path(sysconfig.get_path("stdlib"))
    groups = [("stdlib", platform.python_version(), "PSF-2.0", collect_stdlib(root))]
    for package in () if stdlib_only else PACKAGES:
        version, documents = collect_package(package)
        groups.append((package.distribution, version, package.licence, documents))
    seen: set[bytes] = set()
    sources: list[Source] = []
    kept: list[Document] = []
    for name, version, licence, documents in groups:
        unique = list(deduplicate(documents, seen))
        size = sum(len(document.text.encode()) for document in unique)
        if unique:
            sources.append(
                Source(name=name, version=version, licence=licence, files=len(unique), size=size)
            )
            kept += unique
    return Corpus(sources=tuple(sources), documents=tuple(kept))


def deduplicate(documents: Iterable[Document], seen: set[bytes]) -> Iterator[Document]:
    """Drops documents that equal an earlier one except for white space; `seen` is updated."""
    for document in documents:
        digest = hashlib.sha256(" ".join(document.text.split()).encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield document


def save(corpus: Corpus, path: Path) -> None:
    head = {"format": FORMAT, "sources": [asdict(source) for source in corpus.sources]}
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as archive:
        archive.write(json.dumps(head) + "\n")
        for document in corpus.documents:
            archive.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")


def load(paths: Sequence[Path]) -> Corpus:
    """Reads archives made by `save`; any other file is one document of plain text."""
    sources: list[Source] = []
    documents: list[Document] = []
    for path in paths:
        if path.suffix == ".xz":
            with lzma.open(path, "rt", encoding="utf-8") as archive:
                head = json.loads(next(archive))
                if head.get("format") != FORMAT:
                    raise ValueError(f"{path} is not a {FORMAT} archive")
                sources += [Source(**source) for source in head["sources"]]
                documents += [Document(**json.loads(line)) for line in archive]
        else:
            text = path.read_text(encoding="utf-8")
            size = len(text.encode())
            sources.append(
                Source(name=path.name, version="", licence="as the file says", files=1, size=size)
            )
            documents.append(Document(path=path.name, text=text))
    return Corpus(sources=tuple(sources), documents=tuple(documents))


def bucket(path: str) -> int:
    """0..999, from the path alone, so that a file always stays on its side of the split."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) % 1000


def split(documents: Sequence[Document]) -> Split:
    """Whole files by hash of their path; each part gets at least one.

    Raises:
        ValueError: fewer than three documents.
    """
    if len(documents) < 3:
        raise ValueError(f"{len(documents)} documents cannot be split in three, give at least 3")
    ordered = sorted(documents, key=lambda document: (bucket(document.path), document.path))
    buckets = [bucket(document.path) for document in ordered]
    first = max(1, sum(b < VALIDATION_BUCKETS for b in buckets))
    second = max(first + 1, sum(b < VALIDATION_BUCKETS + HELDOUT_BUCKETS for b in buckets))
    second = min(second, len(ordered) - 1)
    return Split(
        validation=tuple(ordered[:first]),
        heldout=tuple(ordered[first:second]),
        train=tuple(ordered[second:]),
    )


def familiar_lines(parts: Split) -> float:
    """Share of held-out lines of at least 40 characters that are also in the training text."""
    known = {
        line for document in parts.train for line in document.text.split("\n") if len(line) >= 40
    }
    lines = [
        line for document in parts.heldout for line in document.text.split("\n") if len(line) >= 40
    ]
    return sum(line in known for line in lines) / max(1, len(lines))


def heldout_sample(corpus: Corpus, *, limit: int = HELDOUT_BYTES) -> str:
    """Whole held-out files of the standard library, at most `limit` bytes, notice first."""
    version = next(source.version for source in corpus.sources if source.name == "stdlib")
    parts = [NOTICE.format(version=version, separator=END_OF_TEXT)]
    size = len(parts[0])
    for document in split(corpus.documents).heldout:
        length = len(document.text.encode()) + len(END_OF_TEXT)
        small_enough = length <= limit // 4 and size + length <= limit
        if document.path.startswith("stdlib/") and small_enough:
            parts.append(document.text)
            size += length
    return END_OF_TEXT.join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demo_training.corpus", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="archive to write (.jsonl.xz)")
    parser.add_argument("--heldout", type=Path, help="also write the held-out sample here")
    parser.add_argument("--stdlib-only", action="store_true")
    options = parser.parse_args(arguments)
    corpus = collect(stdlib_only=options.stdlib_only)
    save(corpus, options.out)
    if options.heldout:
        options.heldout.write_text(heldout_sample(corpus), encoding="utf-8")
    for source in corpus.sources:
        print(
            f"{source.name:18} {source.version:16} {source.licence:28}"
            f"{source.files:6} files {source.size / 1e6:8.2f} MB"
        )
    megabytes = sum(source.size for source in corpus.sources) / 1e6
    print(f"{megabytes:.1f} MB of text in {options.out.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
