"""How near fp8 KV and rounded weights stay to float32, on a text and on random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphengine.profiles import accuracy
from graphengine.profiles.benchmark.shapes import Subject

OPTIONS = {"device": "cpu", "dtype": "float32", "max_batch": 2, "prefill_buckets": (48,)}
SMALL = OPTIONS | {"max_batch": 1, "prefill_buckets": (32,)}


# On 8 windows of 256 tokens: rms 0.10, 97 % and 62 to 75 %; of random weights rms 0.003 and 97 %.
@pytest.mark.parametrize(("shape", "rms", "best"), [("demo", 0.25, 0.9), ("tiny", 0.01, 0.85)])
def test_predictions_are_those_of_float32_but_for_little(
    shape: str, rms: float, best: float
) -> None:
    subject = Subject.of_shape(shape)
    plain, *fp8 = accuracy.measure(subject, "kv", 48, OPTIONS, prompts=2, new_tokens=8)
    assert (plain.kind, plain.rms, plain.best, plain.tokens) == ("dtype", 0.0, 1.0, 1.0)
    assert [each.kind for each in fp8] == ["fp8", "fp8 calibrated"]
    assert fp8[0].rms != fp8[1].rms, "the calibration changed nothing"
    for each in fp8:
        assert 0 < each.rms < rms and each.rms <= each.most and each.best > best
        assert each.nll == pytest.approx(plain.nll, abs=0.05) and 0 < each.tokens <= 1


def test_fewer_bits_are_further_from_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "ROUNDED_KINDS", ("int4", "int8"))
    found = accuracy.measure(
        Subject.of_shape("demo"), "weights", 32, SMALL, prompts=1, new_tokens=4
    )
    plain, *rounded = found
    assert (plain.kind, plain.rms, plain.best, plain.tokens) == ("dtype", 0.0, 1.0, 1.0)
    assert plain.per_step is not None and 1 <= plain.per_step <= 4
    names = [f"{kind}{head}" for kind in ("int4", "int8") for head in ("", ", lm_head")]
    assert [each.kind for each in rounded] == names
    rms = {each.kind: each.rms for each in rounded}
    assert 0 < rms["int8"] < rms["int4"] < 1 and len(set(rms.values())) == 4
    for each in rounded:
        assert (
            each.bits is not None
            and plain.bits is not None
            and each.per_step is not None
            and each.per_step >= 1
        )
        assert each.bits == pytest.approx(plain.bits * each.nll / plain.nll)
        assert each.nll == pytest.approx(plain.nll, abs=0.4) and 0 < each.tokens <= 1


def test_the_command_prints_and_keeps_the_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "kv.json"
    sizes = ["--context", "12", "--prompts", "1", "--new-tokens", "3"]
    accuracy.main(["--of", "kv", "--shape", "tiny", "--device", "cpu", *sizes, "--out", str(file)])
    header, *lines = capsys.readouterr().out.splitlines()
    assert (
        header.split() == ["kind", "nll", "bits", "rms", "most", "best", "tokens", "per", "step"]
        and len(lines) == 3
    )
    made = json.loads(file.read_text())
    assert made["subject"] == "tiny" and made["environment"] and len(made["figures"]) == 3


def test_windows_of_two_tokens_are_measured() -> None:
    subject = Subject.of_shape("tiny")
    plain, *_ = accuracy.measure(subject, "kv", 2, OPTIONS, prompts=1, new_tokens=1)
    assert (plain.rms, plain.best) == (0.0, 1.0) and plain.nll > 0
    assert plain.bits is None and plain.per_step is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Of a window's tokens the first is not predicted.
        (["--context", "1"], "context=1 must be at least 2"),
        (["--new-tokens", "0"], "new_tokens=0 must be at least 1"),
        (["--prompts", "0"], "prompts=0 must be at least 1"),
        (["--context", "400", "--prompts", "9999"], "10000 windows of 400 tokens are more than"),
    ],
)
def test_wrong_sizes_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        accuracy.main(["--of", "kv", "--device", "cpu", *arguments])
    assert message in capsys.readouterr().err
