"""Speculation changes no token: each engine that drafts against one of its family that does not.

With any drafter, at any temperature, wherever a request ends, and however many come and go. What
shows that drafts were in play at all is the acceptance and the names of the replayed graphs.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.mtp_modules import LAYOUTS, VOCAB, write_random
from engines.device_cases import alternately, pairwise_here
from engines.small_engine import MAX_SEQ_LEN, OTHER, PROMPT, assert_idle, greedy
from engines.speculation import (
    BEST,
    DEMO,
    SCRIPTS,
    TREE,
    Job,
    Outcome,
    Tokens,
    demo_jobs,
    open_plain,
    open_speculating,
    outcome,
    outcomes,
    random_jobs,
    run_with,
    script,
    serve,
    write_constant,
    write_draft_model,
)
from extent import extent
from graphengine import DynamicTree, Engine, Request, SamplingParams
from graphengine.demo import checkpoint_path, heldout_text
from graphengine.kernels.linear.residual import Residual
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.speculative import MTP, Auto, DraftModel, NGram, Speculative, UserProvided

WHOLE = checkpoint_path()
"""The demo with all of its layers, whose draft module is as often right as in use."""

# Drafters of the demo model, and the share of its drafts of `demo_jobs` that must be accepted at
# each position: 0.1 less than a CPU measures, of a share below 0.3 half to three quarters.
DEMO_DRAFTERS: dict[str, tuple[Callable[[Path], Speculative], Sequence[float]]] = {
    "mtp-1": (lambda folder: MTP(k=1), (0.7,)),
    "mtp-2": (lambda folder: MTP(k=2), (0.7, 0.53)),
    "mtp-3": (lambda folder: MTP(k=3), (0.7, 0.55, 0.45)),
    "mtp-5": (lambda folder: MTP(k=5), (0.67, 0.47, 0.4, 0.3, 0.24)),
    "mtp-tree": (lambda folder: MTP(tree=TREE), (0.82, 0.7, 0.48, 0.31)),
    "mtp-dynamic": (lambda folder: MTP(tree=BEST), (0.82, 0.67, 0.51, 0.56)),
    "mtp-vocabulary": (
        lambda folder: MTP(k=3, draft_vocab=DraftVocabulary(text=text_of(folder), size=512)),
        (0.5, 0.13, 0.06),
    ),
    "mtp-vanilla": (lambda folder: MTP(k=1, style="vanilla"), (0.7,)),
    "ngram-3": (lambda folder: NGram(k=3), (0.18, 0.16, 0.12)),
    "ngram-5": (lambda folder: NGram(k=5, max_n=2), (0.13, 0.11, 0.08, 0.08, 0.08)),
    "auto": (lambda folder: Auto(), (0.13, 0.11, 0.08, 0.08, 0.08)),
    "model-itself": (lambda folder: DraftModel(WHOLE, k=3), (0.97, 0.97, 0.97)),
    "model-itself-1": (lambda folder: DraftModel(WHOLE, k=1), (0.97,)),
    # Random models: they are seldom right.
    "model-llama": (lambda folder: DraftModel(random_model(folder, "llama"), k=3), ()),
    "model-qwen3": (lambda folder: DraftModel(random_model(folder, "qwen3"), k=2), ()),
}


def text_of(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_text(heldout_text()[:20_000], encoding="utf-8")
    return file


def random_model(folder: Path, kind: str) -> Path:
    return write_draft_model(folder / kind, kind, 4096, DEMO)


Plain = Callable[..., list[Outcome]]


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    """`plain(path, jobs, **options)`: what plain decoding makes of jobs; each is served once."""
    engines: dict[str, Engine] = {}
    served: dict[str, list[Outcome]] = {}

    def of(path: Path, jobs: list[Job], **options: Any) -> list[Outcome]:
        key = f"{path} {sorted(options.items())}"
        if key not in engines:
            engines[key] = open_plain(path, **options)
        asked = f"{key} {jobs}"
        if asked not in served:
            served[asked] = outcomes(engines[key], jobs)
        return served[asked]

    yield of
    for engine in engines.values():
        engine.close()


def speculative_replays(engine: Engine) -> int:
    counters = engine.counters.items()
    return sum(n for name, n in counters if name.startswith("replays/decode/") and "/k" in name)


def assert_drafted(engine: Engine, least: float = 1.0, rates: Sequence[float] = ()) -> None:
    """Every decode replay verified drafts; they came to as many tokens a step, and as large a share
    of them was accepted at each position.
    """
    decoded = sum(n for name, n in engine.counters.items() if name.startswith("replays/decode/"))
    assert decoded == speculative_replays(engine) > 0
    length = engine.acceptance.mean_length
    assert length is not None and length >= least, f"{engine.acceptance}"
    if rates:
        reached = zip(engine.acceptance.rates, rates, strict=True)
        assert all(rate >= floor for rate, floor in reached), f"{engine.acceptance} of {rates}"


# Every drafter.


# What differs from another by a number alone.
NUMBERS = extent(("mtp-2", "ngram-5", "model-itself-1", "model-qwen3"), ())
# Both lookaheads of each way to draft.
LOOKAHEADS = {
    "mtp-1": (0,), "mtp-2": (1,), "mtp-5": (0,), "mtp-tree": (1,), "mtp-dynamic": (0,),
    "mtp-vocabulary": (1,),
    "ngram-5": (0,), "auto": (1,), "model-itself-1": (0,), "model-llama": (1,),
    "model-qwen3": (0,),
}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "name", "lookahead"),
    pairwise_here(
        alternately(
            {name: LOOKAHEADS.get(name, (0, 1)) for name in DEMO_DRAFTERS if name not in NUMBERS}
        ),
        (0, 1),
    ),
)
def test_the_demo_model_says_what_it_says_without_drafts(
    device: str, plain: Plain, tmp_path: Path, name: str, lookahead: int
) -> None:
    make, rates = DEMO_DRAFTERS[name]
    jobs = demo_jobs()
    expected = plain(WHOLE, jobs, device=device)
    with open_speculating(make(tmp_path), WHOLE, device=device, lookahead=lookahead) as engine:
        assert outcomes(engine, jobs) == expected
        assert_drafted(engine, rates=rates)
        assert lookahead or not engine.counters["discarded_tokens"]


# As above, of the jobs of the next test. In float32 a CPU measures 0.87, 0.80, 0.77 of mtp-3, 0.90
# of mtp-vanilla, 0.64, 0.07, 0.03 of mtp-vocabulary, 0.54 thrice of ngram-3 and 0.99 of
# model-itself; in bfloat16 texts part where logits are near each other.
BFLOAT16_RATES: dict[str, Sequence[float]] = {
    "mtp-3": (0.7, 0.6, 0.5),
    "mtp-vanilla": (0.7,),
    "mtp-vocabulary": (0.45, 0.03, 0.01),
    "ngram-3": (0.25, 0.25, 0.25),
    "model-itself": (0.9, 0.9, 0.9),
}


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("name", BFLOAT16_RATES)
def test_the_demo_model_in_bfloat16(plain: Plain, tmp_path: Path, name: str, pdl: bool) -> None:
    make, rates = DEMO_DRAFTERS[name][0], BFLOAT16_RATES[name]
    options: dict[str, Any] = {"device": "cuda", "max_batch": 8, "max_seq_len": 512}
    jobs = [*demo_jobs(), *random_jobs(4096, 1), *demo_jobs()]
    expected = plain(WHOLE, jobs, **options)
    with open_speculating(make(tmp_path), WHOLE, **options, pdl=pdl) as engine:
        assert engine.memory.dtype == torch.bfloat16 and engine.runtime.program.launch.pdl is pdl
        assert outcomes(engine, jobs) == expected
        assert_drafted(engine, rates=rates)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", extent([3], [1, 3, 4]))
def test_random_checkpoints_with_modules(
    device: str, plain: Plain, tmp_path_factory: pytest.TempPathFactory, layout: str, k: int
) -> None:
    path = write_random(tmp_path_factory.getbasetemp() / f"modules-{layout}", layout)
    options: dict[str, Any] = {"device": device, "dtype": "float32"}
    jobs = random_jobs(VOCAB, k)
    expected = plain(path, jobs, **options)
    with open_speculating(MTP(k), path, **options) as engine:
        assert outcomes(engine, jobs) == expected
        assert_drafted(engine, 1.0)


@pytest.mark.parametrize("layout", ["mimo", "deepseek"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_random_checkpoints_with_a_module_for_each_draft(
    device: str, plain: Plain, tmp_path: Path, layout: str, lookahead: int
) -> None:
    path = write_random(tmp_path / "modules", layout)
    options: dict[str, Any] = {"device": device, "dtype": "float32"}
    jobs = random_jobs(VOCAB, 5)
    expected = plain(path, jobs, **options)
    mode = MTP(2, style="vanilla")
    with open_speculating(mode, path, **options, lookahead=lookahead) as engine:
        assert outcomes(engine, jobs) == expected
        assert_drafted(engine, 1.0)


ODD = ("llama-biases", "llama-tied-yarn", "llama-linear-96", "qwen3-biases", "qwen3-tied-128")


@pytest.mark.parametrize(
    ("device", "name", "drafter"),
    pairwise_here(alternately(dict.fromkeys(ODD, ("ngram", "model"))), ("ngram", "model")),
)
def test_odd_random_checkpoints(
    device: str, plain: Plain, tmp_path: Path, checkpoints: dict[str, Any], name: str, drafter: str
) -> None:
    oracle = checkpoints[name]
    options: dict[str, Any] = {"device": device, "dtype": "float32"}
    vocab_size = oracle.model.config.vocab_size
    jobs = random_jobs(vocab_size, len(drafter))
    expected = plain(oracle.path, jobs, **options)
    mode: Speculative = NGram(k=2, max_n=3)
    if drafter == "model":
        mode = DraftModel(write_draft_model(tmp_path / "draft", "llama", vocab_size, None), k=3)
    with open_speculating(mode, oracle.path, **options) as engine:
        assert outcomes(engine, jobs) == expected
        assert_drafted(engine, 1.0)


@pytest.mark.parametrize("name", SCRIPTS)
def test_drafts_of_the_caller(device: str, plain: Plain, name: str) -> None:
    jobs = demo_jobs()
    expected = plain(DEMO, jobs, device=device)
    known = [tokens for tokens, *_ in expected]
    with open_speculating(UserProvided(3), device=device) as engine:
        assert engine.config.lookahead == 0
        callers = script(name, known, 3, 4096)
        assert outcomes(engine, jobs, drafts=callers.of) == expected
        acceptance = engine.acceptance
        if name == "right":
            # All but a request's last steps: those past its end are verified by nobody.
            assert acceptance.rate == 1.0 and acceptance.mean_length > 3.0
        elif name in ("wrong", "none"):
            assert acceptance.accepted == 0 and acceptance.mean_length == 1.0
        else:
            assert acceptance.accepted > 0 and acceptance.per_position[-1] > 0


def test_blocks_are_crossed_and_rewound_at_every_offset(
    device: str, plain: Plain, checkpoints: dict[str, Any]
) -> None:
    """Prompts that end at every offset in a block of 8, steps that keep 0 to 5 of 5 drafts."""
    path = checkpoints["qwen3-biases"].path
    options: dict[str, Any] = {"device": device, "dtype": "float32", "max_batch": 5}
    dice = random.Random(8)
    jobs = [
        Job(tuple(dice.randrange(307) for _ in range(length)), greedy(26, ignore_eos=True))
        for length in range(1, 18)
    ]
    expected = plain(path, jobs, **options)
    known = [tokens for tokens, *_ in expected]
    crossed: set[tuple[int, int]] = set()
    with open_speculating(UserProvided(5), path, **options) as engine:
        for start in range(6):
            callers = script("partly", known, 5, 307)
            callers.right = lambda step, start=start: (step * 5 + start) % 6
            requests = [engine.submit(job.prompt, job.params) for job in jobs]
            drafts = callers.of(requests)

            index_of = {request.id: index for index, request in enumerate(requests)}

            def noted(
                request: Request,
                drafts: Any = drafts,
                callers: Any = callers,
                index_of: dict[int, int] = index_of,
            ) -> Tokens:
                proposed = drafts(request)
                index = index_of[request.id]
                length = request.job.prompt_len + len(request.token_ids) - 1
                crossed.add((length % 8, callers.right(callers.steps[index])))
                return proposed

            run_with(engine, noted)
            assert_idle(engine)
            assert [outcome(request) for request in requests] == expected
    assert crossed == {(offset, right) for offset in range(8) for right in range(6)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "least"), [(MTP(k=3), 2.2), (NGram(k=3), 1.3)], ids=["mtp", "ngram"]
)
def test_the_held_out_text(device: str, plain: Plain, mode: Speculative, least: float) -> None:
    """Prompts out of the whole text; every one on a GPU, some of them here."""
    text = heldout_text()
    stride, tokens = (2_000, 60) if device == "cuda" else (9_000, 30)
    jobs = [Job(text[at : at + 200], greedy(tokens)) for at in range(0, len(text) - 200, stride)]
    options: dict[str, Any] = {"device": device, "max_batch": 8, "max_seq_len": 256}
    expected = plain(WHOLE, jobs, **options)
    with open_speculating(mode, WHOLE, **options) as engine:
        assert outcomes(engine, jobs) == expected
        assert_drafted(engine, least)
        print(f"\n{device}, {mode}: {engine.acceptance}")


def test_every_bucket(device: str, plain: Plain) -> None:
    """One to eight rows, each bucket at K = 3."""
    options: dict[str, Any] = {"device": device, "max_batch": 8}
    jobs = [Job(f"def f{n}(", greedy(12 + 2 * n, ignore_eos=True)) for n in range(8)]
    expected = plain(DEMO, jobs, **options)
    with open_speculating(MTP(k=3), **options) as engine:
        for rows in (1, 2, 3, 4, 5, 8):
            assert outcomes(engine, jobs[:rows]) == expected[:rows]
        for bucket in engine.memory.ladder.sizes:
            assert engine.counters[f"replays/decode/{bucket}/k3/fast"] > 0


# Sampling.


@pytest.mark.parametrize("mode", [MTP(k=3), NGram(k=2)], ids=["mtp", "ngram"])
def test_seeded_requests_sample_what_they_sample_without_drafts(
    device: str, plain: Plain, mode: Speculative
) -> None:
    """Both samplers, and both in one step."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.6}, {"temperature": 1.0}, {"temperature": 1.5},
        {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_n_sigma": 1.0}, {"temperature": 0.0},
    ]  # fmt: skip
    jobs = [
        Job(prompt, SamplingParams(**({"max_tokens": 14, "seed": seed, "min_tokens": 3} | options)))
        for prompt in extent((PROMPT,), (PROMPT, OTHER))
        for seed, options in enumerate(settings)
    ]
    expected = plain(DEMO, jobs, device=device)
    with open_speculating(mode, device=device) as engine:
        assert outcomes(engine, jobs) == expected
        assert_drafted(engine)
        assert engine.acceptance.accepted > 0
        for sampler in ("fast", "full"):
            names = [name for name in engine.counters if name.endswith(f"/k{mode.k}/{sampler}")]
            assert sum(engine.counters[name] for name in names) > 0


# Of each of 16 requests: 4,000 or 8,000 in all on a CPU, and 20,000 on a GPU.
DRAWS = {"cpu": extent(250, 500), "cuda": 1_250}
# Bounds of chi-square that a true hypothesis exceeds once in 100,000 tests, by Wilson and Hilferty.
QUANTILE = 4.265


def chi_square_bound(freedom: int) -> float:
    return freedom * (1 - 2 / (9 * freedom) + QUANTILE * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: list[int], expected: list[float]) -> tuple[float, float]:
    """The statistic and its bound, over pooled bins with at least 5 expected each."""
    pooled: list[tuple[float, float]] = []
    count = weight = 0.0
    for seen, wanted in sorted(zip(counts, expected, strict=True), key=lambda pair: pair[1]):
        count, weight = count + seen, weight + wanted
        if weight >= 5:
            pooled.append((count, weight))
            count = weight = 0.0
    pooled[-1] = (pooled[-1][0] + count, pooled[-1][1] + weight)
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pooled)
    return statistic, chi_square_bound(len(pooled) - 1)


def leave_out_layers(engine: Engine) -> None:
    """A constant model's layers add nothing to its embedding; on a CPU they would take minutes."""
    norm = engine.model.weights.final_norm

    def decode(lanes: Any, residual: Residual, *rest: Any, **options: Any) -> Residual:
        residual.scaled.copy_(residual.x * norm)
        return residual

    engine.model.decode = decode  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "filtered"),
    extent(
        [("mtp", True), ("ngram", False), ("tree", True)],
        [("mtp", True), ("ngram", False), ("tree", True), ("user", True)],
    ),
)
def test_the_sampled_distribution_is_that_of_the_model(
    device: str, tmp_path: Path, drafter: str, filtered: bool
) -> None:
    """A model whose tokens are independent and known: so are those of many drawn with drafts.

    By chi-square: the tokens, each with the one before, and those after three accepted drafts.
    """
    path, p = write_constant(tmp_path / "constant")
    draws = DRAWS[device]
    options: dict[str, Any] = {"max_tokens": draws, "temperature": 1.0}
    if filtered:
        options["top_k"] = 7
        p = torch.where(p >= p.topk(7).values[-1], p, 0.0)
        p /= p.sum()
    assert 0.2 < float(p.max()) < 0.8, "drafts must pass now and then"

    modes: dict[str, Speculative] = {
        "mtp": MTP(k=3), "ngram": NGram(k=3), "user": UserProvided(3),
        "tree": MTP(tree=DynamicTree(nodes=3, top_k=2, depth=3)),
    }  # fmt: skip
    sizes: dict[str, Any] = {"max_batch": 16, "max_seq_len": draws + 20, "buckets": (16,)}
    with open_speculating(modes[drafter], path, device=device, dtype="float32", **sizes) as engine:
        requests = [
            engine.submit([index % VOCAB], SamplingParams(seed=index, **options))
            for index in range(16)
        ]
        best = int(p.argmax())
        if device == "cpu":
            leave_out_layers(engine)
        drafts = (lambda request: [best] * 3) if drafter == "user" else None
        events = run_with(engine, drafts)
        assert engine.acceptance.mean_length > 1.1, f"{engine.acceptance}"

    tokens = [token for request in requests for token in request.token_ids]
    assert len(tokens) == 16 * draws
    counts = Counter(tokens)
    statistic, bound = chi_square(
        [counts[token] for token in range(VOCAB)], (p * len(tokens)).tolist()
    )
    assert statistic < bound, f"{statistic:.1f} of {bound:.1f}"

    pairs: Counter[tuple[int, int]] = Counter()
    for request in requests:
        pairs.update(zip(request.token_ids, request.token_ids[1:], strict=False))
    joint = (p[:, None] * p[None, :] * pairs.total()).flatten().tolist()
    seen = [pairs[divmod(index, VOCAB)] for index in range(VOCAB**2)]
    statistic, bound = chi_square(seen, joint)
    assert statistic < bound, f"pairs: {statistic:.1f} of {bound:.1f}"

    # The token after accepted drafts is drawn anew; the last of a step is its own.
    last = Counter(event.token_ids[-1] for event in events if len(event.token_ids) == 4)
    statistic, bound = chi_square(
        [last[token] for token in range(VOCAB)], (p * last.total()).tolist()
    )
    assert statistic < bound, f"after three drafts: {statistic:.1f} of {bound:.1f}"


# Ends.


@pytest.fixture(scope="module")
def oracle_of_ends() -> Iterator[Callable[[str], tuple[Engine, Engine]]]:
    """By device, a plain engine and one whose caller drafts."""
    opened: dict[str, tuple[Engine, Engine]] = {}

    def of(device: str) -> tuple[Engine, Engine]:
        if device not in opened:
            opened[device] = (
                open_plain(device=device),
                open_speculating(UserProvided(3), device=device),
            )
        return opened[device]

    yield of
    for engines in opened.values():
        for engine in engines:
            engine.close()


def assert_same_end(
    engines: tuple[Engine, Engine], jobs: list[Job], known: Tokens | None = None
) -> list[Outcome]:
    """Jobs with drafts that are all right: each goes on as `known` does, or as it is found to."""
    without, engine = engines
    expected = outcomes(without, jobs)
    callers = script("right", [known or tokens for tokens, *_ in expected], 3, 4096)
    requests = serve(engine, jobs, callers.of)
    assert [outcome(request) for request in requests] == expected
    for request in requests:
        assert request.acceptance.rate in (1.0, None), f"{request}: {request.acceptance}"
    return expected


def known_of(engine: Engine, prompt: str, tokens: int = 40) -> Tokens:
    ((known, *_),) = outcomes(engine, [Job(prompt, greedy(tokens, ignore_eos=True))])
    return known


@pytest.mark.parametrize("by", ["eos", "stop-id", "max-tokens", "stop-and-length", "min-tokens"])
def test_a_request_may_end_at_every_offset_of_a_step(
    device: str, oracle_of_ends: Any, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    engines = oracle_of_ends(device)
    known = known_of(engines[0], OTHER)
    first = [index for index, token in enumerate(known) if token not in known[:index]]
    # Each offset twice at least, and not the whole of the text.
    first = [index for index in first if index < 14]
    ends = first if by in ("eos", "stop-id", "stop-and-length") else list(range(10))
    # Steps of 4 tokens after the one of the prompt.
    assert {(end - 1) % 4 for end in ends if end} == {0, 1, 2, 3}
    jobs = []
    for end in ends:
        options: dict[str, Any] = {"max_tokens": 40}
        if by == "stop-id":
            options["stop_token_ids"] = (4095, known[end])
        elif by == "max-tokens":
            options["max_tokens"] = end + 1
        elif by == "stop-and-length":
            options |= {"stop_token_ids": (known[end],), "max_tokens": end + 1}
        elif by == "min-tokens":
            options |= {"stop_token_ids": (known[end],), "min_tokens": end + 1}
        jobs.append(Job(OTHER, greedy(ignore_eos=by != "eos", **options)))
    if by == "min-tokens":
        # Barred for a while, the stop token may be replaced: what is right changes too.
        said = assert_same_end(engines, jobs)
        assert all(len(tokens) > end for end, (tokens, *_) in zip(ends, said, strict=True))
        return
    if by == "eos":
        # An engine has one set of them.
        said = []
        for end, job in zip(ends, jobs, strict=True):
            for engine in engines:
                monkeypatch.setattr(engine.core.intake, "_eos_ids", (4095, known[end]))
            said += assert_same_end(engines, [job], known)
    else:
        said = assert_same_end(engines, jobs, known)
    for end, (tokens, _, reason) in zip(ends, said, strict=True):
        assert tokens == known[: end + 1]
        assert reason == ("length" if by == "max-tokens" else "stop")


def test_a_stop_string_may_end_at_every_offset_of_a_step(device: str, oracle_of_ends: Any) -> None:
    engines = oracle_of_ends(device)
    known = known_of(engines[0], PROMPT)
    pieces = [engines[0].tokenizer.decode([token]) for token in known]
    text, seen = "".join(pieces), set()
    for end in range(1, 20):
        # The end of one token and the start of the next.
        stop = pieces[end - 1][-1:] + pieces[end][:1]
        at = len("".join(pieces[:end])) - 1
        if len(stop) < 2 or text.find(stop) != at:
            continue
        job = Job(PROMPT, greedy(40, ignore_eos=True, stop=[stop, "never in the text"]))
        ((tokens, said, reason),) = assert_same_end(engines, [job], known)
        assert (tokens, said, reason) == (known[: end + 1], text[:at], "stop")
        seen.add((end - 1) % 4)
    assert len(seen) >= 3, f"offsets {seen}"


def test_max_seq_len_ends_a_request_at_every_offset_of_a_step(
    device: str, oracle_of_ends: Any
) -> None:
    engines = oracle_of_ends(device)
    for room in range(1, 7):
        prompt = tuple(random.Random(room).randrange(4096) for _ in range(MAX_SEQ_LEN - room))
        job = Job(prompt, greedy(None, ignore_eos=True))
        ((known, *_),) = outcomes(engines[0], [job])
        assert len(known) == room
        assert_same_end(engines, [job], known)


@pytest.mark.parametrize("lookahead", extent([1], [0, 1]))
@pytest.mark.parametrize(
    "mode", [MTP(k=3), MTP(tree=TREE), NGram(k=3), DraftModel(DEMO, k=3)], ids=str
)
def test_a_drafter_at_the_end_of_the_table(
    device: str, plain: Plain, mode: Speculative, lookahead: int
) -> None:
    """No position past max_seq_len is written: neighbours go on as before."""
    length = 64
    jobs = [
        Job(tuple(range(100, 100 + length - room)), greedy(None, ignore_eos=True))
        for room in (1, 2, 3, 4, 5, 6, 7, 9)
    ]
    jobs.insert(2, Job(PROMPT, greedy(30, ignore_eos=True)))
    sizes: dict[str, Any] = {"device": device, "max_seq_len": length}
    expected = plain(DEMO, jobs, **sizes)
    with open_speculating(mode, **sizes, lookahead=lookahead) as engine:
        assert outcomes(engine, jobs) == expected


def test_a_cancelled_request_leaves_nothing_behind(device: str, plain: Plain) -> None:
    """A slot's next request must not meet the drafts, or the tokens, of the one before."""
    # What was left behind would be met in the first steps.
    jobs = [Job(prompt, replace(params, max_tokens=9)) for prompt, params in demo_jobs()[:3]]
    expected = plain(DEMO, jobs, device=device)
    for mode in (MTP(k=3), NGram(k=3)):
        with open_speculating(mode, device=device) as engine:
            for steps in extent((1, 2, 3, 5), range(1, 9)):
                doomed = [engine.submit(OTHER, greedy(50)) for _ in range(3)]
                for _ in range(steps):
                    engine.step()
                for request in doomed:
                    request.cancel()
                requests = [engine.submit(job.prompt, job.params) for job in jobs]
                run_with(engine)
                assert [outcome(request) for request in requests] == expected
                assert_idle(engine)


def test_the_family_and_numerics_are_those_of_the_plain_engine(device: str) -> None:
    """What makes the comparison of this file fair."""
    with open_plain(device=device) as without, open_speculating(MTP(k=3), device=device) as engine:
        assert engine.row_family == without.row_family == "dot"
        assert engine.numerics_id == without.numerics_id
        assert replace(engine.config, speculative=None, gate=None) == without.config
