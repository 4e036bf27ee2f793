"""The command line, drafts and updates with a GGUF file: some of the demo's layers in Q8_0."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch

from checkpoints.few_layers import few_layers
from graphengine import DraftModel, Engine, SamplingParams
from graphengine.cli.main import main
from graphengine.demo import checkpoint_path

pytest.importorskip("gguf")

from checkpoints.gguf_files import Written, vocabulary, written

PROMPT = "def fib(n):"
TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The file, with the demo's tokenizer, and a folder with the same values and tokenizer."""
    folder = tmp_path_factory.mktemp("demo")
    library = tokenizers.Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    add = vocabulary(
        library,
        pre="qwen2",
        roles={"eos": "<|endoftext|>"},
        more={"ggml.add_bos_token": False, "chat_template": TEMPLATE},
    )
    files = written(Path(few_layers()), folder, "Q8_0", tokenizer=add)
    for file in checkpoint_path().glob("tokenizer*.json"):
        shutil.copy(file, files.plain)
    return files


def call(capsys: pytest.CaptureFixture[str], command: str, file: Path, *arguments: str) -> str:
    sizes = ("--device", "cpu", "--max-batch", "2", "--max-seq-len", "96")
    capsys.readouterr()
    assert main([command, "--checkpoint", str(file), *sizes, *arguments]) == 0
    return capsys.readouterr().out


def open_engine(path: Path, **options: object) -> Engine:
    sizes = {"device": "cpu", "dtype": "float32", "max_batch": 2, "max_seq_len": 96}
    return Engine.from_pretrained(path, **(sizes | options))  # type: ignore[arg-type]


def test_generate_chat_and_info(
    demo: Written, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(demo.plain) as engine:
        expected = engine.generate([PROMPT, "# user: hi\n# assistant:"], GREEDY)
    greedy = ("--temperature", "0", "--max-tokens", "12")
    text = call(capsys, "generate", demo.file, "--prompt", PROMPT, *greedy)
    assert text.startswith(expected[0].text)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    reply = json.loads(call(capsys, "chat", demo.file, "--json", *greedy).splitlines()[0])
    assert reply["text"] == expected[1].text
    told = json.loads(call(capsys, "info", demo.file, "--json"))
    assert "Qwen3ForCausalLM" in json.dumps(told)


def test_a_draft_model_from_a_file(demo: Written) -> None:
    with open_engine(demo.plain) as engine:
        expected = engine.generate(PROMPT, GREEDY).token_ids
    with open_engine(demo.plain, speculative=DraftModel(demo.file, k=3)) as engine:
        assert engine.generate(PROMPT, GREEDY).token_ids == expected
        assert engine.acceptance.accepted == engine.acceptance.proposed > 0


def test_updates_of_weights(demo: Written, tmp_path: Path) -> None:
    with (
        open_engine(demo.file) as engine,
        pytest.raises(ValueError, match=r"quantised"),
    ):
        engine.update_weights({"model.norm.weight": torch.ones(256)})
    library = tokenizers.Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    add = vocabulary(library, pre="qwen2")
    wide = written(Path(few_layers()), tmp_path, "TQ2_0", tokenizer=add)
    with open_engine(wide.file) as engine:
        before = engine.generate(PROMPT, GREEDY).token_ids
        engine.update_weights({"model.norm.weight": torch.zeros(256)})
        assert engine.generate(PROMPT, GREEDY).token_ids != before
        engine.update_weights(wide.file)
        assert engine.generate(PROMPT, GREEDY).token_ids == before


def test_quantize_wants_a_folder(
    demo: Written, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["quantize", str(demo.file), str(tmp_path / "out"), "--kind", "int8"]) == 2
    assert "is a GGUF file" in capsys.readouterr().err
