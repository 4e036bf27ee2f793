"""The order of the rooms, and what one module may know of another; each rule is tested on sources
that break it.
"""

from __future__ import annotations

from collections import Counter

import pytest

import house
from graphengine.kernels.linear.kinds import CODES, KINDS
from house import ROOT, package_files

KIND_NAMES = {*CODES, *KINDS}


def shown(path: object) -> str:
    return str(path).removeprefix(f"{ROOT}/")


def test_no_imports_form_a_circle() -> None:
    assert house.circles(house.package_graph()) == []


def test_imports_point_down_the_list_of_rooms() -> None:
    assert house.upward_imports(house.package_graph()) == []


def test_the_list_has_every_room_and_no_other() -> None:
    rooms = {house.room_of(house.module_name(path)) for path in package_files()} - {None}
    assert rooms == {*house.ROOMS} and len(rooms) == len(house.ROOMS)


# Lists: one file for each of what they list.
LISTS = ("graphengine/models/families",)
MOST_FILES = 16


def test_no_folder_is_crowded() -> None:
    """A reader finds a file by its folder's name, in a folder that fits on a screen."""
    counts = Counter(shown(path.parent) for path in package_files())
    crowded = {name: count for name, count in counts.items() if count > MOST_FILES}
    assert set(crowded) <= {*LISTS}, crowded


def test_no_module_uses_the_privates_of_another() -> None:
    """But for what the module about Triton's versions is for."""
    found = [
        f"{shown(path)}:{use}"
        for path in package_files()
        for use in house.private_accesses(path.read_text("utf-8"))
    ]
    (use,) = found
    assert use.startswith("kernels/core/triton_versions.py:") and use.endswith("._reinterpret")


def test_docstrings_begin_with_what_they_are_about() -> None:
    found = [
        f"{shown(path)}:{line}: {text}"
        for path in package_files()
        for line, text in house.fragments(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("docstring", "is_fragment"),
    [
        ("Of the same.", True),
        ("Those that a rank meets.", True),
        ("As in reports.", True),
        ("The same, for all.", True),
        ("Offsets of all rows.", False),
        ("Assign the rows.", False),
        ("The samest of rows.", False),
    ],
)
def test_a_planted_fragment_is_found(docstring: str, is_fragment: bool) -> None:
    for source in (
        f'"""{docstring}"""',
        f'def f():\n    """{docstring}"""',
        f'class C:\n    x: int\n    """{docstring}"""',
        f'X = 1\n"""{docstring}\n\nMore."""',
    ):
        assert [text for _, text in house.fragments(source)] == [docstring] * is_fragment


def test_families_are_named_in_models_alone() -> None:
    found = [
        f"{shown(path)}:{where}"
        for path in package_files()
        for where in house.family_names(shown(path), path.read_text("utf-8"))
    ]
    assert found == []


def test_nobody_but_who_makes_it_asks_which_drafter_it_is() -> None:
    sources = {shown(path): path.read_text("utf-8") for path in package_files()}
    where = ("graphengine/drafters/", "graphengine/speculative.py")
    classes = house.drafter_classes(
        source for path, source in sources.items() if path.startswith(where)
    )
    assert {"MTP", "NoDrafter", "TreeEagle", "Eagle3Module"} < classes
    found = [
        f"{path}:{where}"
        for path, source in sources.items()
        for where in house.class_tests(path, source, classes)
    ]
    assert found == []


def test_models_alone_ask_which_model_it_is() -> None:
    classes = {f"{kind}{part}" for kind in ("Decoder", "Model") for part in ("Config", "Weights")}
    found = [
        f"{shown(path)}:{where}"
        for path in package_files()
        if not shown(path).startswith("graphengine/models/")
        for where in house.class_tests(
            shown(path), path.read_text("utf-8"), classes | {"DecoderModel", "Model"}
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    ["isinstance(mode, MTP)", "isinstance(d, Drafter | speculative.MTP)", "type(mode) is MTP",
     "type(mode) in (NGram, MTP)", "match mode:\n    case MTP(k=1):\n        pass"],
)  # fmt: skip
def test_a_planted_question_is_found(source: str) -> None:
    classes = house.drafter_classes(["class MTP(Mode): ...", "class Fewer(MTP): ..."])
    assert classes == {"MTP", "Fewer"}
    assert len(house.class_tests("graphengine/config.py", source, classes)) == 1
    assert house.class_tests("graphengine/drafters/making.py", source, classes) == []
    assert house.class_tests("graphengine/config.py", "isinstance(MTP(), Mode)", classes) == []


def test_kinds_of_weights_are_named_in_their_table_decoders_and_readers_alone() -> None:
    found = [
        f"{shown(path)}:{where}"
        for path in package_files()
        for where in house.kind_comparisons(shown(path), path.read_text("utf-8"), KIND_NAMES)
    ]
    assert found == []
    assert all((ROOT / file).is_file() for file in house.MAY_NAME_KINDS)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('kind.code == "int4"', 1),
        ('if code not in ("e4m3", "int8"): ...', 2),
        ('kind == "fp8"', 1),
        ('{"mxfp4": 32}', 1),
        ('match code:\n    case "e2m1": ...', 1),
        ('config.kv_dtype == "fp8"', 0),
        ('f(kind="int4")', 0),
        ('"""int4"""', 0),
    ],
)
def test_a_planted_comparison_with_a_kind_is_found(source: str, count: int) -> None:
    assert len(house.kind_comparisons("profiles/accuracy.py", source, KIND_NAMES)) == count
    assert house.kind_comparisons(house.MAY_NAME_KINDS[0], source, KIND_NAMES) == []


@pytest.mark.parametrize(
    "source",
    [
        "from graphengine.b import x",
        "import graphengine.b",
        "def f():\n    from graphengine import b",
        "if TYPE_CHECKING:\n    from graphengine.b import T",
    ],
)
def test_a_planted_circle_is_found(source: str) -> None:
    sources = {"graphengine.a": source, "graphengine.b": "import graphengine.c"}
    sources |= {"graphengine.c": "from graphengine.a import y", "graphengine.d": "import os"}
    assert house.circles(house.import_graph(sources)) == [
        ["graphengine.a", "graphengine.b", "graphengine.c"]
    ]


def test_a_planted_import_upwards_is_found() -> None:
    graph = {
        "graphengine.host.reuse": {"graphengine.core.runtime", "graphengine.requests.request"},
        "graphengine.drafters.mtp.layer": {
            "graphengine.models.contract",
            "graphengine.kernels.linear",
        },
        "graphengine.profiles.bench": {"graphengine.engine"},
    }
    assert house.upward_imports(graph) == ["graphengine.host.reuse -> graphengine.core.runtime"]


@pytest.mark.parametrize(
    "source", ["engine._graphs", "def f(x):\n    return x._y", "a.b._c()", "self.engine._step"]
)
def test_a_planted_private_access_is_found(source: str) -> None:
    assert len(house.private_accesses(source)) == 1


@pytest.mark.parametrize(
    "source",
    ["self._x", "cls._x", "super()._x()", "pair._replace(a=1)", "torch._C._x", "x.__class__",
     "class A:\n    def f(self, other):\n        self._x = other._x"],
)  # fmt: skip
def test_what_is_ones_own_is_no_private_access(source: str) -> None:
    assert house.private_accesses(source) == []


@pytest.mark.parametrize(
    "source", ["dense_model()", "x.llama", "from a.models.qwen2 import b",
               "class DenseConfig: ..."],
)  # fmt: skip
def test_a_planted_family_is_found(source: str) -> None:
    assert len(house.family_names("graphengine/core/runtime.py", source)) == 1
    assert house.family_names("graphengine/models/families/qwen2.py", source) == []
