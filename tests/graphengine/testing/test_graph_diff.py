"""What counts as a difference between two graphs, on structures made by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphengine.buckets import GraphEdge, GraphNode, GraphStructure
from graphengine.testing.snapshots.graph_diff import (
    GraphChange,
    diff_structures,
    diff_text,
    normalise,
    normalise_name,
    summarise,
)
from planted.graphs import PLANTED, STEP, chain, nested, with_full_edge, with_node, without_edge

LAYER = ("norm", "qkv", "attention", "out", "mlp")


def lines(old: GraphStructure, new: GraphStructure) -> list[str]:
    return [str(change) for change in diff_structures(old, new)]


def what(changes: list[GraphChange]) -> list[tuple[str, str]]:
    return [(change.what, change.of) for change in changes]


# Names.

COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::"
    "{lambda(float)#1}>(at::TensorIteratorBase&, at::native::F const&)::{lambda(int)#1}>"
    "(int, at::native::F)"
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("begin_decode", "begin_decode"),
        ("conv_2d", "conv_2d"),
        ("layer_12", "layer_12"),
        ("linear_0d1d2de3c", "linear"),
        ("gemm_BLOCK_M_128_BLOCK_N_64_F8", "gemm_BLOCK_M_#_BLOCK_N_#_F8"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128", "_matmul_ogs_NNT_bf16xbf16xmxfp4_#"),
        ("triton_poi_fused_add_relu_12", "triton_poi_fused_add_relu"),
        ("triton_mm_3", "triton_mm"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_#_#_#_v_bz_TNT"),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1__5x",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize#_warpgroupsize#__5x",
        ),
        (
            "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8",
            "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_#_#_tn_align8",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, Add<float>, std::array<char*, 3ul> >"
            "(int, Add<float>, std::array<char*, 3ul>)",
            "at::native::vectorized_elementwise_kernel<#, Add<float>, std::array<char*, #>>",
        ),
        (
            "void (anonymous namespace)::k<1>((anonymous namespace)::X)",
            "(anonymous namespace)::k<#>",
        ),
        ("at::_GLOBAL__N__0be7d8f2_19_A_cu_0c5b6e85::k", "at::(anonymous namespace)::k"),
        ("ns::(anonymous namespace)", "ns::(anonymous namespace)"),
        ("k(int) [clone .kd]", "k"),
        ("k_at_0x7f3a00_0x1", "k_at_0x?_0x?"),
        ("k@0x7f3a00", "k@0x?"),
        (
            COPY,
            "at::native::elementwise_kernel<#, #, at::native::gpu_kernel_impl_nocast<at::native::"
            "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()}::operator()() const::"
            "{lambda(float)}>(at::TensorIteratorBase&, at::native::F const&)::{lambda(int)}>",
        ),
    ],
)
def test_names_lose_what_changes_by_itself(name: str, expected: str) -> None:
    assert normalise_name(name) == expected
    assert normalise_name(expected) == expected, "a name may be normalised twice"


@given(st.text(alphabet="ab_0d1xZ(){}<>:,# ~lBLOCK", max_size=40))
def test_any_text_is_a_name(name: str) -> None:
    assert isinstance(normalise_name(name), str)


def test_tuning_alone_makes_no_difference() -> None:
    before = chain(["gemm_128x64x32", "void k<4>(int)"])
    after = chain(["gemm_64x64x64", "void k<1>(int)"])
    assert diff_structures(before, after) != []
    assert normalise(before) == normalise(after)
    assert normalise(before, names=False) == before
    tuned = with_node(after, 0, grid=(99, 1, 1), block=(256, 1, 1), shared_bytes=4096)
    assert normalise(before) != normalise(tuned)
    assert normalise(before, launch_sizes=False) == normalise(tuned, launch_sizes=False)


def test_nested_graphs_are_normalised() -> None:
    before, after = (nested(chain([f"k<{width}>(int)"])) for width in (1, 4))
    assert before != after and normalise(before) == normalise(after)
    unknown = with_node(before, 1, graphs=None)
    assert normalise(unknown).nodes[1].graphs is None


# Differences.


def test_equal_graphs_have_none() -> None:
    assert diff_structures(chain(), chain()) == []
    assert diff_text(chain(), chain()) == ""
    assert diff_structures(GraphStructure(), GraphStructure()) == []


def test_the_order_of_edges_does_not_matter() -> None:
    turned = replace(chain(), edges=chain().edges[::-1])
    assert turned != chain() and diff_structures(chain(), turned) == []


EXPECTED = {
    "an added node": [
        "+ node [3] kernel  scale  grid 8,1,1 block 128,1,1  <- 2 (programmatic)"
        "  -> 4 (programmatic)",
        "- edge [2 -> 3] linear -> attention  programmatic",
    ],
    "a removed node": [
        "- node [2] kernel  linear  grid 8,1,1 block 128,1,1  <- 1 (programmatic)"
        "  -> 3 (programmatic)",
        "+ edge [1 -> 2] norm -> attention  programmatic",
    ],
    "a renamed kernel": ["~ node [3] kernel: name attention -> attention_v2"],
    "a changed grid": ["~ node [2] linear: grid 8,1,1 -> 16,1,1"],
    "a changed block": ["~ node [2] linear: block 128,1,1 -> 256,1,1"],
    "more shared memory": ["~ node [2] linear: shared_bytes 0 B -> 1024 B"],
    "a lost programmatic edge": ["~ edge [2 -> 3] linear -> attention: type programmatic -> full"],
    "a lost edge": ["- edge [2 -> 3] linear -> attention  programmatic"],
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_told_in_a_line(fault: str) -> None:
    assert lines(chain(), PLANTED[fault]) == EXPECTED[fault]


@pytest.mark.parametrize("fault", PLANTED)
def test_the_other_way_round_is_the_opposite(fault: str) -> None:
    forth, back = (
        diff_structures(*pair) for pair in ((chain(), PLANTED[fault]), (PLANTED[fault], chain()))
    )
    opposite = {"added": "removed", "removed": "added", "changed": "changed"}
    assert what(back) == [(opposite[kind], of) for kind, of in what(forth)]
    assert [change.old for change in back] == [change.new for change in forth]


def test_places_before_and_after_a_shift_are_both_told() -> None:
    shifted = with_node(chain(("fill", *STEP)), 3, grid=(9, 1, 1))
    changes = lines(chain(), shifted)
    assert "~ node [2 -> 3] linear: grid 8,1,1 -> 9,1,1" in changes and len(changes) == 2
    assert "~ edge [2 -> 3, now 3 -> 4] linear -> attention: type programmatic -> full" in lines(
        chain(), with_full_edge(chain(("fill", *STEP)), 3)
    )


def test_edits_of_repeated_layers_are_the_fewest() -> None:
    """Two of 30 equal layers get one more kernel and one loses one."""
    without_qkv = tuple(name for name in LAYER if name != "qkv")
    old = chain(LAYER * 30)
    new = chain((*LAYER * 10, "scale", *LAYER * 10, "scale", *LAYER * 8, *without_qkv, *LAYER))
    nodes = [change for change in diff_structures(old, new) if change.of == "node"]
    assert what(nodes) == [("added", "node"), ("added", "node"), ("removed", "node")]
    assert [change.new for change in nodes[:2]] == [(50,), (101,)]
    assert nodes[2].old == (141,)


def test_equal_nodes_are_matched_before_like_ones() -> None:
    """The second of four linears with grids of their own is gone: the others did not change."""
    old = chain(["linear"] * 4)
    for index in range(4):
        old = with_node(old, index, grid=(index + 1, 1, 1))
    kept = [replace(old.nodes[place], index=index) for index, place in enumerate((0, 2, 3))]
    changes = diff_structures(old, GraphStructure(nodes=tuple(kept)))
    nodes = [(change.what, change.old) for change in changes if change.of == "node"]
    assert nodes == [("removed", (1,))]


def test_unlike_numbers_of_other_kernels_are_no_renaming() -> None:
    """Three kernels became one."""
    fused = diff_structures(chain("abcde"), chain(["a", "fused", "e"]))
    nodes = [change.what for change in fused if change.of == "node"]
    assert nodes == ["removed", "removed", "removed", "added"]


def test_another_kind_of_node_is_no_change_of_the_old() -> None:
    copied = with_node(chain(), 3, kind="memcpy", name=None, grid=None, block=None, bytes=64)
    changes = diff_structures(chain(), copied)
    assert ("removed", "node") in what(changes) and ("added", "node") in what(changes)


def test_sizes_of_copies_are_exact() -> None:
    def copy(size: int) -> GraphStructure:
        node = GraphNode(index=0, kind="memcpy", bytes=size, detail="DtoD")
        return GraphStructure(nodes=(node,))

    assert lines(copy(65536), copy(65537)) == ["~ node [0] memcpy: bytes 65536 B -> 65537 B"]


def test_a_difference_in_a_nested_graph_says_where() -> None:
    inner = chain(["a", "b"])
    old, new = nested(inner, inner), nested(inner, without_edge(inner, 0))
    assert lines(old, new) == ["- edge [0 -> 1] in graph 1/1 a -> b  programmatic"]
    deep, changed = nested(old), nested(new)
    assert lines(deep, changed) == ["- edge [0 -> 1] in graph 1/0.1/1 a -> b  programmatic"]


def test_bodies_may_be_more_fewer_or_unknown() -> None:
    one, two = (nested(*[chain("a")] * count, kind="conditional") for count in (1, 2))
    unknown = with_node(one, 1, graphs=None)
    assert lines(one, two) == ["~ node [1] conditional: nested graphs 1 -> 2"]
    assert lines(one, unknown) == ["~ node [1] conditional: nested graphs 1 -> unknown"]
    assert diff_structures(unknown, unknown) == []


def test_the_text_counts_and_is_bounded() -> None:
    old, new = chain(LAYER * 30), chain([f"{name}_v2" for name in LAYER * 30])
    heading, *rest = diff_text(old, new, limit=3).splitlines()
    assert heading == "nodes 150, kernels 150, programmatic edges 149 of 149"
    assert rest[0] == "  ~ node [0] kernel: name norm -> norm_v2"
    assert rest[3:] == ["  ... and 147 more of 150 changes"]
    assert summarise(chain(), PLANTED["a lost edge"]) == (
        "nodes 6, kernels 6, programmatic edges 5 of 5 -> 4 of 4"
    )


def test_a_long_name_is_cut_but_not_where_it_changed() -> None:
    long = "k" * 300
    (change,) = lines(chain([long, "b"]), chain([f"{long}1", "b"]))
    assert change == f"~ node [0] kernel: name {long} -> {long}1"
    (change,) = lines(chain([long]), with_node(chain([long]), 0, grid=(9, 1, 1)))
    assert len(change) < 120 and "…: grid 8,1,1 -> 9,1,1" in change


# Any two graphs.


def random_graph(seed: int) -> GraphStructure:
    dice = random.Random(seed)
    count = dice.randrange(12)
    nodes = tuple(
        GraphNode(
            index=index, kind="kernel", name=dice.choice("abc"), grid=(dice.choice((1, 2)), 1, 1)
        )
        for index in range(count)
    )
    pairs = [(a, b) for b in range(count) for a in range(b) if dice.random() < 0.2]
    kinds = ("full", "programmatic")
    edges = tuple(GraphEdge(source=a, target=b, type=dice.choice(kinds)) for a, b in pairs)
    return GraphStructure(nodes=nodes, edges=edges)


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_difference_accounts_for_every_node(left: int, right: int) -> None:
    old, new = random_graph(left), random_graph(right)
    changes = diff_structures(old, new)
    nodes = [change for change in changes if change.of == "node"]
    added = sum(change.what == "added" for change in nodes)
    removed = sum(change.what == "removed" for change in nodes)
    assert len(old.nodes) - removed == len(new.nodes) - added
    assert (changes == []) == (old == new)
    for place, graph in (("old", old), ("new", new)):
        named = [getattr(change, place) for change in nodes if getattr(change, place)]
        assert len(set(named)) == len(named)
        assert all(index < len(graph.nodes) for (index,) in named)


def test_torch_names_that_were_demangled_are_normalised() -> None:
    mangled = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEEEEviT0_"
    demangle = getattr(torch._C, "_demangle", None)
    if demangle is None:
        pytest.skip("this torch cannot demangle")
    expected = "at::native::vectorized_elementwise_kernel<#, at::native::CUDAFunctor_add<float>>"
    assert normalise_name(demangle(mangled)) == expected
