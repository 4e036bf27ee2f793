"""The checkpoint in the box: that it is what its card says, and that the engine decodes it."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from demo_training.corpus import END_OF_TEXT
from demo_training.evaluate import evaluate
from extent import extent
from graphengine import Engine, SamplingParams
from graphengine.demo import checkpoint_path, heldout_text
from graphengine.text.tokenizer import Tokenizer

PROMPT_LENGTHS = (1, 5, 16, 33, 80, 150)


def read_json(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((checkpoint_path() / name).read_text(encoding="utf-8"))
    return value


def heldout_documents() -> list[str]:
    """The held-out files; the first part says where they come from."""
    return heldout_text().split(END_OF_TEXT)[1:]


def heldout_prompts() -> list[list[int]]:
    """Pieces of held-out files, in tokens."""
    tokenizer = Tokenizer.from_directory(checkpoint_path())
    dice = random.Random(0)
    documents = [tokenizer.encode(text) for text in heldout_documents()]
    prompts = []
    for length in PROMPT_LENGTHS:
        document = dice.choice([tokens for tokens in documents if len(tokens) > length])
        start = dice.randrange(len(document) - length)
        prompts.append(document[start : start + length])
    return prompts


def test_transformers_loads_the_main_model() -> None:
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint_path(), dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert all(key.startswith("mtp.") for key in info["unexpected_keys"])
    assert not info["missing_keys"] and not info["mismatched_keys"]
    config = model.config
    assert config.tie_word_embeddings and config.vocab_size == 4096
    # Parameters of the main model; a tied embedding counts once.
    assert 5e6 < sum(parameter.numel() for parameter in model.parameters()) < 9e6


def test_transformers_reads_the_same_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(checkpoint_path())
    tokenizer = Tokenizer.from_directory(checkpoint_path())
    assert tokenizer.vocab_size == 4096
    assert tokenizer.eos_token_id == oracle.eos_token_id == read_json("config.json")["eos_token_id"]
    for text in heldout_documents():
        ids = tokenizer.encode(text)
        assert oracle(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("prefill_buckets", [(16, 256), (32,)], ids=["whole", "chunked"])
def test_logits_and_greedy_tokens_are_transformers(
    demo_oracle: Any,
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    prefill_buckets: tuple[int, ...],
) -> None:
    with Engine.from_pretrained(
        checkpoint_path(),
        device=device,
        dtype="float32",
        max_batch=2,
        max_seq_len=256,
        prefill_buckets=prefill_buckets,
        lookahead=0,
    ) as engine:
        for prompt in heldout_prompts():
            seen = eager(engine)
            tokens = extent(8, 64)
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            result = engine.generate(prompt, params)
            assert len(result.token_ids) == tokens
            demo_oracle.assert_greedy(result)
            demo_oracle.assert_logits(result, seen)


def test_a_batch_of_heldout_prompts(demo_oracle: Any, device: str) -> None:
    """Several at once in captured graphs: every bucket, and rows that come and go."""
    with Engine.from_pretrained(
        checkpoint_path(), device=device, dtype="float32", max_batch=4, max_seq_len=256
    ) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        for result in engine.generate(heldout_prompts(), params):
            assert len(result.token_ids) == 16
            demo_oracle.assert_greedy(result)
        for rows in engine.memory.ladder.sizes:
            assert engine.counters[f"replays/decode/{rows}/fast"] > 0


def test_heldout_text_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "socket", offline)
    monkeypatch.setattr(socket, "getaddrinfo", offline)
    documents = heldout_documents()
    assert len(documents) >= 5
    assert sum(map(len, documents)) > 20_000 and all(len(text) > 100 for text in documents)
    with Engine.from_pretrained(
        checkpoint_path(), device="cpu", max_batch=1, max_seq_len=64
    ) as engine:
        assert len(engine.generate(documents[0][:40]).token_ids) > 0


def test_the_weights_are_small_bfloat16_with_an_mtp_module() -> None:
    file = checkpoint_path() / "model.safetensors"
    assert file.stat().st_size <= 16 * 2**20
    config = read_json("config.json")
    hidden, ffn, head_dim = (
        config[key] for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
        "self_attn.q_proj": [queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "self_attn.q_norm": [head_dim],
        "self_attn.k_norm": [head_dim],
        "mlp.gate_proj": [ffn, hidden],
        "mlp.up_proj": [ffn, hidden],
        "mlp.down_proj": [hidden, ffn],
    }
    expected = {
        "mtp.fc": [hidden, 2 * hidden],
        "mtp.pre_fc_norm_embedding": [hidden],
        "mtp.pre_fc_norm_hidden": [hidden],
        "mtp.norm": [hidden],
        "model.embed_tokens": [config["vocab_size"], hidden],
        "model.norm": [hidden],
    }
    for prefix in (
        "mtp.layers.0",
        *(f"model.layers.{i}" for i in range(config["num_hidden_layers"])),
    ):
        expected |= {f"{prefix}.{name}": shape for name, shape in layer.items()}
    with safe_open(file, framework="pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        assert {tensors.get_slice(name).get_dtype() for name in shapes} == {"BF16"}
        assert all(bool(tensors.get_tensor(name).isfinite().all()) for name in shapes)
    assert shapes == {f"{name}.weight": shape for name, shape in expected.items()}
    parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    metrics = read_json("metrics.json")
    assert parameters == metrics["parameters"]
    assert file.stat().st_size == metrics["checkpoint_bytes"]


def test_the_card_names_licences_and_numbers() -> None:
    card = (checkpoint_path() / "MODEL_CARD.md").read_text(encoding="utf-8")
    metrics = read_json("metrics.json")
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "PSF-2.0" in card and "Python Software Foundation" in " ".join(card.split())
    for licence in ("MIT", "BSD-3-Clause", "Apache-2.0"):
        assert licence in card
    rows = re.findall(
        r"^\| (\S+) \| [\d.+a-z]+ \| ([^|]+) \| \d+ \| [\d.]+ \|$", card, re.MULTILINE
    )
    assert len(rows) >= 10
    permissive = ("MIT", "BSD-", "Apache-2.0", "PSF-2.0")
    assert all(licence.startswith(permissive) for _, licence in rows), rows
    assert str(metrics["parameters"]) in card
    assert str(metrics["checkpoint_bytes"]) in card
    assert f"{metrics['heldout']['bits_per_byte']:.4g} bits per byte" in card
    for depth, share in enumerate(metrics["heldout"]["mtp"]["agrees_with_target"], start=1):
        assert f"| {depth} | {100 * share:.1f} % |" in card
    # The held-out text is the PSF's: its licence lies beside it.
    licence = (checkpoint_path().parent / "PSF-LICENSE.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in licence.upper()


def test_a_sample_gives_about_the_reported_metrics(tmp_path: Path) -> None:
    """A few kilobytes vary: the margins are wide."""
    sample = tmp_path / "sample.txt"
    sample.write_text(END_OF_TEXT.join(text[:2500] for text in heldout_documents()[:6]))
    found, reported = evaluate(checkpoint_path(), sample, device="cpu"), read_json("metrics.json")
    reported = reported["heldout"]
    assert found["bytes"] > 9000
    assert 0.3 < found["bits_per_byte"] < 1.0
    assert abs(found["bits_per_byte"] - reported["bits_per_byte"]) < 0.3
    shares = zip(
        found["mtp"]["agrees_with_target"], reported["mtp"]["agrees_with_target"], strict=True
    )
    for share, whole in shares:
        assert abs(share - whole) < 0.12
    first, _, third = reported["mtp"]["agrees_with_target"]
    assert first >= third > 0.5, "deep enough for more than one accepted draft"
