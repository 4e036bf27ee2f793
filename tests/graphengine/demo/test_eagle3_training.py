"""Training of the demo model's EAGLE3 head on the CPU, short: it drafts in an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.eagle3_heads import HEAD_DIM, THETA, Head, Shape
from graphengine import Eagle3, Engine, SamplingParams
from graphengine.demo import checkpoint_path
from graphengine.demo import corpus as corpora
from graphengine.demo import train_eagle3 as training
from graphengine.demo.eagle3 import Eagle3Head, HeadConfig, head_json, read_target, save_head
from graphengine.demo.model import DemoConfig, DemoModel
from graphengine.demo.own_text import continued, own_text
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


def random_pair(drafted: int) -> tuple[DemoModel, Eagle3Head]:
    torch.manual_seed(0)
    target = DemoModel(TINY).eval().requires_grad_(False)
    ids = torch.randperm(TINY.vocab_size)[:drafted].sort().values if drafted else None
    config = HeadConfig(layers=(1, 3), ffn_size=40, depth=4, drafted=drafted)
    head = Eagle3Head(config, TINY, ids)
    for parameter in (*target.parameters(), *head.parameters()):
        parameter.data += 0.1 * torch.randn_like(parameter)
    return target, head


def run_command(folder: Path, *options: str) -> dict[str, Any]:
    files = [str(SOURCES / f"{name}.py") for name in ("corpus", "evaluate", "model", "train")]
    small = "--batch 2 --sequence 128 --anchors 48 --own-windows 4 --depth 3 --heldout-tokens 400"
    whole = ["--out", str(folder), *small.split(), "--device", "cpu", "--corpus", *files, *options]
    training.main(whole)
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return metrics


@torch.no_grad()
@pytest.mark.parametrize("drafted", [0, 23], ids=["shared lm_head", "own lm_head"])
def test_unrolled_runs_are_those_of_a_head_run_by_run(tmp_path: Path, drafted: int) -> None:
    target, head = random_pair(drafted)
    window, anchors = torch.randint(TINY.vocab_size, (1, 19)), [0, 5, 13]
    _, streams, following = read_target(head, target, window)
    found = head.outputs(following, streams, torch.tensor(anchors))
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
            logits = head.logits(found[run][0, index], target)
            torch.testing.assert_close(logits, plain.logits(output), atol=2e-3, rtol=2e-3)

    save_head(tmp_path, head)
    stored = load_file(tmp_path / "model.safetensors")
    assert {"fc.weight", "midlayer.hidden_norm.weight", "norm.weight"} < stored.keys()
    if head.ids is None:
        assert not {"lm_head.weight", "d2t", "t2d"} & stored.keys()
    else:
        assert stored["lm_head.weight"].shape == (drafted, TINY.hidden_size)
        assert torch.equal(stored["d2t"] + torch.arange(drafted), head.ids)
        assert torch.equal(stored["t2d"].nonzero().flatten(), head.ids)


def test_own_stretches_are_what_the_target_says_after_what_stands_before() -> None:
    target, _ = random_pair(0)
    text = torch.randint(TINY.vocab_size, (2, 22))
    found = continued(target, text, torch.zeros(2), stretch=4)
    with torch.no_grad():
        greedy = target.logits(target.hidden(found)).argmax(-1)
    for position in range(22):
        wanted = greedy[:, position - 1] if position // 4 % 2 else text[:, position]
        assert torch.equal(found[:, position], wanted), position
    warm = continued(target, text, torch.ones(2), stretch=4)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "0"), "--steps 0: at least one is needed"),
        (("--minutes", "0.1"), r"no time left to train: -\d+\.\d s after compiling"),
        (("--layers", "0,3"), r"layers \[0, 3\] must ascend, from 1 to at most 6"),
        (("--layers", "1,7"), r"layers \[1, 7\] must ascend, from 1 to at most 6"),
        (("--draft-vocab", "5000"), "a draft vocabulary of 5000 tokens, the target has 4096"),
        (("--depth", "0"), "depth 0: at least one run is needed"),
        (("--own-share", "1.5"), r"--own-share 1\.5 must be in \[0, 1\]"),
        (("--sequence", "3"), "windows of 3 tokens have no room for 3 runs"),
    ],
)
def test_a_training_that_cannot_be_is_refused(
    tmp_path: Path, options: tuple[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_command(tmp_path, "--own-seconds", "0", *options)


def test_a_short_training_gives_a_head_whose_drafts_are_accepted(tmp_path: Path) -> None:
    metrics = run_command(tmp_path, "--steps", "40", "--draft-vocab", "1024")
    first, last = metrics["curve"][0], metrics["curve"][-1]
    assert (first[0], last[0]) == (1, 40) == (1, metrics["steps"])
    assert all(after < before - 1 for before, after in zip(first[1:], last[1:], strict=True))
    assert {path.name for path in tmp_path.iterdir()} == {
        "MODEL_CARD.md", "config.json", "metrics.json", "model.safetensors",
    }  # fmt: skip
    card = (tmp_path / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "$" not in card and str(tmp_path) not in card and "1024 most frequent tokens" in card
    assert f"{metrics['checkpoint_bytes']} bytes" in card

    text = (SOURCES / "train.py").read_text(encoding="utf-8")
    prompts = [
        Tokenizer.from_directory(checkpoint_path()).encode(text)[at : at + 24] for at in (9, 500)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "max_batch": 2, "max_seq_len": 96,
    }  # fmt: skip
    with Engine.from_pretrained(checkpoint_path(), **options, row_family="dot") as engine:
        plain = [result.token_ids for result in engine.generate(prompts, params)]
    with Engine.from_pretrained(
        checkpoint_path(), **options, speculative=Eagle3(tmp_path, 3)
    ) as engine:
        assert [result.token_ids for result in engine.generate(prompts, params)] == plain
        rate = engine.acceptance.as_dict()["rates"][0]
    # By chance one draft of 4,096 would be accepted.
    assert rate > 0.03
