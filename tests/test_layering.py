"""The folders may only import downwards, by the table in the design; each rule is tested on sources
that break it.

The rules read source text, imports inside functions and under TYPE_CHECKING included, so nothing
has to be importable, and what an optional branch would do on another machine counts too.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from house import ROOT, imports, module_name, package_files

THIRD_PARTY = {"torch", "triton", "numpy"}
LIBRARIES = THIRD_PARTY | {
    "cuda",
    "gguf",
    "huggingface_hub",
    "llguidance",
    "jinja2",
    "nvtx",
    "safetensors",
    "tokenizers",
}
# What each folder may import beside the standard library: these modules and all below them.
ALLOWED = {
    "kernels": THIRD_PARTY | {"graphengine.kernels"},
    "buckets": {"torch", "numpy", "cuda", "graphengine.kernels", "graphengine.buckets"},
    "graphengine": LIBRARIES - {"cuda"} | {"graphengine", "prompt_toolkit"},
    # The pytest plugin and its checks are for programs that have nothing to do with the engine.
    "graphengine/testing": {
        "pytest",
        "torch",
        "triton",
        "graphengine.buckets",
        "graphengine.testing",
    },
    "profiles": LIBRARIES | {"graphengine"},
}
FORBIDDEN = {"graphengine": {"graphengine.profiles"}}

# What all but `graphengine/models` may know of it: the contract, and what finds, reads, chains and
# watches models by it. None of these names a family.
MODELS = "graphengine.models"
MODEL_DOORS = {
    f"{MODELS}.{name}"
    for name in (
        *(
            "contract",
            "launches",
            "linears",
            "states",
            "families.registry",
            "policies",
            "repeats",
            "routing",
            "vocabulary",
            "weights",
        ),
        *("adapters", "checkpoints", "inner", "plans", "quantised", "splitting"),
    )
}
# Layers of drafters are composed of the same blocks as those of models.
DRAFTERS = "graphengine.drafters"
DRAFTER_DOORS = {
    f"{MODELS}.{name}"
    for name in ("blocks", "composition", "decoder", "decoder_layer", "hf", "sublayers")
}

# Packages on disk that must never be imported by their folder's name.
TOP_LEVEL = {"kernels", "buckets", "profiles"}
TOP_LEVEL_WORD = re.compile(rf"(?<![.\w])(?:{'|'.join(sorted(TOP_LEVEL))})\b")
# Code that runs what it reads.
UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
}
UNSAFE_CALLS = {"torch.load", "torch.save", "torch.serialization", "torch.jit.load", "torch.hub"}


def ruled_folder(path: Path) -> str:
    """The innermost folder around a file for which the table has a line."""
    folders = [parent.relative_to(ROOT).as_posix() for parent in path.parents[: -len(ROOT.parts)]]
    return next(folder for folder in folders if folder in ALLOWED)


def within(name: str, modules: set[str]) -> bool:
    """Whether `name` is one of `modules` or lies below one."""
    return any(name == module or name.startswith(module + ".") for module in modules)


def layering_violations(source: str, folder: str, module: str) -> list[str]:
    """Imports of `source`, a file in `folder`, that point up or out of the design's table."""
    found = []
    for line, name in imports(source, module):
        standard = name.split(".")[0] in sys.stdlib_module_names
        allowed = standard or within(name, ALLOWED[folder])
        if not allowed or within(name, FORBIDDEN.get(folder, set())):
            found.append(f"line {line}: {folder}/ must not import {name}")
    return found


def top_level_violations(source: str, module: str) -> list[str]:
    """Imports of a folder of this repository by the name that it has on disk."""
    # Most files have no such word.
    if not TOP_LEVEL_WORD.search(source):
        return []
    return [
        f"line {line}: imports top-level {name}"
        for line, name in imports(source, module)
        if within(name, TOP_LEVEL)
    ]


def unsafe_violations(source: str, module: str) -> list[str]:
    """Uses of pickle, by itself or through torch and numpy."""
    nodes = list(ast.walk(ast.parse(source)))
    ends = {name.rpartition(".")[2] for name in UNSAFE_CALLS}
    aliases = {
        alias.asname or alias.name: alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found = [
        f"line {line}: imports {name}"
        for line, name in imports(source, module)
        if within(name, UNSAFE_MODULES | UNSAFE_CALLS)
    ]
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in ends:
            first, *rest = ast.unparse(node).split(".")
            name = ".".join([aliases.get(first, first), *rest])
            if name in UNSAFE_CALLS:
                found.append(f"line {node.lineno}: uses {name}")
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) == "True"
        ):
            found.append(f"line {node.lineno}: allows numpy to unpickle")
    return found


def family_violations(source: str, module: str) -> list[str]:
    """Imports of what a model is made of, in a file that is no part of `graphengine/models`."""
    if within(module, {MODELS}):
        return []
    doors = MODEL_DOORS | (DRAFTER_DOORS if within(module, {DRAFTERS}) else set())
    return [
        f"line {line}: imports {name}"
        for line, name in imports(source, module)
        if within(name, {MODELS}) and not within(name, doors)
    ]


def describe(path: Path, violations: list[str]) -> list[str]:
    return [f"{path.relative_to(ROOT)}: {violation}" for violation in violations]


def test_the_folders_import_downwards() -> None:
    violations = []
    for path in package_files():
        folder = ruled_folder(path)
        found = layering_violations(path.read_text(), folder, module_name(path))
        violations += describe(path, found)
    assert not violations, "\n".join(violations)


def test_nothing_imports_a_folder_as_a_top_level_package() -> None:
    violations = []
    for path in [*package_files(), *sorted((ROOT / "tests").rglob("*.py"))]:
        found = top_level_violations(path.read_text(), module_name(path))
        violations += describe(path, found)
    assert not violations, "\n".join(violations)


def test_transformers_is_imported_by_tests_alone() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in package_files()
        for _, name in imports(path.read_text(), module_name(path))
        if within(name, {"transformers"})
    }
    assert not users


def test_package_code_unpickles_nothing() -> None:
    violations = []
    for path in package_files():
        violations += describe(path, unsafe_violations(path.read_text(), module_name(path)))
    assert not violations, "\n".join(violations)


def test_families_are_known_to_models_alone() -> None:
    violations = []
    for path in package_files():
        violations += describe(path, family_violations(path.read_text(), module_name(path)))
    assert not violations, "\n".join(violations)


# The rules catch what they are for.


def planted_in(folder: str) -> str:
    """The name of a module in that folder."""
    return module_name(ROOT / folder / "planted.py")


def test_the_innermost_line_of_the_table_holds() -> None:
    assert ruled_folder(ROOT / "graphengine" / "testing" / "plugin.py") == "graphengine/testing"
    assert ruled_folder(ROOT / "graphengine" / "models" / "decoder.py") == "graphengine"


@pytest.mark.parametrize(
    ("folder", "source", "name"),
    [
        ("kernels", "import graphengine.buckets", "graphengine.buckets"),
        ("kernels", "from graphengine import buckets", "graphengine.buckets"),
        ("kernels", "from graphengine import Engine", "graphengine.Engine"),
        ("kernels", "import graphengine", "graphengine"),
        ("kernels", "from ..buckets import Field", "graphengine.buckets.Field"),
        ("kernels", "from .. import engine", "graphengine.engine"),
        ("kernels", "def f():\n    import graphengine.engine", "graphengine.engine"),
        ("kernels", "import cuda.bindings", "cuda.bindings"),
        ("kernels", "import safetensors", "safetensors"),
        ("kernels", "import torchvision", "torchvision"),
        (
            "buckets",
            "from graphengine.requests.request import Request",
            "graphengine.requests.request.Request",
        ),
        ("buckets", "import triton", "triton"),
        ("buckets", "import nvtx", "nvtx"),
        ("graphengine", "from graphengine import profiles", "graphengine.profiles"),
        ("graphengine", "from graphengine.profiles import x", "graphengine.profiles.x"),
        ("graphengine", "from . import profiles", "graphengine.profiles"),
        (
            "graphengine",
            "from importlib import import_module\nimport_module('graphengine.profiles')",
            "graphengine.profiles",
        ),
        ("graphengine", "import transformers", "transformers"),
        (
            "graphengine",
            "if TYPE_CHECKING:\n    from transformers import PreTrainedModel",
            "transformers.PreTrainedModel",
        ),
        ("graphengine", "import pytest", "pytest"),
        ("graphengine/testing", "from graphengine import Engine", "graphengine.Engine"),
        ("graphengine/testing", "from ..engine import Engine", "graphengine.engine.Engine"),
        ("graphengine/testing", "import hypothesis", "hypothesis"),
        ("profiles", "import transformers.models", "transformers.models"),
        ("profiles", "import kernels", "kernels"),
    ],
)
def test_a_planted_import_is_found(folder: str, source: str, name: str) -> None:
    found = layering_violations(source, folder, planted_in(folder))
    line = source.count("\n") + 1
    assert found == [f"line {line}: {folder}/ must not import {name}"]


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("kernels", "import os.path, torch, triton.language as tl\nfrom numpy import typing"),
        ("kernels", "from graphengine.kernels.core.dispatch import use_triton\nfrom . import norm"),
        ("buckets", "from graphengine.kernels import linear\nfrom cuda.bindings import runtime"),
        ("buckets", "from graphengine import kernels"),
        ("graphengine", "import nvtx, jinja2.sandbox, tokenizers\nfrom safetensors import torch"),
        ("graphengine", "from graphengine.buckets import Field\nfrom huggingface_hub import x"),
        ("graphengine/testing", "import pytest, torch\nfrom graphengine.buckets import Field"),
        ("profiles", "from graphengine.engine import Engine\nimport torch, sqlite3"),
    ],
)
def test_what_the_table_allows_is_allowed(folder: str, source: str) -> None:
    assert layering_violations(source, folder, planted_in(folder)) == []


@pytest.mark.parametrize(
    "source", ["import kernels", "from kernels.norm import rms_norm", "import buckets.static as s"]
)
def test_a_planted_top_level_import_is_found(source: str) -> None:
    assert len(top_level_violations(source, "graphengine.planted")) == 1


def test_a_module_of_the_package_is_not_a_top_level_one() -> None:
    source = "from graphengine import kernels\nfrom .kernels import norm\nimport kernelspec"
    assert top_level_violations(source, "graphengine.planted") == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.save({}, 'x')",
        "from torch import load",
        "import torch.serialization",
        "import torch\nwith torch.serialization.safe_globals([]): pass",
        "read = __import__('pickle').loads",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_planted_unpickling_is_found(source: str) -> None:
    assert unsafe_violations(source, "graphengine.planted")


def test_safe_loading_is_not_unpickling() -> None:
    source = "import json, torch\njson.load(f)\nself.load(x)\nnp.load(f, allow_pickle=False)"
    assert unsafe_violations(source, "graphengine.planted") == []


@pytest.mark.parametrize(
    "source",
    [
        "from graphengine.models import llama",
        "from graphengine.models.decoder import DecoderModel",
        "if TYPE_CHECKING:\n    from graphengine.models.blocks.rope_tables import RopeTables",
        "import graphengine.models.families.qwen3",
        "def f():\n    from .models import decoder",
    ],
)
def test_a_planted_family_is_found(source: str) -> None:
    assert len(family_violations(source, "graphengine.planted")) == 1


def test_models_and_the_contracts_users_are_no_violation() -> None:
    contract = "from graphengine.models.contract import Model"
    stored = "from .models.checkpoints.stored import read_model"
    assert family_violations(f"{contract}\n{stored}", "graphengine.planted") == []
    own = "from graphengine.models.decoder import DecoderConfig"
    assert family_violations(own, "graphengine.drafters.mtp.layer") == []
    assert family_violations(own, "graphengine.models.families.llama") == []
