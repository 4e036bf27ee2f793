"""Moshi: text and codes are those of transformers' own `generate`, frame for frame, with a silent
user; with one who speaks, those of a plain loop over transformers' layers.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.moshi_models import (
    CODES,
    HIDDEN,
    TEXT,
    Codes,
    beginning,
    frames_by_hand,
    frames_of,
    sound_of,
    write_moshi,
)
from engines.small_engine import assert_idle, open_engine, run
from extent import LONG, extent
from graphengine import CodeSampling, Feed, Request, SamplingParams
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.inner.weights import InnerWeights
from graphengine.requests.frames import StreamedCodes

FRAMES = extent(8, 30)
SIZES: dict[str, Any] = {"dtype": "float32", "prompt_embeds": True, "max_seq_len": 96}
MODELS: dict[str, dict[str, Any]] = {
    "two codes": {"books": 2, "depth": {"num_key_value_heads": 1}},
    "eight": {"books": 8, "backbone": {"num_hidden_layers": 3}},
    # More than a block of the inner decoder's cache.
    "eighteen": {"books": 18, "depth": {"num_hidden_layers": 1}},
}
pytestmark = pytest.mark.filterwarnings("ignore:Passing `generation_config`")


class Moshi(NamedTuple):
    path: Path
    model: Any

    @property
    def books(self) -> int:
        found: int = self.model.num_codebooks
        return found

    @property
    def blank(self) -> Codes:
        return np.arange(3, 3 + self.books)

    def sound(self, count: int, seed: int = 0) -> Codes:
        """Random frames of sound, of the user."""
        return np.random.default_rng(seed).integers(0, CODES, (count, self.books))

    def prompt(self, count: int) -> Codes:
        """Random frames of sound after the beginning, [count, 1 + 2 * K], not delayed."""
        dice = np.random.default_rng(count)
        text = dice.integers(0, TEXT, (count, 1))
        return np.concatenate([text, self.sound(count, 1), self.sound(count, 2)], axis=1)


def new(path: Path, books: int, **options: Any) -> Moshi:
    return Moshi(path, write_moshi(path, books, **options))


@pytest.fixture(scope="module", params=MODELS)
def moshi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Moshi:
    return new(tmp_path_factory.mktemp("moshi"), **MODELS[request.param])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Moshi:
    return new(tmp_path_factory.mktemp("three"), 3)


def asked(moshi: Moshi, frames: int = FRAMES, **options: Any) -> SamplingParams:
    greedy = {"temperature": 0.0, "feed": Feed(moshi.blank)} | options
    return SamplingParams(max_tokens=frames, **greedy)


def after(engine: Any, moshi: Moshi, prompt: Codes, params: SamplingParams) -> Any:
    """The prompt as the engine takes it, and the options that go on with its late codes."""
    books = moshi.books
    fed = engine.delay_frames(np.concatenate([beginning(books), prompt]))
    late, feed = fed[-1], params.feed
    assert feed is not None
    theirs = Feed(feed.pad, feed.rows, before=late[1 + books :])
    return engine.embed_frames(fed[:-1]), replace(
        params, forced_codes=late[None, : 1 + books], feed=theirs
    )


def test_frames_are_those_of_transformers(moshi: Moshi, device: str) -> None:
    """The beginning alone, and prompts of different lengths after it, together and in chunks."""
    frames = FRAMES if moshi.books < 5 else extent(4, 20)
    prompts = [moshi.prompt(count) for count in (0, 1, 17)]
    wanted = [frames_of(moshi.model, prompt, moshi.blank, frames) for prompt in prompts]
    assert len(np.unique(np.concatenate(wanted), axis=0)) > frames
    both = {"buckets": (1, 3)}, {"prefill_buckets": (8,), "lookahead": 1}
    for options in both if LONG else both[moshi.books > 5 :]:
        with open_engine(moshi.path, device=device, **SIZES | options) as engine:
            calls = [after(engine, moshi, each, asked(moshi, frames)) for each in prompts]
            results = engine.generate(*map(list, zip(*calls, strict=True)))
            for result, expected in zip(results, wanted, strict=True):
                assert np.array_equal(result.codes, expected)
                assert list(result.token_ids) == expected[:, 0].tolist()
                assert result.finish_reason == "length"
            # Without given codes, the late ones of the first frame are those of the beginning.
            alone = engine.generate(engine.embed_frames(beginning(moshi.books)), asked(moshi))
            assert np.array_equal(alone.codes[:frames], wanted[0][: len(alone.codes)])
            assert_idle(engine)


def test_sound_is_that_of_transformers(three: Moshi, device: str) -> None:
    """All frames, and any two in a row, from which the codes of one frame of sound come."""
    with open_engine(three.path, device=device, **SIZES) as engine:
        for prompt in (three.prompt(0), three.prompt(4)):
            wanted = sound_of(three.model, prompt, three.blank, FRAMES)
            given = after(engine, three, prompt, asked(three))
            frames = engine.generate(*given).codes
            said = wanted[len(wanted) - FRAMES + 1 :]
            assert np.array_equal(engine.undelay_frames(frames), said)
            for index in range(FRAMES - 1):
                one = engine.undelay_frames(frames[index : index + 2])
                assert np.array_equal(one, said[index : index + 1])
            assert engine.undelay_frames(frames[:1]).shape == (0, 3)
            # The late codes of the first frame are those of the prompt's last one.
            late = prompt[-1:, 2:4] if len(prompt) else np.full((1, 2), CODES)
            assert np.array_equal(frames[:1, 2:], late)


def test_each_run_has_its_own_weights(three: Moshi, device: str) -> None:
    """Log-probabilities of given codes are those of transformers' depth decoder, for each code."""
    books, model = three.books, three.model
    given_codes = np.random.default_rng(7).integers(0, CODES, (4, 1 + books))
    params = asked(three, 4, forced_codes=given_codes, logprobs=0)
    with open_engine(three.path, device=device, **SIZES) as engine:
        prompt = engine.embed_frames(np.repeat(beginning(books), 3, axis=0))
        found = engine.generate(prompt, params)
        weights = engine.core.runtime.model.weights.inner_weights
        assert isinstance(weights, InnerWeights)
        qkv = [weights.layers_of(run)[1].attention.linears()[0].weight for run in range(books)]
        assert all(not torch.equal(qkv[0], other) for other in qkv[1:])
    with torch.no_grad():
        base, said = prompt.cpu(), torch.tensor(given_codes)
        heard = np.concatenate([three.blank[:1], np.full(books - 1, CODES)])
        rows = []
        for frame in range(4):
            hidden = model.decoder.model(inputs_embeds=base[None]).last_hidden_state[:, -1:]
            text = model.decoder.lm_head(hidden)[0, 0].log_softmax(0)[said[frame, 0]]
            codes = model.depth_decoder(
                input_ids=said[frame : frame + 1, :-1],
                last_hidden_state=hidden.expand(1, books, -1),
                attention_mask=torch.ones(1, books).long(),
            ).logits[0]
            of_codes = codes.log_softmax(1).gather(1, said[frame, 1:, None])[:, 0]
            rows.append(torch.cat([text[None], of_codes]))
            embedded = model.decoder.model.embed_tokens(said[frame, 0])
            for place, code in enumerate([*said[frame, 1:].tolist(), *heard.tolist()]):
                embedded = embedded + model.embed_tokens[place].weight[code]
            base, heard = torch.cat([base, embedded[None]]), three.blank
    assert found.codes_logprobs is not None
    assert np.array_equal(found.codes, given_codes)
    wanted = torch.stack(rows).numpy()
    assert np.abs(found.codes_logprobs - wanted).max() < 1e-4
    assert len(np.unique(np.round(wanted, 3))) > 12


def heard_in(request: Request, said: Codes, blank: Codes, before: Codes) -> Codes:
    """What the user says with each frame, as it is fed, where silence is between given frames."""
    frames = len(request.token_ids)
    sound = np.tile(blank, (frames, 1))
    for frame, row in zip(request.fed_frames, said, strict=True):
        if frame < frames:
            sound[frame] = row
    late = np.concatenate([before[None], sound])[:frames]
    return np.concatenate([sound[:, :1], late[:, 1:]], axis=1)


def by_hand(three: Moshi, request: Request, said: Codes) -> Codes:
    """The frames of a request that follows the beginning, by the plain loop."""
    none = np.full(three.books, CODES)
    heard = heard_in(request, said, three.blank, none)
    frames = len(request.token_ids)
    return frames_by_hand(
        three.model, beginning(three.books), heard, frames, first=none[1:].tolist()
    )


def test_the_loop_by_hand_is_that_of_transformers(three: Moshi) -> None:
    silent = np.concatenate([[[3, CODES, CODES]], np.tile(three.blank, (FRAMES - 1, 1))])
    found = frames_by_hand(three.model, beginning(3), silent, FRAMES, first=[CODES] * 2)
    assert np.array_equal(found, frames_of(three.model, three.prompt(0), three.blank, FRAMES))


@pytest.mark.parametrize(("lookahead", "steps"), [(0, 1), (1, 1), (1, 3)])
def test_a_user_who_speaks_is_heard(three: Moshi, device: str, lookahead: int, steps: int) -> None:
    """In time at first, then late, then after a silence; codes that are late follow their frame."""
    said, options = three.sound(9, seed=5), {"lookahead": lookahead, "steps_per_launch": steps}
    with open_engine(three.path, device=device, **SIZES | options) as engine:
        params = asked(three, 16, feed=Feed(three.blank, said[:2]))
        request = engine.submit(engine.embed_frames(beginning(3)), params)
        fed, turns = 2, [1, 7, 8, 12]
        while not request.finished:
            if turns and len(request.token_ids) >= turns[0]:
                engine.feed(request, torch.tensor(said[fed : fed + 2]))
                fed, turns = min(9, fed + 2), turns[1:]
            engine.step()
        assert_idle(engine)
        said = said[:fed]
        assert engine.counters["feed/late"] > 0 and len(request.fed_frames) == fed
        wanted = by_hand(three, request, said)
        assert np.array_equal(request.result().codes, wanted)
        silent = frames_of(three.model, three.prompt(0), three.blank, 16)
        assert not np.array_equal(wanted, silent)


@pytest.mark.parametrize("seed", range(extent(1, 30)))
def test_any_timing_gives_the_frames_of_what_was_heard(
    three: Moshi, device: str, seed: int
) -> None:
    dice = random.Random(seed)
    options = {
        "lookahead": dice.randrange(3), "steps_per_launch": dice.choice((1, 2, 5)),
        "max_batch": 2, "kv_blocks": 8, "swap_blocks": 16,
    }  # fmt: skip
    running: list[tuple[Request, list[Codes]]] = []
    with open_engine(three.path, device=device, **SIZES | options) as engine:
        start = engine.embed_frames(beginning(3))
        for turn in range(extent(30, 50)):
            if len(running) < 3 and turn % 6 == 0:
                first = three.sound(dice.randrange(4), seed=turn)
                params = asked(three, dice.randrange(2, 30), feed=Feed(three.blank, first))
                running.append((engine.submit(start, params), [first]))
            for request, given_rows in running:
                if not request.finished and dice.random() < 0.3:
                    given_rows.append(three.sound(dice.choice((1, 1, 2, 18)), seed=100 + turn))
                    engine.feed(request, given_rows[-1])
            engine.step()
        run(engine)
        assert_idle(engine)
    for request, given_rows in running:
        wanted = by_hand(three, request, np.concatenate(given_rows))
        assert np.array_equal(request.result().codes, wanted)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=12))
def test_late_codes_follow_whatever_was_heard(turns: list[tuple[int, int]]) -> None:
    """Rows are given and frames launched in any order; each frame is read once it is launched."""
    pad, before = np.array([[90, 91, 92]], np.int32), np.array([[80, 81, 82]], np.int32)
    rows = StreamedCodes(pad, pad[:0], before)
    heard: list[Any] = []
    sound: list[Any] = []
    count = 0
    for launched, given_rows in turns:
        new_rows = np.arange(3 * given_rows, dtype=np.int32).reshape(-1, 3) + 3 * count
        count += given_rows
        first = rows.add(new_rows)
        if given_rows:
            sound += [pad[0]] * (first - len(sound))
            sound += list(new_rows)
        stop = rows.launched + launched
        ready = min(rows.ready, stop)
        at_once = rows.between(rows.launched, ready) if ready > rows.launched else []
        heard += [*at_once, *[pad[0]] * (launched - len(at_once))]
        rows.loaded, rows.launched = max(rows.loaded, ready), stop
    sound += [pad[0]] * (len(heard) - len(sound))
    late = [before[0], *sound]
    wanted = [[sound[i][0], *late[i][1:]] for i in range(len(heard))]
    assert np.array_equal(np.array(heard), np.array(wanted))


def test_requests_pause_and_draw_by_their_seeds(three: Moshi, device: str) -> None:
    """The same frames alone and together, in a pool that is too small for all."""
    params = [
        asked(three, 18, temperature=0.9, top_k=20, codes=CodeSampling(temperature=0.7), seed=seed)
        for seed in (1, 2)
    ]
    pool = {"kv_blocks": 4, "swap_blocks": 8, "max_seq_len": 24}
    with open_engine(three.path, device=device, **SIZES | pool) as engine:
        start = engine.embed_frames(beginning(3))
        results = engine.generate([start] * 2, params)
        assert engine.counters["pauses"] >= 1
        for result, each in zip(results, params, strict=True):
            assert np.array_equal(result.codes, engine.generate(start, each).codes)
        assert not np.array_equal(results[0].codes, results[1].codes)


def test_options_of_tokens_are_for_the_text(three: Moshi, device: str) -> None:
    plain = frames_of(three.model, three.prompt(0), three.blank, FRAMES)
    with open_engine(three.path, device=device, **SIZES) as engine:
        start = engine.embed_frames(beginning(3))
        stop = int(plain[3, 0])
        stopped = engine.generate(start, asked(three, stop_token_ids=[stop]))
        first = plain[:, 0].tolist().index(stop)
        assert np.array_equal(stopped.codes, plain[: first + 1]) and stopped.stop_reason == stop
        few = engine.generate(start, asked(three, allowed_token_ids=[4, 5])).codes
        assert set(few[:, 0]) <= {4, 5} and len(set(few[:, 1])) > 2
        with pytest.raises(ValueError, match=rf"token id {TEXT} is not in|{TEXT}"):
            engine.submit(start, asked(three, allowed_token_ids=[TEXT]))


def test_updated_weights_are_those_of_both_decoders(
    three: Moshi, device: str, tmp_path: Path
) -> None:
    other = new(tmp_path, 3, seed=9)
    with open_engine(three.path, device=device, **SIZES) as engine:
        start = engine.embed_frames(beginning(3))
        before = engine.generate(start, asked(three)).codes
        engine.update_weights(tmp_path)
        updated = engine.generate(engine.embed_frames(beginning(3)), asked(three)).codes
    for found, each in ((before, three), (updated, other)):
        assert np.array_equal(found, frames_of(each.model, each.prompt(0), each.blank, FRAMES))


def test_calls_that_are_refused(three: Moshi) -> None:
    with open_engine(three.path, device="cpu", **SIZES) as engine:
        start, blank = engine.embed_frames(beginning(3)), three.blank
        for params, message in (
            (SamplingParams(), r"this model hears 3 codes beside each frame, and needs at least"),
            (asked(three, feed=Feed(blank[:2])), r"pad of shape \[1, 2\]: the model takes codes, "),
            (asked(three, feed=Feed(torch.zeros(3))), r"codes, \[n, 3\], not torch.float32"),
            (asked(three, feed=Feed(blank + 27)), r"code 30 in row 0: a codebook has 30"),
            (asked(three, feed=Feed(blank, -three.sound(2) - 1)), r"rows of shape \[2, 3\] has c"),
            (asked(three, feed=Feed(blank, before=blank + 27)), r"before of shape \[1, 3\] has co"),
            (asked(three, forced_codes=[[TEXT + 1, 0, 0, 0]]), r"forced_codes\[0\]\[0\]=54"),
            (asked(three, forced_codes=[[0, 0, 0]]), "a frame of this model has 4 codes"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit(start, params)
        with pytest.raises(ValueError, match="token 0 of the prompt is 5: each position of this"):
            engine.submit([5, 6], asked(three))
        request = engine.submit(start, asked(three, 2))
        with pytest.raises(ValueError, match=r"the model takes codes, \[n, 3\], not torch.float"):
            engine.feed(request, torch.zeros(1, 3))
        run(engine)
        with pytest.raises(ValueError, match="stream into the frames of this model: it has no ses"):
            engine.session()
        for call, codes, message in (
            (engine.embed_frames, [[0] * 5], r"must be integers \[frames, 4 or 7\]"),
            (engine.embed_frames, [[TEXT + 1] + [0] * 6], r"codes\[0\]\[0\] is 54: a codebook has"),
            (engine.embed_frames, [[0] * 6 + [30]], r"codes\[0\]\[6\] is 30: a codebook has 30"),
            (engine.delay_frames, [[0] * 6], r"must be integers \[frames, 4 or 7\]"),
            (engine.undelay_frames, [[0] * 7], r"must be integers \[frames, 4\]"),
            (engine.undelay_frames, torch.zeros(1, 4).bfloat16(), r"torch.bfloat16 must be integ"),
            (engine.embed_frames, torch.zeros(1, 4).int().to_sparse(), "codes must be dense, with"),
            (engine.embed_frames, [[1], [1, 2]], r"codes=\[\[1\], \[1, 2\]\] must be integers"),
        ):
            with pytest.raises(ValueError, match=message):
                call(codes)
        assert engine.delay_frames([[1, 2, 3, 4]]).tolist() == [[1, 2, 29, 29], [-1, -1, 3, 4]]
        assert engine.embed_frames([[1, 2, 3, 4]]).shape == (1, HIDDEN)


def test_the_budget_has_rings_of_codes(three: Moshi) -> None:
    """Sixteen rows of three codes and the pad for each slot, and where they end."""
    with open_engine(three.path, device="cpu", **SIZES, max_batch=3) as engine:
        lines = {line.name: line.bytes for line in engine.memory.budget.lines}
        assert lines["codes that stream in"] == 3 * (17 * 3 * 4 + 4)
        assert "embeddings of frames" not in lines


def test_feeds_of_codes_are_checked() -> None:
    pad = np.arange(3)
    for rows, options, message in (
        (torch.zeros(2, 3), {}, "rows of torch.float32 and a pad of torch.int64 must both be"),
        (None, {"before": pad[:2]}, r"before of shape \[1, 2\] and torch.int64 is for a pad of as"),
        (None, {"before": torch.zeros(3)}, "before of shape .* is for a pad of as many codes"),
        (None, {"before": np.zeros((2, 3), int)}, r"before of shape \[2, 3\] must be one row"),
        (np.zeros((2, 3), bool), {}, "torch.bool must be of floating point"),
        (np.array([["a"] * 3]), {}, r"feed: rows must be numbers, not array\(.* of <U1"),
        (None, {"before": np.array([None] * 3)}, "feed: before must be numbers, not array"),
        (torch.zeros(2, 3, device="meta"), {}, "feed: rows must be dense, with values"),
    ):
        with pytest.raises(ValueError, match=message):
            Feed(pad, rows, **options)
    feed = Feed(pad, np.ones((2, 3), np.uint8), before=pad)
    assert feed == Feed(torch.arange(3), torch.ones(2, 3).int(), before=pad)
    assert feed != Feed(pad, np.ones((2, 3), np.uint8)) and feed != Feed(pad, before=pad)
    pad[0] = 9
    assert feed.pad[0, 0] == 0
    assert repr(feed) == "Feed(pad=tensor[3], rows=tensor[2, 3])"


def _config(three: Moshi) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((three.path / "config.json").read_text())
    return found


def test_keys_are_read(three: Moshi) -> None:
    config = read_model_config(_config(three))
    inner = config.inner
    assert inner is not None and inner.fed and inner.fed_books == 3
    assert inner.codebooks == (TEXT + 1, *[CODES + 1] * 3)
    assert (config.vocab_size, inner.head_rows, inner.codes) == (TEXT, TEXT, CODES)
    assert (inner.end_token, inner.runs, inner.steps, len(inner.layers)) == (-1, 3, 4, 2)
    assert inner.norm_eps == 1e-4 and config.norm_eps == 1e-5
    assert unknown_keys(_config(three)) == []
    strange = _config(three)
    strange["depth_decoder_config"]["window"] = 3
    assert unknown_keys(strange) == ["depth_decoder_config.window"]
    # The codec's size is that of codebooks where none is told.
    untold = {**_config(three), "audio_vocab_size": None}
    untold["depth_decoder_config"]["audio_vocab_size"] = None
    assert read_model_config(untold).inner.codes == 32


@pytest.mark.parametrize(
    ("changes", "of_depth", "message"),
    [
        ({"num_codebooks": 1}, {}, r"num_codebooks=1: must be an integer in \[2, 126\]"),
        ({"ffn_dim": 141}, {}, "ffn_dim=141: supported: an even number"),
        ({"vocab_size": 32_767}, {}, "vocab_size=32767: supported: 1 to 32766 codes"),
        ({"audio_vocab_size": 2**15}, {}, "audio_vocab_size=32768: supported: 1 to 32766"),
        ({"sliding_window": 100}, {}, "sliding_window=100: supported: null"),
        ({"hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
        ({}, {"num_codebooks": 5}, "depth_decoder_config.num_codebooks=5: supported: 3, the back"),
        ({}, {"audio_vocab_size": 5}, "depth_decoder_config.audio_vocab_size=5: supported: 29"),
        ({}, {"vocab_size": 5}, "depth_decoder_config.vocab_size=5: supported: 53"),
        ({}, {"input_size": 5}, "depth_decoder_config.input_size=5: supported: 48"),
        ({}, {"sliding_window": 2}, "depth_decoder_config.sliding_window=2: supported: num_codeb"),
        ({}, {"rope_scaling": {"factor": 2}}, "depth_decoder_config.rope_parameters=.*no RoPE"),
        ({}, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_configs_that_are_refused(
    three: Moshi, changes: dict[str, Any], of_depth: dict[str, Any], message: str
) -> None:
    config = _config(three) | changes
    config["depth_decoder_config"] |= of_depth
    with pytest.raises(ValueError, match=message):
        read_model_config(config)


def test_the_published_shape() -> None:
    """All defaults are those of the published models, of 7.7 billion parameters."""
    config = {"architectures": ["MoshiForConditionalGeneration"]}
    model = read_model_config(config)
    inner = model.inner
    assert (model.num_layers, model.hidden_size, model.max_positions) == (32, 4096, 3000)
    assert (inner.steps, inner.hidden_size, len(inner.layers), inner.codes) == (9, 1024, 6, 2048)
    weights = model.allocate(device="meta", dtype=torch.bfloat16)
    assert weights.parameters // 10**6 == 7687
    assert isinstance(weights.inner_weights, InnerWeights)
    # Each run reads its own weights once, and no embedding.
    books = sum(
        table.nbytes
        for name, table in weights.inner_weights.stored().items()
        if "embed" in name
        for table in [table.tensor]
    )
    whole = sum(tensor.nbytes for tensor in weights.inner_weights.tensors())
    ones, norms = 2 * 1024, 2 * 1024 * 2 * 6
    read = weights.inner_weights.step_nbytes
    assert read == whole - books - ones + 7 * norms
