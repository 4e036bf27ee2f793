"""Held-out bits per byte and draft agreement of a demo checkpoint.

    python -m demo_training.evaluate --checkpoint DIR [--text heldout.txt] [--device cpu]

The text is documents joined by the end-of-text token's spelling.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from demo_training.checkpoint import load_model
from demo_training.corpus import END_OF_TEXT, Document
from demo_training.model import DEPTH, DemoModel
from demo_training.tokenizer import encode, load_tokenizer
from graphengine import demo

HELDOUT = Path(demo.__file__).with_name("heldout.txt")


def windows(tokens: torch.Tensor, *, length: int, batch: int) -> Iterator[torch.Tensor]:
    """[B, length+1] pieces that overlap by one token: every token but the first is a target once.

    The last piece may be shorter.
    """
    full = (len(tokens) - 1) // length
    for start in range(0, full, batch):
        rows = range(start, min(start + batch, full))
        yield torch.stack([tokens[row * length : (row + 1) * length + 1] for row in rows])
    if len(tokens) - full * length >= 2:
        yield tokens[full * length :][None]


@torch.no_grad()
def mean_loss(model: DemoModel, tokens: torch.Tensor, *, batch: int) -> float:
    """Nats a token of the main model alone; training chooses the best weights by it."""
    total, count = torch.zeros((), device=tokens.device), 0
    for piece in windows(tokens, length=model.config.max_positions, batch=batch):
        logits = model.logits(model.hidden(piece[:, :-1].long())).float()
        targets = piece[:, 1:].long().flatten()
        total += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        count += targets.numel()
    return float(total) / count


@torch.no_grad()
def measure(model: DemoModel, tokens: torch.Tensor, *, size: int, batch: int) -> dict[str, Any]:
    """Metrics of `tokens`, the encoding of `size` bytes of text.

    Bits per byte: all nats, including those of end-of-text tokens, over the bytes; the context
    restarts every `max_positions` tokens. MTP at depth d = 1..DEPTH: at every position p of a
    window with enough room, the module drafts d tokens with the text's own tokens p+1..p+d as input
    (teacher-forced) and its own outputs as hidden states after the first step; its best token d is
    compared with the target model's best after token p+d, and with the text's p+d+1.
    """
    sums = torch.zeros(1 + 2 * DEPTH, dtype=torch.float64, device=tokens.device)
    targets_seen = anchors_seen = 0
    for piece in windows(tokens, length=model.config.max_positions, batch=batch):
        text, targets = piece[:, :-1].long(), piece[:, 1:].long()
        hidden = model.hidden(text)
        logits = model.logits(hidden).float()
        sums[0] += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        targets_seen += targets.numel()
        greedy = logits.argmax(-1)
        anchors = torch.arange(max(0, text.shape[1] - DEPTH), device=tokens.device)
        for step, output in enumerate(model.drafts(hidden, targets, anchors)):
            draft, rows = model.logits(output).argmax(-1), anchors + (step + 1)
            sums[1 + step] += (draft == greedy.index_select(1, rows)).sum()
            sums[1 + DEPTH + step] += (draft == targets.index_select(1, rows)).sum()
        anchors_seen += text.shape[0] * len(anchors)
    values: list[float] = sums.tolist()
    shares = [round(value / max(1, anchors_seen), 4) for value in values[1:]]
    return {
        "tokens": targets_seen,
        "bytes": size,
        "loss": round(values[0] / targets_seen, 4),
        "bits_per_byte": round(values[0] / math.log(2) / size, 4),
        "mtp": {
            "positions": anchors_seen,
            "agrees_with_target": shares[:DEPTH],
            "agrees_with_text": shares[DEPTH:],
        },
    }


def default_batch(device: torch.device | str) -> int:
    return 16 if torch.device(device).type == "cuda" else 1


def evaluate(checkpoint: Path, text: Path, *, device: str) -> dict[str, Any]:
    documents = [
        Document(path=str(index), text=part)
        for index, part in enumerate(text.read_text(encoding="utf-8").split(END_OF_TEXT))
    ]
    model = load_model(checkpoint, device=device)
    tokens = encode(load_tokenizer(checkpoint), documents).to(device)
    size = sum(len(document.text.encode()) for document in documents)
    return measure(model, tokens, size=size, batch=default_batch(device))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo_training.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=HELDOUT)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    metrics = evaluate(options.checkpoint, options.text, device=options.device)
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
