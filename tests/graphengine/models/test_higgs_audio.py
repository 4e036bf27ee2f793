"""Higgs Audio v2: frames are those of transformers' `generate`, code for code, delays and the end
included; sound without delays is what transformers' processor gives its codec.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import HiggsAudioV2Processor
from transformers.models.higgs_audio_v2.generation_higgs_audio_v2 import (
    HiggsAudioV2DelayPatternLogitsProcessor,
)

from checkpoints.higgs_models import BEGIN, DELAY, SOUND, frames_of, write_higgs
from engines.frames import assert_frames_paused, of_place
from engines.small_engine import assert_idle, greedy, open_engine, run
from extent import extent
from graphengine import CodeSampling, Engine, PromptParts, SamplingParams
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_reference
from graphengine.models import decoder
from graphengine.models.blocks.norms import lane_kinds
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.inner.parallel_heads import ParallelHeads
from graphengine.program import heads_step
from graphengine.program.frame_step import CODE_STRIDE

FRAMES = extent(12, 40)
SIZES: dict[str, Any] = {"dtype": "float32", "prompt_embeds": True, "max_seq_len": 192}
Codes = NDArray[np.integer[Any]]
MODELS: dict[str, dict[str, Any]] = {
    "one code": {"codebooks": 1, "codes": 29},
    "two": {"codebooks": 2, "codes": 70, "hidden_size": 60, "head_dim": 20},
    "five": {"codebooks": 5},
    "nine, with biases": {
        "codebooks": 9,
        "codes": 41,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}


class Higgs(NamedTuple):
    path: Path
    model: Any

    def says(self, ids: list[int], frames: int = FRAMES, sound: Any = None) -> Codes:
        """Greedy frames of transformers after this prompt."""
        return frames_of(self.model, ids, frames, sound).numpy()


def written(name: str, folder: Path, **options: Any) -> Higgs:
    return Higgs(folder, write_higgs(folder, **MODELS[name] | options))


@pytest.fixture(scope="module", params=MODELS)
def higgs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Higgs:
    return written(request.param, tmp_path_factory.mktemp("higgs"))


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Higgs:
    return written("five", tmp_path_factory.mktemp("five"))


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Higgs:
    """It draws its first end code a few frames after the delay at the beginning."""
    return written("five", tmp_path_factory.mktemp("ending"), ends=True, seed=1)


def text(length: int, seed: int = 0) -> list[int]:
    """Ids of a text that asks for sound."""
    draw = torch.Generator().manual_seed(100 * seed + length)
    return [*torch.randint(280, (length - 1,), generator=draw).tolist(), BEGIN]


def codes_of(engine: Engine, *prompts: Any, frames: int = FRAMES) -> list[Codes]:
    """Greedy frames of these prompts as a batch."""
    results = engine.generate(list(prompts), greedy(frames))
    run(engine)
    assert_idle(engine)
    found = [result.codes for result in results]
    assert all(codes is not None and codes.dtype == np.int32 for codes in found)
    return [codes for codes in found if codes is not None]


def test_frames_are_those_of_transformers(higgs: Higgs, device: str) -> None:
    """Prompts of different lengths together, alone and whole, and in chunks."""
    prompts = [text(length) for length in (10, 16, 70)]
    wanted = [higgs.says(prompt) for prompt in prompts]
    assert len(np.unique(np.concatenate(wanted), axis=0)) > FRAMES
    for chunks in ((32, 96), (8,)):
        options = SIZES | {"prefill_buckets": chunks, "buckets": (1, 3)}
        with open_engine(higgs.path, device=device, **options) as engine:
            for found, expected in zip(codes_of(engine, *prompts), wanted, strict=True):
                assert np.array_equal(found, expected)
            assert np.array_equal(codes_of(engine, prompts[1])[0], wanted[1])


@pytest.mark.parametrize("steps", [1, 3])
def test_launches_of_several_steps_have_the_same_frames(
    five: Higgs, ending: Higgs, device: str, steps: int
) -> None:
    options = SIZES | {"steps_per_launch": steps, "lookahead": 1}
    for higgs in (five, ending):
        prompts = [text(length) for length in (11, 7)]
        with open_engine(higgs.path, device=device, **options) as engine:
            for prompt, found in zip(prompts, codes_of(engine, *prompts), strict=True):
                assert np.array_equal(found, higgs.says(prompt))


def test_sound_in_prompts(higgs: Higgs, device: str) -> None:
    """Where transformers' processor puts it, before text and at the beginning of the reply."""
    heads = read_model_config(_config(higgs)).inner
    assert isinstance(heads, ParallelHeads)
    places = heads.steps
    sound = np.random.default_rng(3).integers(heads.begin_code, size=(6, places))
    said = delayed_by_processor(sound, heads)
    head, tail = text(8), [5, 9, *text(12, seed=1)]
    ids = [*head, *[SOUND] * (len(said) - places + 1), *[DELAY] * (places - 1), *tail]
    wanted = higgs.says(ids, sound=said)
    assert not np.array_equal(wanted, higgs.says([*head, *tail]))
    first, rest = wanted[:2], FRAMES - 2
    going_on = higgs.says([*ids, SOUND, SOUND], rest, sound=np.concatenate([said, first]))
    # With a begin id among its last K ids, transformers goes on with the delay that has begun.
    assert np.array_equal(going_on, wanted[2:]) == (places > 2)
    for options in ({}, {"prefill_buckets": (8,)}, {"prefix_caching": True}):
        with open_engine(higgs.path, device=device, **SIZES | options) as engine:
            delayed = engine.delay_frames(sound)
            assert np.array_equal(delayed, said) and delayed.dtype == np.int32
            prompt = PromptParts(head, engine.embed_frames(delayed), tail)
            # The second one finds the prefix of the first where prefixes are kept.
            for _ in range(2):
                assert np.array_equal(codes_of(engine, prompt)[0], wanted), options
            longer = PromptParts(*prompt.parts, engine.embed_frames(first))
            assert np.array_equal(codes_of(engine, longer, frames=rest)[0], going_on)


def delayed_by_processor(sound: Codes, heads: ParallelHeads) -> Codes:
    """The frames that transformers' processor makes of sound [n, K]."""
    codes = np.pad(sound, ((1, 1), (0, 0)))
    codes[0], codes[-1] = heads.begin_code, heads.end_code
    processor = SimpleNamespace(
        audio_stream_bos_id=heads.begin_code, audio_stream_eos_id=heads.end_code
    )
    found = HiggsAudioV2Processor.build_delay_pattern(processor, torch.from_numpy(codes.T[None]))
    frames: Codes = found[0].T.numpy()
    return frames


def test_a_prompt_without_a_begin_id(five: Higgs, device: str) -> None:
    """As in transformers, one frame of begin codes, and no delays."""
    prompt = text(11)[:-1]
    wanted = five.says(prompt)
    assert (wanted[0] == 35).all() and (wanted[1] != 35).all()
    with open_engine(five.path, device=device, **SIZES) as engine:
        assert np.array_equal(codes_of(engine, prompt)[0], wanted)


def test_a_prompt_that_is_shorter_than_a_frame(five: Higgs, device: str) -> None:
    """Its delays begin like those of longer prompts; transformers miscounts there."""
    with open_engine(five.path, device=device, **SIZES) as engine:
        codes = codes_of(engine, [BEGIN])[0]
    for step, frame in enumerate(codes[:5]):
        assert ((frame == 35) == (np.arange(5) >= step)).all()


def of_processor(codes: Codes) -> Codes:
    """[n, K]: what transformers' processor gives its codec of these frames."""
    given = []

    def decode(found: torch.Tensor) -> Any:
        given.append(found[0].T.numpy())
        return SimpleNamespace(audio_values=torch.zeros(1))

    processor = SimpleNamespace(
        audio_stream_bos_id=35,
        audio_stream_eos_id=36,
        audio_tokenizer=SimpleNamespace(decode=decode),
        revert_delay_pattern=lambda ids: HiggsAudioV2Processor.revert_delay_pattern(None, ids),
    )
    HiggsAudioV2Processor.batch_decode(processor, torch.from_numpy(codes[None]))
    sound: Codes = given[0]
    return sound


def test_frames_end_as_in_transformers(ending: Higgs, device: str) -> None:
    """Each code ends one step after the one before; a frame of end codes alone is the last."""
    prompts = [text(length) for length in (11, 16, 23)]
    wanted = [ending.says(prompt, 60) for prompt in prompts]
    assert all(8 < len(codes) < 60 and (codes[-1] == 36).all() for codes in wanted)
    assert len({len(codes) for codes in wanted}) > 1
    with open_engine(ending.path, device=device, **SIZES) as engine:
        for found, expected in zip(engine.generate(prompts, greedy(60)), wanted, strict=True):
            assert np.array_equal(found.codes, expected)
            assert found.finish_reason == "stop" and found.stop_reason is None
            sound = engine.undelay_frames(expected)
            assert np.array_equal(sound, of_processor(expected)) and sound.dtype == np.int32
            # As they come, K frames in a row give one frame of sound.
            last = len(sound) + 1
            pairs = [engine.undelay_frames(expected[at : at + 5]) for at in range(1, last)]
            assert np.array_equal(np.concatenate(pairs), sound)
        endless = engine.generate(prompts[0], greedy(40, ignore_eos=True))
        assert endless.finish_reason == "length" and len(endless.codes) == 40
        assert np.array_equal(endless.codes[: len(wanted[0])], wanted[0])
        assert (endless.codes[len(wanted[0]) :] == 36).all()
        # The next one in the slot begins afresh.
        assert np.array_equal(codes_of(engine, prompts[1], frames=60)[0], wanted[1])


def test_sound_of_delayed_frames_comes_back(five: Higgs) -> None:
    sound = np.random.default_rng(1).integers(35, size=(9, 5))
    with open_engine(five.path, device="cpu", **SIZES) as engine:
        assert np.array_equal(engine.undelay_frames(engine.delay_frames(sound)), sound)
        assert engine.undelay_frames(sound[:4]).shape == (0, 5)
        with pytest.raises(ValueError, match=r"codes\[0\]\[1\] is 37: a codebook has 37 codes"):
            engine.undelay_frames([[1, 37, 2, 3, 4]])
    with open_engine(device="cpu") as engine:
        for call in (engine.delay_frames, engine.undelay_frames):
            with pytest.raises(ValueError, match="_frames is for models whose steps emit frames"):
                call([[1]])


def test_requests_pause_in_the_middle_of_their_frames(ending: Higgs, device: str) -> None:
    """Also while their codes end."""
    prompts = [text(length) for length in (40, 30, 20)]
    wanted = [ending.says(prompt, 30) for prompt in prompts]
    assert_frames_paused(ending.path, prompts, wanted, 30, spare=2, device=device, **SIZES)


def test_events_have_the_codes_of_their_frames(five: Higgs, device: str) -> None:
    """A request that is cancelled stops within a frame."""
    prompt = text(11)
    wanted = [tuple(frame) for frame in five.says(prompt).tolist()]
    with open_engine(five.path, device=device, **SIZES) as engine:
        request = engine.submit(prompt, greedy(FRAMES))
        events = run(engine)
        assert [event.codes for event in events if event.token_ids] == wanted
        assert request.token_ids == [frame[0] for frame in wanted]
        cancelled = engine.submit(prompt, greedy(FRAMES))
        while len(cancelled.token_ids) < 3:
            engine.step()
        cancelled.cancel()
        said = len(cancelled.token_ids)
        run(engine)
        result = cancelled.result()
        assert result.finish_reason == "cancelled" and len(result.codes) == said
        assert [tuple(frame) for frame in result.codes.tolist()] == wanted[:said]


def logits_of(model: Any, prompt: list[int], codes: Codes) -> torch.Tensor:
    """[frames, K, V]: transformers' logits of each code of these frames after the prompt."""
    ids = torch.tensor([[*prompt, *[SOUND] * (len(codes) - 1)]])
    said = torch.from_numpy(codes[:-1]).long()[None]
    with torch.no_grad():
        found = model(input_ids=ids, audio_input_ids=said).logits[0, len(prompt) - 1 :]
    logits: torch.Tensor = found.unflatten(1, (codes.shape[1], -1))
    return logits


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 0.9, "top_k": 6, "top_p": 0.7, "min_p": 0.02, "top_n_sigma": 1.5},
    "each code": {
        "temperature": 1.1,
        "top_k": 3,
        "codes": CodeSampling(
            temperature=(0.5, 0.0, 2.0, 1.0), top_k=(-1, 2, 5, 0), top_p=(1.0, 1.0, 1.0, 0.6)
        ),
    },
}


def delayed_by_transformers(prompt: list[int], logits: torch.Tensor, codes: Codes) -> torch.Tensor:
    """These logits [frames, K, V] of frames as transformers' processor leaves them."""
    places, size = logits.shape[1:]
    processor = HiggsAudioV2DelayPatternLogitsProcessor(
        delay_pattern=[place + 1 for place in range(places)],
        audio_bos_token_id=BEGIN,
        audio_eos_token_id=DELAY,
        audio_stream_bos_id=size - 2,
        audio_stream_eos_id=size - 1,
        num_codebooks=places,
        codebook_size=size,
    )
    ids, found = list(prompt), []
    for of_frame, frame in zip(logits, codes, strict=True):
        found.append(processor(torch.tensor([ids]), of_frame.reshape(1, -1)))
        ids.append(DELAY if DELAY in ids or (frame == size - 1).any() else SOUND)
    return torch.stack(found)


@pytest.mark.parametrize("name", OPTIONS)
def test_codes_are_drawn_as_the_sampler_says(five: Higgs, device: str, name: str) -> None:
    """Code k of the frame at position p has the noise of position p + k * CODE_STRIDE."""
    prompt, options = text(11), OPTIONS[name]
    seen, ended = set(), 0
    with open_engine(five.path, device=device, **SIZES) as engine:
        for seed in range(3):
            params = SamplingParams(max_tokens=12, seed=seed, ignore_eos=True, **options)
            codes = engine.generate(prompt, params).codes
            logits = logits_of(five.model, prompt, codes)
            logits = delayed_by_transformers(prompt, logits, codes)
            for (step, place), code in np.ndenumerate(codes):
                sampling = SamplingTensors.neutral(1)
                for option, value in {**of_place(options, place), "seed": seed}.items():
                    getattr(sampling, option).fill_(value)
                if logits[step, place].isfinite().sum() == 1:
                    # No filter knows what to do with one logit.
                    sampling = SamplingTensors.neutral(1)
                drawn = sample_reference(
                    logits[step, place][None].float(),
                    torch.zeros(1, dtype=torch.int32),
                    torch.tensor([len(prompt) - 1 + step + place * CODE_STRIDE]).int(),
                    sampling,
                )
                assert drawn.item() == code, f"{seed=} {step=} {place=}"
            seen.add(codes.tobytes())
            ended += bool((codes == 36).any())
    assert len(seen) == 3 and (ended or name != "temperature")


@pytest.mark.parametrize("mode", ["raw_logprobs", "sampled_logprobs"])
def test_known_frames_are_scored(five: Higgs, device: str, mode: Any) -> None:
    """Each code by its own head's logits."""
    prompt, known = text(11), np.random.default_rng(2).integers(35, size=(6, 5))
    heat = {"raw_logprobs": 1.0, "sampled_logprobs": 0.5}[mode]
    params = SamplingParams(
        max_tokens=6, temperature=0.5, logprobs=0, forced_codes=known, logprobs_mode=mode
    )
    with open_engine(five.path, device=device, **SIZES, logprobs_mode=mode) as engine:
        result = engine.generate(prompt, params)
    assert np.array_equal(result.codes, known)
    found = (logits_of(five.model, prompt, known) / heat).log_softmax(-1)
    wanted = found.gather(-1, torch.from_numpy(known)[..., None])[..., 0].numpy()
    np.testing.assert_allclose(result.codes_logprobs, wanted, atol=1e-4)


def test_a_reply_that_was_cut_off_goes_on(ending: Higgs, device: str) -> None:
    """Also in the delay at its beginning, and while its codes end."""
    prompt = text(11)
    whole = ending.says(prompt, 40)
    with open_engine(ending.path, device=device, **SIZES) as engine:
        for said in (1, 3, len(whole) - 3, len(whole) - 1):
            params = greedy(40, forced_codes=whole[:said])
            assert np.array_equal(engine.generate(prompt, params).codes, whole)


def test_a_session_goes_on_after_what_was_said(ending: Higgs, device: str) -> None:
    """Its frames are sound to the next turn, the one of end codes that ended it among them."""
    first, second = text(11), [7, 9, *text(9, seed=2)]
    said = ending.says(first, 40)
    ids = [*first, *[SOUND] * (len(said) - 4), *[DELAY] * 4, *second]
    wanted = ending.says(ids, 10, sound=said)
    with open_engine(ending.path, device=device, **SIZES) as engine, engine.session() as session:
        session.append(first)
        assert np.array_equal(session.generate(greedy(40)).codes, said)
        session.append(second)
        assert np.array_equal(session.generate(greedy(10)).codes, wanted)


def test_codes_do_not_depend_on_neighbours_or_buckets(five: Higgs, device: str) -> None:
    prompt = text(11)
    asked = [
        SamplingParams(max_tokens=FRAMES, **options)
        for options in (
            {"temperature": 0.0},
            {"temperature": 0.8, "seed": 3},
            {"temperature": 1.2, "codes": CodeSampling(top_k=3), "seed": 4},
        )
    ]
    sizes = SIZES | {"buckets": (1, 2, 3)}
    with open_engine(five.path, device=device, **sizes) as engine:
        alone = [engine.generate(prompt, each).codes for each in asked]
        together = engine.generate([prompt] * 3, asked)
        assert not np.array_equal(alone[0], alone[1])
        for one, other in zip(alone, together, strict=True):
            assert np.array_equal(one, other.codes)
    sizes = SIZES | {"buckets": (3,), "prefill_buckets": (8,), "lookahead": 0}
    with open_engine(five.path, device=device, **sizes) as engine:
        for each, one in zip(asked, alone, strict=True):
            assert np.array_equal(engine.generate(prompt, each).codes, one)


def _delay_begins_late(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ParallelHeads.begun
    monkeypatch.setattr(ParallelHeads, "begun", lambda self, ids: max(begun(self, ids) - 1, 0))


def _delay_begins_early(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ParallelHeads.begun
    monkeypatch.setattr(ParallelHeads, "begun", lambda self, ids: begun(self, ids) + 1)


def _end_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame after an end code has two."""
    taken = heads_step.take_frame

    def take(*given: Any, **options: Any) -> Any:
        token = taken(*given, **options)
        ending = given[8].ending
        ending.copy_(torch.where(ending == 1, 2, ending))
        return token

    monkeypatch.setattr(heads_step, "take_frame", take)


def _kinds_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text goes through the feed-forwards of sound."""
    monkeypatch.setattr(
        decoder, "lane_kinds", lambda token, slot: type(lane_kinds(token, slot))(
            *lane_kinds(token, slot)[::-1]
        )
    )  # fmt: skip


def _heads_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes have the logits of the code before."""
    drawn = heads_step.sample_tiles

    def sample(logits: torch.Tensor, *given: Any, **options: Any) -> Any:
        return drawn(logits.roll(1, 0), *given, **options)

    monkeypatch.setattr(heads_step, "sample_tiles", sample)


@pytest.mark.parametrize(
    "plant",
    [
        _delay_begins_late,
        _delay_begins_early,
        _end_is_off_by_one,
        _kinds_are_swapped,
        _heads_are_moved,
    ],
)
def test_a_planted_fault_shows(ending: Higgs, monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    prompt = text(11)
    wanted = ending.says(prompt, 40)
    plant(monkeypatch)
    with open_engine(ending.path, device="cpu", **SIZES) as engine:
        assert not np.array_equal(codes_of(engine, prompt, frames=40)[0], wanted)


def _config(higgs: Higgs) -> dict[str, Any]:
    found: dict[str, Any] = higgs.model.config.to_dict()
    return found | {"architectures": ["HiggsAudioV2ForConditionalGeneration"]}


def test_keys_are_read(five: Higgs) -> None:
    config = read_model_config(_config(five))
    heads = config.inner
    assert isinstance(heads, ParallelHeads)
    assert (heads.steps, heads.codes, heads.width, heads.end_token) == (5, 37, 72, 37)
    assert (heads.begin_code, heads.end_code, heads.begin_id) == (35, 36, BEGIN)
    assert heads.place_ids == (SOUND, DELAY) and config.vocab_size == 307
    assert unknown_keys(_config(five)) == []
    # transformers' defaults, but for the number of codes, which has no room for those of delays.
    smallest = {"architectures": ["HiggsAudioV2ForConditionalGeneration"], "codebook_size": 1026}
    config = read_model_config(smallest)
    assert (config.inner.steps, config.num_layers, config.rope.kind) == (8, 28, "llama3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebook_size": 40_000}, "codebook_size=40000: supported: at most 32767 codes"),
        ({"vocab_size": 37}, "vocab_size=37: supported: more than codebook_size=37"),
        ({"audio_stream_bos_id": 37}, "audio_stream_bos_id=37: supported: 1 to 36, one of"),
        ({"audio_stream_eos_id": 0}, "audio_stream_eos_id=0: supported: 1 to 36, one of"),
        ({"audio_stream_eos_id": 35}, "audio_stream_eos_id=35: supported: another than audio_st"),
        ({"num_codebooks": 128}, r"num_codebooks=128: must be an integer in \[1, 127\]"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_configs_that_are_refused(five: Higgs, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(_config(five) | changes)


def test_requests_that_are_refused(five: Higgs) -> None:
    with open_engine(five.path, device="cpu", **SIZES) as engine:
        for token in (SOUND, DELAY):
            message = f"token 2 of the prompt is {token}, which stands for a frame of sound"
            with pytest.raises(ValueError, match=message):
                engine.submit([1, 2, token], greedy(2))
        with pytest.raises(ValueError, match="top_k has 2 numbers, and a frame has 4 codes after"):
            engine.submit([1], SamplingParams(codes=CodeSampling(top_k=(1, 2))))
        assert not engine.busy


def test_updated_weights_are_those_of_all_heads(five: Higgs, device: str, tmp_path: Path) -> None:
    prompt = text(11)
    other = written("five", tmp_path, seed=9)
    with open_engine(five.path, device=device, **SIZES) as engine:
        before = codes_of(engine, prompt)[0]
        engine.update_weights(tmp_path)
        after = codes_of(engine, prompt)[0]
    assert np.array_equal(before, five.says(prompt)) and np.array_equal(after, other.says(prompt))
    assert not np.array_equal(before, after)
