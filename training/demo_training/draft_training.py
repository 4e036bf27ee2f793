"""Training of a drafter for the demo model: its text, the run, and the checkpoint with its card."""

import argparse
import hashlib
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from string import Template
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from demo_training.checkpoint import load_model, write_json
from demo_training.corpus import END_OF_TEXT, Document
from demo_training.drafting import DemoDrafter, DrafterConfig, agreement, draft_losses
from demo_training.evaluate import default_batch
from demo_training.logs import log
from demo_training.model import DemoModel
from demo_training.optimiser import Optimiser
from demo_training.own_text import own_text
from demo_training.replayed import replayed
from demo_training.tokenizer import encode, load_tokenizer
from demo_training.train import (
    device_name,
    encode_parts,
    prepare,
    random_anchors,
    random_windows,
    rate_factor,
)
from graphengine.demo import checkpoint_path, heldout_text

# Seconds of --minutes kept for the held-out figures and the export.
RESERVE = 8.0
# Losses that metrics.json holds.
CURVE = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`minutes` for the whole command after imports; `own_seconds` of them for the target to write.

    With `steps`, training takes that many steps, however long they take, and the target writes one
    round of windows. `own_share` is the share of a batch's windows that the target wrote parts of;
    it writes `own_windows` at once.
    """

    minutes: float = 4.0
    steps: int | None = None
    batch: int = 16
    sequence: int = 2048
    anchors: int = 256
    own_share: float = 0.75
    own_seconds: float = 20.0
    own_windows: int = 512
    muon_rate: float = 0.007
    adam_rate: float = 0.004
    weight_decay: float = 0.1
    seed: int = 1
    log_every: float = 5.0
    device: str = "cuda"

    def check(self, depth: int) -> None:
        """ValueError for settings that cannot be trained with."""
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps {self.steps}: at least one is needed")
        if not 0 <= self.own_share <= 1:
            raise ValueError(f"--own-share {self.own_share} must be in [0, 1]")
        if self.sequence <= depth:
            raise ValueError(f"windows of {self.sequence} tokens have no room for {depth} drafts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """The text that a drafter is trained on, int32 on the device.

    corpus  [tokens]
    own     [windows, length + 1] that the target wrote parts of; empty: all text is the corpus's
    """

    corpus: torch.Tensor
    own: torch.Tensor

    def batch(self, count: int, length: int, own_share: float) -> torch.Tensor:
        """Random windows, int64 [count, length + 1]."""
        from_own = round(own_share * count)
        plain = random_windows(self.corpus, batch=count - from_own, length=length)
        if not from_own:
            return plain
        chosen = torch.randint(len(self.own), (from_own,), device=self.own.device)
        return torch.cat((plain, self.own[chosen].long()))

    def save(self, path: Path, target: str) -> None:
        """Save the text for another training with the same target."""
        save_file({"corpus": self.corpus, "own": self.own}, path, metadata={"target": target})

    @classmethod
    def load(cls, path: Path, target: str, settings: Settings) -> "Text":
        """Load saved text.

        ValueError for text of another target, or without windows of the wanted length.
        """
        length = settings.sequence
        with safe_open(path, framework="pt", device=settings.device) as file:
            written_by = file.metadata()["target"]
            text = cls(corpus=file.get_tensor("corpus"), own=file.get_tensor("own"))
        if written_by != target:
            raise ValueError(f"{path} is text of target {written_by[:12]}, this is {target[:12]}")
        if text.own.shape[1] != length + 1 or (settings.own_share and not len(text.own)):
            raise ValueError(
                f"{path} has {len(text.own)} windows of {text.own.shape[1] - 1} tokens that the "
                f"target wrote in; --sequence is {length}, --own-share {settings.own_share}"
            )
        return text


def target_id(checkpoint: Path) -> str:
    """The SHA-256 of a target's weights, by which saved text names its target."""
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


def make_text(
    target: DemoModel,
    checkpoint: Path,
    settings: Settings,
    paths: Sequence[Path],
    *,
    stdlib_only: bool,
) -> Text:
    """The corpus, and windows of it that the target writes parts of."""
    length = settings.sequence
    _, parts = prepare(paths, stdlib_only)
    encoded = encode_parts(load_tokenizer(checkpoint), parts, length=length, device=settings.device)
    corpus = encoded.train
    log(f"tokens: {len(corpus)} training")
    if not settings.own_share:
        return Text(corpus=corpus, own=corpus.new_zeros(0, length + 1))
    own = own_text(
        target,
        corpus,
        windows=settings.own_windows,
        length=length + 1,
        seconds=settings.own_seconds if settings.steps is None else 0.0,
    )
    log(f"written by the target: {own.numel()} tokens, every other stretch its own")
    return Text(corpus=corpus, own=own)


def heldout_tokens(folder: Path, device: str) -> torch.Tensor:
    """Tokens of the shipped held-out text, int32."""
    documents = [
        Document(path=str(index), text=part)
        for index, part in enumerate(heldout_text().split(END_OF_TEXT))
    ]
    return encode(load_tokenizer(folder), documents).to(device)


def parts_of_run(steps: int | None, deadline: float) -> Iterator[float]:
    """Yield, before each step, the part of the run that is over: of `steps`, or of the time."""
    if steps is not None:
        yield from (step / steps for step in range(steps))
        return
    began = time.monotonic()
    if deadline <= began:
        raise ValueError(f"no time left to train: {deadline - began:.1f} s after preparing")
    while (now := time.monotonic()) < deadline:
        yield (now - began) / (deadline - began)


def fit(
    drafter: DemoDrafter, target: DemoModel, text: Text, settings: Settings, deadline: float
) -> list[list[float]]:
    """Trains until `deadline` (time.monotonic), or for `settings.steps`.

    Returns a row at some moments and at the end: the number of steps, and the losses in nats by
    draft.
    """
    device, parameters = text.corpus.device, list(drafter.parameters())
    optimiser = Optimiser(drafter, weight_decay=settings.weight_decay)

    def fed() -> tuple[torch.Tensor, torch.Tensor]:
        depth, length = drafter.depth, settings.sequence
        anchors = random_anchors(settings.anchors, length=length, device=device, depth=depth)
        return text.batch(settings.batch, length, settings.own_share), anchors

    def descend(windows: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, parts = draft_losses(drafter, target, windows, anchors)
        return parts, *torch.autograd.grad(loss, parameters)

    step = replayed(descend, *fed())
    log("ready to train")
    curve: list[list[float]] = []
    running = torch.zeros(drafter.depth, device=device)
    taken, logged = 0, time.monotonic()

    def note(part: float) -> None:
        values = running.tolist()
        if not all(value == value and abs(value) < float("inf") for value in values):
            raise FloatingPointError(f"losses {values} at step {taken}: stopped")
        curve.append([taken, *(round(value, 4) for value in values)])
        log(f"{part:6.1%}  step {taken:6}  losses {' '.join(f'{value:.3f}' for value in values)}")

    for part in parts_of_run(settings.steps, deadline):
        losses, *gradients = step(*fed())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        factor = rate_factor(part)
        optimiser.step(muon_rate=settings.muon_rate * factor, adam_rate=settings.adam_rate * factor)
        running.lerp_(losses, 0.05 if taken else 1.0)
        taken += 1
        if taken == 1 or time.monotonic() - logged >= settings.log_every:
            note(part)
            logged = time.monotonic()
    note(1.0)
    return curve


def train(
    out: Path,
    checkpoint: Path,
    config: DrafterConfig,
    settings: Settings,
    paths: Sequence[Path] = (),
    *,
    text_path: Path | None = None,
    stdlib_only: bool = False,
    heldout: int | None = None,
) -> dict[str, Any]:
    """The whole command; returns the contents of metrics.json.

    text_path  where the text is, or will be if nothing is there
    heldout    number of tokens of the held-out text to evaluate on; None: all
    """
    started = time.monotonic()
    settings.check(config.depth)
    torch.manual_seed(settings.seed)
    on_gpu, length = settings.device.startswith("cuda"), settings.sequence
    target = load_model(checkpoint, device=settings.device).requires_grad_(False)
    config.check(target.config)
    target.dtype = torch.bfloat16 if on_gpu else torch.float32
    target.to(target.dtype)

    if text_path is not None and text_path.exists():
        text = Text.load(text_path, target_id(checkpoint), settings)
        log(f"text: {len(text.corpus)} tokens, and {text.own.numel()} that the target wrote in")
    else:
        text = make_text(target, checkpoint, settings, paths, stdlib_only=stdlib_only)
        if text_path is not None:
            text.save(text_path, target_id(checkpoint))
    drafter = config.build(target.config, text.corpus).to(settings.device)
    drafter.begin_as(target)
    began = time.monotonic()
    deadline = started + 60 * settings.minutes - RESERVE
    curve = fit(drafter, target, text, settings, deadline)
    seconds = time.monotonic() - began
    drafter.save(out)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    found = agreement(
        drafter,
        target,
        heldout_tokens(checkpoint, settings.device)[:heldout],
        length=length,
        batch=default_batch(settings.device),
    )
    metrics = {
        "heldout": found,
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "checkpoint_bytes": (out / "model.safetensors").stat().st_size,
        "training_tokens": len(text.corpus),
        "own_tokens": text.own.numel(),
        "steps": int(curve[-1][0]),
        "seconds": round(seconds, 1),
        "device": device_name(settings.device),
        "torch": torch.__version__,
        "drafter": asdict(config),  # type: ignore[call-overload]
        "settings": asdict(settings),
        "curve": curve[:: max(1, len(curve) // CURVE)],
    }
    save_card(out, metrics, config)
    return metrics


def save_card(folder: Path, metrics: Mapping[str, Any], config: DrafterConfig) -> None:
    """metrics.json and MODEL_CARD.md; neither names a path of this machine."""
    write_json(folder / "metrics.json", metrics)
    found = metrics["heldout"]
    shares = zip(
        found["greedy"]["agrees_with_target"], found["sampled"]["agrees_with_target"], strict=True
    )
    depths = [
        f"| {depth} | {100 * greedy:.1f} % | {100 * sampled:.1f} % |"
        for depth, (greedy, sampled) in enumerate(shares, start=1)
    ]
    card = Template(config.card.read_text(encoding="utf-8")).substitute(
        {**metrics, **config.card_values},
        depths="\n".join(depths),
        positions=found["positions"],
        depth=config.depth,
        layers=", ".join(map(str, config.layers)),
        python=platform.python_version(),
    )
    (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")


def training_options(name: str, about: str | None) -> argparse.ArgumentParser:
    """The options that the training scripts share: where things are, and `Settings`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m graphengine.demo.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--checkpoint", type=Path, default=checkpoint_path(), help="checkpoint of the target model")
    add("--corpus", type=Path, nargs="+", default=[], help="an archive, or text files")
    add(
        "--stdlib-only",
        action="store_true",
        help="without --corpus, read only the standard library",
    )
    add(
        "--own-text",
        type=Path,
        help="file with the text that an earlier training read and the text that the target wrote "
        "for it; this training writes it if it does not exist",
    )
    add("--heldout-tokens", type=int, help="tokens of held-out text to use (default: all)")
    defaults = Settings()
    add(
        "--minutes",
        type=float,
        default=defaults.minutes,
        help="time limit for everything after the imports",
    )
    add("--steps", type=int, help="training steps, instead of --minutes")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--batch", type=int, default=defaults.batch, help="windows per step")
    add("--sequence", type=int, default=defaults.sequence, help="tokens per window")
    add("--anchors", type=int, default=defaults.anchors, help="anchors per window")
    add(
        "--own-share",
        type=float,
        default=defaults.own_share,
        help="share of each batch's windows that the target wrote parts of",
    )
    add("--own-seconds", type=float, default=defaults.own_seconds)
    add(
        "--own-windows",
        type=int,
        default=defaults.own_windows,
        help="windows that the target writes at once",
    )
    add("--muon-rate", type=float, default=defaults.muon_rate)
    add("--adam-rate", type=float, default=defaults.adam_rate)
    add("--weight-decay", type=float, default=defaults.weight_decay)
    add("--seed", type=int, default=defaults.seed)
    add("--log-every", type=float, default=defaults.log_every, help="seconds between log lines")
    return parser


def layer_numbers(text: str) -> tuple[int, ...]:
    """Layer numbers from the text of an option."""
    return tuple(int(layer) for layer in text.split(","))


def run(options: argparse.Namespace, config: DrafterConfig) -> None:
    """Train with the options of a command line."""
    # cuDNN's attention is planned anew for each shape, and without it one kind of kernels is used.
    torch.backends.cuda.enable_cudnn_sdp(False)
    metrics = train(
        options.out,
        options.checkpoint,
        config,
        Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)}),
        options.corpus,
        text_path=options.own_text,
        stdlib_only=options.stdlib_only,
        heldout=options.heldout_tokens,
    )
    log(f"held out: {json.dumps(metrics['heldout'])}")
    log(f"done: {metrics['parameters']} parameters, {metrics['checkpoint_bytes']} bytes")
