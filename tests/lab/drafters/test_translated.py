"""A draft LM with another tokenizer: lossless by both methods, and honest about its α.

Run alone: python -m pytest tests/lab/drafters/test_translated.py
"""

import json
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.llama import LlamaForCausalLM

from specdec.context import Context, HiddenStateSpec, Proposal
from specdec.decoding.decode import decode, generate
from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.decoding.way import Way
from specdec.drafters.base import vocabulary
from specdec.errors import UserError
from specdec.forcing.teacher import AcceptanceTable, TeacherForcing
from specdec.formats import draft_checkpoint
from specdec.lab.drafters.bridge import Bridge
from specdec.lab.drafters.translated import Translated, TranslatedConfig
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape, Static
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.drafters.families import logits_at
from tests.laws import law
from tests.runs import as_before
from tests.tiny import WORDS, architectures, batch_of, make_tokenizer

TEXT = "the old man and the sea. a cat by the door. we walk home by night. why not? " * 3
METHODS = ("tli", "slem")
TREES: list[Shape] = [
    Static([[0], [1], [2], [0, 0], [1, 0], [0, 1], [0, 0, 0]]),
    Dynamic(3, 10, 4),
]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, in which a space is a part of the word after it (Ġ)."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["\n".join(WORDS), " ".join(WORDS * 2)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece's: ▁ for a space, single bytes as <0x0A>, letters and words."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.?", *(f"▁{w}" for w in WORDS if len(w) > 1)]
    vocab = [
        "<unk>",
        "<s>",
        "</s>",
        "<0x0A>",
        "<0x61>",
        *letters,
        *(w for w in WORDS if len(w) > 1),
    ]
    raw = Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocab = ["<unk>", "<eos>", "\n", " ", *"abcdefghijklmnopqrstuvwxyz.?<|>_"]
    raw = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocab)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token="<unk>")


TOKENIZERS = {
    "words": make_tokenizer,
    "bytes": byte_tokenizer,
    "pieces": piece_tokenizer,
    "letters": letter_tokenizer,
}
PAIRS = [("words", "bytes"), ("bytes", "words"), ("words", "letters"), ("bytes", "letters")]


def save(folder: Path, kind: str, seed: int, positions: int = 512, steps: int = 60) -> Path:
    tokenizer = TOKENIZERS[kind]()
    torch.manual_seed(seed)
    vocab = len(tokenizer) + 3  # rows that stand for no token, as in many models
    config = architectures(vocab, 2, positions)["llama"]
    config.tie_word_embeddings, config.bos_token_id = False, None
    config.eos_token_id = tokenizer.eos_token_id
    model = LlamaForCausalLM(config)
    ids = torch.tensor([tokenizer.encode(TEXT, add_special_tokens=False)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):  # enough to have the text by heart, or no two models ever agree
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save(root / kind, kind, seed) for seed, kind in enumerate(TOKENIZERS)}


def load(folder: Path) -> Target:
    return load_target(TargetConfig(path=str(folder), dtype="float32", device="cpu"))


def make(target: Target, source: Path, method: str, **more: Any) -> Translated:
    config = TranslatedConfig(depth=3, source=str(source), method=method, **more)
    return Translated.build(config, target).float().eval()


def prompts(target: Target) -> list[list[int]]:
    texts = ("the old man and the sea.", "a cat", "we walk home by night\nwhy not")
    return [target.tokenizer.encode(t, add_special_tokens=False) for t in texts]


def test_intersection_is_by_text() -> None:
    """Ġ, ▁ and a plain space are one; byte tokens, special tokens; the spare rows are in none."""
    words, raw, pieces = make_tokenizer(), byte_tokenizer(), piece_tokenizer()
    ids, own = Bridge(words, raw).common(10_000, 10_000)
    assert ids == sorted(set(ids)) and len(set(own)) == len(own)
    named = dict(zip(words.convert_ids_to_tokens(ids), raw.convert_ids_to_tokens(own)))
    assert named[" "] == "Ġ" and named["\n"] == "Ċ" and named["a"] == "a" and named["."] == "."
    assert named["<|im_end|>"] == "<|end|>"  # the eos of both
    assert "<unk>" not in named and "<|im_start|>" not in named
    for a, b in zip(ids[1:], own[1:]):
        if a != words.eos_token_id:
            assert words.decode([a]) == raw.decode([b])

    ids, own = Bridge(raw, pieces).common(10_000, 10_000)
    named = dict(zip(raw.convert_ids_to_tokens(ids), pieces.convert_ids_to_tokens(own)))
    both = [w for w in WORDS if f"Ġ{w}" in raw.get_vocab() and len(w) > 1]
    assert len(both) > 2 and all(named[f"Ġ{w}"] == f"▁{w}" for w in both)
    assert all(named[c] == c for c in "abcxyz.?")  # "a", not its byte token
    assert named["Ċ"] == "<0x0A>" and named["Ġ"] == "▁" and named["<|end|>"] == "</s>"
    assert Bridge(raw, raw).common(10_000, 10_000)[0] == list(range(len(raw)))
    cut = Bridge(raw, pieces).common(100, 20)
    assert max(cut[0]) < 100 and max(cut[1]) < 20


def test_texts_go_there_and_back() -> None:
    """What the draft wrote becomes the target's own tokens of that text, or none at all."""
    words, letters, raw = make_tokenizer(), letter_tokenizer(), byte_tokenizer()
    bridge = Bridge(words, letters)
    ids = words.encode("the old man", add_special_tokens=False)
    own = bridge.to_draft(ids)
    assert letters.decode(own) == "the old man"
    wrote = letters.encode(" and the", add_special_tokens=False)
    back = bridge.to_target(ids, own, wrote)
    assert back == words.encode(" and the", add_special_tokens=False)
    assert bridge.to_target(ids, own, [*wrote, letters.eos_token_id, wrote[0]]) == [
        *back, words.eos_token_id,
    ]  # fmt: skip
    # " manx" would be another word: what extends a token that is committed is not drafted
    assert bridge.to_target(ids, own, letters.encode("x", add_special_tokens=False)) == []
    # the eos, which both have; another marker as its text; the end of a text, left out
    chat = words.encode("<|im_start|>user<|im_end|>", add_special_tokens=False)
    assert letters.decode(bridge.to_draft(chat)) == "<|im_start|>user<eos>"
    assert bridge.to_draft([words.pad_token_id]) == [letters.eos_token_id]  # never empty
    # bytes that are not a whole character yet
    raw_bridge = Bridge(raw, raw)
    sea = raw.encode("sea é", add_special_tokens=False)
    assert raw_bridge.to_draft(sea[:-1]) == raw.encode("sea ", add_special_tokens=False)
    assert raw_bridge.to_target(sea[:2], sea[:2], sea[2:-1]) == raw.encode(
        _rest(raw, sea[:2], "sea "), add_special_tokens=False
    )


def _rest(tokenizer: Any, ids: list[int], text: str) -> str:
    return text[len(tokenizer.decode(ids)) :]


@pytest.mark.parametrize(
    "pair,method,shape",
    [(pair, method, Chain(3)) for pair in PAIRS for method in METHODS]
    + [(pair, "tli", shape) for pair in PAIRS[:2] for shape in TREES],
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else x if isinstance(x, str) else None,
)
def test_speculation_is_greedy_decoding(
    folders: dict[str, Path], pair: tuple[str, str], method: str, shape: Shape
) -> None:
    target = load(folders[pair[0]])
    drafter = make(target, folders[pair[1]], method)
    many = prompts(target)
    eos = tuple(target.tokenizer.encode("h?", add_special_tokens=False))
    plain = [generate(target, p, max_new_tokens=20, eos=eos).ids for p in many]
    way, options = Way(drafter, shape), {"max_new_tokens": 20, "eos": eos}
    alone = [decode(target, [p], way, **options)[0] for p in many]
    together = decode(target, many, way, **options)
    assert [g.ids for g in alone] == plain
    assert [g.ids for g in together] == plain
    assert [g.steps for g in together] == [g.steps for g in alone]
    assert sum(r.accepted for g in alone for r in g.steps) > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_that_is_the_target_is_always_right(folders: dict[str, Path], method: str) -> None:
    """Through text and back: with one tokenizer, whose text has one tokenisation."""
    target = load(folders["letters"])
    drafter = make(target, folders["letters"], method)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        prompt = torch.randint(4, 30, (9,), generator=draw).tolist()
        result = generate(target, prompt, Way(drafter, Chain(3)), max_new_tokens=20, eos=(0, 1))
        text = result.ids[:-1] if result.ids[-1] < 2 else result.ids
        inside = [r for r in result.steps if r.anchor + 3 < len(prompt) + len(text)]
        assert inside and all(r.accepted == r.drafted == 3 for r in inside)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_first_token_follows_p(folders: dict[str, Path], pair: tuple[str, str]) -> None:
    """tli: Σ_x q(x) · law(x) = p, exactly, with the q that the family reports; q is the draft's
    own softmax over the intersection. Hot, so that no token is certain; once with a top-k."""
    target = load(folders[pair[0]])
    drafter, V = make(target, folders[pair[1]], "tli"), target.vocab_size
    lm = load(folders[pair[1]])
    assert drafter.vocab_S is not None
    betas = []
    for prompt in prompts(target):
        for sampler in (Sampler(3.0), Sampler(3.0, top_k=20)):
            text = torch.tensor([prompt])
            final = target.hidden_states(text, HiddenStateSpec())[1][0, -1:]
            p = sampler.probs(target.logits(final))[0].double()
            choose = Choose(sampler, "none", RowDraws([0]), vocabulary(drafter), V)
            proposal = drafter.draft(Context(text), Chain(1), choose, drafter.new_cache())
            assert proposal.q_BGV is not None
            q = proposal.q_BGV[0, 0].double()
            own = torch.tensor([lm.tokenizer.encode(target.tokenizer.decode(prompt))])
            theirs = sampler.probs(lm.model(own).logits[0, -1][drafter.draft_S]).double()
            torch.testing.assert_close(q[drafter.vocab_S], theirs, atol=1e-6, rtol=1e-4)
            assert abs(float(q.sum()) - 1) < 1e-6
            tokens = torch.arange(V)[:, None]
            laws = law(
                VERIFICATION_METHODS["rejection"],
                Proposal(tokens, q.expand(V, 1, V)),
                p.expand(V, 2, V),
            )
            stop, after = laws.stop_BM, laws.next_BMV
            first = (q[:, None] * stop[:, :1] * after[:, 0]).sum(0) + q * stop[:, 1]
            torch.testing.assert_close(first, p, atol=1e-6, rtol=1e-4)
            betas.append(float(torch.minimum(p, q).sum()))
            assert abs(float((q * stop[:, 1]).sum()) - betas[-1]) < 1e-6
    assert min(betas) > 0.05 and max(betas) < 0.999  # neither hopeless nor the target


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_draft_equals_the_uncached_one(
    folders: dict[str, Path], method: str, temperature: float
) -> None:
    """Over a decoder's history, where the draft's tokens of the old text change with the new."""
    target = load(folders["letters"])
    drafter, cache = make(target, folders["bytes"], method), None
    cache = drafter.new_cache()
    text = target.tokenizer.encode("the moon and the old lake by night", add_special_tokens=False)
    rows, went_back = torch.tensor([text, text[4:] + text[:4]]), 0
    for n, ends in enumerate([(4, 6), (5, 9), (9, 10), (14, 16), (23, 18), (30, 31)]):
        ctx = Context(rows, lengths=list(ends))
        before = [list(own) for own in cache.tokens]

        def draw(ctx: Context, seeds: list[int], cache: Any, n: int = n) -> Any:
            rows_of = RowDraws(seeds)
            choose = Choose(
                Sampler(temperature), "none", rows_of, vocabulary(drafter), target.vocab_size
            )
            return drafter.draft(ctx, Chain(3), choose, cache)

        cached = draw(ctx, [n, n + 9], cache)
        went_back += sum(own[: len(old)] != old for own, old in zip(cache.tokens, before))
        for b, end in enumerate(ends):
            plain = draw(Context(rows[b : b + 1, :end]), [n + 9 * b], None)
            tokens = plain.tokens_BG[0].tolist()
            assert cached.tokens_BG[b, : len(tokens)].tolist() == tokens
            assert (cached.tokens_BG[b, len(tokens) :] == -1).all()
            if cached.q_BGV is not None:
                torch.testing.assert_close(cached.q_BGV[b], plain.q_BGV[0], atol=1e-5, rtol=1e-4)
    assert went_back > 3  # "th" became "the", and the like


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("method", METHODS)
def test_alpha_of_teacher_forcing_is_what_the_decoder_accepts(
    folders: dict[str, Path], pair: tuple[str, str], method: str
) -> None:
    """At T = 0, step by step over the target's own text."""
    target = load(folders[pair[0]])
    drafter, kept = make(target, folders[pair[1]], method), 0
    for prompt in prompts(target):
        ids = prompt + generate(target, prompt, max_new_tokens=24, eos=()).ids
        mask = [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        batch = batch_of(target, drafter.needs, Sampler(1.0), [ids], [mask])
        table = TeacherForcing(drafter, target, Sampler(1.0))(batch, measure=True)
        assert isinstance(table, AcceptanceTable)
        hits = dict(
            zip(table.anchors.position_N.tolist(), table.alpha.greedy.cumprod(-1).sum(-1).tolist())
        )
        spec = generate(target, prompt, Way(drafter, Chain(3)), max_new_tokens=24, eos=())
        for r in spec.steps:
            if r.anchor + 3 < len(ids):
                assert r.accepted == hits[r.anchor]
                kept += r.accepted
    assert kept > 0


def test_forced_alpha_at_depth_one_is_the_decoders_own(folders: dict[str, Path]) -> None:
    """tli at T = 1: β at depth 1 given an accepted token is Σ min(p, q) of the q that the decoder
    drafts from after that very token; after one that cannot be drafted it is 0."""
    target = load(folders["words"])
    drafter, V = make(target, folders["letters"], "tli"), target.vocab_size
    sampler = Sampler(1.0)
    assert drafter.vocab_S is not None
    inside = set(drafter.vocab_S.tolist())
    prompt = prompts(target)[1]
    choose = Choose(sampler, "none", RowDraws([0]), vocabulary(drafter), V)
    proposal = drafter.draft(Context(torch.tensor([prompt])), Chain(2), choose, drafter.new_cache())
    assert proposal.q_BGV is not None
    outside = next(i for i in range(V) if i not in inside)
    for token, known in ((int(proposal.tokens_BG[0, 0]), True), (outside, False)):
        ids = [*prompt, token, 5, 6]
        mask = [False] * len(prompt) + [True] * 3
        batch = batch_of(target, drafter.needs, sampler, [ids], [mask])
        table = TeacherForcing(drafter, target, sampler)(batch, measure=True)
        assert isinstance(table, AcceptanceTable)
        n = table.anchors.position_N.tolist().index(len(prompt) - 1)
        final = target.hidden_states(torch.tensor([ids]), HiddenStateSpec())[1][0]
        p = sampler.probs(target.logits(final[len(prompt) - 1 : len(prompt) + 1]))
        beta = torch.minimum(p, proposal.q_BGV[0]).sum(-1)
        torch.testing.assert_close(table.alpha.sampled[n, 0], beta[0], atol=1e-5, rtol=1e-4)
        expected = beta[1] if known else torch.tensor(0.0)
        torch.testing.assert_close(table.alpha.sampled[n, 1], expected, atol=1e-5, rtol=1e-4)


def test_depths_and_documents(folders: dict[str, Path]) -> None:
    """As the contract has it: no depth reads a later token, forcing is drafting the text's own,
    packed documents do not see each other."""
    target = load(folders["words"])
    for method in METHODS:
        drafter = make(target, folders["bytes"], method)
        text = prompts(target)[2]
        ctx, anchors = Context(torch.tensor([text])), torch.tensor([[3, 6]])

        base = logits_at(drafter, ctx, anchors, None)
        own = torch.tensor([[text[4:6], text[7:9]]])
        torch.testing.assert_close(logits_at(drafter, ctx, anchors, own), base)
        changed = own.clone()
        changed[..., 1] = 8
        other = logits_at(drafter, ctx, anchors, changed)
        torch.testing.assert_close(other[:, :, :2], base[:, :, :2])
        short = logits_at(drafter, ctx, anchors, own[..., :0])
        torch.testing.assert_close(short, base[:, :, :1])
        last = torch.tensor([[len(text) - 2, len(text) - 1]])  # with fewer tokens after them
        assert logits_at(drafter, ctx, last, None).shape[:3] == (1, 2, 3)
        packed = torch.tensor([prompts(target)[0] + text])
        first = len(packed[0]) - len(text)
        position = torch.tensor([[*range(first), *range(len(text))]])
        there = logits_at(drafter, Context(packed, position_BT=position), anchors + first, None)
        torch.testing.assert_close(there, base, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_text_beyond_the_drafts_positions(
    folders: dict[str, Path], tmp_path: Path, method: str
) -> None:
    target = load(folders["words"])
    drafter = make(target, save(tmp_path / "short", "letters", 5, positions=32), method)
    prompt = prompts(target)[0]
    plain = generate(target, prompt, max_new_tokens=30, eos=())
    cache = drafter.new_cache()
    fast = generate(target, prompt, Way(drafter, Chain(3)), max_new_tokens=30, eos=())
    assert fast.ids == plain.ids
    drafter.after_texts([prompt + plain.ids], cache)
    assert 8 <= len(cache.tokens[0]) <= 24  # of 32, a quarter is for the draft


@pytest.mark.parametrize("method", METHODS)
def test_tokens_beyond_either_embedding_are_neither_read_nor_drafted(
    folders: dict[str, Path], method: str
) -> None:
    """Tokenizers may have tokens that the model has no row for, as Gemma's has one."""
    target = load(folders["words"])
    drafter = make(target, folders["letters"], method)
    rows = drafter.lm.embedding.num_embeddings
    own = drafter.bridge.to_draft
    drafter.bridge.to_draft = lambda ids: [rows, *own(ids), rows]  # type: ignore[method-assign]
    beyond = [3, target.vocab_size, 4]
    drafter.bridge.to_target = lambda *_: beyond  # type: ignore[method-assign]
    prompt = prompts(target)[0]
    plain = generate(target, prompt, max_new_tokens=8, eos=())
    fast = generate(target, prompt, Way(drafter, Chain(3)), max_new_tokens=8, eos=())
    assert fast.ids == plain.ids
    if method == "slem":
        assert drafter._written([prompt], drafter.new_cache()) == [[3]]


@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded(folders: dict[str, Path], tmp_path: Path, method: str) -> None:
    target = load(folders["words"])
    drafter = make(target, folders["bytes"], method)
    draft_checkpoint.write_draft(tmp_path / "draft", drafter, target)
    loaded = draft_checkpoint.load_draft(tmp_path / "draft", target)
    ctx, anchors = Context(torch.tensor([prompts(target)[2]])), torch.tensor([[3, 6]])
    drafts = (drafter, loaded, copy(drafter), deepcopy(loaded))
    first, *others = (logits_at(d, ctx, anchors, None) for d in drafts)
    assert all(torch.equal(first, other) for other in others)


def test_mistakes_are_told_in_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    target = load(folders["words"])
    for message, method, source in (
        ("did you mean 'slem'", "slme", str(folders["bytes"])),
        (r"drafter\.source is missing", "tli", ""),
        (r"drafter\.source='/nowhere' could not be loaded", "tli", "/nowhere"),
    ):
        with pytest.raises(UserError, match=message):
            Translated.build(TranslatedConfig(source=source, method=method), target)
    with pytest.raises(UserError, match="target's tokenizer"):
        bare = Target(target.model, None, "bare")
        Translated.build(TranslatedConfig(source=str(folders["bytes"])), bare)
    other = save(tmp_path / "letters", "letters", 7)
    draft_checkpoint.write_draft(tmp_path / "draft", make(target, other, "tli"), target)
    save(tmp_path / "moved", "letters", 8)
    card = tmp_path / "draft" / draft_checkpoint.CARD
    moved = json.dumps(as_before(card)).replace(str(other), str(tmp_path / "moved"))
    card.write_text(moved)
    with pytest.raises(UserError, match="other weights"):
        draft_checkpoint.load_draft(tmp_path / "draft", target)
