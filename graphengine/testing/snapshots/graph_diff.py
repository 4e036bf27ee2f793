"""The differences of two captured graphs, node by node and edge by edge.

    old, new = normalise(before), normalise(after)     # names without what tuning changes
    changes = diff_structures(old, new)                # [] where they are the same
    print(diff_text(old, new))

Everything works on `GraphStructure`s, so it needs no GPU: two files from another machine will do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from graphengine.buckets import GraphNode, GraphStructure
from graphengine.buckets.graphs.structure import FULL

# Patterns that are removed from a name, in this order; `normalise_name` says why.
_NAME_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<![a-zA-Z0-9])0x[0-9a-fA-F]+(?![a-zA-Z0-9])", "0x?"),
        (r"_GLOBAL__N__\w+?(?=::|$)", "(anonymous namespace)"),
        (r"#\d+\}", "}"),
        (r"(?<=[<, ])-?\d+[ul]*(?=[,>]| >)", "#"),
        (r"> (?=>)", ">"),
        (r"(?<![a-zA-Z0-9])(tilesize|warpgroupsize)?\d+(?:x\d+)+(?![a-zA-Z0-9])", r"\1#"),
        (r"_0(?=\d*[cde])[\dcde]*$", ""),
        (r"(?<=_)([A-Z][A-Z0-9_]*?)_\d+(?=_|$)", r"\1_#"),
        (r"^(triton_[a-z]+(?:_\w+?)?)_\d+$", r"\1"),
    )
)

# Characters of a kernel's name in a line of text; names that changed are shown in full.
_NAME_WIDTH = 80

_FIELDS = ("kind", "name", "detail", "grid", "block", "shared_bytes", "bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One property of a node or an edge: its name, and both values as text."""

    field: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.field} {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChange:
    """One node or edge that was added, removed or changed; `str()` gives one line.

    `old` and `new` are its place in either graph: (index,) of a node, (source, target) of an edge,
    None where there is none. `graph` is "" for the outermost graph, "4/0" for graph 0 inside of
    node 4 (by the old graph's indices). `label` describes the node, or names the ends of the edge.
    `fields` is empty unless `what` is "changed".
    """

    what: Literal["added", "removed", "changed"]
    of: Literal["node", "edge"]
    label: str
    old: tuple[int, ...] | None = None
    new: tuple[int, ...] | None = None
    fields: tuple[FieldChange, ...] = ()
    graph: str = ""

    def __str__(self) -> str:
        sign = {"added": "+", "removed": "-", "changed": "~"}[self.what]
        places = [" -> ".join(map(str, place)) for place in (self.old, self.new) if place]
        if len(set(places)) == 1:
            places = places[:1]
        # An edge's label has an arrow already.
        place = (" -> " if self.of == "node" else ", now ").join(places)
        inside = f" in graph {self.graph}" if self.graph else ""
        changed = f": {'; '.join(map(str, self.fields))}" if self.fields else ""
        return f"{sign} {self.of} [{place}]{inside} {self.label}{changed}"


def normalise_name(name: str) -> str:
    """A kernel's name without the parts that may change while the program does not.

    - addresses ("0x7f3a..."), nvcc's hashed namespaces and " [clone ...]"
    - in C++ names the return type, the parameters (they repeat the template's arguments), the
      numbers of lambdas, and integer template arguments: vector widths, which depend on the
      alignment of pointers, and tile sizes
    - tile shapes as written by cuBLAS and Triton's `repr`: "64x128x32" becomes "#"
    - Triton's specialisation suffix ("_0d1d2c") and constants in a name ("_BLOCK_M_128")
    - the number that torch.compile gives its kernels ("triton_poi_fused_add_3"): one more kernel
      would rename all that follow
    """
    name = _without_signature(name)
    for pattern, replacement in _NAME_RULES:
        name = pattern.sub(replacement, name)
    return name


def normalise(
    structure: GraphStructure, *, names: bool = True, launch_sizes: bool = True
) -> GraphStructure:
    """A copy with `normalise_name`d kernels, nested graphs included.

    names         False keeps names as they are
    launch_sizes  False leaves out grid, block and shared memory, which tuning may also change
    """

    def node(old: GraphNode) -> GraphNode:
        new = replace(old, graphs=old.graphs and tuple(map(graph, old.graphs)))
        if names and new.name is not None:
            new = replace(new, name=normalise_name(new.name))
        return new if launch_sizes else replace(new, grid=None, block=None, shared_bytes=None)

    def graph(old: GraphStructure) -> GraphStructure:
        return replace(old, nodes=tuple(map(node, old.nodes)))

    return graph(structure)


def diff_structures(old: GraphStructure, new: GraphStructure) -> list[GraphChange]:
    """How `new` differs from `old`, without normalising; nodes before edges. Empty: they are equal.

    Nodes are matched by their contents and not by their index, so an extra node is one change, plus
    its edges. The alignment is the shortest edit (Myers), first of equal nodes, then, between
    those, of equal kinds and names. Nodes left over in one place count as renamed if their kinds
    agree one to one, otherwise as removed and added.
    """
    return [] if old == new else list(_diff(old, new, ""))


def diff_text(old: GraphStructure, new: GraphStructure, *, limit: int = 40) -> str:
    """A line with the counts of both, then at most `limit` changes, one a line; "" if equal."""
    changes = diff_structures(old, new)
    if not changes:
        return ""
    lines = [summarise(old, new), *(f"  {change}" for change in changes[:limit])]
    if len(changes) > limit:
        lines.append(f"  ... and {len(changes) - limit} more of {len(changes)} changes")
    return "\n".join(lines)


def summarise(old: GraphStructure, new: GraphStructure) -> str:
    """Counts of nodes, kernels and programmatic edges, nested graphs included, in one line."""

    def facts(graph: GraphStructure) -> dict[str, str]:
        count = graph.count()
        programmatic, edges = graph.programmatic_edges()
        return {
            "nodes": str(sum(count.values())),
            "kernels": str(count.get("kernel", 0)),
            "programmatic edges": f"{programmatic} of {edges}",
        }

    before, after = facts(old), facts(new)
    return ", ".join(
        f"{name} {value}" if after[name] == value else f"{name} {value} -> {after[name]}"
        for name, value in before.items()
    )


def _diff(old: GraphStructure, new: GraphStructure, graph: str) -> Iterator[GraphChange]:
    pairs = list(_align(old.nodes, new.nodes, (_content, _identity)))
    for before, after in pairs:
        if before is None and after is not None:
            label = after.describe(_NAME_WIDTH) + _neighbours(after, new)
            yield GraphChange(what="added", of="node", label=label, new=(after.index,), graph=graph)
        elif after is None and before is not None:
            label = before.describe(_NAME_WIDTH) + _neighbours(before, old)
            yield GraphChange(
                what="removed", of="node", label=label, old=(before.index,), graph=graph
            )
        elif before is not None and after is not None:
            yield from _diff_nodes(before, after, graph)
    kept = [(before.index, after.index) for before, after in pairs if before and after]
    yield from _diff_edges(old, new, kept, graph)


def _diff_nodes(old: GraphNode, new: GraphNode, graph: str) -> Iterator[GraphChange]:
    fields = tuple(
        FieldChange(field=field, old=_show(field, before), new=_show(field, after))
        for field in _FIELDS
        if (before := getattr(old, field)) != (after := getattr(new, field))
    )
    nested = old.graphs or (), new.graphs or ()
    known = [None if node.graphs is None else len(node.graphs) for node in (old, new)]
    if known[0] != known[1]:
        shown = ["unknown" if count is None else str(count) for count in known]
        fields += (FieldChange(field="nested graphs", old=shown[0], new=shown[1]),)
    if fields:
        yield GraphChange(
            what="changed",
            of="node",
            label=_label(new) if old.name == new.name else new.kind,
            old=(old.index,),
            new=(new.index,),
            fields=fields,
            graph=graph,
        )
    # If the numbers differ, the first graphs are compared; the numbers were reported above.
    for number, (before, after) in enumerate(zip(*nested, strict=False)):
        yield from _diff(before, after, f"{graph}{'.' if graph else ''}{old.index}/{number}")


def _diff_edges(
    old: GraphStructure, new: GraphStructure, kept: Sequence[tuple[int, int]], graph: str
) -> Iterator[GraphChange]:
    """Edges between nodes that both graphs have; other edges are reported with their node."""
    new_place = dict(kept)
    old_place = {after: before for before, after in kept}
    types_of_old, types_of_new = _types_by_ends(old), _types_by_ends(new)
    for (source, target), types in types_of_old.items():
        if source not in new_place or target not in new_place:
            continue
        place = new_place[source], new_place[target]
        after = types_of_new.get(place)
        label = f"{_label(old.nodes[source])} -> {_label(old.nodes[target])}"
        if after is None:
            yield GraphChange(
                what="removed",
                of="edge",
                label=f"{label}  {types}",
                old=(source, target),
                graph=graph,
            )
        elif after != types:
            yield GraphChange(
                what="changed",
                of="edge",
                label=label,
                old=(source, target),
                new=place,
                fields=(FieldChange(field="type", old=types, new=after),),
                graph=graph,
            )
    for (source, target), types in types_of_new.items():
        if source not in old_place or target not in old_place:
            continue
        if (old_place[source], old_place[target]) not in types_of_old:
            label = f"{_label(new.nodes[source])} -> {_label(new.nodes[target])}  {types}"
            yield GraphChange(
                what="added", of="edge", label=label, new=(source, target), graph=graph
            )


_Pair = tuple[GraphNode | None, GraphNode | None]


def _align(
    old: Sequence[GraphNode],
    new: Sequence[GraphNode],
    keys: Sequence[Callable[[GraphNode], Hashable]],
) -> Iterator[_Pair]:
    """Each node of either graph once, in order, with its partner or None; partners by the strictest
    key that finds one.
    """
    if not keys:
        if [node.kind for node in old] == [node.kind for node in new]:
            yield from zip(old, new, strict=True)
        else:
            yield from ((node, None) for node in old)
            yield from ((None, node) for node in new)
        return
    key, *laxer = keys
    past_old = past_new = 0
    ends = len(old), len(new), 0
    for start_old, start_new, length in (*_common_runs(*map(_numbered(key), (old, new))), ends):
        yield from _align(old[past_old:start_old], new[past_new:start_new], laxer)
        past_old, past_new = start_old + length, start_new + length
        yield from zip(old[start_old:past_old], new[start_new:past_new], strict=True)


def _common_runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs (start in old, start in new, length) of a longest common subsequence, in order.

    Myers, "An O(ND) difference algorithm and its variations", 1986. Layers repeat, and there the
    heuristics of `difflib` find far more edits than needed.
    """
    # By diagonal (place in old - place in new): how far in `old` this many edits reach, and the
    # runs on the way, linked from the last to the first.
    reached: dict[int, tuple[int, _Runs]] = {1: (0, None)}
    for edits in range(len(old) + len(new) + 1):
        for diagonal in range(-edits, edits + 1, 2):
            left, right = reached.get(diagonal - 1), reached.get(diagonal + 1)
            if left is None or (right is not None and left[0] < right[0]):
                assert right is not None, f"{edits=} {diagonal=}"
                place, runs = right
            else:
                place, runs = left[0] + 1, left[1]
            start = place
            while (
                place < len(old)
                and place - diagonal < len(new)
                and old[place] == new[place - diagonal]
            ):
                place += 1
            if place > start:
                runs = (start, start - diagonal, place - start), runs
            reached[diagonal] = place, runs
            if place >= len(old) and place - diagonal >= len(new):
                return _unlinked(runs)
    raise AssertionError(f"no alignment of {len(old)} and {len(new)} nodes")


_Runs = tuple[tuple[int, int, int], "_Runs"] | None


def _unlinked(runs: _Runs) -> list[tuple[int, int, int]]:
    found = []
    while runs is not None:
        run, runs = runs
        found.append(run)
    return found[::-1]


def _numbered(
    key: Callable[[GraphNode], Hashable],
) -> Callable[[Sequence[GraphNode]], list[int]]:
    """A function that gives nodes of equal keys equal numbers, which are cheap to compare."""
    numbers: dict[Hashable, int] = {}
    return lambda nodes: [numbers.setdefault(key(node), len(numbers)) for node in nodes]


def _content(node: GraphNode) -> Hashable:
    """Everything about a node but its place."""
    return replace(node, index=0)


def _identity(node: GraphNode) -> Hashable:
    return node.kind, node.name


def _types_by_ends(graph: GraphStructure) -> dict[tuple[int, int], str]:
    """{(source, target): the types of the edges between them, in words}."""
    types: dict[tuple[int, int], list[str]] = defaultdict(list)
    for edge in graph.edges:
        types[edge.source, edge.target].append(edge.describe() or FULL)
    return {ends: " and ".join(sorted(words)) for ends, words in types.items()}


def _neighbours(node: GraphNode, graph: GraphStructure) -> str:
    """The edges of a node: "  <- 11 (programmatic)  -> 13 (full)"."""
    before, after = [], []
    for edge in graph.edges:
        words = edge.describe() or FULL
        if edge.target == node.index:
            before.append(f"{edge.source} ({words})")
        elif edge.source == node.index:
            after.append(f"{edge.target} ({words})")
    sides = (("<-", before), ("->", after))
    return "".join(f"  {arrow} {', '.join(ends)}" for arrow, ends in sides if ends)


def _label(node: GraphNode) -> str:
    return node.kind if node.name is None else _shorten(node.name)


def _show(field: str, value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    # Exact: two sizes may round to the same "64.0 KiB".
    return "none" if value is None else f"{value} B" if "bytes" in field else str(value)


def _shorten(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"


def _without_signature(name: str) -> str:
    """A demangled function without "void " and its parameters; any other name as it is."""
    bare = re.sub(r"( ?\[clone [^\]]*\])+$", "", name).removesuffix(" const")
    if not bare.endswith(")"):
        return bare
    depth = 0
    for place in range(len(bare) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(bare[place], 0)
        if depth == 0:
            break
    head = bare[:place]
    # "k<1>::operator()" and "(anonymous namespace)" end in no parameters.
    if depth or not head or head.endswith(("operator", "::")):
        return bare
    return head.removeprefix("void ")
