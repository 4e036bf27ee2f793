"""Prompts with embeddings: an encoder's output stands between the words.

    python examples/prompt_embeddings.py

A camera's picture becomes a few rows as wide as the model's own embeddings. They are fed as tokens
are, in the same graphs; in a session the next turn keeps their KV and prefills its own words alone.
"""

from __future__ import annotations

import torch
from torch import nn

from graphengine import Engine, PromptParts, Result, SamplingParams

HIDDEN = 256  # hidden_size in the model's config.json
PARAMS = SamplingParams(temperature=0, max_tokens=12)


class Encoder(nn.Module):
    """Yours: a picture [3, 32, 32] becomes 16 rows, one for each of its patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, kernel_size=8, stride=8)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.patches(picture[None]).flatten(2)[0].t()
        return rows


def main() -> list[Result]:
    torch.manual_seed(0)
    encoder, results = Encoder(), []
    with (
        Engine.from_pretrained("demo", max_batch=1, max_seq_len=256, prompt_embeds=True) as engine,
        engine.session() as session,
    ):
        session.append(PromptParts("# seen: ", encoder(torch.rand(3, 32, 32)), "\ndef move("))
        results.append(session.generate(PARAMS))
        session.append("\n\ndef grip(")
        results.append(session.generate(PARAMS))
        # A picture alone is a prompt, too.
        results.append(engine.generate(encoder(torch.rand(3, 32, 32)), PARAMS))
    for result in results:
        seen = result.prompt_token_ids.count(-1)
        print(f"{len(result.prompt_token_ids)} tokens, {seen} of them seen: {result.text!r}")
    return results


if __name__ == "__main__":
    main()
