"""The reference that an export carries: what a server that loads it should answer and accept.

`reference_of` decodes a dozen prompts greedily with our own decoder and notes the ids of the
responses and the accepted tokens by position. `Reference.load` reads it back from an export.
`scripts/check` replays it on a server (reference_replay.py).

Two computations of the same logits differ by rounding, so a token is only as certain as the gap to
the runner-up. A gap of the target below `NEAR` is noted at each token of a response.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor

from specdec.context import HiddenStateSpec
from specdec.decoding.decode import decode
from specdec.decoding.generation import Generation
from specdec.decoding.way import Way
from specdec.drafters import family
from specdec.drafters.base import Drafter, Predictor, vocabulary
from specdec.errors import require
from specdec.files import read_record, record
from specdec.formats.draft_checkpoint import CARD
from specdec.formats.draft_import import keeps_layout
from specdec.formats.gguf_file import REFERENCE_KEY, read_json_key
from specdec.formats.stored_tensors import untied
from specdec.integrity import of_value, sealed, unsealed
from specdec.runtime.cpu.machine_probes import native_dtype
from specdec.sampling.trees import DEEPEST, Chain
from specdec.targets.fingerprint import digest_of
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target

FORMAT = 1
FILE = "reference/reference.json"  # in the folder of an export
PROMPTS, NEW_TOKENS = 12, 40  # how many prompts, and the most tokens of a response
HEAD, TAIL = 32, 64  # tokens that are kept of the two ends of a longer prompt
NEAR = 1.0  # the largest gap between two logits that is noted
# the largest gap that rounding closes, by the dtype of the computation
ROUNDING = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.5}
# words, digits, accents, two scripts, a sign and code: tokenizers differ in these
PROBE = "Hello, how are you? 12345 naïve café, 東京 привет 🙂\n\tdef f(x): return x  # 3.14"


@dataclass(frozen=True)
class ReferenceResponse:
    """A response to a prompt. `drafted`, `accepted` and `beyond` count tokens by position:
    `accepted` holds those of the response and `beyond` those that the last speculation step
    accepted after its end. `closing` is the position, from 0, of the drafted token that is the last
    one of the response; None: it was not drafted. `near` holds the places in the response, from 0,
    where the target's two best logits differ by less than `NEAR`, each with that gap."""

    ids: list[int]
    steps: int
    drafted: list[int]
    accepted: list[int]
    beyond: list[int]
    closing: int | None = None
    near: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class ReferenceTarget:
    """The target, by its weights and config and by its tokenizer. `name` and `eos` are those of
    `TargetParts`."""

    name: str
    revision: str | None
    fingerprint: str
    tokenizer: str  # a hash of its vocabulary; empty: it has none
    vocab_size: int
    eos: list[int]


@dataclass(frozen=True)
class ReferenceDraft:
    """The draft: what builds its network, and a hash of each of its tensors, under our names.
    `vocab` holds the target ids of its draft vocabulary, which some layouts leave out; None: all
    tokens. `as_it_came`: it was imported, and its export has the layout that it came in."""

    family: str
    layout: str
    config: dict[str, Any]
    sizes: dict[str, Any]
    tensors: dict[str, str]
    vocab: list[int] | None = None
    as_it_came: bool = False

    def empty(self) -> Drafter:
        """A drafter of this kind with weights of no meaning. Raises UserError as `family` and
        `record` do."""
        kind = family(self.family)
        config: Any = record(kind.Config, self.config, "draft.config")
        drafter = kind(config, record(kind.Sizes, self.sizes, "draft.sizes"))
        if isinstance(drafter, Predictor) and self.vocab is not None:
            drafter.vocab_S = torch.tensor(self.vocab)
        return drafter


@dataclass(frozen=True)
class ReferenceRendering:
    """How prompts were rendered: the arguments of the chat template, and whether the draft has a
    template of its own. A server should make `chat` of the user's words `PROBE`, and `text` of the
    words alone; None where that is not known, for the `reason`."""

    arguments: dict[str, Any] = field(default_factory=dict)
    own_template: bool = False
    probe: str = PROBE
    chat: list[int] | None = None
    text: list[int] | None = None
    reason: str = ""  # why `chat` is not known


@dataclass(frozen=True)
class Reference:
    """What `Reference.load` reads. `responses` are those to all `prompts`, by the dtype in which
    they were computed; `absent` says of each other dtype why it is missing. Decoding is greedy, in
    chains of `gamma` tokens, of at most `max_new_tokens` a response."""

    format: int
    draft: ReferenceDraft
    target: ReferenceTarget
    rendering: ReferenceRendering
    origin: str  # of the prompts, in words
    gamma: int
    max_new_tokens: int
    prompts: list[list[int]]
    responses: dict[str, list[ReferenceResponse]]
    absent: dict[str, str] = field(default_factory=dict)
    sampling: dict[str, float] = field(default_factory=lambda: {"temperature": 0.0})
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.format == FORMAT, f"format is {self.format}, but this version reads {FORMAT}")
        counts = [len(each) for each in self.responses.values()]
        complete = bool(self.prompts) and bool(counts) and {*counts} == {len(self.prompts)}
        require(complete, "the numbers of prompts and responses differ: export the draft again")

    @property
    def json(self) -> str:
        """The text of the file, with a checksum."""
        return json.dumps(sealed(asdict(self)), ensure_ascii=False)

    @classmethod
    def load(cls, export: Path | str) -> Self:
        """The reference of an export, a folder or a GGUF file. Raises UserError if it has none or
        if it is damaged."""
        path, remedy = Path(export), "export the draft again with scripts/export"
        require(path.exists(), f"{path} does not exist: give an export, such as runs/NAME/export")
        require(
            not (path / CARD).is_file(),
            f"{path} is a draft: give its export, such as runs/NAME/export, or {remedy}",
        )
        if not path.is_file():
            require(
                (path / FILE).is_file(),
                f"{path} carries no reference ({FILE} is missing): {remedy}",
            )
            return read_record(cls, path / FILE, remedy)
        value = read_json_key(path, REFERENCE_KEY)
        require(value is not None, f"{path} carries no reference (key {REFERENCE_KEY}): {remedy}")
        return record(cls, unsealed(value, where=path), str(path))


def reference_of(
    drafter: Drafter,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    layout: str,
    origin: str,
    rendering: ReferenceRendering,
    max_new_tokens: int = NEW_TOKENS,
    others: Mapping[str, list[ReferenceResponse]] | None = None,
) -> Reference:
    """The reference of a draft for its export in a layout, computed in the target's dtype.
    `prompts` are cut by `shortened`. `others` are responses to them in other dtypes
    (`expected_responses`)."""
    gamma, dtype = chain_of(drafter), str(target.dtype).removeprefix("torch.")
    vocab_S = vocabulary(drafter)
    expected = expected_responses(drafter, target, prompts, max_new_tokens)
    responses = {dtype: expected, **(others or {})}
    return Reference(
        format=FORMAT,
        draft=ReferenceDraft(
            family=drafter.config.name,
            layout=layout,
            config=asdict(drafter.config),
            sizes=asdict(drafter.sizes),
            tensors=tensor_digests(drafter),
            vocab=None if vocab_S is None else vocab_S.tolist(),
            as_it_came=keeps_layout(drafter, layout),
        ),
        target=ReferenceTarget(
            name=target.name,
            revision=target.revision,
            fingerprint=target.fingerprint(),
            tokenizer=tokenizer_digest(target.tokenizer),
            vocab_size=target.vocab_size,
            eos=list(target.eos),
        ),
        rendering=rendering,
        origin=origin,
        gamma=gamma,
        max_new_tokens=max_new_tokens,
        prompts=[list(prompt) for prompt in prompts],
        responses=responses,
        absent={
            x: _reason_absent(x, target) for x in ("float32", "bfloat16") if x not in responses
        },
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def _reason_absent(dtype: str, target: TargetParts) -> str:
    native = native_dtype(target.device.type)
    if dtype == "bfloat16" and native.dtype != dtype:
        return native.reason
    loaded = str(target.dtype).removeprefix("torch.")
    return f"the target was loaded in {loaded}; scripts/export adds {dtype}"


def chain_of(drafter: Drafter) -> int:
    """How many tokens a speculation step of the reference drafts: as many as the drafter was
    trained for, which is what an export's README serves it with."""
    return min(drafter.depth, drafter.limits.depth or DEEPEST)


def shortened(prompt: Sequence[int], target: TargetParts, max_new_tokens: int) -> list[int]:
    """A prompt of at most `HEAD` + `TAIL` tokens that leaves room for a response. Of a longer one
    both ends are kept: the first tokens, without which some targets write nonsense, and the
    generation prompt."""
    room = target.room(1) - max_new_tokens - 2
    head, tail = (min(size, max(1, room // 2)) for size in (HEAD, TAIL))
    if len(prompt) <= head + tail:
        return list(prompt)
    return [*prompt[:head], *prompt[-tail:]]


def expected_responses(
    drafter: Drafter, target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[ReferenceResponse]:
    """The responses to all prompts, decoded together."""
    way = Way(drafter, Chain(chain_of(drafter)))
    responses = decode(target, prompts, way, max_new_tokens=max_new_tokens)
    return [_response(drafter, target, response) for response in responses]


def _response(drafter: Drafter, target: Target, response: Generation) -> ReferenceResponse:
    gamma, last = chain_of(drafter), len(response.prompt) + len(response.ids) - 1
    drafted, accepted, beyond = ([0] * gamma for _ in range(3))
    closing = None
    for step in response.steps:
        for k in range(step.drafted):
            drafted[k] += 1
            if k < step.accepted:
                (accepted if step.anchor + 1 + k <= last else beyond)[k] += 1
                closing = k if step.anchor + 1 + k == last else closing
    return ReferenceResponse(
        ids=response.ids,
        steps=len(response.steps),
        drafted=drafted,
        accepted=accepted,
        beyond=beyond,
        closing=closing,
        near=_near_ties(target, response),
    )


@torch.no_grad()
def _near_ties(target: Target, response: Generation) -> list[tuple[int, float]]:
    """`near` of a `ReferenceResponse`, from one more forward pass over its text."""
    ids_1T = torch.tensor([[*response.prompt, *response.ids]], device=target.device)
    _, final_1TD = target.hidden_states(ids_1T, HiddenStateSpec())
    first = target.placed(response.prompt) - 1
    gap_T = _gap(target.logits(final_1TD[0, first : first + len(response.ids)]))
    return [(t, round(gap, 3)) for t, gap in enumerate(gap_T.tolist()) if gap < NEAR]


def _gap(logits: Tensor) -> Tensor:
    """By how much the best logit [N] of each row [N, V] is above the second best."""
    best_N2 = logits.float().topk(2, -1).values
    return best_N2[:, 0] - best_N2[:, 1]


def tensor_digests(drafter: Drafter) -> dict[str, str]:
    """A hash of each tensor of a draft, whatever floating-point type it is stored in."""
    return {name: digest_of(x) for name, x in sorted(untied(drafter.state_dict()).items())}


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary; empty if there is no tokenizer."""
    return "" if tokenizer is None else of_value(sorted(tokenizer.get_vocab().items()))
