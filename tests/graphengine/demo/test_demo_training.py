"""The demo's training command end to end on the CPU, tiny, with transformers as the oracle."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from demo_training import corpus as corpora
from demo_training import train as training
from demo_training.checkpoint import load_model
from demo_training.corpus import END_OF_TEXT, Corpus, Document, Source
from demo_training.evaluate import evaluate, windows
from demo_training.model import DEPTH, DemoConfig, DemoModel, Rope, training_losses
from demo_training.optimiser import newton_schulz
from demo_training.tokenizer import load_tokenizer
from demo_training.train import main, rate_factor
from graphengine import demo
from timelines.fake_clock import Clock

TEXT = "def number(n: int) -> int:\n    return n + 1\n\n\nclass Émile:\n    pass  # ½ 日本\n"
TINY = DemoConfig(
    vocab_size=300, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_size=48
)


def random_model() -> DemoModel:
    torch.manual_seed(0)
    model = DemoModel(TINY).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The shapes are tiny: on a busy machine threads would mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_command(folder: Path, clock: Clock, *options: str) -> dict[str, Any]:
    """The metrics of a tiny training whose time is the clock's."""
    source = Path(corpora.__file__).parent
    files = [str(source / f"{name}.py") for name in ("corpus", "evaluate", "model", "train")]
    tiny = "--layers 2 --hidden 32 --sequence 64 --batch 4 --anchors 16 --vocab 400"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "time", clock.module)
        main(["--out", str(folder), *tiny.split(), *options, "--device", "cpu", "--corpus", *files])
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return metrics


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    # A day a look: steps are counted, and how long they take is nothing to them.
    metrics = run_command(folder, Clock(per_call=86400.0), "--steps", "20")
    assert metrics["steps"] == 20 and metrics["curve"][-1]["step"] == 20
    return folder


def test_training_for_a_time_ends_at_its_end(tmp_path: Path) -> None:
    """Also in a process that has lived for long: the limit counts from the command's beginning."""
    clock = Clock(per_call=0.125)
    clock.now = 1e6
    metrics = run_command(tmp_path, clock, "--seconds", "4")
    # A step looks twice; each of up to 14 validations logs once.
    assert 4 / 0.25 - 14 <= metrics["steps"] <= 4 / 0.25
    assert metrics["curve"][-1]["step"] == metrics["steps"] and metrics["seconds"] >= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "0"), "--steps 0: at least one is needed"),
        (("--limit", "44"), r"no time left to train: -1\.0 s after compiling"),
    ],
)
def test_a_training_without_a_step_is_refused(
    tmp_path: Path, options: tuple[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_command(tmp_path, Clock(), *options)


def test_checkpoint_files_and_keys(checkpoint: Path) -> None:
    names = {path.name for path in checkpoint.iterdir()}
    assert names == {
        "MODEL_CARD.md",
        "config.json",
        "generation_config.json",
        "metrics.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    weights = load_file(checkpoint / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights
    outside = {"fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"}
    mtp = {name for name in weights if name.startswith("mtp.")}
    layer = {name.replace("model.layers.0.", "mtp.layers.0.") for name in weights if ".0." in name}
    assert mtp == {f"mtp.{name}.weight" for name in outside} | layer
    card = (checkpoint / "MODEL_CARD.md").read_text(encoding="utf-8")
    metrics = json.loads((checkpoint / "metrics.json").read_text(encoding="utf-8"))
    assert f"{metrics['heldout']['bits_per_byte']:.4g} bits per byte" in card
    assert str(checkpoint.parent) not in card + json.dumps(metrics)
    assert metrics["steps"] > 0 and 0 < metrics["heldout"]["bits_per_byte"] < 8


def test_transformers_loads_the_same_model(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert type(oracle).__name__ == "Qwen3ForCausalLM"
    model = load_model(checkpoint)
    tokens = torch.randint(model.config.vocab_size, (2, 40))
    with torch.no_grad():
        expected = oracle(tokens).logits
        found = model.logits(model.hidden(tokens))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_transformers_loads_the_same_tokenizer(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    text = TEXT + END_OF_TEXT + "  \n\n\t é e\u0301 " + TEXT
    ids = tokenizer.encode(text).ids
    assert oracle(text)["input_ids"] == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert oracle.eos_token_id == 0


def test_evaluation_of_a_text(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(END_OF_TEXT.join([TEXT * 3, TEXT]), encoding="utf-8")
    metrics = evaluate(checkpoint, path, device="cpu")
    assert metrics["bytes"] == 4 * len(TEXT.encode())
    assert metrics["bits_per_byte"] == pytest.approx(
        metrics["loss"] * metrics["tokens"] / math.log(2) / metrics["bytes"], rel=1e-3
    )
    assert len(metrics["mtp"]["agrees_with_target"]) == DEPTH


def draft_one_by_one(model: DemoModel, tokens: torch.Tensor, anchor: int) -> list[torch.Tensor]:
    """The engine's drafter: step 0 over the text so far, then a row at a time onto its cache."""
    layer, rows = model.mtp.layers[0], anchor + 1
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache.append((k, v))
        keys = torch.cat([key for key, _ in cache], dim=2).repeat_interleave(2, dim=1)
        values = torch.cat([value for _, value in cache], dim=2).repeat_interleave(2, dim=1)
        scores = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:]).triu(1 + scores.shape[-1] - scores.shape[-2]).bool()
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values

    h = model.hidden(tokens[:, :rows])
    outputs = []
    for step in range(DEPTH):
        count = rows if step == 0 else 1
        first = 0 if step == 0 else anchor + step
        positions = torch.arange(first, first + count)
        x = model.mtp.fuse(model.embed(tokens[:, positions + 1]), h)
        y, _, _ = layer(x, Rope.of(model.config, positions), attend)
        h = model.mtp.norm(y)[:, -1:]
        outputs.append(h[:, 0])
    return outputs


def test_drafts_are_those_of_step_by_step_inference() -> None:
    model = random_model()
    tokens = torch.randint(TINY.vocab_size, (2, 21))
    anchors = torch.tensor([0, 3, 4, 16])
    with torch.no_grad():
        found = model.drafts(model.hidden(tokens[:, :-1]), tokens[:, 1:], anchors)
        for index, anchor in enumerate(anchors.tolist()):
            expected = draft_one_by_one(model, tokens, anchor)
            for step in range(DEPTH):
                torch.testing.assert_close(found[step][:, index], expected[step])


def test_every_parameter_gets_a_gradient() -> None:
    model = random_model()
    windows_of_text = torch.randint(TINY.vocab_size, (2, 17))
    loss, parts = training_losses(model, windows_of_text, torch.tensor([0, 5, 12]))
    assert parts.shape == (1 + DEPTH,)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_newton_schulz_is_about_orthogonal() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(3, 16, 40)))
    assert values.min() > 0.5 and values.max() < 1.3


def test_windows_score_each_token_once() -> None:
    tokens = torch.arange(1, 24)
    targets = [t for piece in windows(tokens, length=5, batch=3) for t in piece[:, 1:].flatten()]
    assert [int(t) for t in targets] == list(range(2, 24))


def test_rate_warms_up_and_ends_at_zero() -> None:
    assert rate_factor(0.0) == 0.0 and rate_factor(1.0) == 0.0
    assert rate_factor(0.02) == pytest.approx(1.0)
    assert rate_factor(0.51) == pytest.approx(0.5)


def small_corpus(count: int) -> Corpus:
    documents = [Document(path=f"stdlib/{i}.py", text=f"{TEXT}# {i}\n") for i in range(count)]
    source = Source(name="stdlib", version="3", licence="PSF-2.0", files=count, size=1)
    return Corpus(sources=(source,), documents=tuple(documents))


def test_split_is_whole_and_stable() -> None:
    documents = small_corpus(2000).documents
    parts = corpora.split(documents)
    together = [*parts.train, *parts.validation, *parts.heldout]
    assert {d.path for d in together} == {d.path for d in documents}
    assert len(together) == len(documents)
    assert 0.01 < len(parts.heldout) / len(documents) < 0.03
    fewer = corpora.split(documents[:1500])
    assert {d.path for d in fewer.heldout} <= {d.path for d in parts.heldout}
    with pytest.raises(ValueError, match="2 documents"):
        corpora.split(documents[:2])


def test_archive_round_trip(tmp_path: Path) -> None:
    corpus = small_corpus(4)
    corpora.save(corpus, tmp_path / "corpus.jsonl.xz")
    assert corpora.load([tmp_path / "corpus.jsonl.xz"]) == corpus


def test_shipped_sample_is_from_the_held_out_files() -> None:
    sample = Path(demo.__file__).with_name("heldout.txt").read_text(encoding="utf-8")
    assert len(sample.encode()) <= corpora.HELDOUT_BYTES
    assert sample.startswith("# Notice") and sample.count(END_OF_TEXT) >= 5
