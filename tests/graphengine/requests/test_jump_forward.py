"""Jump-forward: text that a grammar forces is drafted on the device, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from engines.guided import CHOICE, SETTINGS, WORDS, schema
from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, greedy, open_engine
from engines.speculation import (
    BEST,
    DRAFTING,
    TREE,
    Outcome,
    open_plain,
    open_speculating,
    outcome,
    run_with,
)
from extent import extent
from graphengine import Engine, JumpForward, Request, SamplingParams, StructuredOutputsParams
from graphengine.config import EngineConfig
from graphengine.requests.grammar_pool import TableGuide
from graphengine.requests.grammars import Guide
from graphengine.speculative import (
    MTP,
    DraftModel,
    GateOptions,
    NGram,
    SaveHiddenStates,
    Speculative,
    Suffix,
    UserProvided,
)
from launches.compilation import graph_kernels

llguidance = pytest.importorskip("llguidance")

POOL = {"grammar_pool_mib": 1}
CLOSED = {"json": schema(["name", "size"]), "disable_any_whitespace": True}
TEXT = "return the value of the first element of this list, and nothing else"
GRAMMARS: tuple[dict[str, Any], ...] = (
    CLOSED,
    {"choice": [TEXT]},
    {"regex": WORDS},
    {"choice": [*CHOICE]},
)
DRAFTERS: dict[str, Speculative] = {
    **DRAFTING,
    "jump": JumpForward(k=4),
    "suffix": Suffix(k=5),
    "vanilla": MTP(k=1, style="vanilla"),
}


def guided(asked: dict[str, Any], max_tokens: int = 60, **options: Any) -> SamplingParams:
    params = StructuredOutputsParams(**asked)
    return SamplingParams(max_tokens=max_tokens, structured_outputs=params, **options)


def jobs(spelling: str) -> list[tuple[str, SamplingParams]]:
    """Grammars, and one request without any between them."""
    prompts = (PROMPT, OTHER, LONG, PROMPT)
    found = [
        (prompts[at], guided(asked | {"spelling": spelling}, **SETTINGS[at]))
        for at in range(len(SETTINGS))
        for number, asked in enumerate(GRAMMARS)
        if extent(at == number, True)
    ]
    found.insert(2, (PROMPT, greedy(30, ignore_eos=True)))
    return found


Said = list[tuple[Outcome, Any]]


def served(engine: Engine, spelling: str, where: str = "device") -> Said:
    requests = [engine.submit(*job) for job in jobs(spelling)]
    assert {request.grammar for request in requests} == {where, None}
    run_with(engine)
    assert_idle(engine)
    assert engine.counters["discarded_tokens"] == 0
    return [(outcome(each), each.logprobs and tuple(each.logprobs)) for each in requests]


KNOWN: dict[tuple[str, str], Said] = {}


def plain(device: str, spelling: str) -> Said:
    """What the requests say without drafts."""
    if (device, spelling) not in KNOWN:
        with open_plain(device=device, **POOL) as engine:
            KNOWN[device, spelling] = served(engine, spelling)
            assert engine.counters["guided/jumped"] == 0
    return KNOWN[device, spelling]


@pytest.mark.parametrize(
    ("name", "spelling", "options"),
    extent(
        [
            ("jump", "any", {"lookahead": 1}),
            ("jump", "tokenizer", {"lookahead": 2, "steps_per_launch": 3}),
            ("ngram", "tokenizer", {"lookahead": 1}),
            ("mtp", "any", {"lookahead": 0}),
        ],
        [
            (name, spelling, options)
            for name in DRAFTERS
            for spelling in ("any", "tokenizer")
            for options in (
                {"lookahead": 0},
                {"lookahead": 1},
                {"lookahead": 2, "steps_per_launch": 3},
            )
        ],
    ),
)
def test_no_token_changes(device: str, name: str, spelling: str, options: dict[str, Any]) -> None:
    with open_speculating(DRAFTERS[name], device=device, **options, **POOL) as engine:
        assert served(engine, spelling) == plain(device, spelling)
        jumped = engine.counters["guided/jumped"]
        # A draft model keeps its drafts.
        assert jumped == 0 if name == "model" else jumped > 5
        if name == "jump":
            assert jumped == engine.acceptance.accepted
        assert engine.counters["guided/steps"] == 0
        assert engine.scheduler.lookahead == options["lookahead"]


def test_the_spelling_alone_differs(device: str) -> None:
    """A text alone has the tokenizer's tokens, or those that the model likes better."""
    with open_plain(device=device, **POOL) as engine:
        requests = [
            engine.submit(PROMPT, guided({"choice": [TEXT], "spelling": spelling}, temperature=0.0))
            for spelling in ("any", "tokenizer")
        ]
        run_with(engine)
        assert {request.text for request in requests} == {TEXT}
        ids = engine.tokenizer.encode(TEXT, add_special_tokens=False)
        assert list(requests[1].token_ids) == list(ids) != list(requests[0].token_ids)


def decode_steps(engine: Engine) -> dict[int, int]:
    """Decode steps by their drafts."""
    found: dict[int, int] = {}
    for key in engine.runtime.graphs:
        if key.kind == "decode" and (count := engine.counters[key.counter]):
            found[key.drafts] = found.get(key.drafts, 0) + key.steps * count
    return found


@pytest.mark.parametrize("k", [1, 4])
def test_each_step_emits_all_that_it_can(device: str, k: int) -> None:
    """Prefill samples the first of n tokens; every step emits k drafts and the token after them."""
    with open_speculating(JumpForward(k=k), device=device, max_batch=1, **POOL) as engine:
        asked = {"choice": [TEXT], "spelling": "tokenizer"}
        request = engine.submit(PROMPT, guided(asked, seed=1))
        run_with(engine)
        n = len(request.token_ids)
        steps = -(-(n - 1) // (1 + k))
        assert request.text == TEXT and n > 12
        # Lookahead may launch a step for a request that has ended.
        assert steps <= decode_steps(engine)[k] <= steps + 1
        assert engine.counters["guided/jumped"] == n - 1 - steps == engine.acceptance.accepted
        assert request.acceptance.accepted == n - 1 - steps


def twenty_fields() -> dict[str, Any]:
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "string", "maxLength": 6},
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"enum": ["red", "green", "blue"]},
        {"type": "boolean"},
    )
    names = (
        *("name", "size", "colour", "weight", "owner", "address", "city", "country", "postcode"),
        *("phone", "email", "price", "currency", "quantity", "category", "status", "created_at"),
        *("updated_at", "rating", "verified"),
    )
    fields = {name: kinds[index % 4] for index, name in enumerate(names)}
    return {
        "json": {
            "type": "object",
            "properties": fields,
            "required": names,
            "additionalProperties": False,
        },
        "disable_any_whitespace": True,
    }


@pytest.mark.parametrize("spelling", ["any", "tokenizer"])
def test_json_of_twenty_fields_takes_two_thirds_of_the_steps(device: str, spelling: str) -> None:
    options = {"device": device, "max_batch": 1, "max_seq_len": 512, "grammar_pool_mib": 4}
    with open_speculating(JumpForward(k=4), **options) as engine:
        asked = twenty_fields() | {"spelling": spelling}
        request = engine.submit(PROMPT, guided(asked, 400, temperature=0.0))
        run_with(engine)
        assert request.grammar == "device" and request.finish_reason == "stop"
        tokens = len(request.token_ids)
        assert tokens > 120
        # Without jump-forward each step emits one token.
        assert tokens / decode_steps(engine)[4] > {"any": 1.5, "tokenizer": 2.5}[spelling]


def test_steps_without_a_grammar_have_no_drafts(device: str) -> None:
    with open_speculating(JumpForward(k=3), device=device, **POOL) as engine:
        engine.generate(PROMPT, greedy(5, ignore_eos=True))
        assert set(decode_steps(engine)) == {0}
        # One whose grammar the host follows has no drafts either.
        slow = engine.submit(PROMPT, guided({"grammar": "start: /[a-z]{5}/"}))
        run_with(engine)
        assert slow.grammar == "host" and set(decode_steps(engine)) == {0}
        engine.generate(PROMPT, guided({"regex": "abc"}))
        assert set(decode_steps(engine)) == {0, 3}


def test_a_gate_and_a_schedule_still_count(device: str) -> None:
    gate = GateOptions(max_live=1)
    with open_speculating(JumpForward(k=3), device=device, gate=gate, **POOL) as engine:
        alone = engine.generate(PROMPT, guided({"choice": [TEXT]}, seed=2)).token_ids
        assert set(decode_steps(engine)) == {3}
        counted = engine.counters["gate/steps/3"]
        assert counted == decode_steps(engine)[3]
        requests = [engine.submit(PROMPT, guided({"choice": [TEXT]}, seed=2)) for _ in range(2)]
        run_with(engine)
        assert {tuple(request.token_ids) for request in requests} == {alone}
        assert engine.counters["gate/overloaded"] > 0
    with open_speculating(
        JumpForward(k=3), device=device, draft_len_schedule={1: 3, 2: 1}, **POOL
    ) as engine:
        requests = [engine.submit(PROMPT, guided({"choice": [TEXT]}, seed=2)) for _ in range(2)]
        run_with(engine)
        assert {tuple(request.token_ids) for request in requests} == {alone}
        assert decode_steps(engine)[1] > 0


def test_a_gate_learns_from_steps_without_forced_text(device: str) -> None:
    gate = GateOptions(window=8, probe_every=1000)
    with open_speculating(JumpForward(k=3), device=device, gate=gate, **POOL) as engine:
        free = engine.submit(PROMPT, guided({"regex": "[a-z ]{60}"}, 90, seed=1))
        run_with(engine)
        assert free.grammar == "device" and engine.counters["gate/off"] == 1
        steps = decode_steps(engine)
        assert 8 <= steps[3] <= 10 and steps[0] >= 5


def test_pauses_change_nothing(device: str) -> None:
    options = {"kv_blocks": 12, "swap_blocks": 64, **POOL}
    with open_speculating(JumpForward(k=4), device=device, **options) as engine:
        requests = []
        for index, job in enumerate(jobs("tokenizer")):
            if index % 3 == 0:
                engine.submit(OTHER, greedy(60, ignore_eos=True))
            requests.append(engine.submit(*job))
        run_with(engine)
        said = [said for said, _ in plain(device, "tokenizer")]
        assert [outcome(request) for request in requests] == said
        assert engine.counters["pauses"] >= 1 and engine.counters["guided/jumped"] > 5


@pytest.mark.parametrize("name", extent(["tree"], ["plain", "mtp", "tree", "dynamic"]))
def test_a_full_pool_changes_nothing(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host then makes masks from the tables that the device would read, also after drafts."""
    modes: dict[str, Speculative | None] = {
        "plain": None, "mtp": MTP(k=3), "tree": MTP(tree=TREE), "dynamic": MTP(tree=BEST),
    }  # fmt: skip
    mode, options = modes[name], {"device": device, **POOL}
    engine = open_plain(**options) if mode is None else open_speculating(mode, **options)
    with engine:
        pool = engine.core.intake._grammar_pool
        monkeypatch.setattr(pool, "take", lambda *_: None)
        request = engine.submit(PROMPT, guided({"choice": [TEXT]}))
        assert isinstance(request.job.guide, TableGuide)
        assert "of the pool's 1048576 are in use" in request.grammar_reason
        run_with(engine)
        found, wanted = served(engine, "tokenizer", "host"), plain(device, "tokenizer")
        if name in ("tree", "dynamic") and device == "cuda":
            # Trees cut the keys of attention otherwise: log-probabilities have other bits.
            found, wanted = ([(said, None) for said, _ in each] for each in (found, wanted))
        assert found == wanted
        assert engine.counters["guided/steps"] > 0


# Who jumps.


@pytest.mark.parametrize(
    "mode",
    [
        UserProvided(k=3),
        MTP(tree=TREE),
        MTP(tree=BEST),
        DraftModel(path="x"),
        SaveHiddenStates(directory="x"),
        None,
    ],
    ids=str,
)
def test_some_drafters_keep_their_drafts(mode: Speculative | None) -> None:
    assert not EngineConfig(device="cpu", max_batch=1, speculative=mode, **POOL).jumps
    assert not EngineConfig(device="cpu", speculative=NGram(k=3)).jumps
    assert EngineConfig(device="cpu", speculative=NGram(k=3), **POOL).jumps


def test_one_launch_of_the_full_graphs_drafts_forced_text() -> None:
    """And none of others, nor of engines without a pool, or with trees."""
    cases: list[tuple[Speculative, dict[str, int], bool]] = [
        (JumpForward(k=2), POOL, True),
        (NGram(k=2), POOL, True),
        (NGram(k=2), {}, False),
        (MTP(tree=TREE), POOL, False),
    ]
    for mode, options, jumps in cases:
        with open_speculating(mode, device="cpu", **options) as engine:
            for name, kernels in graph_kernels(engine).items():
                count = sum(kernel.name == "_draft_forced_kernel" for kernel in kernels)
                assert count == (jumps and name.endswith("full")), (name, mode)


def test_a_callers_drafts_are_not_counted(device: str) -> None:
    """Nor replaced: a wrong draft of the caller's stays wrong."""
    with open_speculating(UserProvided(k=3), device=device, **POOL) as engine:
        asked = {"choice": [TEXT], "spelling": "tokenizer"}
        ids = engine.tokenizer.encode(TEXT, add_special_tokens=False)
        request = engine.submit(PROMPT, guided(asked, temperature=0.0))

        def drafts(each: Request) -> list[int]:
            said = len(each.token_ids)
            return [*ids[said : said + 1], 5]

        run_with(engine, drafts)
        assert request.text == TEXT and engine.counters["guided/jumped"] == 0
        assert 0 < engine.acceptance.accepted <= len(ids) / 2


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"JumpForward\(k=4\) drafts text .* grammar_pool_mib, which is 0"
    ):
        open_engine(device="cpu", speculative=JumpForward(k=4))
    with pytest.raises(ValueError, match=r"k=0 drafts a step must be an integer in \[1"):
        JumpForward(k=0)
    with pytest.raises(ValueError, match="spelling='all' must be 'any', 'tokenizer' or None"):
        StructuredOutputsParams(regex="a", spelling="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="spelling='any' is not for grammar"):
        StructuredOutputsParams(grammar='start: "a"', spelling="any")


@pytest.mark.parametrize(
    ("pool", "spelling", "free"),
    [(0, None, False), (0, "any", True), (1, None, True), (1, "tokenizer", False)],
)
def test_the_host_spells_as_asked(pool: int, spelling: Any, free: bool) -> None:
    """Where the host follows a grammar, llguidance allows its tokenizer's spelling or all."""
    with open_engine(device="cpu", grammar_pool_mib=pool) as engine:
        engine.core.intake._grammar_pool = None
        params = guided({"regex": "return.?", "spelling": spelling})
        guide = engine.submit(PROMPT, params).job.guide
        assert isinstance(guide, Guide) and ("no_forcing" in guide._grammar) == free
        run_with(engine)
