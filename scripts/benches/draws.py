"""Compares a speculation step at T > 0 whose rows are drawn together with one that draws row by
row."""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any
from unittest.mock import patch

import torch
from benches.turns import show
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.context import Proposal
from specdec.decoding import decode
from specdec.decoding.generation import PHASES
from specdec.decoding.verification_methods import Verdict, VerificationMethod, verify
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS, Drafter
from specdec.errors import nearest, require
from specdec.measure.machine import processor_name
from specdec.progress import console
from specdec.sampling import sampler
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.trees import Chain, Shape, Static
from specdec.targets.target import Target

PROMPT = 16  # tokens
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


class GeneratorDraws(RowDraws):
    """Random numbers of a single row, from its `torch.Generator`."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__([0], generator.device)
        self.generator = generator

    def uniform(self, count: int, used_B: Tensor | None = None) -> Tensor:
        made = torch.empty(1, count, dtype=torch.float64, device=self.generator.device)
        return made.uniform_(generator=self.generator)


class RowByRow:
    """The decoder's draws as in earlier versions: a generator for each row, and a loop over the
    rows."""

    def __init__(self, rows: int, device: torch.device) -> None:
        made = [torch.Generator(device).manual_seed(b) for b in range(rows)]
        self.draws = [GeneratorDraws(generator) for generator in made]

    def judged(
        self,
        verification: VerificationMethod,
        proposal: Proposal,
        logits_BMV: Tensor,
        choose: Choose,
    ) -> Verdict:
        verdicts = []
        for b, draws in enumerate(self.draws[: len(logits_BMV)]):
            ids = proposal.tokens_BG[b].tolist()
            nodes = max((i + 1 for i, token in enumerate(ids) if token >= 0), default=0)
            q, parents = (
                None if x is None else x[b : b + 1, :nodes]
                for x in (proposal.q_BGV, proposal.parents_BG)
            )
            alone = Proposal(proposal.tokens_BG[b : b + 1, :nodes], q, parents)

            def p_of(place_B: Tensor | None, b: int = b, M: int = nodes + 1) -> Tensor:
                there = logits_BMV[b, None, :M] if place_B is None else logits_BMV[b, place_B]
                return choose.sampler.probs(there)

            verdicts.append(verify(verification, alone, p_of, draws))
        accepted_B, next_B = (torch.cat([v[i] for v in verdicts]) for i in (0, 1))
        paths = [v.path_BK[0] for v in verdicts]
        return Verdict(accepted_B, next_B, pad_sequence(paths, batch_first=True, padding_value=-1))

    def drawn(
        self, choose: Choose, q_BTS: Tensor, count: int, going_B: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        index_BTC = q_BTS.new_zeros(*q_BTS.shape[:2], count, dtype=torch.long)
        none_BTC = torch.ones_like(index_BTC, dtype=torch.bool)
        for b, (q_TS, row) in enumerate(zip(q_BTS, self.draws, strict=False)):
            if count == 1:
                at_TC = row.uniform(len(q_TS))[0, :, None]
                drawn_TC = sampler.draws(q_TS, at_TC)
            else:
                race_TS = torch.empty_like(q_TS).exponential_(generator=row.generator)
                drawn_TC = (q_TS / race_TS).topk(count, -1).indices
            index_BTC[b], none_BTC[b] = drawn_TC, q_TS.gather(-1, drawn_TC) <= 0
        return index_BTC, none_BTC


def draws(
    method: Annotated[str, "of the drafter, as in drafter=METHOD"],
    *,
    batch: Annotated[int, "rows that are decoded together"] = 32,
    vocabs: Annotated[Sequence[int], "sizes of the vocabulary"] = (2048, 32000),
    gamma: Annotated[int, "tokens of a chain"] = 4,
    new: Annotated[int, "new tokens of each row"] = 24,
    repeats: Annotated[int, "turns of both, after one that does not count"] = 7,
    device: Annotated[str, "such as cuda"] = "cpu",
) -> None:
    """Milliseconds of a speculation step at T = 1 with draws for the whole batch and row by row.

    Both decode the same prompts in turn, in one process, with a small random target and a random
    drafter for it. Medians over turns; phases are those of the decoder's clock.
    """
    console.print(f"{processor_name()}, torch {torch.__version__}: {batch} rows on {device}")
    table = []
    for vocab in vocabs:
        target, drafter = _random_pair(method, vocab, device)
        shapes: dict[str, Shape] = {f"chain of {gamma}": Chain(gamma)}
        shapes[f"tree of {len(TREE)}"] = Static(TREE)
        for name, shape in shapes.items():
            found: dict[str, list[dict[str, float]]] = {"row by row": [], "together": []}
            for turn in range(1 + repeats):
                for how, seconds in found.items():
                    one = _step(target, drafter, shape, batch, new, how == "row by row")
                    seconds += [one] * (turn > 0)
            medians = {
                how: {key: 1e3 * statistics.median(s[key] for s in many) for key in many[0]}
                for how, many in found.items()
            }
            before, after = medians.values()
            gains = [f"{before[key] / after[key]:.2f}" for key in ("judge", "step")]
            for how, of in medians.items():
                figures = [f"{x:.2f}" for x in of.values()]
                table.append([str(vocab), name, how, *figures, *(gains if of is after else "  ")])
    show(["vocabulary", "topology", "draws", *PHASES, "step", "gain: judge", "gain: step"], table)


def _random_pair(method: str, vocab: int, device: str) -> tuple[Target, Drafter]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).float().to(device)
    model.generation_config.eos_token_id = None
    target = Target(model, None, "random")
    require(method in DRAFTERS, f"method {method!r} is unknown{nearest(method, DRAFTERS)}")
    kind = DRAFTERS[method]
    settings: Any = kind.Config()
    return target, kind.build(settings, target).float().eval().to(device)


def _step(
    target: Target, drafter: Drafter, shape: Shape, batch: int, new: int, by_row: bool
) -> dict[str, float]:
    """Seconds of a speculation step, by phase and in total."""
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(target.vocab_size, (batch, PROMPT), generator=draw).tolist()
    way = Way(drafter, shape, sampler=sampler.Sampler(1.0))
    with ExitStack() as stack:
        if by_row:
            rows = RowByRow(batch, target.device)
            stack.enter_context(patch.object(decode, "judged", rows.judged))
            stack.enter_context(patch.object(Choose, "_draw", lambda *given: rows.drawn(*given)))
        made = decode.decode(target, prompts, way, max_new_tokens=new, eos=(), seeds=range(batch))
    first = min(made, key=lambda g: g.seconds)  # until it ends, the batch has all its rows
    spent = first.spent | {"step": first.seconds}
    return {key: seconds / len(first.steps) for key, seconds in spent.items()}
