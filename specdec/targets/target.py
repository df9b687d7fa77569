"""The target: a frozen Hugging Face language model, causal (causal.py) or not (seq2seq.py)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.compat import restore_rescaled_weights
from specdec.context import Context, FeatureSpec
from specdec.errors import require
from specdec.runtime.cache import SlotCache
from specdec.runtime.quantised import method
from specdec.sampling.choose import Processor
from specdec.targets.parts import TargetParts
from specdec.targets.saved import save_model, save_tokenizer

# The layers of a `FeatureSpec` [B, T, F], None if it names none, and the final states [B, T, D]
PassStates = tuple[Tensor | None, Tensor]


class Target(TargetParts, ABC):
    """The parts of a frozen model and its layers: features of a text, and logits."""

    lean_allowed = True  # False if the target's checks find a difference
    without_twin: str | None = None  # why no shrunken twin was checked (see self_check.py)
    processes = 1  # that hold its layers together (see tensor_parallel.py)
    refills = True  # whether a row of its caches can be given to another text
    streams: int | None = None  # the dimension of the streams, where layers pass several
    holders: Sequence[nn.Module] = ()  # the modules with recurrent states

    @property
    def restricted(self) -> bool:
        """Whether passes over its caches are right only in a slower way (see `only_chains`)."""
        return False

    @property
    def lean(self) -> Any:
        """A pass over a cache without the model's modules (a `LeanPass`); None if there is none."""
        return None

    @torch.no_grad()
    def features(
        self,
        ids_BT: Tensor,
        needs: FeatureSpec,
        *,
        cache: SlotCache | None = None,
        parents_BT: Tensor | None = None,
        position_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
    ) -> tuple[Context, Tensor]:
        """Run the target over `ids_BT`; returns the context and the final hidden state [B, T, D],
        whose `logits` a caller can take in chunks.

        With `position_BT` and no cache, rows hold documents, which begin at position 0. Each
        document is read as if it were alone; at padding (`document_BT` below 0) features are 0.
        With `cache`, `ids_BT` continues the cached tokens, as a tree if `parents_BT` is given (see
        `SlotCache.place`); the caller then tells the cache what to keep.
        """
        if cache is not None:
            layers, final_BTD = self._continued(ids_BT, needs, cache, parents_BT)
        else:
            layers, final_BTD = self._read(ids_BT, needs, position_BT, document_BT)
        final = final_BTD if needs.final_hidden else None
        return Context(ids_BT, layers, final, document_BT, position_BT), final_BTD

    def position_inputs(self, ids_BT: Tensor) -> dict[str, Tensor]:
        """What tells the model the positions of a whole text, where its own count differs from that
        of `generate`: RoBERTa's begins after the padding token's id."""
        return {}

    @abstractmethod
    def _read(
        self,
        ids_BT: Tensor,
        needs: FeatureSpec,
        position_BT: Tensor | None,
        document_BT: Tensor | None,
    ) -> PassStates:
        """`features` without a cache."""

    @abstractmethod
    def _continued(
        self, ids_BT: Tensor, needs: FeatureSpec, cache: SlotCache, parents_BT: Tensor | None
    ) -> PassStates:
        """`features` over a cache."""

    @abstractmethod
    def new_cache(self, capacity: int | None = None) -> SlotCache:
        """An empty KV cache; `capacity` fixes its slots, for compiled passes."""

    def step(
        self, ids_BT: Tensor, needs: FeatureSpec, cache: SlotCache, parents_BT: Tensor | None = None
    ) -> tuple[Context, Tensor]:
        """A pass of decoding: the context and the logits [B, T, V]."""
        ctx, final_BTD = self.features(ids_BT, needs, cache=cache, parents_BT=parents_BT)
        return ctx, self.logits(final_BTD)

    @property
    def decoder_start(self) -> int | None:
        """The token with which the decoder of an encoder-decoder begins; None for other models."""
        return None

    def prompt_for_decoding(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that `decode` continues, from those that the model's tokenizer gives: for an
        encoder-decoder, the decoder's start token follows them."""
        return list(tokens)

    def example_ids(self, length: int) -> Tensor:
        """Ids [1, T] of a text of this length that the target can read, for a trial."""
        return torch.arange(length, device=self.device)[None] % self.vocab_size

    def shown(self, processors: Sequence[Processor]) -> list[Processor]:
        """The processors, each given the tokens that transformers would give it."""
        return list(processors)

    def save(self, folder: Path) -> None:
        """Write model and tokenizer in the form that engines load (a GGUF target becomes dense).
        Raises UserError for a model that is quantised in memory."""
        require(
            method(self.model.config) is None,
            f"{folder}: not written: {self.title} is quantised ({self.quantisation}), and an "
            "engine can load it from where it is: export the draft alone",
        )
        require(
            not getattr(self.model, "_hf_peft_config_loaded", False),
            f"{folder}: not written: an adapter was loaded with {self.title}, such as from an "
            "adapter_config.json in its folder, and engines would load the model without it: merge "
            "it into the weights, or remove it, and train for that target",
        )
        # engines must stop where answers end here
        eos = self.eos if set(self.eos) - set(self.generation_eos) else None
        restore_rescaled_weights(self.model)
        save_model(self.model, folder, eos)
        save_tokenizer(self.tokenizer, folder)

    @contextmanager
    def _watched(self, needs: FeatureSpec) -> Iterator[dict[int, Tensor]]:
        """A dict of the residual stream after each layer of `needs`, filled by passes inside."""
        seen: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for k in needs.layers:
                stack.enter_context(self._hook(k, seen))
            yield seen

    def _hook(self, k: int, seen: dict[int, Tensor]) -> Any:
        """A removable hook that keeps the residual stream after k layers in `seen`: of several
        streams, their mean."""
        num_layers = len(self.layers)
        require(
            0 < k <= num_layers,
            f"drafter.layers asks for layer {k} of the target: give 1 to {num_layers}",
        )

        def note_stream(_layer: nn.Module, _args: Any, out: Any) -> None:
            stream = out[0] if type(out) in (tuple, list) else out
            require(
                isinstance(stream, Tensor),
                f"{self.title} passes more than one tensor between layers, so a draft cannot read "
                "its layers: give a drafter that reads only the target's final state",
            )
            if stream.dim() == 4 and self.streams is not None:
                stream = stream.mean(self.streams)
            alike = stream.dim() == 3 and stream.shape[-1] == self.width
            require(
                alike,
                f"{self.title} passes states {list(stream.shape)} between layers, but its head "
                f"reads a width of {self.width}, so a draft cannot read its layers: give a drafter "
                "that reads only the target's final state",
            )
            # Mamba keeps it in float32; a layer may be on another device than the text
            seen[k] = stream.to(self.device, self.dtype)

        return self.layers[k - 1].register_forward_hook(note_stream)


def concatenated(seen: dict[int, Tensor], needs: FeatureSpec) -> Tensor | None:
    """The layers of `needs` [B, T, F] in their order, or None if it names none."""
    return torch.cat([seen[k] for k in needs.layers], -1) if needs.layers else None
