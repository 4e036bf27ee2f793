"""CSM: frames are those of transformers' `generate`, code for code, whatever an engine does with
the prompts; and what of its configs is read or refused.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from checkpoints.csm_models import AUDIO, END_OF_AUDIO, frames_of, read_csm, write_csm
from engines.frames import assert_frames_paused
from engines.small_engine import assert_idle, greedy, open_engine, run
from extent import extent
from graphengine import Engine, EngineConfig, PromptParts, SamplingParams
from graphengine.cli.main import main
from graphengine.models.contract import ModelWeights
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.inner.steps import InnerSteps
from graphengine.models.quantised.forms import rounded_forms
from graphengine.opening.requirements import check_frames
from graphengine.program.frame_step import CACHE_FIELD, InnerStep

FRAMES = extent(6, 40)
SIZES: dict[str, Any] = {"dtype": "float32", "prompt_embeds": True, "max_seq_len": 192}
Codes = NDArray[np.integer[Any]]
MODELS: dict[str, dict[str, Any]] = {
    "two codes": {"codebooks": 2, "codes": 29},
    "five": {"codebooks": 5},
    "biases, untied": {
        "codebooks": 7,
        "codes": 70,
        "tie_codebooks_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "depth": {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True,
                  "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    },
    "thirty-three": {"codebooks": 33, "codes": 41, "depth": {"num_hidden_layers": 1}},
}  # fmt: skip


class Csm(NamedTuple):
    path: Path
    model: Any
    frames: int = FRAMES

    def says(self, ids: list[int], frames: int = FRAMES, **inputs: Any) -> Codes:
        """Greedy frames of transformers after this prompt."""
        return frames_of(self.model, input_ids=torch.tensor([ids]), frames=frames, **inputs).numpy()


def written(name: str, folder: Path) -> Csm:
    model = write_csm(folder, **MODELS[name])
    # Long frames take their time.
    return Csm(folder, model, FRAMES if MODELS[name]["codebooks"] < 10 else extent(3, 20))


@pytest.fixture(scope="module", params=MODELS)
def csm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Csm:
    return written(request.param, tmp_path_factory.mktemp("csm"))


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Csm:
    return written("five", tmp_path_factory.mktemp("five"))


def text(length: int, seed: int = 0) -> list[int]:
    """Ids of a text."""
    draw = torch.Generator().manual_seed(100 * seed + length)
    return torch.randint(300, (length,), generator=draw).tolist()


def codes_of(engine: Engine, *prompts: Any, frames: int = FRAMES) -> list[Codes]:
    """Greedy frames of these prompts as a batch."""
    results = engine.generate(list(prompts), greedy(frames))
    run(engine)
    assert_idle(engine)
    found = [result.codes for result in results]
    assert all(codes is not None and codes.dtype == np.int32 for codes in found)
    return [codes for codes in found if codes is not None]


def test_frames_are_those_of_transformers(csm: Csm, device: str) -> None:
    """Prompts of different lengths together, alone and whole, and in chunks."""
    prompts, frames = [text(length) for length in (1, 11, 70)], csm.frames
    wanted = [csm.says(prompt, frames) for prompt in prompts]
    assert len(np.unique(np.concatenate(wanted), axis=0)) > frames
    for chunks in ((32, 96), (8,)):
        options = SIZES | {"prefill_buckets": chunks, "buckets": (1, 3)}
        with open_engine(csm.path, device=device, **options) as engine:
            for found, expected in zip(
                codes_of(engine, *prompts, frames=frames), wanted, strict=True
            ):
                assert np.array_equal(found, expected)
            assert np.array_equal(codes_of(engine, prompts[1], frames=frames)[0], wanted[1])


@pytest.mark.parametrize("steps", [1, 3])
def test_launches_of_several_steps_have_the_same_frames(five: Csm, device: str, steps: int) -> None:
    prompts = [text(length) for length in (11, 3)]
    options = SIZES | {"steps_per_launch": steps, "lookahead": 1}
    with open_engine(five.path, device=device, **options) as engine:
        for prompt, found in zip(prompts, codes_of(engine, *prompts), strict=True):
            assert np.array_equal(found, five.says(prompt))


def test_a_prompt_of_text_and_sound(five: Csm, device: str) -> None:
    """Frames of the codec where transformers' processor puts them, with the frame after them."""
    dice = torch.Generator().manual_seed(3)
    sound = torch.randn(1, 1, 240, generator=dice)
    with torch.no_grad():
        codes = five.model.codec_model.encode(sound).audio_codes[0].T
    frames, places = codes.shape
    head, tail = text(7), text(9, seed=1)
    ids = [*head, *[AUDIO] * frames, END_OF_AUDIO, *tail]
    cutoffs = torch.tensor([[sound.shape[-1]]])
    wanted = five.says(ids, input_values=sound, input_values_cutoffs=cutoffs)
    assert not np.array_equal(wanted, five.says([*head, *tail]))
    for options in ({}, {"prefill_buckets": (8,)}, {"prefix_caching": True}):
        with open_engine(five.path, device=device, **SIZES | options) as engine:
            said = engine.embed_frames(codes)
            end = engine.embed_frames(np.zeros((1, places), np.int64))
            prompt = PromptParts(head, said, end, tail)
            # The second one finds the prefix of the first where prefixes are kept.
            for _ in range(2):
                assert np.array_equal(codes_of(engine, prompt)[0], wanted), options


def test_frames_that_were_said_are_a_prompt(five: Csm, device: str) -> None:
    """A turn that goes on after a reply continues it: as embeddings, frames are what steps read."""
    prompt = text(11)
    wanted = five.says(prompt, 2 * FRAMES)
    with open_engine(five.path, device=device, **SIZES) as engine:
        said = PromptParts(prompt, engine.embed_frames(wanted[:FRAMES]))
        assert np.array_equal(codes_of(engine, said)[0], wanted[FRAMES:])


def test_requests_pause_in_the_middle_of_their_frames(five: Csm, device: str) -> None:
    prompts = [text(length) for length in (40, 30, 20)]
    wanted = [five.says(prompt, 40) for prompt in prompts]
    assert_frames_paused(five.path, prompts, wanted, 40, spare=3, device=device, **SIZES)


def test_events_have_the_codes_of_their_frames(five: Csm, device: str) -> None:
    prompt = text(11)
    wanted = [tuple(frame) for frame in five.says(prompt).tolist()]
    with open_engine(five.path, device=device, **SIZES) as engine:
        request = engine.submit(prompt, greedy(FRAMES))
        events = run(engine)
        assert [event.codes for event in events if event.token_ids] == wanted
        assert request.token_ids == [frame[0] for frame in wanted]
        assert request.result().to_dict()["codes"] == [list(frame) for frame in wanted]
        assert request.text == ""
        cancelled = engine.submit(prompt, greedy(FRAMES))
        while len(cancelled.token_ids) < 3:
            engine.step()
        cancelled.cancel()
        run(engine)
        result = cancelled.result()
        assert result.finish_reason == "cancelled"
        assert [tuple(frame) for frame in result.codes.tolist()] == wanted[: len(result.token_ids)]
        waiting = engine.submit(prompt, greedy(FRAMES))
        waiting.cancel()
        run(engine)
        assert waiting.result().codes.shape[0] == 0


def with_an_end(csm: Csm, folder: Path, after: int) -> Csm:
    """A model that ends once it has said `after` frames: its middle codes are all 0, and row 0 of
    lm_head is that of the first code that comes up then.
    """
    model = csm.model
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["depth_decoder.codebooks_head.weight"][:-1] = 0
    # Without their embeddings the other codes do not keep the first ones from varying.
    codes = csm.model.config.vocab_size
    tensors["depth_decoder.model.embed_tokens.weight"][codes:-codes] = 0
    tensors["lm_head.weight"][0] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    silent = read_csm(folder)
    said = Csm(folder, silent).says(text(11), 40)
    first = said[:, 0].tolist()
    new = next(
        index
        for index in range(after, 40)
        if first[index] not in first[:index] and 0 not in first[: index + 1]
    )
    row, head = first[new], tensors["lm_head.weight"]
    head[[0, row]] = head[[row, 0]]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Csm(folder, read_csm(folder))


def test_a_frame_of_end_codes_ends_a_request(five: Csm, device: str, tmp_path: Path) -> None:
    ending = with_an_end(five, tmp_path, 3)
    prompt = text(11)
    wanted = ending.says(prompt, 12)
    # The last code is not judged, neither here nor by transformers.
    assert 3 < len(wanted) < 12 and not wanted[-1][:-1].any() and wanted[:-1, 0].all()
    with open_engine(ending.path, device=device, **SIZES) as engine:
        result = engine.generate(prompt, greedy(12))
        assert np.array_equal(result.codes, wanted)
        assert result.finish_reason == "stop" and result.stop_reason is None
        endless = engine.generate(prompt, greedy(12, ignore_eos=True))
        assert len(endless.codes) == 12 and np.array_equal(endless.codes[: len(wanted)], wanted)
        assert endless.finish_reason == "length"


def _stale_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Position 0 is not run, so its keys and values are those of the frame before."""
    begun = InnerSteps.begin

    def begin(self: InnerSteps, hidden: Any, eps: float, slot: Any, x: Any, launch: Any) -> None:
        if not getattr(self, "ran", False):
            begun(self, hidden, eps, slot, x, launch)
            self.ran = True  # type: ignore[attr-defined]

    monkeypatch.setattr(InnerSteps, "begin", begin)


def _wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes of places 1 and 2 are fed to each other's positions."""
    ran = InnerSteps.run

    def run(self: InnerSteps, place: int, *given: Any) -> Any:
        return ran(self, {2: 3, 3: 2}.get(place, place), *given)

    monkeypatch.setattr(InnerSteps, "run", run)


def _wrong_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each code is embedded by the codebook before its own."""
    taken = InnerStep._taken

    def take(self: InnerStep, *given: Any) -> Any:
        weights, table = self._weights, self._weights.codes
        object.__setattr__(weights, "codes", table.roll(self.config.codes, 0))
        try:
            return taken(self, *given)
        finally:
            object.__setattr__(weights, "codes", table)

    monkeypatch.setattr(InnerStep, "_taken", take)


def _wrong_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 2 has the head of code 3."""
    head = InnerSteps.head

    def wrong(self: InnerSteps, place: int, *given: Any) -> Any:
        return head(self, 3 if place == 2 else place, *given)

    monkeypatch.setattr(InnerSteps, "head", wrong)


@pytest.mark.parametrize("plant", [_stale_cache, _wrong_step, _wrong_embedding, _wrong_head])
def test_a_planted_fault_shows(five: Csm, monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    prompt = text(11)
    wanted = five.says(prompt)
    plant(monkeypatch)
    with open_engine(five.path, device="cpu", **SIZES) as engine:
        assert not np.array_equal(codes_of(engine, prompt)[0], wanted)


def test_the_inner_cache_lives_for_one_step(five: Csm, device: str) -> None:
    prompt = text(11)
    wanted = five.says(prompt)
    with open_engine(five.path, device=device, **SIZES) as engine:
        cache = engine.runtime.buffers[CACHE_FIELD]
        request = engine.submit(prompt, greedy(FRAMES))
        while not request.finished:
            engine.step()
            engine.runtime.synchronize()
            cache.fill_(torch.nan)
        assert np.array_equal(request.result().codes, wanted)


def test_a_code_that_cannot_be_drawn_ends_a_request(five: Csm, device: str, caplog: Any) -> None:
    """A NaN in the middle of a frame fails the request, and no other."""
    prompt = text(11)
    wanted = five.says(prompt)
    with open_engine(five.path, device=device, **SIZES) as engine:
        weights = engine.model.weights.inner_weights
        row = 2 * weights.config.codes + int(wanted[4, 2])
        before = weights.codes[row].clone()
        weights.codes[row] = torch.nan
        result = engine.generate(prompt, greedy(FRAMES))
        assert result.finish_reason == "error" and len(result.codes) <= 4
        assert "NaN" in caplog.text
        weights.codes[row] = before
        assert np.array_equal(codes_of(engine, prompt)[0], wanted)


def _config(five: Csm) -> dict[str, Any]:
    found: dict[str, Any] = five.model.config.to_dict()
    return found | {"architectures": ["CsmForConditionalGeneration"]}


def test_keys_are_read(five: Csm, caplog: Any) -> None:
    config = read_model_config(_config(five))
    inner = config.inner
    assert inner is not None
    assert (inner.steps, inner.codes, inner.width, inner.hidden_size) == (5, 37, 72, 40)
    assert (inner.end_code, inner.judged, inner.end_token, len(inner.layers)) == (0, 4, 37, 2)
    assert config.vocab_size == 307 and not config.tie_embeddings
    assert unknown_keys(_config(five)) == []
    assert read_model_config({"architectures": ["CsmForConditionalGeneration"]}).inner.steps == 32
    strange = _config(five) | {"depth_decoder_config": {"window": 3}}
    assert unknown_keys(strange) == ["depth_decoder_config.window"]


@pytest.mark.parametrize(
    ("changes", "of_depth", "message"),
    [
        ({"vocab_size": 40_000}, {}, "vocab_size=40000: supported: at most 32767 codes"),
        ({"text_vocab_size": 37}, {}, "text_vocab_size=37: supported: more than vocab_size=37"),
        ({"codebook_eos_token_id": 37}, {}, "codebook_eos_token_id=37: supported: one of the"),
        ({"num_codebooks": 1}, {}, r"num_codebooks=1: must be an integer in \[2, 256\]"),
        ({}, {"num_codebooks": 4}, "depth_decoder_config.num_codebooks=4: supported: 5, the"),
        ({}, {"vocab_size": 36}, "depth_decoder_config.vocab_size=36: supported: 37"),
        ({}, {"backbone_hidden_size": 8}, "depth_decoder_config.backbone_hidden_size=8: sup"),
        ({}, {"max_position_embeddings": 4}, "max_position_embeddings=4: supported: num_codebo"),
        ({}, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_configs_that_are_refused(
    five: Csm, changes: dict[str, Any], of_depth: dict[str, Any], message: str
) -> None:
    config = _config(five) | changes
    config["depth_decoder_config"] = config["depth_decoder_config"] | of_depth
    with pytest.raises(ValueError, match=message):
        read_model_config(config)


REFUSED_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"speculative": "ngram:2"}, r"speculative=NGram\(k=2, max_n=5\)"),
    ({"tensor_parallel": 2}, "tensor_parallel=2"),
    ({"pipeline_parallel": 2}, "pipeline_parallel=2"),
    ({"data_parallel": 2}, "data_parallel=2"),
    ({"max_adapters": 2}, "max_adapters=2"),
    ({"adapters": {"a": "/nowhere"}}, "adapters="),
    ({"merge_adapter": "/nowhere"}, "merge_adapter="),
    ({"quantize": "fp8"}, "quantize='fp8'"),
    ({"kv_dtype": "fp8"}, "kv_dtype='fp8'"),
    ({"prompt_logprobs": True}, "prompt_logprobs=True"),
    ({"grammar_pool_mib": 4}, "grammar_pool_mib=4"),
]
SERVED_WITHOUT = "a CsmForConditionalGeneration, each step of which emits a frame of 5 codes, is"


@pytest.mark.parametrize(("options", "message"), REFUSED_OPTIONS)
def test_options_that_are_refused(five: Csm, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        open_engine(five.path, device="cpu", dtype="float32", **options)
    assert SERVED_WITHOUT in str(raised.value)


def test_quantised_weights_are_refused(five: Csm) -> None:
    linears = five_weights(five).linears()
    model = read_model_config(_config(five)).stored_as(rounded_forms(linears, "fp8", head=False))
    message = r"a CsmForConditionalGeneration with quantised weights \(model.layers.0.mlp.down_proj"
    with pytest.raises(ValueError, match=message):
        check_frames(model, EngineConfig(device="cpu"))
    check_frames(read_model_config(_config(five)), EngineConfig(device="cpu"))


def five_weights(five: Csm) -> ModelWeights:
    return read_model_config(_config(five)).allocate(device="meta", dtype=torch.float32)


def test_updated_weights_are_those_of_both_decoders(five: Csm, device: str, tmp_path: Path) -> None:
    prompt = text(11)
    other = Csm(tmp_path, write_csm(tmp_path, 5, seed=9))
    with open_engine(five.path, device=device, **SIZES) as engine:
        before = codes_of(engine, prompt)[0]
        engine.update_weights(tmp_path)
        after = codes_of(engine, prompt)[0]
    assert np.array_equal(before, five.says(prompt)) and np.array_equal(after, other.says(prompt))
    assert not np.array_equal(before, after)


def test_requests_that_are_refused(five: Csm) -> None:
    of_tokens = {
        "min_tokens": 2, "stop_token_ids": [3], "stop_token_sequences": [[3, 4]],
        "allowed_token_ids": [3], "bad_words": [[3]], "logit_bias": {3: 1.0},
        "repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5,
        "prompt_logprobs": 0, "forced_tokens": True,
    }  # fmt: skip
    with open_engine(five.path, device="cpu", **SIZES) as engine:
        for name, value in of_tokens.items():
            with pytest.raises(ValueError, match=f"{name}=.*each step of this model emits a frame"):
                engine.submit([1, 2], SamplingParams(**{name: value}))
        for name, value in {"stop": "x", "include_stop_str_in_output": True}.items():
            with pytest.raises(ValueError, match=f"{name}=.*: frames have no text"):
                engine.submit([1, 2], SamplingParams(**{name: value}))
        for codes, message in (
            ([[1, 2, 3, 4]], r"of shape \[1, 4\] and int64 must be integers \[frames, 5\]"),
            ([[0.5] * 5], "float64 must be integers"),
            ([[1] * 5, [1, 2, 37, 4, 5]], r"codes\[1\]\[2\] is 37: a codebook has 37 codes"),
            (torch.tensor([[1, -1, 2, 3, 4]]), r"codes\[0\]\[1\] is -1"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.embed_frames(codes)
        assert not engine.busy
    with (
        open_engine(device="cpu") as engine,
        pytest.raises(ValueError, match="embed_frames is for models whose steps emit frames"),
    ):
        engine.embed_frames([[1]])


def test_info_shows_the_frame(five: Csm, capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "--checkpoint", str(five.path), "--device", "cpu", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert (shown["frame_codes"], shown["codebook"], shown["vocabulary"]) == (5, 37, 307)
    lines = {line["name"]: line["bytes"] for line in shown["budget"]}
    inner = read_model_config(_config(five)).inner
    slots = shown["max_batch"]
    drawn = 3 * (inner.steps - 1) * (-(-slots // 4) * 4)
    held = 4 * (slots * (1 + inner.steps) + math.prod(inner.cache_shape(slots)) + drawn)
    assert lines["state of frames"] == held and lines["codes of frames"] > 0
    given = 2 * slots * shown["max_seq_len"] * inner.steps
    assert lines["codes that requests give"] == given
