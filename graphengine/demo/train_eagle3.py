"""Trains an EAGLE3 head for the demo model, and writes its checkpoint. See the card in the result.

python -m graphengine.demo.train_eagle3 --out DIR [--minutes 4 | --steps N] [--corpus x.jsonl.xz]
"""

import argparse
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

import torch

from graphengine.demo import checkpoint_path, heldout_text
from graphengine.demo.checkpoint import load_model, write_json
from graphengine.demo.corpus import END_OF_TEXT, Document
from graphengine.demo.eagle3 import (
    Eagle3Head,
    HeadConfig,
    agreement,
    frequent_ids,
    head_losses,
    save_head,
)
from graphengine.demo.evaluate import default_batch
from graphengine.demo.model import DemoModel
from graphengine.demo.optimiser import Optimiser
from graphengine.demo.own_text import own_text
from graphengine.demo.tokenizer import encode, load_tokenizer
from graphengine.demo.train import (
    Losses,
    compiled_losses,
    device_name,
    encode_parts,
    log,
    prepare,
    random_anchors,
    random_windows,
    rate_factor,
)

CARD = Path(__file__).with_name("eagle3_card_template.md")

# Seconds of --minutes kept for the held-out figures and the export.
RESERVE = 8.0
# Losses that metrics.json holds.
CURVE = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`minutes` for the whole command after imports; `own_seconds` of them for the target to write.

    With `steps`, training takes that many steps, however long they take, and the target writes one
    round of windows. `own_share` of a batch's windows are those that the target wrote parts of, of
    `own_windows` that it writes at once.
    """

    minutes: float = 4.0
    steps: int | None = None
    batch: int = 16
    length: int = 2048
    anchors: int = 256
    own_share: float = 0.5
    own_seconds: float = 20.0
    own_windows: int = 512
    muon_rate: float = 0.007
    adam_rate: float = 0.004
    weight_decay: float = 0.1
    seed: int = 1
    log_every: float = 5.0
    compiled: bool = True
    device: str = "cuda"

    def check(self, depth: int) -> None:
        """ValueError for what cannot be trained."""
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps {self.steps}: at least one is needed")
        if not 0 <= self.own_share <= 1:
            raise ValueError(f"--own-share {self.own_share} must be in [0, 1]")
        if self.length <= depth:
            raise ValueError(f"windows of {self.length} tokens have no room for {depth} runs")


class Text:
    """Where windows come from: the corpus, and what the target wrote; int32 on the device.

    corpus  [tokens]
    own     [windows, length + 1]; None: all windows are the corpus's
    """

    def __init__(self, corpus: torch.Tensor, own: torch.Tensor | None, settings: Settings) -> None:
        self.corpus, self.own, self.length = corpus, own, settings.length
        count = 0 if own is None else round(settings.own_share * settings.batch)
        self.from_own, self.from_corpus = count, settings.batch - count

    def batch(self) -> torch.Tensor:
        """int64 [batch, length + 1]"""
        plain = random_windows(self.corpus, batch=self.from_corpus, length=self.length)
        if self.own is None:
            return plain
        chosen = torch.randint(len(self.own), (self.from_own,), device=self.own.device)
        return torch.cat((plain, self.own[chosen].long()))


def fit(
    head: Eagle3Head, target: DemoModel, text: Text, settings: Settings, deadline: float
) -> list[list[float]]:
    """Trains until `deadline` (time.monotonic), or for `settings.steps`.

    Returns the number of steps and the losses then, in nats by run, at some moments and the end.
    """
    device, steps = text.corpus.device, settings.steps
    optimiser = Optimiser(head, weight_decay=settings.weight_decay)

    def fed() -> tuple[torch.Tensor, torch.Tensor]:
        depth, length = head.config.depth, settings.length
        anchors = random_anchors(settings.anchors, length=length, device=device, depth=depth)
        return text.batch(), anchors

    losses_of: Losses = head_losses
    if settings.compiled:
        losses_of = compiled_losses(head_losses, head, target, *fed())
    began = logged = time.monotonic()
    if steps is None and deadline <= began:
        raise ValueError(f"no time left to train: {deadline - began:.1f} s after compiling")
    step, part, curve = 0, 0.0, []
    running = torch.zeros(head.config.depth, device=device)

    def note() -> None:
        values = running.tolist()
        if not all(value == value and abs(value) < float("inf") for value in values):
            raise FloatingPointError(f"losses {values} at step {step}: stopped")
        curve.append([step, *(round(value, 4) for value in values)])
        log(f"{part:6.1%}  step {step:6}  losses {' '.join(f'{value:.3f}' for value in values)}")

    while part < 1.0:
        loss, parts = losses_of(head, target, *fed())
        loss.backward()  # type: ignore[no-untyped-call]
        factor = rate_factor(part)
        optimiser.step(muon_rate=settings.muon_rate * factor, adam_rate=settings.adam_rate * factor)
        running.lerp_(parts, 1.0 if step == 0 else 0.05)
        step += 1
        if step == 1 or time.monotonic() - logged >= settings.log_every:
            note()
            logged = time.monotonic()
        if steps is None:
            part = min(1.0, (time.monotonic() - began) / (deadline - began))
        else:
            part = step / steps
    note()
    return curve


def heldout_tokens(folder: Path, device: str) -> torch.Tensor:
    """int32: the shipped held-out text."""
    documents = [
        Document(path=str(index), text=part)
        for index, part in enumerate(heldout_text().split(END_OF_TEXT))
    ]
    return encode(load_tokenizer(folder), documents).to(device)


def train(
    out: Path,
    checkpoint: Path,
    config: HeadConfig,
    settings: Settings,
    paths: Sequence[Path],
    *,
    stdlib_only: bool = False,
    heldout: int | None = None,
) -> dict[str, Any]:
    """The whole command; returns what metrics.json holds.

    heldout  tokens of the held-out text that are looked at; None: all
    """
    started = time.monotonic()
    settings.check(config.depth)
    torch.manual_seed(settings.seed)
    on_gpu = settings.device.startswith("cuda")
    target = load_model(checkpoint, device=settings.device).requires_grad_(False)
    config.check(target.config)
    target.dtype = torch.bfloat16 if on_gpu else torch.float32
    target.to(target.dtype)

    _, parts = prepare(paths, stdlib_only)
    tokenizer, length = load_tokenizer(checkpoint), settings.length
    tokens = encode_parts(tokenizer, parts, length=length, device=settings.device).train
    log(f"tokens: {len(tokens)} training")
    own = None
    if settings.own_share > 0:
        own = own_text(
            target,
            tokens,
            windows=settings.own_windows,
            length=length + 1,
            seconds=settings.own_seconds if settings.steps is None else 0.0,
        )
        log(f"written by the target: {own.numel()} tokens, every other stretch its own")

    ids = frequent_ids(tokens, config.drafted, target.config.vocab_size)
    head = Eagle3Head(config, target.config, ids).to(settings.device)
    head.begin_as(target)
    began = time.monotonic()
    deadline = started + 60 * settings.minutes - RESERVE
    curve = fit(head, target, Text(tokens, own, settings), settings, deadline)
    seconds = time.monotonic() - began
    save_head(out, head)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16())
    found = agreement(
        head,
        target,
        heldout_tokens(checkpoint, settings.device)[:heldout],
        length=length,
        batch=default_batch(settings.device),
    )
    metrics = {
        "heldout": found,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "checkpoint_bytes": (out / "model.safetensors").stat().st_size,
        "training_tokens": len(tokens),
        "own_tokens": 0 if own is None else own.numel(),
        "steps": int(curve[-1][0]),
        "seconds": round(seconds, 1),
        "device": device_name(settings.device),
        "torch": torch.__version__,
        "head": asdict(config),
        "settings": asdict(settings),
        "curve": curve[:: max(1, len(curve) // CURVE)],
    }
    save_card(out, metrics)
    return metrics


def save_card(folder: Path, metrics: Mapping[str, Any]) -> None:
    """metrics.json and MODEL_CARD.md; neither names a path of this machine."""
    write_json(folder / "metrics.json", metrics)
    found, config = metrics["heldout"], metrics["head"]
    shares = zip(
        found["greedy"]["agrees_with_target"], found["sampled"]["agrees_with_target"], strict=True
    )
    depths = [
        f"| {depth} | {100 * greedy:.1f} % | {100 * sampled:.1f} % |"
        for depth, (greedy, sampled) in enumerate(shares, start=1)
    ]
    head = f"its own, for the {config['drafted']} most frequent tokens (`d2t`, `t2d`)"
    card = Template(CARD.read_text(encoding="utf-8")).substitute(
        metrics,
        depths="\n".join(depths),
        positions=found["positions"],
        depth=config["depth"],
        layers=", ".join(map(str, config["layers"])),
        lm_head=head if config["drafted"] else "the target's",
        python=platform.python_version(),
    )
    (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m graphengine.demo.train_eagle3",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults, head = Settings(), HeadConfig()
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--checkpoint", type=Path, default=checkpoint_path(), help="the target's")
    add("--corpus", type=Path, nargs="+", default=[], help="archive, or text files")
    add("--stdlib-only", action="store_true", help="without --corpus")
    add("--minutes", type=float, default=defaults.minutes, help="for everything after imports")
    add("--steps", type=int, help="of training, in place of --minutes")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--no-compile", action="store_true")
    add("--heldout-tokens", type=int, help="of the held-out text; default: all")
    add("--batch", type=int, default=defaults.batch, help="windows a step")
    add("--sequence", type=int, default=defaults.length, help="tokens of a window")
    add("--anchors", type=int, default=defaults.anchors)
    add("--own-share", type=float, default=defaults.own_share, help="of a batch")
    add("--own-seconds", type=float, default=defaults.own_seconds)
    add("--own-windows", type=int, default=defaults.own_windows, help="written at once")
    add("--muon-rate", type=float, default=defaults.muon_rate)
    add("--adam-rate", type=float, default=defaults.adam_rate)
    add("--weight-decay", type=float, default=defaults.weight_decay)
    add("--seed", type=int, default=defaults.seed)
    add("--layers", default=",".join(map(str, head.layers)), help="of the target that are read")
    add("--ffn", type=int, default=head.ffn_size)
    add("--depth", type=int, default=head.depth, help="runs that are unrolled")
    add("--draft-vocab", type=int, default=head.drafted, help="0: the target's lm_head is shared")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    config = HeadConfig(
        layers=tuple(int(layer) for layer in options.layers.split(",")),
        ffn_size=options.ffn,
        depth=options.depth,
        drafted=options.draft_vocab,
    )
    settings = Settings(
        minutes=options.minutes,
        steps=options.steps,
        batch=options.batch,
        length=options.sequence,
        anchors=options.anchors,
        own_share=options.own_share,
        own_seconds=options.own_seconds,
        own_windows=options.own_windows,
        muon_rate=options.muon_rate,
        adam_rate=options.adam_rate,
        weight_decay=options.weight_decay,
        seed=options.seed,
        compiled=options.device.startswith("cuda") and not options.no_compile,
        device=options.device,
    )
    metrics = train(
        options.out,
        options.checkpoint,
        config,
        settings,
        options.corpus,
        stdlib_only=options.stdlib_only,
        heldout=options.heldout_tokens,
    )
    log(f"held out: {json.dumps(metrics['heldout'])}")
    log(f"done: {metrics['parameters']} parameters, {metrics['checkpoint_bytes']} bytes")


if __name__ == "__main__":
    main()
