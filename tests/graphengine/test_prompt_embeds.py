"""Prompts with embeddings: what they say, against transformers and against tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from checkpoints.mtp_modules import write_random
from engines.small_engine import assert_idle, greedy, open_engine, run
from graphengine import MTP, Chat, DraftModel, Engine, NGram, PromptParts
from graphengine.core.snapshots import _adapter_in, _digests, _places_in
from graphengine.prompt_embeds import (
    Embeds,
    EmbedsSpec,
    Grid,
    Place,
    Run,
    embeds_at,
    embeds_of,
)
from graphengine.speculative import Speculative

SIZES: dict[str, Any] = {"dtype": "float32", "prompt_embeds": True}
IDS = [5, 17, 8, 31, 8, 17, 40, 2, 9, 77, 5, 17, 6, 3, 28, 11, 60, 61, 62, 63, 64, 65, 12, 90]


def said_by_transformers(model: PreTrainedModel, embeds: Tensor, count: int) -> list[int]:
    """Greedy tokens after these embeddings [n, H]."""
    said: list[int] = []
    table = model.get_input_embeddings()
    with torch.no_grad():
        for _ in range(count):
            logits = model(inputs_embeds=embeds[None], use_cache=False).logits[0, -1]
            said.append(int(logits.argmax()))
            embeds = torch.cat([embeds, table(torch.tensor(said[-1:]))])
    return said


def rows_of(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """What the model's own embedding gives."""
    with torch.no_grad():
        rows: Tensor = model.get_input_embeddings()(torch.tensor(ids, dtype=torch.int64))
    return rows


def _gemma() -> Gemma3ForCausalLM:
    sizes = {"vocab_size": 263, "hidden_size": 54, "intermediate_size": 76, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**sizes, **heads, sliding_window=9, sliding_window_pattern=2)
    )


@pytest.fixture(scope="module")
def families(
    checkpoints: dict[str, Any],
    expert_checkpoints: dict[str, Any],
    hybrids: dict[str, Any],
    write_model: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    gemma = write_model(_gemma, tmp_path_factory.mktemp("gemma"), 5)
    return {
        "llama": checkpoints["llama-biases"],
        "gemma3": gemma,
        "moe": expert_checkpoints["moe-some-layers"],
        "granite": hybrids["granite"],
        "qwen3_5": hybrids["qwen"],
    }


@pytest.mark.parametrize("name", ["llama", "gemma3", "moe", "granite", "qwen3_5"])
def test_tokens_are_those_of_inputs_embeds(
    families: dict[str, Any], device: str, name: str
) -> None:
    """Embeddings alone, first, last and between tokens, in one chunk and in several."""
    oracle, dice = families[name], torch.Generator().manual_seed(3)
    model = oracle.model
    table = rows_of(model, range(200))
    with open_engine(oracle.path, device=device, **SIZES) as engine:
        for before, count, after in ((0, 5, 0), (3, 9, 2), (2, 40, 1), (4, 6, 0), (0, 1, 70)):
            given = torch.randn(count, table.shape[1], generator=dice) * table.std()
            ids = [int(id) for id in torch.randint(200, (before + after,), generator=dice)]
            whole = torch.cat([rows_of(model, ids[:before]), given, rows_of(model, ids[before:])])
            prompt = PromptParts(ids[:before], given, ids[before:])
            result = engine.generate(prompt, greedy(8, ignore_eos=True))
            assert list(result.token_ids) == said_by_transformers(model, whole, 8)
            assert result.prompt_token_ids == (*ids[:before], *[-1] * count, *ids[before:])
        assert_idle(engine)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with draft modules."""
    return write_random(tmp_path_factory.mktemp("modules"), "mimo")


def table_of(engine: Engine) -> Tensor:
    return engine.runtime.model.weights.embedding


def as_rows(engine: Engine, first: int, stop: int, ids: Sequence[int] = IDS) -> PromptParts:
    """The prompt of these ids, those of first .. stop - 1 as embeddings."""
    rows = table_of(engine)[torch.tensor(ids[first:stop], device=table_of(engine).device)]
    return PromptParts(ids[:first], rows, ids[stop:])


def poison_embeds(engine: Engine) -> None:
    """NaN, wherever no row is copied to."""
    with engine.runtime.on_stream():
        engine.runtime.buffers["prefill_embeds"].fill_(-1)


def test_every_cut_of_a_chunk(device: str) -> None:
    """Rows of the table are as good as their ids, wherever chunks end."""
    with open_engine(device=device, prefill_buckets=(2, 6), **SIZES) as engine:
        poison_embeds(engine)
        expected = engine.generate(IDS, greedy(6)).token_ids
        for first in range(13):
            for count in (1, 7):
                prompt = as_rows(engine, first, first + count)
                assert engine.generate(prompt, greedy(6)).token_ids == expected, (first, count)
                poison_embeds(engine)
        several = PromptParts(IDS[:2], rows := table_of(engine)[IDS[2:3]], IDS[3:5], rows, IDS[5:])
        same = [*IDS[:5], IDS[2], *IDS[5:]]
        wanted = engine.generate(same, greedy(6)).token_ids
        assert engine.generate(several, greedy(6)).token_ids == wanted


def draft_kv(engine: Engine) -> Tensor:
    """What the draft modules keep of the last prompt, in slot 0."""
    runtime = engine.runtime
    blocks = runtime.buffers["block_table"][0, : len(IDS) // 8].long()
    return runtime.caches[-1][0][:, blocks].clone()


MODES: dict[str, Speculative] = {
    "ngram": NGram(k=3),
    "eagle": MTP(k=3),
    "vanilla": MTP(k=2, style="vanilla"),
    "tree": MTP(tree=[[0], [1], [0, 0], [1, 0]]),
}


@pytest.mark.parametrize("name", MODES)
def test_drafts_change_no_token(small: Path, device: str, name: str) -> None:
    """A module reads the rows as it reads the tokens that they are of, so it drafts the same; an
    n-gram finds no embedding.
    """
    options = {"device": device, "prefill_buckets": (2, 6), "row_family": "dot"} | SIZES
    with open_engine(small, **options) as engine:
        table = table_of(engine).cpu()
        noise = torch.randn(7, table.shape[1]) * table.std()
        foreign = PromptParts(IDS[:4], noise, IDS[4:6], noise, IDS[:4])
        wanted = engine.generate(foreign, greedy(24, ignore_eos=True)).token_ids
    with open_engine(small, speculative=MODES[name], **options) as engine:
        assert engine.generate(foreign, greedy(24, ignore_eos=True)).token_ids == wanted
        plain = engine.generate(IDS, greedy(24, ignore_eos=True))
        kept = draft_kv(engine)
        for first, stop in ((0, 7), (3, 9), (5, 24), (11, 13)):
            result = engine.generate(as_rows(engine, first, stop), greedy(24, ignore_eos=True))
            assert result.token_ids == plain.token_ids
            if name != "ngram":
                assert result.acceptance == plain.acceptance
                assert torch.equal(draft_kv(engine), kept) and bool(kept.any())
        if name == "ngram":
            history = engine.runtime.buffers["token_history"]
            assert history[0, :12].tolist() == [*IDS[:11], -2 - 11]


def test_pauses_and_neighbours(device: str) -> None:
    """Requests in a pool that is too small for them, whose prompts differ in their rows alone."""
    with open_engine(device=device, **SIZES) as engine:
        rows = table_of(engine).cpu()
        prompts = [PromptParts(IDS[:3], rows[n : n + 20] * (1 + n), IDS[:2]) for n in range(4)]
        alone = [engine.generate(prompt, greedy(40, ignore_eos=True)) for prompt in prompts]
        assert len({result.token_ids for result in alone}) == 4
    with open_engine(device=device, kv_blocks=17, swap_blocks=40, **SIZES) as engine:
        made = [engine.submit(prompt, greedy(40, ignore_eos=True)) for prompt in prompts]
        run(engine)
        assert [tuple(each.token_ids) for each in made] == [each.token_ids for each in alone]
        assert engine.counters["pauses"] > 0
        assert not any(each.job.embeds for each in made)
        assert_idle(engine)


def test_equal_embeddings_share_blocks_and_others_do_not(device: str) -> None:
    with open_engine(device=device, prefix_caching=True, **SIZES) as engine:
        rows = table_of(engine).cpu()
        first, other = rows[:20].clone(), rows[:20].clone()
        other[9, 0] += 0.5
        params = greedy(4, ignore_eos=True)
        fresh = engine.generate(PromptParts(IDS, first, [1]), params)
        again = engine.generate(PromptParts(IDS, first.clone(), [1]), params)
        changed = engine.generate(PromptParts(IDS, other, [1]), params)
        assert (fresh.cached_tokens, again.cached_tokens, changed.cached_tokens) == (0, 40, 32)
        assert again.token_ids == fresh.token_ids
        # A tensor may be changed once it was submitted.
        request = engine.submit(PromptParts(IDS, first, [1]), params)
        first.zero_()
        run(engine)
        assert tuple(request.token_ids) == fresh.token_ids


def test_kept_states_are_found_by_equal_embeddings_alone(
    families: dict[str, Any], device: str
) -> None:
    """Checkpoints of recurrent layers, at the end of a prompt that others begin with."""
    options = {"device": device, "prefix_caching": True, "session_states": 4, **SIZES}
    with open_engine(families["granite"].path, **options) as engine:
        rows = torch.randn(24, table_of(engine).shape[1])
        other = rows.clone()
        other[3] *= -1
        params = greedy(4, ignore_eos=True)
        for given, cached in ((rows, False), (rows, True), (other, False)):
            result = engine.generate(PromptParts(given, IDS), params)
            assert (result.cached_tokens > 0) == cached
            fresh = engine.generate(PromptParts(given, IDS), greedy(4, ignore_eos=True))
            assert result.token_ids == fresh.token_ids


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_sessions(families: dict[str, Any], device: str, tmp_path: Path, name: str) -> None:
    """Append, rewind into rows and past them, fork, update, save: as one prompt of all of it."""
    options = {"device": device, "prefill_buckets": (8, 16), "max_seq_len": 160} | SIZES
    path = families["granite" if name == "hybrid" else "llama"].path
    params = greedy(5, ignore_eos=True)
    with open_engine(path, **options, session_states=8) as engine:
        width = table_of(engine).shape[1]
        rows = torch.randn(30, width, generator=torch.Generator().manual_seed(1))

        def check(session: Any, *parts: Any) -> None:
            expected = engine.generate(PromptParts(*parts), params)
            assert session.generate(params).token_ids == expected.token_ids

        with engine.session() as session:
            session.append(PromptParts(IDS[:9], rows[:20]))
            check(session, IDS[:9], rows[:20])
            assert session.token_ids[8:30] == (IDS[8], *[-1] * 20, session.token_ids[29])
            session.rewind(5 + 7)
            session.append(rows[20:])
            session.append(IDS[:3])
            check(session, IDS[:9], rows[:13], rows[20:], IDS[:3])
            with session.fork() as branch:
                branch.rewind(len(branch) - 15)
                branch.append([4])
                check(branch, IDS[:9], rows[:6], [4])
                path = tmp_path / "session.safetensors"
                branch.snapshot(path)
                held = branch.token_ids
            session.rewind(len(session) - 4)
            check(session, IDS[:4])
            session.update(PromptParts(IDS[:9], rows[:9]))
            check(session, IDS[:9], rows[:9])
            session.update(PromptParts(IDS[:9], rows[:4], rows[5:9]))
            assert session.cached_tokens <= 13
            check(session, IDS[:9], rows[:4], rows[5:9])
        with engine.restore_session(path) as session:
            assert session.token_ids == held
            session.append([7])
            check(session, IDS[:9], rows[:6], [4], held[-5:], [7])


def test_a_snapshot_with_embeddings_wants_an_engine_that_takes_them(
    families: dict[str, Any], device: str
) -> None:
    path = families["llama"].path
    with open_engine(path, device=device, **SIZES) as engine, engine.session() as session:
        session.append(PromptParts([1, 2], torch.ones(3, 72), [4]))
        kept = session.snapshot()
        assert kept.token_ids == (1, 2, -1, -1, -1, 4) and kept.embeds is not None
        cases = [
            (replace(kept, embeds=kept.embeds[:2]), r"torch.float32 \[2, 72\]: .* be .* \[3, 72\]"),
            (replace(kept, embeds=kept.embeds.half()), r"torch.float16 \[3, 72\]: they must be"),
            (replace(kept, embeds=kept.embeds + 1), "embeds of the session is not what was kept"),
            (replace(kept, embeds="a"), "embeds='a' must be a tensor on the CPU"),
        ]
        for wrong, message in cases:
            with pytest.raises(ValueError, match=message):
                engine.restore_session(wrong)
        with pytest.raises(ValueError, match="token id -1 is outside the vocabulary of 331"):
            engine.restore_session(replace(kept, embeds=None))
        placed = replace(kept, places=(Place(2, 3, Grid(1, 1, 3), False),))
        message = r"a grid of embeddings, Grid\(time=1, .*: this engine takes none"
        with pytest.raises(ValueError, match=message):
            engine.restore_session(replace(placed, digests=dict(_digests(placed))))
        of_adapter = replace(kept, adapter=("one", "0" * 16))
        with pytest.raises(ValueError, match="adapter 'one' is not loaded: there are none"):
            engine.restore_session(replace(of_adapter, digests=dict(_digests(of_adapter))))
    with open_engine(path, device=device, dtype="float32") as engine:
        message = r"the session has embeds of shape \[3, 72\]: the engine must be opened with"
        with pytest.raises(ValueError, match=message):
            engine.restore_session(kept)


@pytest.mark.parametrize(
    ("read", "given", "message"),
    [
        (_places_in, {"places": [[1, "2", None, False]]}, "have a wrong type"),
        (_places_in, {"places": [[1, 0, None, False]]}, "have a wrong type"),
        (_places_in, {"places": [[1, 2, None, 1]]}, "have a wrong type"),
        (_adapter_in, {"adapter": ["one"]}, r"adapter=\['one'\] .* a name and a fingerprint"),
        (_adapter_in, {"adapter": ["one", 5]}, "must be a name and a fingerprint"),
    ],
)
def test_odd_metadata_of_a_snapshot_are_refused(
    read: Callable[[object], object], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(given)


def test_log_probabilities_and_penalties_are_of_tokens(device: str) -> None:
    options = {"prompt_logprobs": True, "max_logprobs": 2, "prefill_buckets": (2, 6)}
    with open_engine(device=device, **options, **SIZES) as engine:
        params = greedy(6, prompt_logprobs=1, logprobs=1)
        plain = engine.generate(IDS, params)
        result = engine.generate(as_rows(engine, 4, 13), params)
        assert plain.prompt_logprobs is not None and result.prompt_logprobs is not None
        assert result.prompt_logprobs[4:13] == (None,) * 9
        assert result.prompt_logprobs[1:4] == plain.prompt_logprobs[1:4]
        assert result.prompt_logprobs[13:] == plain.prompt_logprobs[13:]
        assert result.logprobs == plain.logprobs
        engine.generate(as_rows(engine, 0, len(IDS)), greedy(1, repetition_penalty=1.3))
        counts = engine.runtime.buffers["counts"]
        assert int((counts[0] != 0).sum()) == 1


# What is refused.


def test_wrong_embeddings(device: str) -> None:
    with open_engine(device=device, **SIZES) as engine:
        H = table_of(engine).shape[1]
        cases: list[tuple[Any, str]] = [
            (torch.zeros(3, H + 1), rf"embeddings of shape \[3, {H + 1}\] .* takes \[n, {H}\]"),
            (torch.zeros(H), rf"embeddings of shape \[{H}\] in a prompt: the model takes"),
            (torch.zeros(3, H, dtype=torch.int32), r"\[3, .* and torch.int32 in a prompt: they"),
            (torch.zeros(1, 5, dtype=torch.int64), r"\[1, 5\] .* token ids are one list, \[n\]"),
            (torch.zeros(3, H).to_sparse(), r"embeddings of shape \[3, .* layout torch.sparse_coo"),
            (PromptParts([1], np.zeros((3, H))), rf"not ndarray of shape \[3, {H}\]"),
            (torch.zeros(3, H, device="meta"), r"embeddings of shape \[3, .* on meta have no"),
            (torch.tensor([[0.0] * H, [math.nan] * H]), r"\[2, .* row 1 is not finite in torch.fl"),
            (
                torch.full((1, H), 1e300, dtype=torch.float64),
                "row 0 is not finite in torch.float32",
            ),
            (torch.zeros(128, H), "prompt of 128 tokens leaves no room .* max_seq_len=128"),
            (torch.zeros(0, H), "the prompt is empty"),
            (PromptParts("", [], torch.zeros(0, H)), "the prompt is empty"),
            (PromptParts(), "the prompt is empty"),
            (PromptParts([1], torch.zeros(127, H)), "prompt of 128 tokens leaves no room"),
            (
                PromptParts([1], torch.zeros(5, H), [1] * 123),
                "prompt of 123 tokens after 6 in earlier parts leaves no room .*=128",
            ),
            (
                PromptParts(torch.zeros(5, H), Chat(messages=[{"role": "user", "content": "a"}])),
                "but 5 tokens stand before them: they must be the first part of `PromptParts`",
            ),
            (PromptParts(torch.zeros(1, H), [-1]), "token id -1 is outside the vocabulary"),
        ]
        for prompt, message in cases:
            with pytest.raises(ValueError, match=message):
                engine.submit(prompt)
        late = greedy(2, add_bos=True)
        with pytest.raises(ValueError, match=r"add_bos=True .* this one begins with embeddings"):
            engine.submit(PromptParts(torch.zeros(1, H), "a"), late)
        for each in engine.generate([torch.zeros(2, H), PromptParts("a", torch.ones(1, H))]):
            assert each.token_ids
        assert repr(PromptParts("a", torch.ones(1, 2))) == "PromptParts('a', tensor[1, 2])"
    with open_engine(device=device) as engine:
        message = rf"embeddings of shape \[2, {H}\] .* opened with prompt_embeds=True"
        with pytest.raises(ValueError, match=message):
            engine.submit(PromptParts([1], torch.zeros(2, H)))
        assert "prefill_embeds" not in engine.runtime.buffers.addresses()


def test_engines_that_take_none(small: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt_embeds=True, but the draft model .* other draf"):
        open_engine(small, device="cpu", speculative=DraftModel(small, k=2), **SIZES)


def test_rows_are_rounded_to_the_model_s_dtype_and_known_by_what_is_fed() -> None:
    given, spec = torch.rand(3, 4, dtype=torch.float64), EmbedsSpec(4, torch.bfloat16)
    held, rounded = (embeds_at(rows, 1, spec) for rows in (given, given.bfloat16()))
    (run,) = held.runs
    assert run.start == 1 and torch.equal(run.rows, given.bfloat16())
    ids = [7, -1, -1, -1]
    assert held.identity(ids) == rounded.identity(ids)


def test_rows_are_put_back_where_ids_have_none() -> None:
    rows = torch.arange(10.0).view(5, 2)
    held = Embeds((Run(1, rows[:2]), Run(4, rows[2:])))
    made = embeds_of([7, -1, -1, 9, -1, -1, -1, 4], held.rows())
    assert [(run.start, run.rows.tolist()) for run in made.runs] == [
        (run.start, run.rows.tolist()) for run in held.runs
    ]
    with pytest.raises(ValueError, match="5 embeddings for 1 positions without a token"):
        embeds_of([-1], rows)
