"""A robot at 20 Hz: chunks of actions from pi0, each planned while the one before is executed.

    python examples/robot_policy.py

The camera's encoder is yours. Here it is a small module, captured with `graphengine.buckets`, so
that a picture becomes embeddings in one replay too, and these never leave the GPU. A new chunk
begins with the actions that are executed while it is computed (`fixed`), so motions do not jump.
The policy is a tiny one with random weights, which needs `transformers`.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from graphengine import Policy, PromptParts
from graphengine.buckets import capture_all

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
TICK_S = 0.05
HORIZON, REPLAN, BUSY = 10, 5, 2  # actions of a chunk, ticks between chunks, ticks of planning
WIDTH, JOINTS = 64, 6
TASK = [17, 4, 23]  # what the robot is told, as token ids


class Camera:
    """Pictures [3, 32, 32] become 16 rows of the policy's width, in static memory."""

    def __init__(self) -> None:
        self.picture = torch.zeros(3, 32, 32, device=DEVICE, dtype=DTYPE)
        self.rows = torch.zeros(16, WIDTH, device=DEVICE, dtype=DTYPE)
        self._patches = nn.Conv2d(3, WIDTH, kernel_size=8, stride=8).to(DEVICE, DTYPE)
        self._graph = capture_all({"see": self._see}, device=DEVICE)["see"]

    def see(self, picture: Tensor) -> Tensor:
        self.picture.copy_(picture, non_blocking=True)
        stream = self._graph.stream  # the graph's own; None on a CPU
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        self._graph.replay()
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        return self.rows

    def _see(self) -> None:
        with torch.no_grad():
            self.rows.copy_(self._patches(self.picture[None]).flatten(2)[0].t())


def control_loop(policy: Policy, camera: Camera, ticks: int) -> list[Tensor]:
    """Run the loop; the action of each tick."""
    state, done = torch.zeros(JOINTS), []
    chunk, at = torch.zeros(HORIZON, JOINTS), HORIZON
    for tick in range(ticks):
        deadline = time.perf_counter() + TICK_S
        if at >= REPLAN:
            going_on = chunk[at : at + BUSY]
            picture = torch.rand(3, 32, 32)  # ... your camera ...
            prefix = PromptParts(camera.see(picture), TASK)
            chunk = policy.act(prefix, state, seed=tick, fixed=going_on).cpu()
            at = 0
        action = chunk[at]
        at += 1
        # ... move motors ...
        state = state + 0.1 * action
        done.append(action)
        time.sleep(max(0.0, deadline - time.perf_counter()))
    return done


def tiny_policy(folder: str) -> None:
    """Save a pi0 with random weights."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shared = {"model_type": "gemma", "head_dim": 16, "vocab_size": 64, "intermediate_size": 96}
    library: Any = transformers
    config = library.PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {**shared, **sizes, "hidden_size": WIDTH},
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32,
                "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
                "vision_use_head": False,
            },
            "projection_dim": WIDTH,
            "image_token_id": 63,
        },
        dit_config={**shared, **sizes, "hidden_size": 32},
        chunk_size=HORIZON, max_state_dim=JOINTS, max_action_dim=JOINTS,
    )  # fmt: skip
    library.PI0ForConditionalGeneration(config).save_pretrained(folder)


def main(ticks: int = 20) -> list[Tensor]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        tiny_policy(folder)
        with Policy.from_pretrained(folder, device=DEVICE, max_prefix=32) as policy:
            actions = control_loop(policy, Camera(), ticks)
    print(f"{len(actions)} actions, the last one {[round(x, 2) for x in actions[-1].tolist()]}")
    return actions


if __name__ == "__main__":
    main()
