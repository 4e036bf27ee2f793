"""Dynamic trees: they are those of a plain construction, and no token changes with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.mtp_modules import SIZES, Module
from checkpoints.successors import continuation, write_successors
from checkpoints.vanilla_modules import (
    MODULES,
    agreeing_tensors,
    layout,
    target_model,
    write_agreeing,
)
from engines import speculation
from engines.plain_trees import Root, drafted_tree, plain_tree
from engines.small_engine import PROMPT, assert_idle, greedy, sampled
from engines.speculation import BEST, ENDLESS, Job, outcomes, random_jobs, run_with
from graphengine import DynamicTree, Engine, Request, SamplingParams, StructuredOutputsParams
from graphengine.drafters import FieldSizes
from graphengine.drafters.modules import dynamic_growth
from graphengine.drafters.modules.dynamic_growth import DynamicGrowth
from graphengine.kernels.attention import reference
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.speculative import FORCE_ACCEPTED, MTP, GateOptions

SMALL: dict[str, Any] = {
    "max_batch": 3, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16),
    "dtype": "float32",
}  # fmt: skip
# In half precision a GPU attends in shorter splits where there are trees, and bits differ.
open_plain = partial(speculation.open_plain, dtype="float32")
open_speculating = partial(speculation.open_speculating, dtype="float32")


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE_ACCEPTED, raising=False)


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agreeing(tmp_path_factory.mktemp("agreeing"))


# Options.


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"nodes": 1}, r"a tree's nodes=1 must be an integer in \[2, 31\]"),
    ({"nodes": 32}, r"a tree's nodes=32 must be an integer in \[2, 31\]"),
    ({"top_k": 1}, r"a tree's top_k=1 must be an integer in \[2, 16\]"),
    ({"top_k": 17, "nodes": 31}, r"a tree's top_k=17 must be an integer in \[2, 16\]"),
    ({"depth": True}, r"a tree's depth=True must be an integer in \[2, 31\]"),
    ({"depth": 1}, r"a tree's depth=1 must be an integer in \[2, 31\]"),
    ({"nodes": 3, "top_k": 4}, "a tree of nodes=3 cannot use top_k=4"),
    ({"nodes": 4, "depth": 5}, "a tree of nodes=4 cannot use depth=5"),
    ({"nodes": 7, "top_k": 2, "depth": 2}, "top_k=2 and depth=2 make 6 candidates, fewer than no"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_no_tree_is_refused(change: dict[str, Any], message: str) -> None:
    sizes = {"nodes": 9, "top_k": 3, "depth": 4}
    with pytest.raises(ValueError, match=message):
        DynamicTree(**sizes | change)


def test_options() -> None:
    mode = MTP(tree=BEST)
    assert (mode.k, mode.shape) == (9, BEST)
    assert mode == MTP(9, tree=BEST) and hash(mode) == hash(MTP(tree=BEST))
    assert mode.describe() == "mtp eagle, tree of the best 9 nodes, up to 4 deep, 3 after a node"
    with pytest.raises(ValueError, match="k=4 drafts a step, and the tree has 9 nodes"):
        MTP(4, tree=BEST)


def test_a_rank_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def f(): pass", encoding="utf-8")
    mode = MTP(tree=BEST, draft_vocab=DraftVocabulary(text=text, size=2))
    with pytest.raises(ValueError, match="nodes of rank 2, and the draft vocabulary 2 tokens"):
        open_speculating(mode)


# The trees.


class Follower:
    """A plain module that goes along with a request of an engine."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request, self.committed = engine, request, 0
        self.module = Module(
            layout(MODULES), agreeing_tensors(MODULES), layout(MODULES).prefixes[0]
        )
        self.target = target_model()

    @torch.no_grad()
    def check(self) -> set[tuple[int, ...]]:
        """Check that the tree is the plain one; returns its shape."""
        sequence = [*self.request.prompt_token_ids, *self.request.token_ids]
        end, module = len(sequence) - 1, self.module
        hidden = self.target.model(torch.tensor([sequence[:-1]])).last_hidden_state[0]
        for position in range(self.committed, end):
            u = module.run(sequence[position + 1], hidden[position], position)
        self.committed = end

        def run(token: int, before: Any, position: int) -> tuple[torch.Tensor, Any]:
            after = module.run(token, before, position)
            return module.logits(after), after

        root = Root(run, module.logits(u), u, end)
        expected = plain_tree(BEST, root, self.request.params)
        assert drafted_tree(self.engine, self.request) == expected
        return {tuple(node.parent for node in expected)}


@pytest.mark.parametrize("length", [1, 21])
def test_trees_are_those_of_a_plain_construction(agreeing: Path, length: int) -> None:
    """Node for node, after every step, of a greedy request and of one with noise."""
    generator = torch.Generator().manual_seed(length)
    prompts = torch.randint(SIZES["vocab_size"], (2, length), generator=generator).tolist()
    both = [
        greedy(14, **ENDLESS),
        SamplingParams(temperature=0.8, seed=6, max_tokens=14, **ENDLESS),
    ]
    with open_speculating(MTP(tree=BEST), agreeing, **SMALL, device="cpu", lookahead=0) as engine:
        requests = [engine.submit(*each) for each in zip(prompts, both, strict=True)]
        followers = [Follower(engine, request) for request in requests]
        done, counts, shapes = [0, 0], set(), set()
        while engine.busy:
            engine.step()
            for index, request in enumerate(requests):
                count = len(request.token_ids) - done[index]
                done[index] += count
                if count and not request.finished:
                    counts.add(count)
                    shapes |= followers[index].check()
    assert 1 in counts and max(counts) >= 3, f"steps that accept none, and many: {counts}"
    assert len(shapes) > 4, f"{shapes}"


@pytest.mark.parametrize("table", ["parent", "ancestor", "both"])
def test_a_parent_that_is_off_by_one_is_found(
    monkeypatch: pytest.MonkeyPatch, agreeing: Path, table: str
) -> None:
    """Wrong for the host, for the device and for both, in a tree that is valid."""
    keep = dynamic_growth.keep_best

    def spoil(children: Any, rows: Any, found: Any, trees: Any, **options: Any) -> None:
        keep(children, rows, found, trees, **options)
        depth, ancestor = trees.tables
        for slot in rows.slot[rows.slot >= 0].tolist():
            node = int(depth[slot].argmax())
            wrong = int(trees.parent[slot, node - 1]) - 1
            if table != "ancestor":
                trees.parent[slot, node - 1] = wrong
            if table == "ancestor":
                ancestor[slot, node, depth[slot, node] - 1] = wrong
            elif table == "both":
                depth[slot, node] = 1 + depth[slot, wrong]
                ancestor[slot, node] = ancestor[slot, wrong]
                ancestor[slot, node, depth[slot, wrong]] = wrong

    monkeypatch.setattr(dynamic_growth, "keep_best", spoil)
    found = r"Node\(" if table == "both" else "ancestors of node"
    with pytest.raises(AssertionError, match=found):
        test_trees_are_those_of_a_plain_construction(agreeing, 21)


def test_a_sibling_that_is_seen_is_found(monkeypatch: pytest.MonkeyPatch, agreeing: Path) -> None:
    """By the target, whose tokens it changes."""
    entries = reference._path_entries

    def with_sibling(tree: Any, lane: int, position: int) -> list[int]:
        """A path whose last ancestor is replaced by the node before it."""
        path = entries(tree, lane, position)
        if len(path) > 2:
            path[-2] -= 1
        return path

    monkeypatch.setattr(reference, "_path_entries", with_sibling)
    with pytest.raises(AssertionError, match="assert "):
        test_tokens_are_those_without("cpu", agreeing)


# Tokens.


def test_tokens_are_those_without(device: str, agreeing: Path) -> None:
    """Greedy ones and sampled ones, of more requests than slots, that end inside drafts."""
    jobs = random_jobs(SIZES["vocab_size"], count=5)
    with open_plain(agreeing, **SMALL, device=device) as engine:
        expected = outcomes(engine, jobs)
    with open_speculating(MTP(tree=BEST), agreeing, **SMALL, device=device) as engine:
        assert outcomes(engine, jobs) == expected
        assert 10 < engine.acceptance.accepted < engine.acceptance.proposed


def test_every_depth_of_who_cannot_be_wrong_is_accepted(device: str, tmp_path: Path) -> None:
    path = write_successors(tmp_path, "hidden")
    prompts = [[first, *continuation(first, 9)] for first in (3, 21, 40, 63)]
    with open_speculating(MTP(tree=BEST), path, **SMALL, device=device, lookahead=1) as engine:
        for prompt in prompts:
            engine.submit(prompt, greedy(21, **ENDLESS))
        run_with(engine)
        assert engine.acceptance.rates == [1.0] * BEST.depth, f"{engine.acceptance}"


def test_turns_and_rewinds(device: str, agreeing: Path) -> None:
    """A session's tokens are those of requests with its whole text."""
    options: dict[str, Any] = SMALL | {"device": device, "lookahead": 1}
    whole: list[list[int]] = []
    found: list[tuple[int, ...]] = []
    with (
        open_speculating(MTP(tree=BEST), agreeing, **options) as engine,
        engine.session() as session,
    ):
        for appended, params in (
            ([5, 6, 7, 8, 9], greedy(17, **ENDLESS)),
            ([3, 1], sampled(13, seed=2)),
            ([4] * 7, greedy(11, **ENDLESS)),
        ):
            session.append(appended)
            whole.append(list(session.token_ids))
            request = session.submit(params)
            run_with(engine)
            found.append(tuple(request.token_ids))
            session.rewind(len(session.token_ids) - 3)
    with open_plain(agreeing, **options) as engine:
        expected = [
            tuple(engine.generate(prompt, params).token_ids)
            for prompt, params in zip(
                whole,
                (greedy(17, **ENDLESS), sampled(13, seed=2), greedy(11, **ENDLESS)),
                strict=True,
            )
        ]
    assert found == expected


def test_pauses_cost_no_token(device: str, agreeing: Path) -> None:
    jobs = [
        Job(tuple(range(1, 1 + length)), params)
        for length, params in ((9, greedy(40, **ENDLESS)), (6, sampled(40, seed=1)),
                               (13, greedy(40, **ENDLESS)))
    ]  # fmt: skip
    with open_plain(agreeing, **SMALL, device=device) as engine:
        expected = outcomes(engine, jobs)
    options = SMALL | {"kv_blocks": 14, "swap_blocks": 60, "device": device}
    with open_speculating(MTP(tree=BEST), agreeing, **options) as engine:
        assert outcomes(engine, jobs) == expected
        assert engine.counters["pauses"] > 0 and engine.counters["resumes"] > 0
        assert_idle(engine)


def test_stops_and_lengths_inside_drafts(device: str, tmp_path: Path) -> None:
    path = write_successors(tmp_path, "hidden")
    prompt = (3, *continuation(3, 5))
    known = continuation(prompt[-1], 12)
    ends: list[dict[str, Any]] = [{"max_tokens": count} for count in range(2, 7)]
    ends += [{"max_tokens": 30, "stop_token_ids": [token], "min_tokens": 6} for token in known[:3]]
    jobs = [Job(prompt, SamplingParams(temperature=0.0, **ENDLESS, **end)) for end in ends]
    near_the_end = tuple(index % 64 for index in range(96 - 4))
    jobs.append(Job(near_the_end, greedy(None, **ENDLESS)))
    with open_plain(path, **SMALL, device=device) as engine:
        expected = outcomes(engine, jobs)
    with open_speculating(MTP(tree=BEST), path, **SMALL, device=device) as engine:
        assert outcomes(engine, jobs) == expected


def test_grammars_follow_every_path(device: str) -> None:
    """The host learns the parents with the drafts."""
    pytest.importorskip("llguidance")
    asked = StructuredOutputsParams(regex=r"(True|False|None)(, (True|False|None)){3}")
    params = [
        SamplingParams(max_tokens=30, structured_outputs=asked, **options)
        for options in ({"temperature": 0.0}, {"seed": 1})
    ]
    jobs = [Job(PROMPT, each) for each in params]
    with open_plain(device=device) as engine:
        expected = outcomes(engine, jobs)
    with open_speculating(MTP(tree=BEST), device=device) as engine:
        assert outcomes(engine, jobs) == expected
        assert engine.acceptance.accepted > 4, f"{engine.acceptance}"


def test_a_gate_changes_no_token(device: str, agreeing: Path) -> None:
    gate = GateOptions(window=3, off_below=3.5, on_above=3.5, probe_every=3)
    jobs = random_jobs(SIZES["vocab_size"], count=4)
    with open_plain(agreeing, **SMALL, device=device) as engine:
        expected = outcomes(engine, jobs)
    with open_speculating(MTP(tree=BEST), agreeing, **SMALL, device=device, gate=gate) as engine:
        assert outcomes(engine, jobs) == expected
        assert engine.counters["gate/off"]


def test_forced_acceptance_takes_the_first_path(device: str, agreeing: Path) -> None:
    options: dict[str, Any] = {"device": device, "forced_acceptance": 2}
    with open_speculating(MTP(tree=BEST), agreeing, **SMALL, **options) as engine:
        request = engine.submit([1, 2, 3], greedy(25, **ENDLESS))
        run_with(engine)
        assert len(request.token_ids) == 25
        assert 1 < request.acceptance.mean_length <= 3


# Room.


def test_what_it_holds_is_in_the_budget(agreeing: Path) -> None:
    with open_speculating(MTP(tree=BEST), agreeing, **SMALL, device="cpu") as engine:
        lines = {line.name: line.bytes for line in engine.memory.budget.lines}
        fields = engine.core.drafter.fields(FieldSizes(3, 96, 16, torch.float32))
        assert lines["drafter's state"] == sum(field.nbytes for field in fields) > 0
        # Three runs over three lanes.
        assert engine.core.needs.reserve == 9
    growth = DynamicGrowth(BEST, rows=3)
    sizes = FieldSizes(5, 96, 16, torch.float32)
    buffers = {
        each.name: torch.zeros(each.shape, dtype=each.dtype) for each in growth.fields(sizes)
    }
    growth.open(buffers | {"draft_tokens": torch.zeros(5, 9, dtype=torch.int32)})
    held = [*growth._numbers, *growth._depths]
    assert sum(tensor.nbytes for tensor in held) == growth.table_bytes
