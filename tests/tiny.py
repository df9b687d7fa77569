"""A whole job in seconds: a tiny random target, its tokenizer, made-up conversations.

`architectures` are configs of tiny targets, `random_target` and `random_drafter` models of them.
`make_tiny(folder)` writes them; `Tiny.overrides` are the command line that trains on them,
`compose` and `job` the same in this process; `Tiny.command` is for `tests/processes.py`.
"""

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import train
from specdec.context import Context, HiddenStateSpec
from specdec.drafters import DRAFTERS, Drafter
from specdec.drafters.lm import LMConfig
from specdec.forcing import batch
from specdec.forcing.batch import Batch
from specdec.losses.loss_terms import LOSS_TERMS
from specdec.sampling.sampler import Sampler
from specdec.targets.target import Target
from tests.device import DEVICE
from train.data.response_files import ResponsesConfig
from train.run_config import CONF, Config, composed, quoted, register

REPOSITORY = Path(__file__).resolve().parent.parent
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
ROLES = ("system", "user", "assistant")
WORDS = [
    "a",
    "all",
    "and",
    "any",
    "blue",
    "boat",
    "box",
    "by",
    "can",
    "cat",
    "cold",
    "come",
    "day",
    "do",
    "dog",
    "door",
    "each",
    "eat",
    "far",
    "fish",
    "for",
    "go",
    "good",
    "green",
    "hat",
    "he",
    "hill",
    "home",
    "hot",
    "how",
    "in",
    "is",
    "it",
    "jump",
    "keep",
    "lake",
    "let",
    "like",
    "long",
    "look",
    "man",
    "may",
    "moon",
    "new",
    "night",
    "no",
    "not",
    "of",
    "old",
    "on",
    "one",
    "or",
    "our",
    "rain",
    "red",
    "road",
    "run",
    "sea",
    "she",
    "sing",
    "sky",
    "small",
    "star",
    "sun",
    "the",
    "they",
    "to",
    "tree",
    "two",
    "up",
    "wait",
    "walk",
    "we",
    "what",
    "why",
    "wind",
    "wood",
    "yes",
    "you",
]
MARKS = ("\n", " ", ".", "?")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYERS = 4
CLOCKED = ("tokens_per_second", "waiting")  # figures of a training record
DRAFTER_OVERRIDES = {
    "eagle3": ["drafter.layers=[1,2,3]", "drafter.draft_vocab=48", "drafter.depth=2"],
    "eagle": ["drafter.depth=2"],
    "falcon": ["drafter.depth=3"],
    "mtp": ["drafter.depth=2"],
    "mtp_heads": ["drafter.depth=2"],
    "medusa": ["drafter.draft_vocab=48", "drafter.depth=2"],
    "hydra": ["drafter.draft_vocab=48", "drafter.depth=2", "drafter.prefix=true"],
    "mlp": ["drafter.draft_vocab=48", "drafter.depth=2"],
    "peagle": ["drafter.layers=[1,2,3]", "drafter.draft_vocab=48", "drafter.depth=2"],
    "dflash": ["drafter.draft_vocab=48", "drafter.depth=3"],
    "dflash2": ["drafter.draft_vocab=48", "drafter.depth=3", "drafter.group=8"],
    "lilicorr": ["drafter.draft_vocab=48", "drafter.depth=3", "drafter.correction_width=16"],
    "dspark": ["drafter.draft_vocab=48", "drafter.depth=3"],
    "jetspec": ["drafter.draft_vocab=48", "drafter.depth=3"],
    "spire": ["drafter.draft_vocab=48", "drafter.depth=2", "drafter.window=6"],
    "lm": ["drafter.layers=[0,3]", "drafter.depth=2"],
    "ngram": ["drafter.depth=3"],
    "unigram": ["drafter.depth=2"],
    "bigram": ["drafter.depth=2"],
    "suffix": ["drafter.depth=3"],
    "lookahead": ["drafter.depth=3"],
    "copy": ["drafter.depth=3"],
    "early_exit": ["drafter.depth=2", "drafter.layers=2"],
    "sparse": ["drafter.depth=2"],
    "hybrid": ["drafter.head=bigram", "drafter.copying=ngram", "drafter.depth=3"],
}


def architectures(
    vocab: int, layers: int, positions: int = 256, window: int = 8
) -> dict[str, PreTrainedConfig]:
    """A tiny config of each kind of causal target, weights large enough that tokens differ."""
    shape: dict[str, Any] = dict(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    gpt2: dict[str, Any] = dict(vocab_size=vocab, n_layer=layers, n_positions=positions)
    gpt2 |= dict(bos_token_id=None, eos_token_id=None)  # the real ones are beyond this vocabulary
    return {
        "llama": LlamaConfig(**shape),
        "qwen3": Qwen3Config(**shape),
        "mistral": MistralConfig(**shape, sliding_window=window),
        "gemma2": Gemma2Config(**shape, sliding_window=window, query_pre_attn_scalar=8),
        "gpt2": GPT2Config(**gpt2, n_embd=32, n_head=4, initializer_range=0.3),
    }


# a Llama whose width is a multiple of 256, as llama.cpp's blocks of rounded weights need
OF_ENGINES: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    initializer_range=0.1,
    tie_word_embeddings=True,
)


def random_target(config: PreTrainedConfig, seed: int = 0) -> Target:
    """A float32 target without a tokenizer that never ends a response by itself."""
    torch.manual_seed(seed)
    attention = "eager" if config.model_type == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float()
    model.generation_config.eos_token_id = None
    model.to(DEVICE)
    return Target(model, None, f"tiny-{config.model_type}")


def random_drafter(
    config: Any,
    target: Target,
    noise: float,
    vocab_S: torch.Tensor | None = None,
    seed: int = 1,
    earlier: Drafter | None = None,
) -> Drafter:
    """A drafter with noise on all its weights, so that no part is silent. `vocab_S` is the draft
    vocabulary of a family that prunes it."""
    torch.manual_seed(seed)
    pruned = vocab_S if getattr(config, "draft_vocab", None) else None
    kind = DRAFTERS[config.name]
    drafter = kind.build(config, target, pruned, earlier).float().eval().to(DEVICE)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += noise * torch.randn_like(weight)
    return drafter


def lm(target: Target, noise: float = 0.1) -> Drafter:
    """A draft LM of four of the target's own layers, with noise on its weights."""
    return random_drafter(LMConfig(depth=3, layers=[0, 1, 2, 3]), target, noise)


def batch_of(
    target: Target,
    needs: HiddenStateSpec,
    sampler: Sampler,
    ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
) -> Batch:
    """A batch of whole texts, one per row, which the target reads now."""
    ids_BT = pad_sequence([torch.tensor(x) for x in ids], batch_first=True).to(target.device)
    mask_BT = pad_sequence([torch.tensor(x) for x in masks], batch_first=True).to(target.device)
    position_BT = torch.arange(ids_BT.shape[1], device=target.device).expand_as(ids_BT).contiguous()
    length_B1 = torch.tensor([[len(x)] for x in ids], device=target.device)
    document_BT = torch.where(position_BT < length_B1, 0, -1)
    text = Context(ids_BT, document_BT=document_BT, position_BT=position_BT)
    return batch.batch_of(target, needs, sampler, text, mask_BT)


def learn(drafter: Drafter, texts: Sequence[Sequence[int]]) -> None:
    """Fit a drafter to texts of which the assistant says every token."""
    if drafter.fits_texts:
        drafter.fit(texts, [[True] * len(ids) for ids in texts])


def responding(temperature: float = 0.0, **settings: Any) -> ResponsesConfig:
    """Settings of responses with nothing null: greedy and of at most 192 tokens by default."""
    decided = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "max_new_tokens": 192}
    return ResponsesConfig(**(decided | settings))


def make_tokenizer(
    template: str | None = TEMPLATE, words: Sequence[str] = WORDS
) -> PreTrainedTokenizerFast:
    """Words, spaces and marks, one token each, so that every offset is exact."""
    vocab = [*SPECIAL, *ROLES, *MARKS, *words]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(vocab)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"\w+|\s|[^\w\s]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def save_target(
    folder: Path, seed: int = 0, layers: int = LAYERS, template: str | None = TEMPLATE
) -> Path:
    """A random Llama with its tokenizer, as a Hugging Face folder."""
    tokenizer = make_tokenizer(template)
    torch.manual_seed(seed)
    config = architectures(len(tokenizer), layers, positions=512)["llama"]
    config.bos_token_id = None
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Made-up chats of 8 words and 12 words, 50 tokens as a document; no prompt is near another.

    All are of one length, so that two fill a row of 128 tokens however rows are packed.
    """
    draw = random.Random(seed)
    return [
        {
            "id": f"chat{i}",
            "messages": [
                {"role": "user", "content": " ".join(draw.choices(WORDS, k=8)) + "?"},
                {"role": "assistant", "content": " ".join(draw.choices(WORDS, k=12)) + "."},
            ],
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@dataclass
class Tiny:
    """Where the tiny target, the data and the caches are."""

    root: Path
    target: Path
    data: Path

    def overrides(self, drafter: str = "eagle3", *more: str) -> list[str]:
        """The command line of a job of 12 steps in float32; `more` comes last, so it wins."""
        return [
            "target=model",
            f"target.path={self.target}",
            "target.dtype=float32",
            "target.device=cpu",
            f"target.cache={self.root / 'targets'}",
            "data=conversations",
            f"data.path={self.data}",
            "data.responses=data",
            "data.max_length=128",
            "data.max_prompt=64",
            "data.held_out=0.2",
            f"responses.root={self.root / 'responses'}",
            "responses.max_new_tokens=12",
            *("responses.temperature=0", "responses.top_p=1", "responses.top_k=0"),
            "responses.batch=16",
            f"hidden_states.root={self.root / 'hidden_states'}",
            f"drafter={drafter}",
            *DRAFTER_OVERRIDES.get(drafter, []),
            "optim.lr=5e-3",
            "loop.rows=1",
            "loop.accumulate=2",
            "loop.epochs=2",  # of 6 steps of 2 rows of 2 documents
            "loop.eval_every=4",
            "loop.save_every=4",
            "loop.log_every=1",
            "decode.prompts=2",
            "decode.max_new_tokens=8",
            "track=none",
            *more,
        ]

    def config(self, drafter: str = "eagle3", *more: str) -> Config:
        return compose(self.overrides(drafter, *more))

    def job(self, folder: Path, drafter: str = "eagle3", *more: str) -> float:
        """The whole job in this process."""
        return train.run(self.config(drafter, *more), folder)

    def command(self, folder: Path, drafter: str = "eagle3", *more: str) -> list[str]:
        """The whole job as a command line."""
        return ["train.py", *self.overrides(drafter, *more), f"hydra.run.dir={folder}"]


def make_tiny(root: Path, count: int = 29) -> Tiny:
    """29 chats: 5 are held out by the hash of their prompts, 24 fill 12 rows."""
    target = save_target(root / "target")
    return Tiny(root, target, write_jsonl(root / "chats.jsonl", conversations(count)))


@cache
def _registered(families: tuple[str, ...], terms: tuple[str, ...]) -> None:
    register()


@cache
def _composed_once(overrides: tuple[str, ...]) -> Config:
    return composed(overrides)


def compose(overrides: Sequence[str], hydra: bool = False) -> Any:
    """A `Config` as `train.py` would be given it; with `hydra`, what Hydra composes for that. It
    takes a fifth of a second, half the time of a short job, unless it was composed before."""
    _registered(tuple(DRAFTERS), tuple(LOSS_TERMS))
    if not hydra:
        return deepcopy(_composed_once(tuple(overrides)))
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("config", quoted(overrides), return_hydra_config=True)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """The training records of a run, without what depends on the clock."""
    return [
        (r["step"], {k: v for k, v in r["train"].items() if k not in CLOCKED})
        for r in records(folder)
        if "train" in r
    ]
