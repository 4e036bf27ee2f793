"""Engines whose prefill rounds activations to e4m3, against transformers with rounded inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.quantised_models import HEAD, KINDS, Written, write_model
from checkpoints.successors import continuation, write_successors
from engines import small_engine
from engines.small_engine import LONG, PROMPT, greedy
from graphengine import Engine
from graphengine.kernels.linear.prefill.lane_codes import LaneCodes, code_bytes
from graphengine.models.blocks import streams
from graphengine.models.launches import ONE_RANK, PrefillLaunch
from graphengine.speculative import MTP, DraftModel
from launches.compilation import graph_kernels

Eager = Callable[[Engine], dict[tuple[int, int], Tensor]]

IDS = [*range(1, 72, 3)]
FP8: dict[str, Any] = {"activations": "fp8"}
DEMO: dict[str, Any] = {"device": "cpu", "dtype": "float32", "row_family": "dot"}


def open_engine(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 1, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16)}
    return Engine.from_pretrained(path, **(sizes | {"device": "cpu", "dtype": "float32"} | options))


def open_demo(**options: Any) -> Engine:
    return small_engine.open_engine(**(DEMO | {"quantize": "fp8"} | options))


def rounded(x: Tensor) -> Tensor:
    """Each token's values relative to its largest one, which is 448, as e4m3."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    most = torch.full_like(largest, 448.0)
    return (x * (most / largest)).to(torch.float8_e4m3fn).float() * (largest / most)


@contextmanager
def rounded_inputs(written: Written, plain: tuple[str, ...]) -> Iterator[None]:
    """The rounded inputs of all linears but these."""
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: (rounded(inputs[0]),))
        for name, module in written.model.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in plain)
    ]
    yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def logits_of(
    written: Written, tokens: list[int], *, rounds: bool, plain: tuple[str, ...]
) -> list[Tensor]:
    """After the prompt, and then after each of these tokens, whose inputs are not rounded."""
    if rounds:
        with rounded_inputs(written, plain):
            out = written.model(torch.tensor([IDS]), use_cache=True)
    else:
        out = written.model(torch.tensor([IDS]), use_cache=True)
    found = [out.logits[0, -1]]
    for token in tokens:
        out = written.model(torch.tensor([[token]]), past_key_values=out.past_key_values)
        found.append(out.logits[0, -1])
    return found


@contextmanager
def noted_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LaneCodes]]:
    """What is rounded."""
    noted: list[LaneCodes] = []
    quantise = streams.quantise_lanes

    def note(x: Tensor, **options: Any) -> LaneCodes:
        noted.append(quantise(x, **options))
        return noted[-1]

    with monkeypatch.context() as patch:
        patch.setattr(streams, "quantise_lanes", note)
        yield noted


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("float-quantized channel", {}),
        ("fp8 tensor", {"attention_bias": True, "mlp_bias": True}),
        ("fp8 blocks", {"hidden_size": 200, "intermediate_size": 136}),
        ("fp8 blocks of powers of two", {"family": "qwen3"}),
        # Those of a layer stay as they are.
        ("modelopt FP8", {"plain": ("layers.0.", HEAD)}),
    ],
)
def test_prefill_rounds_inputs_and_decode_does_not(
    tmp_path: Path, eager: Eager, name: str, options: dict[str, Any]
) -> None:
    """In chunks of any size. An input near a tie may be rounded up or down, so the logits are
    compared with what rounding changes.
    """
    plain = options.get("plain", (HEAD,))
    if "layers.0." in plain:
        options = options | {"edit": leave_out("model.layers.0*", HEAD)}
    written = write_model(tmp_path, KINDS[name], **options)
    with open_engine(written.path, **FP8) as engine:
        seen = eager(engine)
        result = engine.generate(IDS, greedy(4, ignore_eos=True))
    tokens = list(result.token_ids[:-1])
    found = [seen[0, len(IDS) - 1 + step] for step in range(4)]
    unrounded = logits_of(written, tokens, rounds=False, plain=plain)
    for row, with_rounding, without in zip(
        found, logits_of(written, tokens, rounds=True, plain=plain), unrounded, strict=True
    ):
        error = (row - with_rounding).abs().max()
        changed = (with_rounding - without).abs().max()
        assert error <= changed / 4, f"{error=} {changed=}"
        assert changed <= without.abs().max() / 2, f"{changed=}"


def leave_out(*names: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["quantization_config"]["exclude_modules"] = list(names)

    return edit


def test_every_chunk_says_the_same() -> None:
    """A token is rounded by itself, so it does not matter which ones are fed with it."""
    said = []
    for buckets in ((8, 32), (4,)):
        with open_demo(**FP8, prefill_buckets=buckets) as engine:
            said.append(engine.generate(LONG, greedy(8, ignore_eos=True)).token_ids)
    assert said[0] == said[1]


def test_what_an_engine_says_of_it(tmp_path: Path) -> None:
    """Its numerics have another name, and a session of the one is refused by the other."""
    with open_demo(**FP8) as engine, open_demo() as other:
        assert engine.numerics_id != other.numerics_id
        assert engine.core.description["activations"] == "fp8"
        assert other.core.description["activations"] is None
        assert "device cpu, float32, prefill fp8, max_seq_len" in str(engine.report())
        assert "prefill fp8" not in str(other.report())
        with engine.session() as session:
            session.append(PROMPT)
            first = session.generate(greedy(3, ignore_eos=True))
            session.snapshot(tmp_path / "session")
        message = "dtype='float32, prefill fp8', the engine of 'float32'"
        with pytest.raises(ValueError, match=message):
            other.restore_session(tmp_path / "session")
        with engine.restore_session(tmp_path / "session") as session:
            assert session.token_ids[-3:] == first.token_ids


def test_greedy_text_is_nearly_the_same() -> None:
    """A trained model, whose weights are rounded to e4m3, too."""
    said = []
    for options in (FP8, {}):
        with open_demo(**options) as engine:
            said.append(engine.generate(PROMPT, greedy(16, ignore_eos=True)).token_ids)
    assert said[0][:8] == said[1][:8]


def test_drafters_round_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's projection of two streams, and the layers of modules and of a draft model."""
    path = write_successors(tmp_path / "successors", "token", modules=1)
    config = json.loads((path / "config.json").read_text())
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    options: dict[str, Any] = {"quantize": "fp8", "row_family": "dot", "max_batch": 2}
    prompt = [9, 8, 30]
    for mode in (None, MTP(1)):
        with (
            open_engine(path, **options, **FP8, speculative=mode) as engine,
            noted_lanes(monkeypatch) as noted,
        ):
            result = engine.generate(prompt, greedy(12, ignore_eos=True))
            assert list(result.token_ids) == continuation(30, 12)
            widths = [lanes.codes.shape[1] for lanes in noted]
            if mode is None:
                assert widths and 2 * hidden not in widths
            else:
                # A projection, and the four products of the module's layer.
                projection, qkv, _, gate_up, down = widths[-5:]
                assert (projection, qkv, gate_up, down) == (2 * hidden, hidden, hidden, ffn)
    meant = write_model(tmp_path / "m", KINDS["fp8 tensor"]).path
    found = []
    for draft in (None, DraftModel(meant, 2)):
        with (
            open_engine(meant, **FP8, row_family="dot", speculative=draft) as engine,
            noted_lanes(monkeypatch) as noted,
        ):
            result = engine.generate([5, 3, 80], greedy(8, ignore_eos=True))
            found.append((result.token_ids, len(noted)))
    # Of the draft model's last layer a chunk needs keys and values alone.
    assert found[0][0] == found[1][0] and found[1][1] - found[0][1] == 4 + 1


def test_a_gpus_prefill_has_two_kernels_a_product() -> None:
    """And its decode none of them."""
    own = ["_quantise_lanes_kernel", "packed_chunk_fp8_kernel"]
    with open_demo(**FP8, dtype="bfloat16", prefill_buckets=(8,)) as engine:
        layers = engine.model.config.num_layers
        for name, kernels in graph_kernels(engine).items():
            found = [kernel.name for kernel in kernels if kernel.name in own]
            rounds = name.startswith("prefill/") and not name.endswith("/note")
            assert found == own * (4 * layers if rounds else 0), name


def test_codes_are_in_the_scratch_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in memory of their own for each product, and what lies beside them stays."""
    with open_demo(**FP8, prefill_buckets=(8,)) as engine, noted_lanes(monkeypatch) as noted:
        engine.generate(PROMPT, greedy(1))
        chunk = [lanes for lanes in noted if len(lanes.codes) == 8]
        assert len({lanes.codes.untyped_storage().data_ptr() for lanes in chunk}) == 1
        assert len({lanes.codes.shape[1] for lanes in chunk}) > 1


@pytest.mark.parametrize("outlived", [False, True])
def test_scratch_has_room_for_codes_beside_the_rest(outlived: bool) -> None:
    launch = PrefillLaunch(activations="fp8")
    like = torch.zeros(1, dtype=torch.bfloat16)
    scratch = streams.PrefillScratch(
        3, 8, 24, like=like, launch=launch, coded=20, outlived=outlived
    )
    codes = scratch._codes
    assert codes is not None and codes.nbytes >= code_bytes(3, 20)
    parts = [scratch.h, scratch.take(8), scratch.take(16, after=8)]
    for index, part in enumerate(parts):
        assert part.data_ptr() % 16 == codes.data_ptr() % 16
        part.fill_(index)
    codes.fill_(255)
    assert [part.unique().tolist() for part in parts] == [[0.0], [1.0], [2.0]]
    alone = streams.PrefillScratch(3, 8, 24, like=like, launch=ONE_RANK, outlived=outlived)
    assert alone._codes is None


def test_the_budget_has_the_codes() -> None:
    """Codes of the widest product's inputs, for the largest chunk."""
    with open_demo(**FP8) as engine, open_demo() as other:
        lines = [
            {line.name: line.bytes for line in each.memory.budget.lines} for each in (engine, other)
        ]
        widest = max(linear.columns for linear in engine.model.config.linears.values())
        more = lines[0].pop("workspace (estimate)") - lines[1].pop("workspace (estimate)")
        assert more == code_bytes(32, widest) > 32 * widest
        assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({"quantize": None}, "float32"),
        ({"quantize": "int8"}, "int8-1x0"),
        ({"quantize": "int4"}, "int4-1x128"),
    ],
)
def test_a_model_without_e4m3_is_refused(options: dict[str, Any], formats: str) -> None:
    message = (
        r"activations='fp8' is for linears in e4m3 with a scale a row or for 128 columns: those of "
        rf"this \w+ are in {formats}$"
    )
    with pytest.raises(ValueError, match=message):
        open_demo(**FP8, **options)


def test_a_head_in_e4m3_is_not_enough(tmp_path: Path) -> None:
    """It has one lane of a chunk, and none of its inputs is rounded."""
    written = write_model(
        tmp_path,
        KINDS["modelopt FP8"],
        plain=("layers.",),
        edit=leave_out("model.layers*"),
    )
    with pytest.raises(ValueError, match=r"are in float32$"):
        open_engine(written.path, **FP8)


def test_only_fp8_is_known() -> None:
    with pytest.raises(ValueError, match="activations='int8' must be 'fp8' or None"):
        open_demo(activations="int8")
