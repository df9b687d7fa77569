"""The one reader of a run's data. Training, `scripts/evaluate`, `scripts/doctor`, `plan=true` and
`scripts/generate` read through this module alone, so all of them have the same prompts, the same
parts and the same counts."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specdec.errors import UserError, require
from specdec.ranks import ALONE, Ranks
from specdec.targets.parts import TargetParts
from train.data.conversations import TEXTS, Conversation, DataConfig, Unusable
from train.data.prompts_trained_on import leave_out, trained_on, without_trained_on
from train.data.reader import Reader, ReaderWork, SharedWork
from train.data.responses import documents_of_log
from train.data.sequences import Document, Prompt
from train.data.split import DataSplit, split_conversations, split_documents, split_prompts

# lists of a `DataSplit`
LISTS = ("train", "held_out", "validation", "test", "prompts", "validation_prompts")


@dataclass(frozen=True)
class DataCounts:
    """The amount of data of a run, before the target generates any response. `train` and
    `validation` count documents, or prompts with `data.responses=target`; `prompts` and
    `validation_prompts` are those of the decoder. `responses` are the tokens of responses in the
    training documents. `digest` is a hash of all token ids in their order, with their masks."""

    records: int
    usable: int
    train: int
    train_tokens: int
    responses: int
    held_out: int
    validation: int
    validation_tokens: int
    prompts: int
    prompt_tokens: int
    validation_prompts: int
    digest: str

    @classmethod
    def of_split(cls, split: DataSplit[Any]) -> "DataCounts":
        return cls(
            records=split.tally.read,
            usable=split.tally.kept,
            train=len(split.train),
            train_tokens=_tokens(split.train),
            responses=sum(int(x.mask.sum()) for x in split.train if isinstance(x, Document)),
            held_out=len(split.held_out),
            validation=len(split.validation),
            validation_tokens=_tokens(split.validation),
            prompts=len(split.prompts),
            prompt_tokens=_tokens(split.prompts),
            validation_prompts=len(split.validation_prompts),
            digest=_digest(split),
        )

    def __str__(self) -> str:
        of_responses = f", {self.responses:,} of them of responses" if self.responses else ""
        return (
            f"read: {self.train:,} to train on ({self.train_tokens:,} tokens{of_responses}), "
            f"{self.validation:,} to validate on ({self.validation_tokens:,} tokens), "
            f"{self.prompts:,} prompts to measure on ({self.prompt_tokens:,} tokens)"
        )


def _tokens(texts: Sequence[Document | Prompt]) -> int:
    return sum(len(text.ids) for text in texts)


def _digest(split: DataSplit[Any]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for name in LISTS:
        digest.update(f"{name}:".encode())
        for text in getattr(split, name):
            digest.update(f"{len(text.ids)}:".encode() + text.ids.tobytes())
            if isinstance(text, Document):
                digest.update(text.mask.tobytes())
    return digest.hexdigest()


def read_run_data(
    cfg: DataConfig,
    target: TargetParts,
    depth: int = 1,
    ranks: Ranks = ALONE,
    starts_from: Collection[Path] = (),
) -> DataSplit[Any]:
    """The data of a run with these settings: prompts if the target generates the responses, else
    documents with those of the data, or speculation steps of a log (`data.decoding_log`), each
    with at most `depth` drafted tokens. Training prompts of the drafts in `starts_from` are not
    measured. With several processes, the first reads the data, and all of them render and
    tokenise. Raises UserError if the data is missing, holds no usable conversation or nothing to
    measure on."""
    require(
        target.reads_pairs is None or cfg.format not in TEXTS,
        f"{target.title} is {target.reads_pairs}, which does not read plain text: give data=pairs",
    )

    def split_with(share: SharedWork) -> DataSplit[Any]:
        return _split(cfg, target.tokenizer, None if ranks.alone else share)

    split = ranks.led(split_with, ReaderWork(cfg, target.tokenizer)) or DataSplit()
    tally, shares = ranks.first(lambda: (split.tally, (split.share, split.validation_share)))
    split = DataSplit(
        **{name: ranks.handed(partial(getattr, split, name)) for name in LISTS},
        tally=tally,
        share=shares[0],
        validation_share=shares[1],
    )
    if cfg.decoding_log:
        logs = Path(cfg.decoding_log)
        held_out = [*split.prompts, *split.validation_prompts, *split.held_out]
        split.train = ranks.handed(lambda: documents_of_log(logs, depth, target, held_out))
    without_trained_on(split, starts_from)
    return split


def _split(cfg: DataConfig, tokenizer: Any, share: SharedWork | None = None) -> DataSplit[Any]:
    if cfg.responses == "target":
        return split_prompts(cfg, tokenizer, share)
    return split_documents(cfg, tokenizer, share)


def unusable_data(
    cfg: DataConfig, split: DataSplit[Any], new: int, target: TargetParts
) -> Iterator[str]:
    """The reasons, a line each, why a run cannot use its data. `new` is the maximum number of
    response tokens."""
    for name, side in (("training", split.train), ("held-out", split.held_out)):
        if not side:
            yield f"no {name} conversation: give more data or change data.held_out"
    most = cfg.longest_prompt
    if not split.prompts:
        yield f"{cfg.name}: no held-out prompt to decode: raise data.max_prompt={most}"
    texts = (*split.train, *split.held_out, *split.prompts)
    for text in texts:
        if text.ids.max(initial=0) >= target.embedding.num_embeddings:  # else far slower
            try:
                target.require_embedded(text.ids, f"{cfg.name}: record {text.id!r}")
            except UserError as error:
                yield str(error)
                break
    longest = max((len(text.ids) for text in (*split.train, *split.held_out)), default=0)
    if cfg.responses == "target" and longest + new > cfg.longest_document:
        yield (
            f"a prompt of {longest} tokens and responses.max_new_tokens={new} do not fit "
            f"data.max_length={cfg.longest_document}: raise data.max_length, or lower "
            f"data.max_prompt={most} or responses.max_new_tokens"
        )


def measured_prompts(
    cfg: DataConfig,
    tokenizer: Any,
    limit: int,
    others: int,
    thinking: str | None = None,
    draft: Path | None = None,
) -> tuple[list[Prompt], list[Prompt]]:
    """At most `limit` prompts of the test part, and at most `others` further held-out prompts, for
    calibration and for choices: first those of the validation part, then the rest of the test part.
    They are those of a run with these settings, which trained `draft` if it is given; `thinking`
    overrides the setting. Raises UserError as `read_run_data` does."""
    if (otherwise := cfg.with_thinking(thinking)) == cfg:
        split = _split(cfg, tokenizer)
    else:
        reader, asking = Reader(cfg, tokenizer), Reader(otherwise, tokenizer)
        use: Any = reader.prompt if cfg.responses == "target" else reader.documents
        split = split_conversations(cfg, use, asking.prompt)
    if draft is not None and (known := trained_on(draft)) is not None:
        leave_out(split, known.before, f"the stages before {draft}")
    return chosen_prompts(split.prompts, split.validation_prompts, limit, others)


def chosen_prompts(
    test: Sequence[Prompt], validation: Sequence[Prompt], limit: int, others: int
) -> tuple[list[Prompt], list[Prompt]]:
    """`measured_prompts`, given all of the decoder's prompts of the test and the validation
    part."""
    return [*test[:limit]], [*validation, *test[limit:]][:others]


def held_out_prompts(cfg: DataConfig, tokenizer: Any) -> list[Prompt]:
    """The decoder's prompts of a run with these settings, in the order of `measured_prompts`."""
    return _split(cfg, tokenizer).prompts


def whole_prompts(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    room: int | None,
    cfg: DataConfig | None = None,
    thinking: str | None = None,
) -> list[Prompt]:
    """The prompts of a file or a chat, each complete up to its last user turn, or to the tool
    results after it. Without a chat template, they are read as plain text. `cfg` are the data
    settings of the draft's run, if it is known, and `thinking` overrides theirs. Raises UserError
    naming the first conversation that is unusable or has more than `room` tokens (None: any
    number)."""
    by_template = bool(tokenizer.chat_template)
    if not by_template and thinking is not None:
        raise UserError(
            f"--thinking {thinking}: the target has no chat template to ask for reasoning: leave "
            "it out"
        )
    cfg = cfg or DataConfig()
    if by_template:
        cfg = replace(cfg, format="auto").with_thinking(thinking)
    else:
        cfg = replace(cfg, format="paragraphs", template_args={}, chat_template=None)
    reader, prompts = Reader(cfg, tokenizer), []
    for conversation in conversations:
        try:
            prompts.append(reader.prompt(conversation, whole=True))
        except Unusable as reason:
            raise UserError(f"{conversation.id}: {reason}") from reason
        if room is not None and len(prompts[-1].ids) > room:
            raise UserError(
                f"{conversation.id}: the prompt has {len(prompts[-1].ids):,} tokens, and the "
                f"target has room for only {max(0, room):,} besides the response: shorten it, "
                "or ask for shorter responses"
            )
    return prompts
