"""`speculative_generate` gives what `generate` of transformers gives, or says that it does not.

Run alone: python -m pytest tests/decoding/test_speculative.py
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, TextStreamer
from transformers.generation.logits_process import (
    EtaLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopHLogitsWarper,
)

from specdec.context import Proposal
from specdec.decoding.decode import decode
from specdec.decoding.speculative import HARMLESS, LATE, READ, speculative_generate
from specdec.drafters.lm import LMConfig
from specdec.errors import UserError
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Shape, Static
from specdec.targets.target import Target
from tests.drafters.families import L, make_drafter, make_target, text
from tests.lab.drafters.test_translated import byte_tokenizer, piece_tokenizer
from tests.lab.targets import test_seq2seq as seq2seq
from tests.tiny import architectures, make_tokenizer, random_drafter, random_target

PROMPTS = [text(seed, 6)[0].tolist() for seed in range(3)]
SHAPES: list[Shape] = [Chain(3), Static([[0], [1], [0, 0]])]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def transformers_ids(target: Target, prompt: list[int], **fields: Any) -> list[int]:
    ids = torch.tensor([prompt])
    fields = {"do_sample": False, "num_beams": 1, "pad_token_id": 0} | fields
    return target.model.generate(ids, attention_mask=torch.ones_like(ids), **fields)[0].tolist()


def scores(target: Target, ids: list[int], **fields: Any) -> Tensor:
    """What transformers draws the token after `ids` from, [V]."""
    made = target.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=1,
        do_sample=True,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **fields,
    )
    return made.scores[0][0]


WARPED: list[dict[str, float]] = [
    {"temperature": 3.0, "min_p": 0.3},
    {"temperature": 3.0, "top_k": 20, "typical_p": 0.5},
    {"temperature": 3.0, "top_k": 0, "epsilon_cutoff": 0.03},
    {"temperature": 0.7, "top_p": 0.9, "eta_cutoff": 0.1},
    {"temperature": 3.0, "top_h": 0.6},
]


@pytest.mark.parametrize("fields", WARPED, ids=lambda f: [*f][-1])
def test_warpers_come_after_temperature(target: Target, fields: dict[str, Any]) -> None:
    """1000 draws from p: the support of transformers, and a total variation that 1000 draws from
    n tokens have (about sqrt(n / (2 π 1000)), .09 for n = 50; twice that is far off)."""
    p = scores(target, PROMPTS[0], **fields).softmax(-1)
    ids = torch.tensor([PROMPTS[0]] * 1000)
    options = {"max_new_tokens": 1, "do_sample": True} | fields
    made = speculative_generate(target, None, ids, **options)
    drawn = torch.bincount(made.sequences[:, -1], minlength=len(p)) / 1000
    assert not drawn[p == 0].any()
    assert float((drawn - p).abs().sum() / 2) < 0.1
    assert int((p > 0).sum()) > 1
    plain = scores(target, PROMPTS[0], **{k: v for k, v in fields.items() if k not in LATE})
    assert (plain.softmax(-1) - p).abs().max() > 0.001  # the warper does something here


@pytest.mark.parametrize("fields", WARPED, ids=lambda f: [*f][-1])
def test_warped_drafts_follow_p(target: Target, fields: dict[str, Any]) -> None:
    """A draft with a small vocabulary, and one that is the target: it is always accepted."""
    options = {"max_new_tokens": 6, "do_sample": True, "shape": Chain(2)} | fields
    ids = torch.tensor(PROMPTS)
    made = speculative_generate(target, make_drafter("eagle3", target, 0.05), ids, **options)
    for g in made.generations:
        for t, token in enumerate(g.ids):
            assert scores(target, g.prompt + g.ids[:t], **fields)[token].isfinite()
    copied = random_drafter(LMConfig(depth=2, layers=list(range(L))), target, 0.0)
    oracle = speculative_generate(target, copied, ids, **options)
    assert all(r.accepted == r.drafted for g in oracle.generations for r in g.steps)


def test_a_draft_with_nothing_to_propose_passes_every_warper() -> None:
    """Two of transformers' warpers raise on a row that is -inf throughout."""
    for warper in (EtaLogitsWarper(0.1), TopHLogitsWarper(0.5)):
        choose = Choose(Sampler(1.0), "with", RowDraws([0]), None, 7, [warper])
        choose.texts = [[1, 2]]
        nothing = Proposal(torch.zeros(1, 0).long())
        chosen = choose(torch.full((1, 1, 7), -torch.inf), 1, nothing, torch.zeros(1, 1).long())
        assert chosen.tokens_BTC.tolist() == [[[-1]]]


def shifted(ids: Tensor, logits: Tensor) -> Tensor:
    """No argmax moves, unless a penalty that multiplies negative logits comes later."""
    return logits - 30


def test_the_callers_processors_follow_the_penalties(target: Target) -> None:
    drafter = make_drafter("lm", target, 0.05)
    fields = {"max_new_tokens": 12, "repetition_penalty": 1.5}
    for given in ([shifted], [RepetitionPenaltyLogitsProcessor(3.0)]):  # the latter replaces 1.5
        made = speculative_generate(
            target, drafter, torch.tensor(PROMPTS), logits_processor=given, **fields
        )
        for prompt, ids in zip(PROMPTS, made.sequences.tolist()):
            assert ids == transformers_ids(target, prompt, logits_processor=given, **fields)


def plain(target: Target, prompt: list[int]) -> list[int]:
    return transformers_ids(target, prompt, max_new_tokens=14)[len(prompt) :]


FIELDS: dict[str, Callable[[list[int]], dict[str, Any]]] = {  # of the plain response
    "min_length": lambda ids: {"min_length": 6 + 9, "eos_token_id": ids[3:5]},
    "min_new_tokens": lambda ids: {"min_new_tokens": 9, "eos_token_id": ids[3:5]},
    "decay": lambda ids: {"exponential_decay_length_penalty": (3, 3.0), "eos_token_id": 60},
    "begin_suppress_tokens": lambda ids: {"begin_suppress_tokens": ids[:1]},
    "suppress_tokens": lambda ids: {"suppress_tokens": ids[2:4]},
    "forced_eos_token_id": lambda ids: {"forced_eos_token_id": 60, "eos_token_id": [60]},
    "bad_words_ids": lambda ids: {"bad_words_ids": [ids[2:4], ids[5:6]]},
    "sequence_bias": lambda ids: {"sequence_bias": [[ids[2:4], -9.0], [[7], 4.0]]},
    "max_length": lambda ids: {"max_new_tokens": None, "max_length": 6 + 10},
    "renormalize_logits": lambda ids: {"renormalize_logits": True, "repetition_penalty": 1.4},
    "remove_invalid_values": lambda ids: {"remove_invalid_values": True, "suppress_tokens": ids},
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("name", list(FIELDS))
def test_a_field_gives_what_generate_gives(target: Target, name: str, shape: Shape) -> None:
    drafter, moved = make_drafter("eagle3", target, 0.05), 0
    for prompt in PROMPTS:
        response = plain(target, prompt)
        fields = {"max_new_tokens": 14} | FIELDS[name](response)
        made = speculative_generate(target, drafter, torch.tensor([prompt]), shape=shape, **fields)
        theirs = transformers_ids(target, prompt, **fields)
        assert made.sequences[0].tolist() == theirs
        moved += theirs[len(prompt) :] != response
    assert moved


def test_a_forced_bos_follows_a_prompt_of_one_token(target: Target) -> None:
    fields = {"max_new_tokens": 5, "forced_bos_token_id": 9, "begin_suppress_tokens": [9, 11]}
    made = speculative_generate(target, make_drafter("lm", target), torch.tensor([[4]]), **fields)
    assert made.sequences[0].tolist() == transformers_ids(target, [4], **fields)
    assert made.sequences[0, 1] == 9


def test_what_is_left_out_is_the_targets_own() -> None:
    target = make_target()
    target.model.generation_config.repetition_penalty = 3.0
    target.model.generation_config.eos_token_id = [plain(target, PROMPTS[0])[4]]
    config, ids = GenerationConfig(max_new_tokens=10), torch.tensor(PROMPTS[:1])
    theirs = transformers_ids(target, PROMPTS[0], generation_config=config)
    assert (
        speculative_generate(target, None, ids, generation_config=config).sequences[0].tolist()
        == theirs
        and len(theirs) < len(PROMPTS[0]) + 10
    )
    fields = {"max_new_tokens": 10, "eos_token_id": None, "repetition_penalty": 1.0}
    made = speculative_generate(target, None, ids, **fields)
    assert made.sequences[0].tolist() == transformers_ids(target, PROMPTS[0], **fields)
    assert target.model.generation_config.repetition_penalty == 3.0


@pytest.mark.parametrize(
    "fields,word",
    [
        ({"num_beams": 4}, r"specdec\.lab\.decoding\.beam\.beam_search"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"max_time": 0.1}, "max_time"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size"),
        ({"watermarking_config": {"bias": 2.5}}, "watermarking_config"),
        ({"token_healing": True}, "token_healing"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"output_scores": True}, "output_scores"),
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'"),
        ({"repetition_penalty": -1.0}, "generation_config: "),
        ({"exponential_decay_length_penalty": (2, 1.5)}, "give eos_token_id"),
    ],
)
def test_what_is_not_done_is_said(target: Target, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        speculative_generate(target, None, torch.tensor(PROMPTS), **{"max_new_tokens": 4} | fields)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"suppress_tokens": [500]}, "suppress_tokens names tokens"),
        ({"sequence_bias": [[[5, 500], 1.0]]}, "sequence_bias names tokens"),
        ({"sequence_bias": {(500,): 1.0}}, "sequence_bias names tokens"),
        ({"bad_words_ids": [[3], [500]]}, "bad_words_ids names tokens"),
        ({"forced_bos_token_id": 500}, "forced_bos_token_id names tokens"),
        ({"streamer": TextStreamer(make_tokenizer())}, "streamer: give a function"),
        (
            {"logits_processor": [PrefixConstrainedLogitsProcessor(lambda *_: [3], 1)]},
            "give one prompt at a time",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_mistakes_are_one_line(target: Target, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        speculative_generate(target, None, torch.tensor(PROMPTS), **{"max_new_tokens": 4} | fields)


def test_one_row_may_be_constrained_by_its_prefix(target: Target) -> None:
    allowed = [PrefixConstrainedLogitsProcessor(lambda _row, ids: [5, 6, int(ids[-1])], 1)]
    fields: dict[str, Any] = {"max_new_tokens": 8, "logits_processor": allowed}
    drafter = make_drafter("lm", target, 0.05)
    made = speculative_generate(target, drafter, torch.tensor(PROMPTS[:1]), **fields)
    assert made.sequences[0].tolist() == transformers_ids(target, PROMPTS[0], **fields)


def test_padding_without_a_mask_is_found_as_transformers_finds_it(target: Target) -> None:
    """The pad token is padding, unless it is an eos too."""
    ids = torch.tensor([[0, 0, 0, *PROMPTS[0][:3]], PROMPTS[1]])
    for fields in ({"pad_token_id": 0}, {"pad_token_id": 0, "eos_token_id": 0}):
        fields |= {"max_new_tokens": 6, "do_sample": False}
        theirs = target.model.generate(ids, **fields)[:, 6:]
        made = speculative_generate(target, None, ids, **fields)
        for ours, response in zip(made.generations, theirs.tolist(), strict=True):
            assert ours.ids == response[: len(ours.ids)]
        assert len(made.generations[0].prompt) == (3 if "eos_token_id" not in fields else 6)


def test_no_row_of_one_seed_is_a_row_of_another(target: Target) -> None:
    ids = torch.tensor([PROMPTS[0]] * 4)
    drawn = [
        g.ids
        for seed in range(4)
        for g in speculative_generate(
            target, None, ids, seed=seed, do_sample=True, max_new_tokens=12, temperature=3.0
        ).generations
    ]
    assert len({tuple(ids) for ids in drawn}) == 16


def test_an_eos_that_never_comes_is_no_padding(target: Target) -> None:
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[0, :2] = 0
    fields = {"max_new_tokens": 1, "eos_token_id": -1}
    made = speculative_generate(target, None, torch.tensor(PROMPTS), mask, **fields)
    assert made.sequences.min() >= 0 and math.isnan(made.tau)  # and no speculation step was needed


def saying(target: Target, prompt: list[int], response: list[int]) -> Callable[..., Tensor]:
    """A processor that leaves one token at each place."""

    def only(ids: Tensor, logits: Tensor) -> Tensor:
        out = torch.full_like(logits, -torch.inf)
        out[:, response[min(ids.shape[1] - len(prompt), len(response) - 1)]] = 0
        return out

    return only


@pytest.mark.parametrize(
    ("of", "prompt", "response", "stop", "kept"),
    [
        ("bytes", "the sea.\n", "\nby the door", "\n\n", 1),  # it began in the prompt
        ("bytes", "the sea.\n\n", "by the door", "\n\n", None),  # it was over there
        ("bytes", "the sea", " by the door", " the", None),
        ("pieces", "the sea", " by the door", " by", 1),  # as the first word's space
        ("pieces", "the sea", " by the door", "y t", 2),
        ("bytes", "the sea", " by . the door", " .", None),  # a tokenizer that cleans up
    ],
)
def test_stop_strings_are_found_where_transformers_finds_them(
    of: str, prompt: str, response: str, stop: str, kept: int | None
) -> None:
    tokenizer = byte_tokenizer() if of == "bytes" else piece_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    torch.manual_seed(0)
    model = random_target(architectures(len(tokenizer), 2)["llama"]).model
    target = Target(model, tokenizer, "words")
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    said = tokenizer(prompt + response, add_special_tokens=False).input_ids[len(ids) :]
    if of == "pieces":
        said = [tokenizer.convert_tokens_to_ids("▁" + word) for word in response.split()]
    fields: dict[str, Any] = {
        "max_new_tokens": len(said),
        "stop_strings": [stop],
        "eos_token_id": None,
        "logits_processor": [saying(target, ids, said)],
    }
    theirs = transformers_ids(target, ids, tokenizer=tokenizer, **fields)
    made = speculative_generate(target, None, torch.tensor([ids]), **fields)
    assert made.sequences[0].tolist() == theirs
    assert kept is None or len(theirs) == len(ids) + kept


@pytest.mark.parametrize("shape", [(0, 4), (4,)])
def test_input_ids_are_rows_of_tokens(target: Target, shape: tuple[int, ...]) -> None:
    ids = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(UserError, match=re.escape(f"the shape {list(shape)}: give [rows, tokens]")):
        speculative_generate(target, None, ids, max_new_tokens=2)


def test_what_counts_the_prompt_wants_prompts_of_one_length(target: Target) -> None:
    ids, mask = torch.tensor(PROMPTS), torch.ones(3, 6, dtype=torch.long)
    mask[1, :2] = 0
    fields = {"max_new_tokens": 4, "min_length": 8, "eos_token_id": 5}
    with pytest.raises(UserError, match="min_length needs prompts of equal length"):
        speculative_generate(target, None, ids, mask, **fields)


def test_harmless_and_neutral_fields_change_nothing(target: Target) -> None:
    fields = {"max_new_tokens": 8}
    harmless = {"use_cache": False, "length_penalty": 2.0, "early_stopping": True, "num_beams": 1}
    neutral = GenerationConfig._get_default_generation_params() | fields
    for more in (harmless, neutral):
        made = speculative_generate(target, None, torch.tensor(PROMPTS[:1]), **fields | more)
        assert made.sequences[0].tolist() == transformers_ids(target, PROMPTS[0], **fields)
    assert set(vars(GenerationConfig())) >= READ | HARMLESS


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 3.0},
        {"no_repeat_ngram_size": 1},
        {"min_length": 8, "eos_token_id": [*range(3, 30)]},
        {"forced_bos_token_id": 9, "forced_eos_token_id": 7, "eos_token_id": 7},
        {"max_new_tokens": None, "max_length": 9},
    ],
    ids=lambda f: next(iter(f)),
)
def test_an_encoder_decoder_sees_its_answer_only(kind: str, fields: dict[str, Any]) -> None:
    """The encoder's tokens alone go in, ragged; the decoder's come out, as from `generate`."""
    target = seq2seq.make_target(kind)
    drafter = seq2seq.make_drafter("seq2seq_lm", target)
    rows = [p[:-1] for p in seq2seq.prompts(target)]
    fields = {"max_new_tokens": 12, "eos_token_id": None} | fields
    longest = max(map(len, rows))
    ids = torch.tensor([r + [0] * (longest - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
    for shape in SHAPES:
        made = speculative_generate(target, drafter, ids, mask, shape=shape, **fields)
        for row, ours in zip(rows, made.sequences.tolist()):
            theirs = transformers_ids(target, row, **fields)
            assert ours[: len(theirs)] == theirs and theirs[0] == target.seq2seq.start


def test_decode_takes_processors_of_the_decoder() -> None:
    target = seq2seq.make_target("t5")
    many = seq2seq.prompts(target)
    processors = [RepetitionPenaltyLogitsProcessor(3.0)]
    for prompt, g in zip(
        many, decode(target, many, max_new_tokens=9, eos=(), processors=processors)
    ):
        fields = {"max_new_tokens": 9, "eos_token_id": None, "repetition_penalty": 3.0}
        assert [target.seq2seq.start, *g.ids] == transformers_ids(target, prompt[:-1], **fields)


def test_a_start_token_among_the_encoders_is_said() -> None:
    for kind, ids in (("t5", [5, 6, 0, 1]), ("bart", [5, 2, 2]), ("bart", [5, 6])):
        with pytest.raises(UserError, match="decoder's start token"):
            rows = torch.tensor([ids])
            speculative_generate(
                seq2seq.make_target(kind), None, rows, torch.ones_like(rows), max_new_tokens=3
            )
    with pytest.raises(UserError, match="decoder_start_token_id=3 is not the 0"):
        speculative_generate(
            seq2seq.make_target("t5"),
            None,
            torch.tensor([[5, 1]]),
            max_new_tokens=3,
            decoder_start_token_id=3,
        )
