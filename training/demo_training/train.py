"""Trains the demo model for a time and writes its checkpoint. See MODEL_CARD.md in the result.

python -m demo_training.train --out DIR [--seconds 480 | --steps N] [--corpus corpus.jsonl.xz]
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from demo_training import corpus as corpora
from demo_training.checkpoint import load_model, save_card, save_model
from demo_training.evaluate import default_batch, mean_loss, measure
from demo_training.logs import log
from demo_training.model import DEPTH, MTP_WEIGHTS, DemoConfig, DemoModel, training_losses
from demo_training.optimiser import Optimiser
from demo_training.tokenizer import encode, train_tokenizer

WARMUP = 0.02
# Parts of the run after which the validation files are evaluated; the best weights are kept.
VALIDATE_AT = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97, 1.0)
VALIDATION_TOKENS = 1 << 18
# Seconds of --limit kept for the last validation, the held-out metrics and the export.
RESERVE = 45.0

# Takes a model and its inputs; returns the loss to minimise and its parts.
Losses = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`seconds` of training, compilation included; `limit` for the whole command after imports.

    With `steps`, training takes that many steps instead, however long they take. `anchors` is the
    number of positions of a window at which the MTP module is trained.
    """

    seconds: float = 480.0
    limit: float = 550.0
    steps: int | None = None
    batch: int = 64
    anchors: int = 256
    muon_rate: float = 0.007
    adam_rate: float = 0.004
    weight_decay: float = 0.1
    dropout: float = 0.05
    seed: int = 1
    log_every: float = 5.0
    compiled: bool = True
    device: str = "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Encoded parts of the corpus on the training device, int32 [tokens]."""

    train: torch.Tensor
    validation: torch.Tensor
    heldout: torch.Tensor
    heldout_bytes: int


@dataclass(slots=True)
class Progress:
    """The state of a run; `best` holds weights on the device."""

    step: int = 0
    best_loss: float = float("inf")
    best: dict[str, torch.Tensor] | None = None


def rate_factor(part: float) -> float:
    """Learning rate relative to its peak after this part of the run: warm-up, then linear to 0."""
    return max(0.0, min(part / WARMUP, (1 - part) / (1 - WARMUP)))


def random_windows(tokens: torch.Tensor, *, batch: int, length: int) -> torch.Tensor:
    """int64 [batch, length + 1] from any offsets, across documents."""
    starts = torch.randint(len(tokens) - length, (batch, 1), device=tokens.device)
    window = torch.arange(length + 1, device=tokens.device)
    return tokens[starts + window].long()


def random_anchors(
    count: int, *, length: int, device: torch.device, depth: int = DEPTH
) -> torch.Tensor:
    """Distinct sorted positions of a window that leave room for a draft module's steps."""
    return torch.randperm(length - depth, device=device)[:count].sort().values


def compiled_losses(plain: Losses, model: nn.Module, *fed: object) -> Losses:
    """The compiled loss, tried by one run forward and backward, or the plain one if that fails."""
    compiled: Losses = torch.compile(plain, dynamic=False)
    try:
        compiled(model, *fed)[0].backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # any failure of the compiler; the plain step still works
        log(f"torch.compile failed, going on without: {type(error).__name__}: {str(error)[:500]}")
        return plain
    finally:
        model.zero_grad(set_to_none=True)
    log("compiled")
    return compiled


class Trainer:
    """One run of `fit`; `export` is called with the weights each time they are the best so far."""

    def __init__(
        self,
        model: DemoModel,
        data: Data,
        settings: Settings,
        export: Callable[[dict[str, torch.Tensor]], None],
    ) -> None:
        self.model, self.data, self.settings, self.export = model, data, settings, export
        self.length = model.config.max_positions
        self.device = data.train.device
        self.optimiser = Optimiser(model, weight_decay=settings.weight_decay)
        self.progress = Progress()
        self.curve: list[dict[str, float]] = []

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        settings, length = self.settings, self.length
        windows = random_windows(self.data.train, batch=settings.batch, length=length)
        anchors = random_anchors(settings.anchors, length=length, device=self.device)
        return windows, anchors

    def step(self, losses_of: Losses, part: float) -> torch.Tensor:
        loss, parts = losses_of(self.model, *self.batch())
        loss.backward()  # type: ignore[no-untyped-call]
        factor = rate_factor(part)
        self.optimiser.step(
            muon_rate=self.settings.muon_rate * factor, adam_rate=self.settings.adam_rate * factor
        )
        self.progress.step += 1
        return parts

    def report(self, losses: torch.Tensor, part: float, began: float) -> None:
        """Logs, and ends the run if the loss is not a number. Waits for the device."""
        values = losses.tolist()
        speed = self.progress.step * self.settings.batch * self.length / (time.monotonic() - began)
        text = " ".join(f"{value:.3f}" for value in values)
        log(f"{part:6.1%}  step {self.progress.step:6}  losses {text}  {speed / 1e6:.3f} Mtok/s")
        if not all(value == value and abs(value) < float("inf") for value in values):
            raise FloatingPointError(f"losses {text} at step {self.progress.step}: stopped")

    def validate(self, losses: torch.Tensor, part: float) -> None:
        """Evaluates the validation files; keeps and exports the weights if they are the best."""
        self.model.eval()
        loss = mean_loss(
            self.model, self.data.validation[:VALIDATION_TOKENS], batch=default_batch(self.device)
        )
        self.model.train()
        train = float(losses[0])
        log(f"{part:6.1%}  step {self.progress.step:6}  training {train:.4f} validation {loss:.4f}")
        self.curve.append(
            {"step": self.progress.step, "training": round(train, 4), "validation": round(loss, 4)}
        )
        if loss < self.progress.best_loss:
            self.progress.best_loss = loss
            state = self.model.state_dict()
            self.progress.best = {name: tensor.clone() for name, tensor in state.items()}
            self.export(self.progress.best)

    def fit(self, deadline: float) -> None:
        """Trains until `deadline` (time.monotonic); the schedule spans the time after compiling.

        With `settings.steps`, training and schedule span that many steps; there is no deadline.
        """
        self.model.train()
        losses_of: Losses = training_losses
        if self.settings.compiled:
            losses_of = compiled_losses(training_losses, self.model, *self.batch())
        began, steps = time.monotonic(), self.settings.steps
        if steps is None and deadline <= began:
            raise ValueError(f"no time left to train: {deadline - began:.1f} s after compiling")
        checks = list(VALIDATE_AT)
        running, logged = torch.zeros(1 + DEPTH, device=self.device), began
        while checks:
            if steps is None:
                part = min(1.0, (time.monotonic() - began) / (deadline - began))
            else:
                part = self.progress.step / steps
            if part < 1.0:
                losses = self.step(losses_of, part)
                running.lerp_(losses, 1.0 if self.progress.step == 1 else 0.02)
            if time.monotonic() - logged >= self.settings.log_every:
                self.report(running, part, began)
                logged = time.monotonic()
            if part >= checks[0]:
                checks = [check for check in checks if check > part]
                self.validate(running, part)


def prepare(paths: Sequence[Path], stdlib_only: bool) -> tuple[corpora.Corpus, corpora.Split]:
    corpus = corpora.load(paths) if paths else corpora.collect(stdlib_only=stdlib_only)
    parts = corpora.split(corpus.documents)
    size = sum(source.size for source in corpus.sources)
    log(f"corpus: {len(corpus.documents)} documents, {size / 1e6:.1f} MB")
    if not any("/test/" in document.path for document in corpus.documents):
        log("corpus: no test package found; a carried --corpus would hold more text")
    return corpus, parts


def encode_parts(tokenizer: Tokenizer, parts: corpora.Split, *, length: int, device: str) -> Data:
    # Shuffled, so that two documents in one window are unrelated in training too.
    order = torch.randperm(len(parts.train), generator=torch.Generator().manual_seed(0)).tolist()
    train = encode(tokenizer, [parts.train[index] for index in order])
    if len(train) < length + 1:
        raise ValueError(f"{len(train)} tokens of training text, a window needs {length + 1}")
    return Data(
        train=train.to(device),
        validation=encode(tokenizer, parts.validation).to(device),
        heldout=encode(tokenizer, parts.heldout).to(device),
        heldout_bytes=sum(len(document.text.encode()) for document in parts.heldout),
    )


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def train(
    out: Path, config: DemoConfig, settings: Settings, paths: Sequence[Path], stdlib_only: bool
) -> dict[str, Any]:
    """The whole command; returns the contents of metrics.json."""
    if settings.steps is not None and settings.steps < 1:
        raise ValueError(f"--steps {settings.steps}: at least one is needed")
    started = time.monotonic()
    torch.manual_seed(settings.seed)
    corpus, parts = prepare(paths, stdlib_only)
    tokenizer = train_tokenizer(parts.train, vocab_size=config.vocab_size)
    log(f"tokenizer: {tokenizer.get_vocab_size()} ids")
    data = encode_parts(tokenizer, parts, length=config.max_positions, device=settings.device)
    log(
        f"tokens: {len(data.train)} training, {len(data.validation)} validation,"
        f" {len(data.heldout)} held out"
    )
    dtype = torch.bfloat16 if settings.device.startswith("cuda") else torch.float32
    model = DemoModel(config, dropout=settings.dropout, dtype=dtype).to(settings.device)
    trainer = Trainer(
        model, data, settings, lambda weights: save_model(out, config, tokenizer, weights)
    )
    began = time.monotonic()
    trainer.fit(min(began + settings.seconds, started + settings.limit - RESERVE))
    seconds = time.monotonic() - began
    exported = load_model(out, device=settings.device)
    heldout = measure(
        exported, data.heldout, size=data.heldout_bytes, batch=default_batch(settings.device)
    )
    seen = trainer.progress.step * settings.batch * config.max_positions
    metrics = {
        "heldout": heldout,
        "heldout_files": len(parts.heldout),
        "heldout_familiar_lines": round(corpora.familiar_lines(parts), 4),
        "validation_loss": round(trainer.progress.best_loss, 4),
        "parameters": sum(parameter.numel() for parameter in exported.parameters()),
        "checkpoint_bytes": (out / "model.safetensors").stat().st_size,
        "corpus_files": len(corpus.documents),
        "corpus_bytes": sum(source.size for source in corpus.sources),
        "training_tokens": len(data.train),
        "steps": trainer.progress.step,
        "tokens_seen": seen,
        "epochs": round(seen / len(data.train), 2),
        "seconds": round(seconds, 1),
        "device": device_name(settings.device),
        "torch": torch.__version__,
        "settings": asdict(settings),
        "mtp_weights": MTP_WEIGHTS,
        "curve": trainer.curve,
    }
    save_card(out, metrics, corpus.sources)
    return metrics


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo_training.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults, shape = Settings(), DemoConfig()
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--corpus", type=Path, nargs="+", default=[], help="an archive, or text files"
    )
    parser.add_argument(
        "--stdlib-only",
        action="store_true",
        help="without --corpus, read only the standard library",
    )
    parser.add_argument(
        "--seconds", type=float, default=defaults.seconds, help="seconds of training"
    )
    parser.add_argument("--steps", type=int, help="training steps, instead of --seconds")
    parser.add_argument(
        "--limit", type=float, default=defaults.limit, help="time limit for everything, in seconds"
    )
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--batch", type=int, default=defaults.batch, help="windows per step")
    parser.add_argument("--anchors", type=int, default=defaults.anchors)
    parser.add_argument("--dropout", type=float, default=defaults.dropout)
    parser.add_argument("--weight-decay", type=float, default=defaults.weight_decay)
    parser.add_argument("--muon-rate", type=float, default=defaults.muon_rate)
    parser.add_argument("--adam-rate", type=float, default=defaults.adam_rate)
    parser.add_argument("--sequence", type=int, default=shape.max_positions)
    parser.add_argument("--vocab", type=int, default=shape.vocab_size)
    parser.add_argument("--hidden", type=int, default=shape.hidden_size)
    parser.add_argument("--layers", type=int, default=shape.layers)
    parser.add_argument("--ffn", type=int, default=0, help="default: three times --hidden")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    config = DemoConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        layers=options.layers,
        ffn_size=options.ffn or 3 * options.hidden,
        max_positions=options.sequence,
    )
    settings = Settings(
        seconds=options.seconds,
        limit=options.limit,
        steps=options.steps,
        batch=options.batch,
        anchors=options.anchors,
        muon_rate=options.muon_rate,
        adam_rate=options.adam_rate,
        weight_decay=options.weight_decay,
        dropout=options.dropout,
        seed=options.seed,
        compiled=options.device.startswith("cuda") and not options.no_compile,
        device=options.device,
    )
    metrics = train(options.out, config, settings, options.corpus, options.stdlib_only)
    heldout = metrics["heldout"]
    log(f"held out: {heldout['bits_per_byte']} bits per byte, MTP {heldout['mtp']}")
    log(f"done: {metrics['parameters']} parameters, {metrics['checkpoint_bytes']} bytes")


if __name__ == "__main__":
    main()
