"""Microseconds of prefill attention over latents at DeepSeek-V2-Lite's sizes, by tiles.

    python tests/support/gpus/latent_times.py --out latents.jsonl

One JSON line a case: a number of tokens after others, and tiles (rows, keys, warps, stages), the
kernel's own first. `error` is the largest difference from float32; `cut_same` says whether the last
half of the tokens has the same bits as a chunk of its own, `packed_same` the same of eight chunks
in one launch. A case that fails prints its exception.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The script's own folder is on the path, its package's is not.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch

from gpus.packed_prompts import time_of
from graphengine.kernels.attention.latent import LatentTiles
from graphengine.kernels.attention.latent_prefill import WGMMA_TILES, latent_attention
from graphengine.observe.environment import environment

MODULE = importlib.import_module("graphengine.kernels.attention.latent_prefill")
HEADS, RANK, ROTATED, BLOCK, SCALE = 16, 512, 64, 16, 0.1147
SIZES = ((1024, 0), (128, 0), (1024, 7168))
"""Tokens of a chunk, and tokens before them."""
TILES = (
    WGMMA_TILES,
    LatentTiles(64, 64, 8, 2),
    LatentTiles(64, 32, 8, 5),
    LatentTiles(64, 32, 8, 7),
    LatentTiles(64, 32, 8, 3),
    # About what a program per token did.
    LatentTiles(16, 32, 4, 2),
)
PROMPTS = 8


@dataclass(frozen=True)
class Case:
    """Tensors of a chunk on the device; its cache's blocks are in random order."""

    q: torch.Tensor
    kv: torch.Tensor
    table: torch.Tensor
    before: int

    @classmethod
    def random(cls, tokens: int, before: int) -> Case:
        torch.manual_seed(0)
        blocks = (tokens + before) // BLOCK
        entry = RANK + ROTATED
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        return cls(
            torch.randn(tokens, HEADS, entry, **options),
            torch.randn(blocks, 1, BLOCK, entry, **options),
            torch.randperm(blocks, device="cuda").int()[None].repeat(PROMPTS, 1),
            before,
        )

    def attend(
        self, first: int = 0, last: int | None = None, *, packed: bool = False
    ) -> torch.Tensor:
        """Results of the tokens from `first` to `last`; `packed`: of the whole chunk in pieces,
        each of a prompt with the same cache.
        """
        q = self.q[first:last]
        tokens = torch.arange(len(q), device="cuda", dtype=torch.int32)
        piece = len(q) // PROMPTS
        starts = torch.arange(PROMPTS + 1, device="cuda", dtype=torch.int32) * piece
        return latent_attention(
            q,
            self.kv,
            self.table,
            tokens // piece if packed else torch.zeros_like(tokens),
            tokens + (self.before + first),
            rank=RANK,
            scale=SCALE,
            query_start_P1=starts if packed else None,
            pdl=True,
        )

    def call(self) -> Callable[[int], object]:
        """A launch with arguments and output that were made before."""
        tokens = torch.arange(len(self.q), device="cuda", dtype=torch.int32)
        slot, position = torch.zeros_like(tokens), tokens + self.before
        out = self.q.new_empty(len(self.q), HEADS, RANK)

        def launch(copy: int) -> None:
            latent_attention(
                self.q, self.kv, self.table, slot, position,
                rank=RANK, scale=SCALE, out=out, pdl=True,
            )  # fmt: skip

        return launch

    def expected(self) -> torch.Tensor:
        """In float32, with plain products."""
        entries = self.kv[self.table[0].long(), 0].flatten(0, 1).float()
        found = []
        for first in range(0, len(self.q), 64):
            q = self.q[first : first + 64].float()
            scores = q @ entries.t() * SCALE
            own = torch.arange(first, first + len(q), device="cuda") + self.before
            hidden = torch.arange(len(entries), device="cuda")[None] > own[:, None]
            scores.masked_fill_(hidden[:, None], -torch.inf)
            found.append(scores.softmax(-1) @ entries[:, :RANK])
        return torch.cat(found)


def measure(case: Case, expected: torch.Tensor) -> dict[str, Any]:
    """Figures with the tiles that `MODULE` has now."""
    whole = case.attend()
    half = len(case.q) // 2
    return {
        "us": time_of(case.call(), 1),
        "error": round(float((whole.float() - expected).abs().max()), 5),
        "cut_same": torch.equal(case.attend(half), whole[half:]),
        "packed_same": torch.equal(case.attend(packed=True), whole),
    }


def measured() -> Iterator[dict[str, Any]]:
    cases = [Case.random(*size) for size in SIZES]
    expected = [case.expected() for case in cases]
    chosen = MODULE.prefill_tiles
    for tiles in TILES:
        MODULE.prefill_tiles = lambda q, tiles=tiles: tiles
        for case, wanted in zip(cases, expected, strict=True):
            row: dict[str, Any] = {"tiles": list(tiles), "tokens": len(case.q)}
            row["before"] = case.before
            try:
                yield row | measure(case, wanted)
            except Exception as error:
                yield row | {"failed": f"{type(error).__name__}: {error}"[:300]}
    MODULE.prefill_tiles = chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each case")
    options = parser.parse_args(arguments)
    for row in measured():
        print(json.dumps(row), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(row | {"environment": environment("cuda")}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
