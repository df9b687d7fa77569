"""What may be wrong with a served draft: each hypothesis is the draft with one thing changed.

`HYPOTHESES` is the table. A hypothesis takes an `Experiment` and yields a `ChangedDraft` for each
way in which its thing may be wrong. `Experiment.predicted` says what an engine would accept with
it, along the text that the engine itself wrote: a drafted token is accepted where it is the text's
next token, so no decoding is needed, and the target reads each text once.

To add a hypothesis, write such a function and give it a line in the table.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor, nn

from specdec.context import Context, HiddenStateSpec
from specdec.drafters.base import Drafter, Predictor
from specdec.drafters.block import Block
from specdec.drafters.layers import RMSNorm, Rope
from specdec.errors import UserError, require
from specdec.measure.reference_replay import AcceptedRange
from specdec.measure.served import TimedResponse
from specdec.targets.target import Target

MORE_GAMMA = 4  # how many tokens more than the reference's γ are tried
THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # bases of rotary positions that models have
CACHE_BLOCKS = (16, 1)  # tokens of the blocks in which engines keep prefixes


@dataclass(frozen=True)
class ChangedDraft:
    """A draft with one thing changed. `culprit` names the thing, and `change` says what it is
    instead. What is None is as it should be: `layers` are those that are read, `final` makes the
    final state [T, D] of a target that has the stream before its norm, `token_ids` are the target
    ids [S] of the draft vocabulary, `unseen` is how many tokens of a prompt the draft has not
    seen, of its length."""

    culprit: str
    change: str
    drafter: Drafter
    gamma: int | None = None
    layers: tuple[int, ...] | None = None
    before_norm: bool = False  # the final state is read before the target's final norm
    token_ids: Tensor | None = None
    unseen: Callable[[int], int] | None = None
    target: Target | None = None


@dataclass
class Suspects:
    """What a user suspects the server of having loaded instead, by name: other drafts for this
    target, and other targets. `require_draft` and `require_target` say which can be tried."""

    drafts: dict[str, Drafter] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)

    @staticmethod
    def require_draft(draft: Drafter, target: Target, gamma: int) -> None:
        """Raise UserError, with the reason, for a draft that cannot be compared with a server that
        drafts γ tokens a step for this target."""
        name, most, rows = draft.config.name, draft.limits.depth, draft.sizes.target_vocab
        served = isinstance(draft, Predictor)
        require(served, f"no engine loads a draft of {name} from a file")
        require(
            rows == target.vocab_size,
            f"it drafts from a vocabulary of {rows}, and the target's has {target.vocab_size}",
        )
        require(
            most is None or most >= gamma,
            f"it drafts at most {most} tokens a step, and the export {gamma}",
        )

    @staticmethod
    def require_target(suspect: Target, target: Target) -> None:
        """Raise UserError, with the reason, for a target that cannot read the texts of another."""
        reads = suspect.reads_pairs
        require(reads is None, f"it is {reads}, and reads prompt and response apart")
        require(
            suspect.vocab_size >= target.vocab_size,
            f"its vocabulary has {suspect.vocab_size} tokens, and the target's {target.vocab_size}",
        )


@dataclass
class Experiment:
    """A draft and its target, and the responses of an engine to prompts. `in_dtype` loads the
    target once more, in another dtype; None: it cannot. `limit` is the number of new tokens within
    which the engine drafts (None: it drafts beyond the end of a response)."""

    target: Target
    drafter: Predictor
    gamma: int
    prompts: Sequence[Sequence[int]]
    responses: Sequence[TimedResponse]
    suspects: Suspects = field(default_factory=Suspects)
    in_dtype: Callable[[torch.dtype], Target | None] = lambda dtype: None
    limit: int | None = None

    def __post_init__(self) -> None:
        self._states: dict[tuple[int, int, int], Tensor] = {}
        self._other: dict[torch.dtype, Target | None] = {}
        layers = self.drafter.needs.layers
        around = {k + d for k in layers for d in (-1, 0, 1)} | {self.target.depth}
        self._layers = tuple(sorted(k for k in around if 0 < k <= self.target.depth))

    def target_in(self, dtype: torch.dtype) -> Target | None:
        """The target in another dtype, loaded at its first use."""
        if dtype not in self._other:
            self._other[dtype] = self.in_dtype(dtype)
        return self._other[dtype]

    @property
    def unchanged(self) -> ChangedDraft:
        return ChangedDraft("nothing", "the draft as it was exported", self.drafter)

    def clone(self) -> Any:
        """A copy of the draft that shares its tensors and its target: modules and parameters of it
        can be replaced."""
        shared: list[Any] = [*self.drafter.parameters(), *self.drafter.buffers(), self.target]
        return copy.deepcopy(self.drafter, {id(x): x for x in shared})

    def with_parameter(self, name: str, change: Callable[[Tensor], Tensor]) -> Any:
        """A clone with one parameter changed."""
        clone = self.clone()
        parent, leaf = _parent(clone, name)
        changed = nn.Parameter(change(getattr(parent, leaf).detach()), requires_grad=False)
        setattr(parent, leaf, changed)
        return clone

    def gaps(self, target: Target) -> list[float]:
        """By how much a target's best logit is above that of the token that the engine wrote, at
        each token of all responses; 0 where they are the same."""
        gaps = list[float]()
        for i, prompt in enumerate(self.prompts):
            ids_T = torch.tensor(self.responses[i].ids, device=target.device)
            final_TD = self.state(target, i, 0)[len(prompt) - 1 : -1]
            logits_TV = target.logits(final_TD).float()
            gap_T = logits_TV.amax(-1) - logits_TV.gather(-1, ids_T[:, None])[:, 0]
            gaps += gap_T.tolist()
        return gaps

    # Along the engine's text

    def text(self, i: int) -> list[int]:
        return [*self.prompts[i], *self.responses[i].ids]

    def state(self, target: Target, i: int, k: int) -> Tensor:
        """The residual stream [T, D] of text i after k of the target's layers; 0: the final
        state."""
        key = id(target), i, k
        if key not in self._states:
            layers = self._layers if k in (0, *self._layers) else (k,)
            if any(target is suspect for suspect in self.suspects.targets.values()):
                layers = ()  # no draft reads it, and it may have fewer layers
            ids_1T = torch.tensor([self.text(i)], device=target.device)
            ctx, final_1TD = target.hidden_states(ids_1T, HiddenStateSpec(layers))
            read = ctx.layers_BTF
            streams = () if read is None else read[0].split(target.width, -1)
            for layer, stream_TD in zip(layers, streams, strict=True):
                self._states[key[0], i, layer] = stream_TD
            self._states[key[0], i, 0] = final_1TD[0]
        return self._states[key]

    def context(self, changed: ChangedDraft) -> Context:
        """All texts as the documents of one row, with what the changed draft reads of the
        target."""
        needs, target = changed.drafter.needs, changed.target or self.target
        ids, places, documents = list[int](), list[int](), list[int]()
        for i, prompt in enumerate(self.prompts):
            text, unseen = self.text(i), changed.unseen(len(prompt)) if changed.unseen else 0
            ids += text
            places += range(len(text))
            documents += [2 * i + (place >= unseen) for place in range(len(text))]
        row_1T, place_1T, document_1T = (
            torch.tensor([x], device=target.device) for x in (ids, places, documents)
        )
        ctx = Context(row_1T, position_BT=place_1T, document_BT=document_1T)
        if layers := changed.layers or needs.layers:
            ctx.layers_BTF = torch.cat([self._states_of_all(target, k) for k in layers], -1)
        if needs.final_hidden:
            last = target.depth if changed.before_norm else 0
            ctx.final_BTD = self._states_of_all(target, last)
        return ctx

    def _states_of_all(self, target: Target, k: int) -> Tensor:
        """`state` of all texts in one row [1, T, D]."""
        return torch.cat([self.state(target, i, k) for i in range(len(self.prompts))])[None]

    @torch.no_grad()
    def predicted(self, changed: ChangedDraft) -> list[AcceptedRange]:
        """What an engine that serves this draft accepts in each response."""
        gamma = changed.gamma or self.gamma
        lengths = [len(response.ids) for response in self.responses]
        written = self._written(changed, gamma).split([length - 1 for length in lengths])
        return [
            accepted_along(written_AK, length, gamma, length == self.limit)
            for written_AK, length in zip(written, lengths, strict=True)
        ]

    def misfit(self, changed: ChangedDraft) -> int:
        """By how many accepted tokens the engine's counts differ from what is predicted."""
        predicted = self.predicted(changed)
        return sum(map(AcceptedRange.misfit, predicted, self.responses))

    def _written(self, changed: ChangedDraft, gamma: int) -> Tensor:
        """Whether depth k at each anchor drafts the text's own token [A, K]; the anchors are the
        tokens of all responses but their last."""
        anchors, ends, start = list[int](), list[int](), 0
        for i, prompt in enumerate(self.prompts):
            end = start + len(self.text(i))
            anchors += range(start + len(prompt), end - 1)
            ends += [end] * (end - 1 - start - len(prompt))
            start = end
        if not anchors:
            return torch.zeros(0, gamma, dtype=torch.bool)
        ctx, drafter = self.context(changed), changed.drafter
        assert isinstance(drafter, Predictor)
        device = ctx.ids_BT.device
        anchors_1A, ends_A = (torch.tensor(x, device=device) for x in ([anchors], ends))
        places_AK = anchors_1A[0, :, None] + torch.arange(1, gamma + 1, device=device)
        text_AK = ctx.ids_BT[0][places_AK.clamp_max(start - 1)]
        drafted = None if gamma <= drafter.depth else text_AK[None, :, :-1]
        hidden_AKD = drafter.hidden(ctx, anchors_1A, drafted)[0]
        ids_S = changed.token_ids if changed.token_ids is not None else drafter.vocab_S
        columns = []
        for k in range(gamma):
            logits_AS = drafter.unembed(hidden_AKD[:, k], k).float()
            if ids_S is not None:  # as in engines: of two logits for one token, one remains
                logits_AV = logits_AS.new_full((len(anchors), self.target.vocab_size), -torch.inf)
                logits_AV[:, ids_S] = logits_AS
                logits_AS = logits_AV
            columns.append(logits_AS.argmax(-1))
        inside_AK = places_AK < ends_A[:, None]
        return ((torch.stack(columns, 1) == text_AK) & inside_AK).cpu()


def accepted_along(
    written_AK: Tensor, length: int, gamma: int, capped: bool = False
) -> AcceptedRange:
    """The accepted tokens by position of greedy decoding in chains of γ along a response of
    `length` tokens, from whether each draft is the text's own token. Prefill emits token 0; a
    speculation step begins at the last token that is known. A step that reaches the end may have
    accepted more, unless it is `capped`: then it drafts up to the last token but one."""
    written, at = written_AK.tolist(), 0
    low, beyond = [0] * gamma, [0] * gamma
    while at < length - 1:
        accepted = 0
        end = length - capped
        while accepted < gamma and at + 1 + accepted < end and written[at][accepted]:
            low[accepted] += 1
            accepted += 1
        if not capped and at + 1 + accepted >= length:
            for k in range(accepted, gamma):
                beyond[k] += 1
        at += accepted + 1
    return AcceptedRange(low, [inside + more for inside, more in zip(low, beyond, strict=True)])


def _parent(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


# The hypotheses


def other_gamma(here: Experiment) -> Iterator[ChangedDraft]:
    """The server drafts another number of tokens."""
    deepest = here.drafter.limits.depth or here.gamma + MORE_GAMMA
    for gamma in range(1, min(deepest, here.gamma + MORE_GAMMA) + 1):
        if gamma != here.gamma:
            change = f"the server drafts {gamma} tokens a step, not {here.gamma}"
            yield ChangedDraft("γ", change, here.drafter, gamma=gamma)


def other_layers(here: Experiment) -> Iterator[ChangedDraft]:
    """The layer ids are counted from another number."""
    layers, depth = here.drafter.needs.layers, here.target.depth
    for by in (1, -1):
        moved = tuple(k + by for k in layers)
        if moved and all(0 < k <= depth for k in moved):
            change = f"the draft reads the layers {list(moved)}, not {list(layers)}"
            yield ChangedDraft("layer ids", change, here.drafter, layers=moved)
    if len(layers) > 1:
        back = layers[::-1]
        change = f"the draft reads the layers in the order {list(back)}, not {list(layers)}"
        yield ChangedDraft("layer ids", change, here.drafter, layers=back)


def missing_norms(here: Experiment) -> Iterator[ChangedDraft]:
    """A norm has no weight, or is left out; a setting of norms has its other value."""
    for name, module in here.drafter.named_modules():
        if isinstance(module, RMSNorm):
            unit = here.with_parameter(f"{name}.weight", torch.ones_like)
            yield ChangedDraft("norm", f"the weight of {name} is missing (1 everywhere)", unit)
            without = here.clone()
            setattr(*_parent(without, name), nn.Identity())
            yield ChangedDraft("norm", f"{name} is left out", without)
    if (clone := _with_first_key_norm(here)) is not None:
        change = "the keys of the text have the k_norm of layer 0 in every layer"
        yield ChangedDraft("norm", change, clone)
    if here.drafter.needs.final_hidden:
        change = "the draft reads the target's last state before its final norm"
        yield ChangedDraft("norm", change, here.drafter, before_norm=True)
    for flag in fields(here.drafter.config):
        value = getattr(here.drafter.config, flag.name)
        if isinstance(value, bool) and "norm" in flag.name:
            with suppress(UserError):  # two settings may exclude each other
                other = rebuilt(here, replace(here.drafter.config, **{flag.name: not value}))
                change = f"{flag.name} is {str(not value).lower()}, not {str(value).lower()}"
                yield ChangedDraft("norm", change, other)


class FirstKeyNorm(nn.Module):
    """The norm of a layer's keys in `Block.hidden`, where the text's keys get the norm of layer 0.
    That pass computes the keys of the text first, and then those of the blocks, whose norm is the
    layer's own; a pass with a cache computes both at once and cannot use this module."""

    def __init__(self, first: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.first, self.own, self.of_text = first, own, True

    def forward(self, keys: Tensor) -> Tensor:
        norm = self.first if self.of_text else self.own
        self.of_text = not self.of_text
        normed: Tensor = norm(keys)
        return normed


def _with_first_key_norm(here: Experiment) -> Any:
    """A clone of a block drafter with `FirstKeyNorm` in its layers after the first; None if their
    norms have equal weights, or for another drafter."""
    if not isinstance(here.drafter, Block):
        return None
    clone = here.clone()
    first, *others = [layer.self_attn for layer in clone.layers]
    if all(torch.equal(x.k_norm.weight, first.k_norm.weight) for x in others):
        return None
    for attention in others:
        attention.k_norm = FirstKeyNorm(first.k_norm, attention.k_norm)
    return clone


def rebuilt(here: Experiment, config: Any) -> Any:
    """The draft's weights in a network of another config; what they lack is as it is drawn."""
    drafter = type(here.drafter)(config, here.drafter.sizes)
    drafter.load_state_dict(here.drafter.state_dict(), strict=False)
    weight = next(here.drafter.parameters())
    drafter.to(weight.device, weight.dtype)
    drafter.attach(here.target)
    return drafter.eval()


def other_rotary_positions(here: Experiment) -> Iterator[ChangedDraft]:
    """RoPE has another base, no scaling, or rotates whole heads."""
    names = [name for name, m in here.drafter.named_modules() if isinstance(m, Rope)]
    llama = getattr(here.drafter, "llama", None)
    if not names or llama is None:
        return
    rope = dict(llama.rope_parameters or {})
    theta = rope.get("rope_theta")
    plain = {"rope_type": "default", "rope_theta": theta}
    changes: list[tuple[str, dict[str, Any], bool]] = []
    if rope.get("rope_type", "default") != "default":
        changes.append((f"no scaling ({rope['rope_type']} is ignored)", plain, False))
        changes.append(("no scaling, and the base 10000", plain | {"rope_theta": 1e4}, False))
    for base in THETAS:
        if base != theta:
            changed = rope | {"rope_theta": base}
            changes.append((f"the base {base:g}, not {theta:g}", changed, False))
    if getattr(llama, "rotary_dim", None) is not None:
        changes.append(("whole heads are rotated, not a part of each", rope, True))
    for words, parameters, whole in changes:
        config = copy.deepcopy(llama)
        config.rope_parameters = parameters
        if whole:
            config.rotary_dim = None
        clone = here.clone()
        for name in names:
            setattr(*_parent(clone, name), Rope(config).to(here.target.device))
        yield ChangedDraft("RoPE", f"rotary positions: {words}", clone)


def other_vocabulary_map(here: Experiment) -> Iterator[ChangedDraft]:
    """Offsets are read as ids, ids as offsets, or there is no map."""
    if (ids_S := here.drafter.vocab_S) is None:
        return
    place_S = torch.arange(len(ids_S), device=ids_S.device)
    for change, wrong_S in (
        ("the offsets are read as token ids", ids_S - place_S),
        ("the token ids are read as offsets", ids_S + place_S),
        ("there is no map: draft token i is target token i", place_S),
    ):
        if wrong_S.max() < here.target.vocab_size:
            yield ChangedDraft("vocabulary map", change, here.drafter, token_ids=wrong_S)


def quantised_draft(here: Experiment) -> Iterator[ChangedDraft]:
    """The draft's weights are rounded to fewer bits."""
    roundings: Mapping[str, Callable[[Tensor], Tensor]] = {
        "4 bits in blocks of 32 (q4_0)": lambda x: _in_blocks(x, GGMLQuantizationType.Q4_0),
        "8 bits in blocks of 32 (q8_0)": lambda x: _in_blocks(x, GGMLQuantizationType.Q8_0),
        "8 bits with a scale a row (int8)": _by_row,
        "8 bits (fp8 e4m3) with a scale a tensor": _fp8,
    }
    for words, rounded in roundings.items():
        clone = here.clone()
        for name, weight in here.drafter.named_parameters():
            if weight.dim() == 2:
                value = nn.Parameter(rounded(weight.detach()), requires_grad=False)
                setattr(*_parent(clone, name), value)
        yield ChangedDraft("quantised draft", f"the draft's weights have {words}", clone)


def _in_blocks(x: Tensor, kind: GGMLQuantizationType) -> Tensor:
    if x.shape[-1] % 32:
        return x
    array = x.float().cpu().numpy()
    return torch.from_numpy(dequantize(quantize(array, kind), kind)).to(x)


def _by_row(x: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return ((x.float() / scale).round() * scale).to(x)


def _fp8(x: Tensor) -> Tensor:
    scale = x.float().abs().max().clamp_min(1e-12) / 448  # the largest number of e4m3
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x)


def stale_head(here: Experiment) -> Iterator[ChangedDraft]:
    """The draft's head is the target's own, or that of a suspect."""
    for name, module in here.drafter.named_modules():
        if not (isinstance(module, nn.Linear) and _is_head(here.drafter, module)):
            continue
        others = {"the target's own": here.target.own_head(here.drafter.vocab_S)}
        for suspect, draft in here.suspects.drafts.items():
            if (head := dict(draft.named_parameters()).get(f"{name}.weight")) is not None:
                others[f"that of {suspect}"] = head
        for suspect, parts in here.suspects.targets.items():
            others[f"that of {suspect}"] = parts.own_head(here.drafter.vocab_S)
        for words, weight in others.items():
            if weight.shape == module.weight.shape and not torch.equal(weight, module.weight):
                other = here.with_parameter(f"{name}.weight", weight.detach().to)  # as the own
                yield ChangedDraft("stale head", f"{name} is {words}", other)


def _is_head(drafter: Drafter, module: nn.Linear) -> bool:
    return bool(module.out_features == (drafter.sizes.draft_vocab or drafter.sizes.target_vocab))


def stale_embedding(here: Experiment) -> Iterator[ChangedDraft]:
    """The draft reads another embedding than the target's."""
    own = here.target.embedding.weight
    tables = {
        "there is no embedding (zeros)": torch.zeros_like(own),
        f"the embedding is scaled by {own.shape[1] ** 0.5:.3g}": own * own.shape[1] ** 0.5,
    }
    for suspect, parts in here.suspects.targets.items():
        if parts.embedding.weight.shape == own.shape:
            tables[f"the embedding is that of {suspect}"] = parts.embedding.weight
    for change, table in tables.items():
        clone, reading = here.clone(), copy.copy(here.target)
        reading.embedding = nn.Embedding.from_pretrained(table.detach().to(own))
        clone.attach(reading)
        yield ChangedDraft("stale embedding", change, clone)


def missing_weights(here: Experiment) -> Iterator[ChangedDraft]:
    """A tensor is not loaded."""
    for name, weight in here.drafter.named_parameters():
        if weight.dim() > 1:
            zero = here.with_parameter(name, torch.zeros_like)
            yield ChangedDraft("missing weights", f"{name} is not loaded (zeros)", zero)


def other_drafts(here: Experiment) -> Iterator[ChangedDraft]:
    """The server drafts with a suspect."""
    for suspect, draft in here.suspects.drafts.items():
        yield ChangedDraft("another draft", f"the server drafts with {suspect}", draft)


def kept_prefix(here: Experiment) -> Iterator[ChangedDraft]:
    """The draft has not seen the part of a prompt that the engine had kept."""
    for block in CACHE_BLOCKS:
        change = f"the draft does not see the cached part of a prompt (blocks of {block} tokens)"

        def unseen(length: int, block: int = block) -> int:
            return (length - 1) // block * block

        yield ChangedDraft("prefix caching", change, here.drafter, unseen=unseen)


def draft_in_16_bits(here: Experiment) -> Iterator[ChangedDraft]:
    """The server computes in bfloat16."""
    weight = next(here.drafter.parameters())
    if weight.dtype == torch.bfloat16:
        return
    target = here.target_in(torch.bfloat16)
    if target is not None:
        clone = here.clone()
        for name, weight in here.drafter.named_parameters():  # `to` would change shared ones
            rounded = nn.Parameter(weight.detach().to(target.dtype), requires_grad=False)
            setattr(*_parent(clone, name), rounded)
        clone.attach(target)
        change = "target and draft are computed in bfloat16"
        yield ChangedDraft("dtype", change, clone, target=target)


HYPOTHESES: dict[str, Callable[[Experiment], Iterator[ChangedDraft]]] = {
    "γ": other_gamma,
    "layer ids": other_layers,
    "norm": missing_norms,
    "RoPE": other_rotary_positions,
    "vocabulary map": other_vocabulary_map,
    "stale head": stale_head,
    "stale embedding": stale_embedding,
    "quantised draft": quantised_draft,
    "another draft": other_drafts,
    "prefix caching": kept_prefix,
    "dtype": draft_in_16_bits,
    "missing weights": missing_weights,
}
