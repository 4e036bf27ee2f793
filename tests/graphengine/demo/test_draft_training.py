"""Training of the demo model's EAGLE3 head and block drafters on the CPU, short: they draft in an
engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.block_drafters import BlockShape, PlainDrafter
from checkpoints.eagle3_heads import HEAD_DIM, THETA, Head, Shape
from demo_training import corpus as corpora
from demo_training import train_block, train_eagle3
from demo_training.block import BlockConfig, BlockDrafter
from demo_training.draft_training import Settings, Text
from demo_training.drafting import DemoDrafter, read_target
from demo_training.eagle3 import Eagle3Head, HeadConfig, head_json
from demo_training.model import DemoConfig, DemoModel
from demo_training.own_text import Writer, own_text
from graphengine import DFlash, Eagle3, Engine, SamplingParams
from graphengine.demo import checkpoint_path
from graphengine.text.tokenizer import Tokenizer

TINY = DemoConfig(
    vocab_size=60, hidden_size=2 * HEAD_DIM, layers=4, heads=2, kv_heads=2, head_dim=HEAD_DIM,
    ffn_size=48, rope_theta=THETA,
)  # fmt: skip
SOURCES = Path(corpora.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The shapes are small: on a busy machine threads would mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_target(shape: DemoConfig = TINY) -> DemoModel:
    torch.manual_seed(0)
    return disturbed(DemoModel(shape).eval().requires_grad_(False))


def disturbed(module: Any) -> Any:
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def run_command(main: Callable[[Sequence[str]], None], folder: Path, *options: str) -> Any:
    """What metrics.json holds."""
    files = [str(SOURCES / f"{name}.py") for name in ("corpus", "evaluate", "model", "train")]
    small = "--batch 2 --sequence 128 --anchors 48 --own-windows 4 --depth 3 --heldout-tokens 400"
    whole = ["--out", str(folder), *small.split(), "--device", "cpu", "--corpus", *files, *options]
    main(whole)
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@torch.no_grad()
@pytest.mark.parametrize("drafted", [0, 23], ids=["shared lm_head", "own lm_head"])
def test_unrolled_runs_are_those_of_a_head_run_by_run(tmp_path: Path, drafted: int) -> None:
    target = random_target()
    ids = torch.randperm(TINY.vocab_size)[:drafted].sort().values if drafted else None
    config = HeadConfig(layers=(1, 3), ffn_size=40, depth=4, drafted=drafted)
    head = disturbed(Eagle3Head(config, TINY, ids))
    window, anchors = torch.randint(TINY.vocab_size, (1, 19)), [0, 5, 13]
    reading = read_target(target, window, head.read_layers)
    streams = reading.streams
    found = head.outputs(reading.embedding, streams, torch.tensor(anchors))
    drafts = head.draft_logits(reading, torch.tensor(anchors), target)
    for index, anchor in enumerate(anchors):
        embedding = target.model.embed_tokens.weight
        stored = {name: tensor.detach() for name, tensor in head.state_dict().items()}
        plain = Head(Shape(layers=(1, 3)), stored, embedding, embedding)
        for position in range(anchor + 1):
            g = plain.fuse(streams[0, position])
            output, y = plain.run(int(window[0, position + 1]), g, position)
        for run in range(head.config.depth):
            if run:
                position = anchor + run
                output, y = plain.run(int(window[0, position + 1]), y, position)
            torch.testing.assert_close(found[run][0, index], output, atol=2e-4, rtol=2e-4)
            logits = drafts[run][0, index]
            torch.testing.assert_close(logits, plain.logits(output), atol=2e-3, rtol=2e-3)

    head.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {"fc.weight", "midlayer.hidden_norm.weight", "norm.weight"} < stored.keys()
    if head.ids is None:
        assert not {"lm_head.weight", "d2t", "t2d"} & stored.keys()
    else:
        assert stored["lm_head.weight"].shape == (drafted, TINY.hidden_size)
        assert torch.equal(stored["d2t"] + torch.arange(drafted), head.ids)
        assert torch.equal(stored["t2d"].nonzero().flatten(), head.ids)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_blocks_are_those_of_a_drafter_run_block_by_block(tmp_path: Path, kind: str) -> None:
    shape = replace(TINY, heads=4)
    target = random_target(shape)
    config = BlockConfig(kind=kind, layers=(0, 2), depth=4, ffn_size=40, rank=16)
    drafter = disturbed(BlockDrafter(config, shape, mask=7))
    window, anchors = torch.randint(TINY.vocab_size, (1, 19)), [0, 5, 13]
    reading = read_target(target, window, drafter.read_layers)
    found = drafter.draft_logits(reading, torch.tensor(anchors), target)
    embedding = target.model.embed_tokens.weight
    stored = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    block_shape = BlockShape(
        layers=(0, 2), dspark=kind == "dspark", rank=16 if kind == "dspark" else 0, mask=7
    )
    plain = PlainDrafter(block_shape, stored, embedding, embedding)
    for index, anchor in enumerate(anchors):
        newest, *after = window[0, anchor + 1 : anchor + 6].tolist()
        block = plain.logits(reading.streams[0, : anchor + 1], newest, block_shape.width(4))
        wanted = plain.draft_logits(block, newest, after)
        logits = torch.stack([draft[0, index] for draft in found])
        torch.testing.assert_close(logits, wanted, atol=2e-3, rtol=2e-3)

    drafter.save(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == stored.keys()


def test_own_stretches_are_what_the_target_says_after_what_stands_before() -> None:
    target = random_target()
    text = torch.randint(TINY.vocab_size, (2, 22))
    writer = Writer(target, 2, 22)
    found = writer.continued(text, torch.zeros(2), stretch=4)
    with torch.no_grad():
        greedy = target.logits(target.hidden(found)).argmax(-1)
    for position in range(22):
        wanted = greedy[:, position - 1] if position // 4 % 2 else text[:, position]
        assert torch.equal(found[:, position], wanted), position
    warm = writer.continued(text, torch.ones(2), stretch=4)
    assert not torch.equal(warm, found) and torch.equal(warm[:, :4], text[:, :4])

    rounds = own_text(target, text.flatten().int(), windows=3, length=8, seconds=0.0)
    assert rounds.shape == (3, 8) and rounds.dtype == torch.int32


@pytest.mark.parametrize(
    ("layers", "ids"), [((1, 3), [1, 3]), ((2, 3), [3, 4])], ids=["as they are", "shifted"]
)
def test_ids_of_layers_are_written_as_they_are_read(
    layers: tuple[int, ...], ids: list[int]
) -> None:
    head = Eagle3Head(HeadConfig(layers=layers), TINY)
    assert head_json(head)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids


EAGLE3, BLOCK = train_eagle3.main, train_block.main


@pytest.mark.parametrize(
    ("main", "options", "message"),
    [
        (EAGLE3, ("--steps", "0"), "--steps 0: at least one is needed"),
        (BLOCK, ("--minutes", "0.1"), r"no time left to train: -\d+\.\d s after preparing"),
        (EAGLE3, ("--layers", "0,3"), r"layers \[0, 3\] must ascend, from 1 to at most 6"),
        (EAGLE3, ("--layers", "1,7"), r"layers \[1, 7\] must ascend, from 1 to at most 6"),
        (BLOCK, ("--layers", "0,6"), r"layers \[0, 6\] must ascend, from 0 to at most 5"),
        (EAGLE3, ("--draft-vocab", "5000"), "a draft vocabulary of 5000 tokens, the target has 40"),
        (BLOCK, ("--depth", "0"), "depth 0: at least one draft is needed"),
        (BLOCK, ("--count", "0"), "0 layers and rank 32: at least one is needed"),
        (BLOCK, ("--own-share", "1.5"), r"--own-share 1\.5 must be in \[0, 1\]"),
        (EAGLE3, ("--sequence", "3"), "windows of 3 tokens have no room for 3 drafts"),
    ],
)
def test_a_training_that_cannot_be_is_refused(
    tmp_path: Path, main: Callable[..., None], options: tuple[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_command(main, tmp_path, "--own-seconds", "0", *options)


def replies(engine: Engine) -> list[tuple[int, ...]]:
    """What it says after text like what was trained on."""
    text = (SOURCES / "train.py").read_text(encoding="utf-8")
    ids = Tokenizer.from_directory(checkpoint_path()).encode(text)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    prompts = [ids[at : at + 24] for at in range(100, 1600, 250)]
    return [each.token_ids for each in engine.generate(prompts, params)]


OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_batch": 2, "max_seq_len": 96,
}  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    """The replies without drafts."""
    with Engine.from_pretrained(checkpoint_path(), **OPTIONS, row_family="dot") as engine:
        return replies(engine)


def accepted(mode: Eagle3 | DFlash, plain: list[tuple[int, ...]]) -> float:
    """The share of first drafts that are right; tokens are those without drafts."""
    with Engine.from_pretrained(checkpoint_path(), **OPTIONS, speculative=mode) as engine:
        assert replies(engine) == plain
        rate: float = engine.acceptance.as_dict()["rates"][0]
    return rate


def check_short_training(folder: Path, metrics: dict[str, Any], said: str) -> None:
    """It learned, and left what a checkpoint needs; its card says this."""
    first, last = metrics["curve"][0], metrics["curve"][-1]
    assert first[0] == 1 and last[0] == metrics["steps"]
    assert all(after < before - 1 for before, after in zip(first[1:], last[1:], strict=True))
    assert {path.name for path in folder.iterdir()} == {
        "MODEL_CARD.md", "config.json", "metrics.json", "model.safetensors",
    }  # fmt: skip
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "$" not in card and str(folder) not in card and said in card
    assert f"{metrics['checkpoint_bytes']} bytes" in card


def test_short_trainings_give_drafters_whose_drafts_are_accepted(
    tmp_path: Path, plain: list[tuple[int, ...]]
) -> None:
    text, head, block = tmp_path / "text.safetensors", tmp_path / "eagle3", tmp_path / "block"
    once = ("--own-text", str(text))
    metrics = run_command(EAGLE3, head, "--steps", "24", "--draft-vocab", "1024", *once)
    check_short_training(head, metrics, "1024 most frequent tokens")
    # By chance one draft of 4,096 would be accepted. So short a training reaches more or less with
    # how a processor rounds.
    rate = accepted(Eagle3(head, 3), plain)
    assert rate > 0.005

    written = text.read_bytes()
    found = run_command(BLOCK, block, "--steps", "24", *once)
    check_short_training(block, found, "3 lanes, 3 drafts")
    assert text.read_bytes() == written
    assert found["own_tokens"] == metrics["own_tokens"] == 4 * 129
    rate = accepted(DFlash(block, 3), plain)
    assert rate > 0.005

    message = r"has 4 windows of 128 tokens that the target wrote in; --sequence is 96, --own-sh"
    with pytest.raises(ValueError, match=message):
        run_command(BLOCK, block, "--steps", "1", "--sequence", "96", *once)
    with pytest.raises(ValueError, match=r"is text of target [0-9a-f]{12}, this is abc"):
        Text.load(text, "abc", Settings(device="cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("main", [EAGLE3, BLOCK])
def test_a_training_s_step_is_captured(
    tmp_path: Path, main: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(main, tmp_path, "--steps", "8", "--device", "cuda")
    assert "no CUDA graph" not in capsys.readouterr().out


def test_both_drafters_are_small_enough_to_be_packaged() -> None:
    shape = DemoConfig()
    drafters: list[DemoDrafter] = [
        Eagle3Head(HeadConfig(), shape), BlockDrafter(BlockConfig(), shape, mask=0)
    ]  # fmt: skip
    counts = [sum(each.numel() for each in drafter.parameters()) for drafter in drafters]
    assert 2 * sum(counts) < 6_000_000, counts


def test_a_dflash_checkpoint_opens(tmp_path: Path, plain: list[tuple[int, ...]]) -> None:
    config = BlockConfig(kind="dflash", depth=3, ffn_size=64)
    BlockDrafter(config, DemoConfig(), mask=5).save(tmp_path)
    accepted(DFlash(tmp_path, 3), plain)
