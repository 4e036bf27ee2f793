"""Hidden states of prompts on disk, against transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, greedy, open_engine, run, sampled
from graphengine import Engine, Request, SamplingParams
from graphengine.demo import checkpoint_path
from graphengine.drafters import hidden_states as module
from graphengine.models.checkpoints import tensor_files
from graphengine.speculative import SaveHiddenStates

TOLERANCE = 1e-4
"""Relative to the largest number of a layer."""

Opening = Callable[..., Engine]


@pytest.fixture
def states(tmp_path: Path) -> Path:
    return tmp_path / "new" / "states"


@pytest.fixture
def saving(states: Path) -> Iterator[Opening]:
    """Open engines that save to `states`."""
    engines: list[Engine] = []

    def opened(
        path: Path | None = None, *, layers: Any = None, write_interval: int = 20, **options: Any
    ) -> Engine:
        mode = SaveHiddenStates(states, layers=layers, write_interval=write_interval)
        engines.append(open_engine(path or checkpoint_path(), speculative=mode, **options))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


def saved(states: Path) -> dict[int, dict[str, Tensor]]:
    return {int(file.stem): load_file(file) for file in states.iterdir()}


def saved_as(request: Request, states: Path) -> dict[str, Tensor]:
    return load_file(states / f"{request.id:08d}.safetensors")


@torch.no_grad()
def expected(oracle: Any, token_ids: list[int], layers: tuple[int, ...]) -> dict[str, Tensor]:
    """By transformers, whose states are numbered from the embedding's on; its last is normed."""
    outputs = oracle.model(torch.tensor([token_ids]), output_hidden_states=True)
    hidden = [state[0].float() for state in outputs.hidden_states]
    return {
        "input_ids": torch.tensor(token_ids),
        "hidden_states": hidden[-1],
        "aux_hidden_states": torch.cat([hidden[layer + 1] for layer in layers], dim=1),
    }


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert got["input_ids"].dtype == torch.int64
    assert torch.equal(got["input_ids"], wanted["input_ids"])
    for name in wanted.keys() - {"input_ids"}:
        assert got[name].shape == wanted[name].shape and got[name].dtype == torch.float32
        error = (got[name] - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error <= TOLERANCE, f"{name}: {error=}"


def test_as_transformers_has_them(
    device: str, saving: Opening, states: Path, demo_oracle: Any
) -> None:
    """Prompts of one chunk and of several, at the chunks' ends and beside them, side by side."""
    engine = saving(device=device, dtype="float32")
    assert engine.config.lookahead == 0
    prompts = demo_oracle.prompts((1, 8, 9, 32, 33, 70, 96))
    requests = [engine.submit(prompt) for prompt in prompts]
    run(engine)
    assert_idle(engine)
    assert not any(name.startswith("replays/decode") for name in engine.counters)
    engine.close()
    assert sorted(saved(states)) == [request.id for request in requests]
    for request, prompt in zip(requests, prompts, strict=True):
        assert_close(saved_as(request, states), expected(demo_oracle, prompt, (1, 2, 3)))


def test_the_token_is_that_of_a_plain_engine(saving: Opening) -> None:
    prompts, params = [PROMPT, LONG, OTHER], greedy(1)
    with open_engine(checkpoint_path()) as plain:
        wanted, numerics = plain.generate(prompts, params), plain.numerics_id
    engine = saving()
    got = engine.generate(prompts, params)
    assert [result.token_ids for result in got] == [result.token_ids for result in wanted]
    assert [result.finish_reason for result in got] == ["length"] * 3
    assert engine.numerics_id == numerics


@pytest.mark.parametrize("layers", [(0, 2), (1,)])
def test_chosen_layers_of_other_models(
    saving: Opening, states: Path, checkpoints: dict[str, Any], layers: tuple[int, ...]
) -> None:
    oracle = checkpoints["llama-tied-yarn"]
    engine = saving(oracle.path, layers=list(reversed(layers)), device="cpu")
    (prompt,) = oracle.prompts((40,))
    request = engine.submit(prompt)
    run(engine)
    engine.close()
    got = saved_as(request, states)
    wanted = expected(oracle, prompt, layers)
    if 2 in layers:
        # Of the last layer transformers shows the normed states alone: ours come before that.
        width = wanted["hidden_states"].shape[1]
        stream = got["aux_hidden_states"][:, -width:]
        weight = oracle.model.model.norm.weight
        scale = (stream.square().mean(-1, keepdim=True) + oracle.model.config.rms_norm_eps).rsqrt()
        wanted["aux_hidden_states"][:, -width:] = stream
        assert_close(
            {"input_ids": got["input_ids"], "hidden_states": stream * scale * weight.detach()},
            {name: wanted[name] for name in ("input_ids", "hidden_states")},
        )
    assert_close(got, wanted)


def test_no_layer_chosen(saving: Opening, states: Path) -> None:
    engine = saving(layers=())
    request = engine.submit(PROMPT)
    run(engine)
    engine.close()
    assert saved_as(request, states).keys() == {"input_ids", "hidden_states"}


def test_the_model_lacks_a_layer(saving: Opening) -> None:
    with pytest.raises(ValueError, match="the model has layers 0 to 6"):
        saving(layers=[3, 7])


def test_files_are_in_the_models_dtype(saving: Opening, states: Path) -> None:
    engine = saving(dtype="bfloat16", device="cpu")
    request = engine.submit(LONG)
    run(engine)
    engine.close()
    kinds = {name: tensor.dtype for name, tensor in saved_as(request, states).items()}
    assert kinds == {
        "input_ids": torch.int64,
        "hidden_states": torch.bfloat16,
        "aux_hidden_states": torch.bfloat16,
    }


def test_written_every_so_many_prompts_and_at_the_end(saving: Opening, states: Path) -> None:
    engine = saving(write_interval=3, max_batch=1)
    assert states.is_dir() and not saved(states)
    for count, files in ((1, 0), (2, 0), (3, 3), (4, 3), (5, 3), (6, 6), (7, 6)):
        engine.generate(PROMPT)
        assert sorted(saved(states)) == list(range(1, files + 1)), f"after {count}"
    engine.close()
    assert sorted(saved(states)) == list(range(1, 8))
    engine.close()


@pytest.mark.parametrize("params", [greedy(2), sampled(16)])
def test_more_than_one_token_is_refused(saving: Opening, params: SamplingParams) -> None:
    engine = saving()
    message = rf"max_tokens={params.max_tokens}: with SaveHiddenStates\(.*\) a prompt has one"
    with pytest.raises(ValueError, match=message):
        engine.submit(PROMPT, params)
    with pytest.raises(ValueError, match=message):
        engine.generate([PROMPT], params)
    assert_idle(engine)
    for fine in (None, greedy(1), greedy(None)):
        result = engine.generate(PROMPT, fine)
        assert len(result.token_ids) == 1 and result.finish_reason == "length"


def test_a_prompt_that_is_cancelled_leaves_no_file(
    saving: Opening, states: Path, demo_oracle: Any
) -> None:
    """Between its chunks, and after the last; what is kept of it goes with the next chunk."""
    engine = saving(max_batch=1)
    (prompt,) = demo_oracle.prompts((90,))
    early, late = engine.submit(prompt), engine.submit(prompt)
    engine.step()
    early.cancel()
    while late.job.placement is None or late.job.placement.prefilled < 64:
        engine.step()
    late.cancel()
    request = engine.submit(prompt)
    run(engine)
    assert isinstance(engine.core.drafter, module.HiddenStatesDrafter)
    assert not engine.core.drafter._parts
    engine.close()
    assert list(saved(states)) == [request.id]
    assert_close(saved_as(request, states), expected(demo_oracle, prompt, (1, 2, 3)))


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=f"directory={file} for hidden states is a file"):
        open_engine(speculative=SaveHiddenStates(file))
    with pytest.raises(ValueError, match=f"directory={file / 'below'} cannot be made: .*directory"):
        open_engine(speculative=SaveHiddenStates(file / "below"))


def test_a_file_that_cannot_be_written(
    saving: Opening, states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step says so, nothing half written is left, and the engine and the prompts live on."""
    engine = saving(write_interval=1)
    request = engine.submit(PROMPT)
    with monkeypatch.context() as patch:

        def full(tensors: dict[str, Tensor], path: Path, metadata: object) -> None:
            path.write_bytes(b"half")
            raise OSError("no space left")

        patch.setattr(tensor_files, "save_file", full)
        with pytest.raises(OSError, match=r"written to .*00000001\.safetensors: no space left"):
            run(engine)
    assert not list(states.iterdir())
    (event,) = run(engine)
    assert event.request is request and event.finish_reason == "length"
    other = engine.submit(OTHER)
    run(engine)
    assert sorted(saved(states)) == [request.id, other.id]


def test_a_short_pool(saving: Opening, states: Path, demo_oracle: Any) -> None:
    """Prompts that wait for each other's blocks."""
    engine = saving(kv_blocks=13, swap_blocks=40)
    prompts = demo_oracle.prompts((90, 80, 17, 33))
    requests = [engine.submit(prompt) for prompt in prompts]
    run(engine)
    engine.close()
    for request, prompt in zip(requests, prompts, strict=True):
        assert_close(saved_as(request, states), expected(demo_oracle, prompt, (1, 2, 3)))
