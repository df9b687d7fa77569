"""The lengths in tokens of a run's prompts and documents, and the number of those above
`data.max_prompt` and `data.max_length`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.data.conversations import DataConfig
from train.data.sequences import Prompt, reason_prompt_too_long
from train.data.split import DataSplit

ADVISED = 0.05  # share of texts that are too long, from which on another limit is advised
FEW_STEPS = 20  # steps of an epoch: with fewer, shorter rows would train better
PERCENTILES = {"50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


@dataclass(frozen=True)
class DataLengths:
    """`percentiles` holds the lengths at `PERCENTILES`, by what is measured; `longer` the number of
    texts above some limits, of which the first is that of the settings; `too_long` is a sentence on
    the treatment of these texts, their share, and the setting that changes it."""

    percentiles: dict[str, list[int]]
    longer: dict[int, int]
    too_long: str

    @classmethod
    def of_split(cls, cfg: DataConfig, split: DataSplit[Any]) -> "DataLengths":
        """The lengths of everything that a run reads of its data, including documents that are
        skipped because they are too long."""
        texts = [*split.train, *split.held_out]
        lengths = [*(len(text.ids) for text in texts), *split.tally.too_long]
        prompts = cfg.responses == "target" and cfg.decoding_log is None
        percentiles = {"prompts" if prompts else "documents": percentiles_of(lengths)}
        if not prompts and split.prompts:
            percentiles["prompts to decode"] = percentiles_of([len(p.ids) for p in split.prompts])
        longer = _longer(cfg, split)
        count = len(texts) + _skipped(cfg, split)
        return cls(percentiles, longer, _of_too_long(cfg, longer[min(longer)], count, lengths))

    def lines(self) -> list[str]:
        """A description, in lines."""
        rows = (
            (name, ", ".join(f"{p} {n:,}" for p, n in zip(PERCENTILES, row, strict=True)))
            for name, row in self.percentiles.items()
        )
        return [*(f"tokens of {name}: {row}" for name, row in rows), self.too_long]


def percentiles_of(lengths: Sequence[int]) -> list[int]:
    """The lengths at `PERCENTILES`; 0 for no lengths."""
    lengths_read = lengths or [0]
    return [int(np.quantile(lengths_read, q, method="higher")) for q in PERCENTILES.values()]


def advice_on_rows(lengths: Sequence[int], longest: int, rows: int) -> str | None:
    """A line of advice on `data.max_length`, if an epoch over documents of these lengths has few
    steps of `rows` rows with up to `longest` tokens, and rows half as long would hold all of
    them."""
    steps, most = sum(lengths) // (rows * longest), max(lengths, default=0)
    enough = max(128, -(-most // 128) * 128)
    if steps >= FEW_STEPS or 2 * enough > longest:
        return None
    return (
        f"an epoch has about {steps} steps, as a row packs up to {longest:,} tokens "
        f"(data.max_length), and no document has more than {most:,}: data.max_length={enough} "
        "takes more and shorter steps"
    )


def cuts_documents(cfg: DataConfig) -> bool:
    """Whether documents that are too long are cut rather than skipped."""
    return cfg.too_long == "truncate" and cfg.responses == "data"


def _skipped(cfg: DataConfig, split: DataSplit[Any]) -> int:
    """The number of conversations that are skipped because they, or their prompts, are too long."""
    if cfg.responses == "target":
        return split.tally.dropped[reason_prompt_too_long(cfg.longest_prompt)]
    return len(split.tally.too_long)


def _longer(cfg: DataConfig, split: DataSplit[Any]) -> dict[int, int]:
    """The number of texts above the limit in the settings; for skipped documents, also above two
    and four times the limit."""
    texts = (*split.train, *split.held_out)
    if cfg.responses == "target":
        shortened = sum(text.shortened for text in texts if isinstance(text, Prompt))
        return {cfg.longest_prompt: shortened + _skipped(cfg, split)}
    most = cfg.longest_document
    if cuts_documents(cfg):
        return {most: sum(text.truncated for text in texts)}
    return {n: sum(x > n for x in split.tally.too_long) for n in (most, 2 * most, 4 * most)}


def _of_too_long(cfg: DataConfig, longer: int, count: int, lengths: Sequence[int]) -> str:
    share = f"({longer / count:.1%})" if count else ""
    advised = longer >= ADVISED * count > 0
    if cfg.responses == "target":
        said = f"prompts {share} are longer than data.max_prompt={cfg.longest_prompt}"
        what = ": the target responds to an earlier turn of the chat, or the chat is skipped"
        remedy = ". A larger data.max_prompt keeps more"
    else:
        said = f"texts {share} are longer than data.max_length={cfg.longest_document}"
        what, remedy = " and are cut there", ". A larger data.max_length keeps more"
        if not cuts_documents(cfg):
            what = " and are skipped (data.too_long=truncate cuts them)"
            enough = percentiles_of(lengths)[2]
            if enough > cfg.longest_document:
                remedy = f". data.max_length={enough} keeps 99 % of them"
    return f"{longer:,} of {count:,} {said}{what}{remedy if advised else ''}"
