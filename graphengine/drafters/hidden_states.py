"""No drafts: each prompt's hidden states go to a file, to train a drafter with.

The prefill graphs leave a chunk's hidden states in static fields. The host copies them out once it
has read the replay; nothing is launched in between. With several ranks, only the driver does so.

As in TensorRT-LLM's mode of this name, `hidden_states` are those after the final norm, which a
draft module and the lm_head read, and `aux_hidden_states` the residual stream after the chosen
layers, before the next norm, side by side in ascending order of the layers.

Letters: P tokens of a prompt, T tokens of a prefill bucket, A chosen layers, H hidden.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import Drafter, DraftSetting, FieldSizes, Prefilled, Verified
from graphengine.drafters.needs import DraftNeeds
from graphengine.models.checkpoints.tensor_files import save_whole
from graphengine.paths import expand_user
from graphengine.speculative import SaveHiddenStates

if TYPE_CHECKING:
    from graphengine.host.step_plan import PrefillChunk
    from graphengine.models.contract import ModelConfig
    from graphengine.requests.request import Request

log = logging.getLogger(__name__)

_HIDDEN, _AUX = "hidden_states", "aux_hidden_states"


class HiddenStatesDrafter(Drafter):
    """`SaveHiddenStates(directory, layers, write_interval)`.

    Each prompt that was prefilled to its end becomes `{directory}/{request id:08d}.safetensors`;
    a file of that name is replaced. It holds

        input_ids          int64 [P]; -1 stands for an embedding
        hidden_states      [P, H] in the model's dtype
        aux_hidden_states  [P, A * H] in the model's dtype; missing where no layer is chosen

    Files are written when `write_interval` prompts are ready, and at `close()`. A directory that
    cannot be made is a ValueError; a file that cannot be written is an OSError of that step or
    close, and its prompt is tried again with the next ones.
    """

    needs = DraftNeeds(wants_hidden=True, prompts_only=True, collects=True)

    def __init__(self, options: SaveHiddenStates, model: ModelConfig) -> None:
        self.directory = expand_user(options.directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"directory={self.directory} for hidden states is a file")
        self.layers = options.layers_of(model.num_layers)
        self.write_interval = options.write_interval
        self._width = model.hidden_size
        # Hidden states copied from prompts that are still being prefilled, and from finished ones.
        self._parts: dict[Request, list[dict[str, Tensor]]] = {}
        self._ready: dict[int, dict[str, Tensor]] = {}

    def fields(self, sizes: FieldSizes) -> list[Field]:
        widths = {_HIDDEN: self._width, _AUX: len(self.layers) * self._width}
        meanings = {
            _HIDDEN: "of the last chunk, after the final norm",
            _AUX: f"of the last chunk, after layers {', '.join(map(str, self.layers))}",
        }
        return [
            Field(
                name=name,
                shape=(sizes.prefill_tokens, width),
                dtype=sizes.dtype,
                owner="device",
                meaning=meanings[name],
                # Padded lanes of a chunk hold anything.
                replicated=False,
            )
            for name, width in widths.items()
            if width
        ]

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"directory={self.directory} cannot be made: {error}") from error
        self._kept = {_HIDDEN: setting.buffers[_HIDDEN]}
        if self.layers:
            self._kept[_AUX] = aux = setting.buffers[_AUX]
            parts = torch.split(aux, self._width, dim=1)
            self.streams = dict(zip(self.layers, parts, strict=True))

    def prepare(self, prefilled: Prefilled) -> None:
        hidden = prefilled.hidden
        assert hidden is not None, "they are what is saved"
        self._kept[_HIDDEN][: len(hidden)].copy_(hidden)

    def propose(self, verified: Verified) -> None:
        pass

    def collect(self, chunk: PrefillChunk) -> None:
        request = chunk.request
        for other in [other for other in self._parts if other.finished and other is not request]:
            del self._parts[other]
        copies = {name: kept[: chunk.count].cpu() for name, kept in self._kept.items()}
        # On a CPU device `.cpu()` did not copy, and the next chunk overwrites the field.
        copies = {name: copy.clone() for name, copy in copies.items()}
        self._parts.setdefault(request, []).append(copies)
        if not chunk.final:
            return
        parts = self._parts.pop(request)
        if request.finish_reason not in ("stop", "length"):
            return
        whole = {name: torch.cat([part[name] for part in parts]) for name in self._kept}
        whole["input_ids"] = torch.tensor(request.prompt_token_ids, dtype=torch.int64)
        self._ready[request.id] = whole
        if len(self._ready) >= self.write_interval:
            self._write()

    def close(self) -> None:
        self._parts.clear()
        self._write()

    def _write(self) -> None:
        """Write the prompts that are ready; each file appears whole or not at all."""
        written = len(self._ready)
        for number in list(self._ready):
            path = self.directory / f"{number:08d}.safetensors"
            try:
                save_whole(self._ready[number], path)
            except (OSError, SafetensorError) as error:
                raise OSError(f"hidden states cannot be written to {path}: {error}") from error
            del self._ready[number]
        if written:
            log.info("hidden states of %d prompts written to %s", written, self.directory)
