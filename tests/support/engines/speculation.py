"""Speculating engines, the requests they get, and drafts that are known to be right or wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpoints.few_layers import HEAD_LAYERS, block_drafter, eagle3_head, few_layers
from checkpoints.mtp_modules import HIDDEN, LAYOUTS, SIZES, random_tensors, rms, write_checkpoint
from engines.small_engine import LIMIT, LONG, OTHER, PROMPT, assert_idle, open_engine
from graphengine import DynamicTree, Engine, Event, Request, Result, SamplingParams
from graphengine.speculative import MTP, DFlash, DraftModel, Eagle3, NGram, Speculative

Tokens = tuple[int, ...]
Outcome = tuple[Tokens, str, str | None]
Drafts = Callable[[Request], Sequence[int]]
"""The drafts that the caller proposes for a decoding request's next step."""

# The family of a step with several tokens a row; few rows of one token would not select it.
DOT: dict[str, Any] = {"row_family": "dot"}
# Requests that end by their length, so that nothing but drafts cuts a step short.
ENDLESS: dict[str, Any] = {"ignore_eos": True}


TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0]]
"""A tree of drafts: three tokens, and what may follow the better ones."""
BEST = DynamicTree(nodes=9, top_k=3, depth=4)
"""A tree of drafts that is as large and as deep, wherever they are most probable."""


def outcome(request: Request | Result) -> Outcome:
    return tuple(request.token_ids), request.text, request.finish_reason


def step_with(engine: Engine, drafts: Drafts | None) -> list[Event]:
    """One step, before which every request that decodes gets its drafts."""
    for request in engine.scheduler.active if drafts is not None else ():
        if request.token_ids and request.finish_reason is None:
            engine.draft(request, drafts(request))
    return engine.step()


def run_with(engine: Engine, drafts: Drafts | None = None) -> list[Event]:
    """Step until nothing is left to do; all events."""
    events: list[Event] = []
    for _ in range(4 * LIMIT):
        if not engine.busy:
            return events
        events += step_with(engine, drafts)
    raise AssertionError(f"busy after {4 * LIMIT} steps: {engine.scheduler.active}")


class Job(NamedTuple):
    """A future request: it has the same tokens in every engine."""

    prompt: str | tuple[int, ...]
    params: SamplingParams


def serve(
    engine: Engine, jobs: Sequence[Job], drafts: Callable[[list[Request]], Drafts] | None = None
) -> list[Request]:
    """All jobs at once, to their end; the engine is idle before and after."""
    requests = [engine.submit(job.prompt, job.params) for job in jobs]
    run_with(engine, None if drafts is None else drafts(requests))
    assert_idle(engine)
    return requests


def outcomes(engine: Engine, jobs: Sequence[Job], **options: Any) -> list[Outcome]:
    return [outcome(request) for request in serve(engine, jobs, **options)]


def open_plain(path: Path | str | None = None, **options: Any) -> Engine:
    """An engine without drafts that computes the bits of one with drafts."""
    return open_engine(path, **(DOT | options))


def open_speculating(
    speculative: Speculative, path: Path | str | None = None, **options: Any
) -> Engine:
    return open_engine(path, **(DOT | options), speculative=speculative)


def demo_jobs() -> list[Job]:
    """More requests than slots: texts of one chunk and of several, greedy ones and sampled ones."""
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    return [
        Job(PROMPT, greedy),
        Job(LONG, SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)),
        Job(OTHER, SamplingParams(seed=3, max_tokens=17)),
        Job("x", SamplingParams(temperature=0.0, max_tokens=1)),
        Job(OTHER * 3, SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=4, max_tokens=23)),
        # To the end of the table, over as many steps as the others take together.
        Job(PROMPT * 16, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)),
    ]


def random_jobs(vocab_size: int, seed: int = 0, count: int = 7) -> list[Job]:
    """Prompts of every length within a block, and of several chunks of 32."""
    dice = random.Random(seed)
    lengths = [*dice.sample(range(1, 18), count - 2), 33, 70]
    jobs = []
    for index, length in enumerate(lengths):
        options = ({"temperature": 0.0}, {"seed": index}, {"seed": index, "min_p": 0.05})[index % 3]
        params = SamplingParams(max_tokens=dice.randrange(5, 30), **options)
        jobs.append(Job(tuple(dice.randrange(vocab_size) for _ in range(length)), params))
    return jobs


# Drafts of a caller that knows the next tokens.


class Script:
    """Drafts for `UserProvided(k)` from the known tokens of plain decoding.

    known  future tokens by request
    right  how many drafts are right in the n-th step of a request; the next one is wrong
    drafts how many drafts there are in the n-th step; None: k
    """

    def __init__(
        self,
        known: Sequence[Tokens],
        k: int,
        vocab_size: int,
        right: Callable[[int], int],
        drafts: Callable[[int], int] | None = None,
    ) -> None:
        self.known, self.k, self.vocab_size = known, k, vocab_size
        self.right, self.drafts = right, drafts or (lambda step: k)
        self.steps: dict[int, int] = {}

    def of(self, requests: list[Request]) -> Drafts:
        """For requests in the order of `known`."""
        index_of = {request.id: index for index, request in enumerate(requests)}

        def drafts(request: Request) -> Tokens:
            index = index_of[request.id]
            step = self.steps[index] = self.steps.get(index, -1) + 1
            return self.make(self.known[index], len(request.token_ids), step)

        return drafts

    def make(self, known: Tokens, done: int, step: int) -> Tokens:
        count = min(self.k, self.drafts(step))
        ahead = list(known[done : done + count])
        # After the request's end nothing is known, and nothing is verified.
        ahead += [0] * (count - len(ahead))
        right = self.right(step)
        if right < count:
            ahead[right] = (ahead[right] + 1) % self.vocab_size
        return tuple(ahead)


SCRIPTS: dict[str, tuple[Callable[[int], int], Callable[[int], int] | None]] = {
    "right": (lambda step: 99, None),
    "wrong": (lambda step: 0, None),
    "partly": (lambda step: step % 4, None),
    "fewer": (lambda step: 99, lambda step: step % 4),
    "none": (lambda step: 0, lambda step: 0),
}
"""Callers: how many drafts are right, and how many there are, at each step of a request."""


def script(name: str, known: Sequence[Tokens], k: int, vocab_size: int) -> Script:
    right, drafts = SCRIPTS[name]
    return Script(known, k, vocab_size, right, drafts)


# Checkpoints.


def write_draft_model(folder: Path, kind: str, vocab_size: int, tokenizer: Path | None) -> Path:
    """A random model of the named kind with one small layer and another model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 40, "intermediate_size": 56,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "max_position_embeddings": 512, "eos_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(len(kind))
    model = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if kind == "llama"
        else Qwen3ForCausalLM(Qwen3Config(**sizes))
    )
    model.float().save_pretrained(folder)
    if tokenizer is not None:
        (folder / "tokenizer.json").symlink_to(tokenizer / "tokenizer.json")
    return folder


def write_constant(folder: Path) -> tuple[Path, torch.Tensor]:
    """A model with the same probabilities after any tokens; and these probabilities.

    All embeddings are the same, and its one layer adds nothing to them. Its draft module passes the
    hidden state on, so it drafts the most probable token.
    """
    layout = LAYOUTS["mimo"]
    tensors = {
        name: tensor
        for name, tensor in random_tensors(layout).items()
        if not name.startswith(("model.layers.1.", layout.prefixes[1]))
    }
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensor)
    embedding, lm_head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    tensors["model.embed_tokens.weight"] = embedding[:1].expand_as(embedding).clone()
    generator = torch.Generator().manual_seed(5)
    tensors["lm_head.weight"] = torch.randn(lm_head.shape, generator=generator) * 0.45
    prefix = layout.prefixes[0]
    identity = torch.eye(HIDDEN)
    tensors[f"{prefix}{layout.projection}.weight"] = torch.cat([identity, 0 * identity], dim=1)
    for norm in (layout.hidden_norm, layout.final_norm):
        tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN)
    sizes = {
        "num_hidden_layers": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 1280
    }  # fmt: skip
    path = write_checkpoint(folder, SIZES | layout.config | sizes, tensors)
    hidden = rms(embedding[0], tensors["model.norm.weight"])
    return path, (tensors["lm_head.weight"] @ hidden).double().softmax(0)


DEMO = few_layers()
DRAFTING = {
    "mtp": MTP(k=3),
    "ngram": NGram(k=3),
    "model": DraftModel(DEMO, k=3),
    "eagle3": Eagle3(eagle3_head(), k=3, layers=HEAD_LAYERS),
    "dflash": DFlash(block_drafter(), k=3),
}
"""One of each way to draft on the device, by the demo model."""


def dtype_of(name: str) -> dict[str, Any]:
    """The dtype of an engine with `DRAFTING[name]` of which some drafts are to be right. Drafts of
    random weights guess the text that the demo says in float32, and never the one in bfloat16.
    """
    return {"dtype": "float32"} if name in ("eagle3", "dflash") else {}
