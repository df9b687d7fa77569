"""Drafts and targets as GGUF files, read back and compared with a second implementation; llama.cpp
itself does not run here.

Run alone: pytest tests/formats/test_gguf.py
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GgufConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from specdec.drafters.dflash import DFlashConfig
from specdec.drafters.dspark import DSparkConfig
from specdec.drafters.eagle3 import Eagle3Config
from specdec.errors import UserError
from specdec.formats import draft_export, export_check, gguf_layout
from specdec.formats.gguf_file import (
    MARK_KEY,
    WEIGHT_TYPES,
    largest_rounding,
    read_json_key,
    read_keys,
    read_tensors,
    tokenizer_keys,
    typed_keys,
    write_gguf,
)
from specdec.formats.gguf_target import write_target_gguf
from specdec.formats.gguf_tokenizer import REGEX
from specdec.formats.layout import FileChoices
from specdec.targets.prompt_rendering import PromptRendering
from specdec.targets.target import Target
from tests.drafters.families import CONFIGS
from tests.formats.test_export_check import BASE, KEPT, TARGETS, V, draft, target_of
from tests.tiny import make_tokenizer, random_drafter, random_target

SERVED = ("eagle3", "dflash", "dflash2", "dspark")
EAGLE3 = Eagle3Config(depth=3, draft_vocab=40, layers=[2, 3, 5])
DRAFTS: dict[str, Any] = {name: CONFIGS[name] for name in SERVED} | {"eagle3": EAGLE3}


@pytest.fixture(scope="module")
def llama() -> Target:
    return target_of("llama")


def written(path: Path, name: str, target: Target, **choices: Any) -> tuple[Any, str]:
    """A draft, and what was said of its export."""
    drafter = draft(DRAFTS[name], target)
    asked = FileChoices(**choices)
    return drafter, draft_export.write_export(path, drafter, target, "gguf", choices=asked)


@pytest.mark.parametrize("name", SERVED)
def test_a_draft_is_one_file_that_says_what_it_is(llama: Target, tmp_path: Path, name: str) -> None:
    drafter, said = written(tmp_path / "head.gguf", name, llama)
    assert "logits identical; a network of its keys as engines build it differs by" in said
    assert [path.name for path in tmp_path.iterdir()] == ["head.gguf"]
    mark = {"drafter": name, "depth": 3, "layout": "gguf", "target": llama.name}
    assert read_json_key(tmp_path / "head.gguf", MARK_KEY) == mark | {"template_args": {}}
    assert draft_export.read_mark(tmp_path / "head.gguf")["drafter"] == name
    keys, tensors = read_keys(tmp_path / "head.gguf"), read_tensors(tmp_path / "head.gguf")
    of = "eagle3" if name == "eagle3" else "dflash"
    assert keys["general.architecture"] == of
    assert gguf_layout.method_of_file(tmp_path / "head.gguf") == name  # as of another project
    assert keys[f"{of}.target_layers"] == list(drafter.needs.layers)
    assert keys[f"{of}.vocab_size"] == V and keys[f"{of}.rope.dimension_count"] == 8
    assert tensors["d2t"].tolist() == KEPT.tolist()  # absolute ids
    assert ("token_embd.weight" in tensors) is False


def test_an_own_chat_template_stands_in_the_mark(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "rendering", PromptRendering({}, "{{ messages }}"))
    written(tmp_path / "head.gguf", "eagle3", llama)
    mark = draft_export.read_mark(tmp_path / "head.gguf")
    assert mark[draft_export.OWN_TEMPLATE] == "{{ messages }}"


@pytest.mark.parametrize("name", SERVED)
def test_the_complete_vocabulary_has_no_ids(llama: Target, tmp_path: Path, name: str) -> None:
    config = replace(DRAFTS[name], draft_vocab=None)
    drafter = random_drafter(config, llama, 0.1)
    said = draft_export.write_export(tmp_path / "head.gguf", drafter, llama, "gguf")
    assert "logits identical" in said
    tensors = read_tensors(tmp_path / "head.gguf")
    assert "d2t" not in tensors and ("output.weight" in tensors) is (name == "eagle3")


ROTARY = ["half of each head", "yarn, half", "llama3", "linear", "longrope, half", "gemma4"]
NORMS = [{"norm_before_residual": True}, {"norm_before_fc": True}]


@pytest.mark.parametrize("kind", [*ROTARY, "gpt_neox", "cohere", "granite"])
def test_heads_rotate_as_the_target_does(tmp_path: Path, kind: str) -> None:
    """Of EAGLE-3, any scaling; of a block, one factor for all frequencies, or it is rejected."""
    target = target_of(kind)
    written(tmp_path / "head.gguf", "eagle3", target)
    if kind in ("yarn, half", "llama3", "longrope, half", "gemma4"):
        with pytest.raises(UserError, match=r"scales all rotary frequencies .* alike"):
            written(tmp_path / "block.gguf", "dflash", target)
        assert not (tmp_path / "block.gguf").exists()
    else:
        written(tmp_path / "block.gguf", "dflash", target)


@pytest.mark.parametrize("norms", NORMS, ids=str)
def test_norms_of_eagle3(llama: Target, tmp_path: Path, norms: dict[str, bool]) -> None:
    drafter = draft(replace(EAGLE3, **norms), llama)
    assert "identical" in draft_export.write_export(tmp_path / "a.gguf", drafter, llama, "gguf")


REFUSED: list[tuple[Any, str, str]] = [
    (replace(EAGLE3, num_layers=2), "llama", "drafter.num_layers=1"),
    (replace(EAGLE3, fc_norm=True), "llama", "drafter.fc_norm=false"),
    (replace(EAGLE3, norm_output=True), "llama", "drafter.norm_output=false"),
    (replace(EAGLE3, layers=[2, 3]), "llama", "three of the target's layers"),
    (replace(EAGLE3, window=8), "llama", "drafter.window=null"),
    (DFlashConfig(depth=3, num_layers=1, window=8), "llama", "drafter.window=8: this format has"),
    (replace(EAGLE3, layers=[2, 3, 6]), "llama", "after the target's last layer, 6"),
    (DFlashConfig(depth=3, num_layers=1), "llama3", "rotary frequencies of a dflash draft"),
    (DSparkConfig(depth=3, num_layers=1, rank=4), "cohere", "before it adds the biases"),
    (DSparkConfig(depth=3, num_layers=1, rank=4), "gemma2", "before it adds the biases"),
]


@pytest.mark.parametrize(("config", "kind", "said"), REFUSED)
def test_what_llama_cpp_would_compute_differently(
    tmp_path: Path, config: Any, kind: str, said: str
) -> None:
    target = target_of(kind)
    with pytest.raises(UserError, match=said):
        draft_export.require_exportable(config, target, "gguf")
    drafter = draft(config, target)
    with pytest.raises(UserError, match=said) as refused:
        draft_export.write_export(tmp_path / "a.gguf", drafter, target, "gguf")
    assert not list(tmp_path.iterdir())
    # which is what the report goes by
    assert draft_export.rejected_layouts(drafter, target)["gguf"] == str(refused.value)


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
SPOILED: dict[str, tuple[str, Change]] = {
    "layers off by one": ("eagle3", lambda k, t: k.update({"eagle3.target_layers": [1, 2, 4]})),
    "another base": ("eagle3", lambda k, t: k.update({"eagle3.rope.freq_base": 5e4})),
    "the normed residual": ("eagle3", lambda k, t: k.update({"eagle3.norm_before_residual": True})),
    "rows as in transformers": (
        "eagle3",
        lambda k, t: t.update({"blk.0.attn_q.weight": t["blk.0.attn_q.weight"].flip(0)}),
    ),
    "offsets for ids": ("eagle3", lambda k, t: t.update({"d2t": t["d2t"] - torch.arange(40)})),
    "a longer block": ("dflash", lambda k, t: k.update({"dflash.block_size": 5})),
    "another mask": ("dflash", lambda k, t: k.update({"tokenizer.ggml.mask_token_id": 3})),
    "the kernels of the other side": (
        "dflash2",
        lambda k, t: t.update({"blk.0.attn_conv_base": t["blk.0.attn_conv_base"].flip(0)}),
    ),
    "no biases": ("dspark", lambda k, t: t.update({"markov_w2.weight": t["markov_w2.weight"] * 0})),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_wrong_file_is_another_network(llama: Target, tmp_path: Path, what: str) -> None:
    """The check can fail: by at least ten times what it allows."""
    name, change = SPOILED[what]
    path = tmp_path / "head.gguf"
    drafter, _ = written(path, name, llama)
    keys, tensors = read_keys(path), read_tensors(path)
    keys = {key: x for key, x in keys.items() if not key.startswith("GGUF.")}
    change(keys, tensors)
    write_gguf(path, tensors, keys)
    gap = export_check.reference_gap(path, drafter, llama)
    assert gap > 10 * export_check.largest_gap(llama)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_weights_are_rounded_as_asked_and_no_further(
    llama: Target, tmp_path: Path, kind: str
) -> None:
    drafter, said = written(tmp_path / "head.gguf", "eagle3", llama, weight_type=kind)
    assert "logits identical; a network of its keys" in said
    assert f"{kind} changes logits by up to" in said and "of 6 places" in said
    reader = GGUFReader(tmp_path / "head.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["fc.weight"] == types["output.weight"] == kind.upper()
    assert types["blk.0.attn_norm.weight"] == "F32" and types["d2t"] == "I64"
    # rows of 48 numbers are no blocks of 32
    assert types["blk.0.ffn_down.weight"] == (kind.upper() if "16" in kind else "F16")
    again = draft_export.read_export(tmp_path / "head.gguf", drafter, llama, "gguf")
    off = (again.fc.weight - drafter.fc.weight).abs() / drafter.fc.weight.abs().max()
    assert 0 < off.max() < {"f16": 1e-3, "bf16": 1e-2, "q8_0": 1e-2, "q4_0": 0.2}[kind]


@pytest.mark.parametrize("kind", list(WEIGHT_TYPES))
def test_the_largest_rounding_is_a_bound_and_a_close_one(tmp_path: Path, kind: str) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[0, 0] = -x[0, :32].abs().max() * 2  # the far end of q4_0's range and its opposite
    x[0, 1] = -x[0, 0]
    keys = {"general.architecture": "x", "general.file_type": int(WEIGHT_TYPES[kind].file_type)}
    write_gguf(tmp_path / "a.gguf", {"x.weight": x}, keys)
    off = (read_tensors(tmp_path / "a.gguf")["x.weight"] - x).abs()
    bound = largest_rounding(x, WEIGHT_TYPES[kind])
    assert bool((off <= bound).all())
    assert kind == "f32" or bool((off > bound / 2).any())


def test_a_tensor_that_is_off_by_more_is_named(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = draft_export.LAYOUTS["eagle3", "gguf"]

    def save(path: Path, tensors: Any, keys: Any) -> None:
        write_gguf(path, tensors | {"fc.weight": tensors["fc.weight"] * 1.1}, keys)

    monkeypatch.setitem(draft_export.LAYOUTS, ("eagle3", "gguf"), replace(layout, save=save))
    with pytest.raises(UserError, match=r"read back, its logits differ by"):
        written(tmp_path / "head.gguf", "eagle3", llama)

    def only_rounded(path: Path, tensors: Any, keys: Any) -> None:
        (save if keys["general.file_type"] else write_gguf)(path, tensors, keys)

    layout = replace(layout, save=only_rounded)
    monkeypatch.setitem(draft_export.LAYOUTS, ("eagle3", "gguf"), layout)
    with pytest.raises(UserError, match=r"tensor 'fc.weight' is off by"):
        written(tmp_path / "head.gguf", "eagle3", llama, weight_type="q8_0")
    assert not list(tmp_path.iterdir())


def test_only_an_earlier_export_is_replaced(llama: Target, tmp_path: Path) -> None:
    path = tmp_path / "head.gguf"
    for name in ("eagle3", "dflash"):
        written(path, name, llama)
    assert draft_export.read_mark(path)["drafter"] == "dflash"
    path.write_text("mine")
    with pytest.raises(UserError, match="not an earlier export"):
        written(path, "eagle3", llama)
    write_gguf(path, {}, {"general.architecture": "llama", "general.file_type": 0})
    with pytest.raises(UserError, match="not an earlier export"):
        written(path, "eagle3", llama)
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        written(tmp_path / "folder.gguf", "eagle3", llama)


def test_tensors_of_any_type_are_read_or_named(tmp_path: Path) -> None:
    """Files of others hold integers of 32 bits and floats of 64; ggml's Q8_K is of no file, and 256
    numbers take 292 bytes."""
    path = tmp_path / "a.gguf"
    numbers = {"ids": np.array([3, -4], "int32"), "x.weight": np.array([[0.1, 2.0]], "float64")}
    rows = np.zeros((1, 292), "uint8")
    for more in ({}, {"y.weight": rows}):
        writer = GGUFWriter(path, "llama")
        for name, x in numbers.items():
            writer.add_tensor(name, x)
        for name, x in more.items():
            writer.add_tensor(name, x, raw_dtype=GGMLQuantizationType.Q8_K)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if not more:
            tensors = read_tensors(path)
            assert torch.equal(tensors["ids"], torch.tensor([3, -4]))
            assert torch.equal(tensors["x.weight"], torch.tensor([[0.1, 2.0]]))
    with pytest.raises(UserError, match=r"tensor 'y.weight' is stored as Q8_K, which cannot"):
        read_tensors(path)


def test_a_folder_is_made_for_the_file(llama: Target, tmp_path: Path) -> None:
    written(tmp_path / "new" / "head.gguf", "eagle3", llama)
    assert [x.name for x in (tmp_path / "new").iterdir()] == ["head.gguf"]


def test_keys_on_the_layout_of_a_file_stay_with_it(tmp_path: Path) -> None:
    """A copy is aligned as usual, so it must not claim another alignment."""
    kept = {"general.architecture": "llama", "general.file_type": 0, "llama.block_count": 2}
    write_gguf(tmp_path / "a.gguf", {}, {**kept, "general.alignment": 64, "split.count": 1})
    assert {*typed_keys(tmp_path / "a.gguf")} == {*kept}


# Tokenizers


def byte_level(pre: Any, size: int = V - 2) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `size` tokens: bytes, two merges and the token that ends a response."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda x: (x not in "abc", x))
    letters = letters[: size - 3]
    vocab = {text: i for i, text in enumerate([*letters, "ab", "abc", "<|end|>"])}
    inner = Tokenizer(BPE(vocab, [("a", "b"), ("ab", "c")]))
    inner.pre_tokenizer = pre
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", chat_template="{}")


SMOLLM = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])


def split_by(regex: str) -> Any:
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), of_bytes])


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        (SMOLLM, "smollm"),
        (split_by(REGEX), "llama-bpe"),
        (split_by(REGEX.replace("{1,3}", "")), "qwen2"),
        (split_by(r"\w+"), "default"),
    ],
)
def test_the_keys_of_a_byte_level_tokenizer(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pre: Any, name: str
) -> None:
    monkeypatch.setattr(llama, "tokenizer", byte_level(pre))
    written(tmp_path / "head.gguf", "eagle3", llama)
    keys = {key: x.value for key, x in tokenizer_keys(tmp_path / "head.gguf").items()}
    assert keys["tokenizer.ggml.pre"] == name and keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.merges"] == ["a b", "ab c"]
    tokens = keys["tokenizer.ggml.tokens"]
    assert len(tokens) == V and tokens[-4:-1] == ["abc", "<|end|>", "[PAD59]"]
    assert keys["tokenizer.ggml.token_type"][-5:-1] == [1, 1, 3, 5]  # normal, control, unused
    assert keys["tokenizer.ggml.eos_token_id"] == tokens.index("<|end|>")
    assert keys["tokenizer.chat_template"] == "{}"
    if name == "default":
        with pytest.raises(UserError, match=r"none of those .* --tokenizer-from FILE.gguf, or"):
            write_target_gguf(tmp_path / "target.gguf", llama, FileChoices())


def test_a_tokenizer_is_copied_from_a_file_of_the_target(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the types of its keys; one with another number of tokens is rejected."""
    monkeypatch.setattr(llama, "tokenizer", byte_level(SMOLLM))
    write_target_gguf(tmp_path / "target.gguf", llama, FileChoices())
    monkeypatch.setattr(llama, "tokenizer", None)
    written(tmp_path / "a.gguf", "eagle3", llama, tokenizer_from=tmp_path / "target.gguf")
    assert tokenizer_keys(tmp_path / "a.gguf") == tokenizer_keys(tmp_path / "target.gguf")
    other = random_target(LlamaConfig(**BASE | {"vocab_size": V + 1}))
    with pytest.raises(UserError, match=f"has {V} tokens, but .* has {V + 1}"):
        written(tmp_path / "b.gguf", "eagle3", other, tokenizer_from=tmp_path / "target.gguf")


def test_the_tokenizer_of_a_target_from_a_gguf_file_is_its_own(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "tokenizer", byte_level(SMOLLM))
    write_target_gguf(tmp_path / "target.gguf", llama, FileChoices())
    monkeypatch.setattr(llama, "tokenizer", make_tokenizer())  # not what is in the file
    monkeypatch.setattr(llama, "name", str(tmp_path / "target.gguf"))
    written(tmp_path / "a.gguf", "eagle3", llama)
    copied = tokenizer_keys(tmp_path / "a.gguf")["tokenizer.ggml.tokens"]
    assert copied == tokenizer_keys(tmp_path / "target.gguf")["tokenizer.ggml.tokens"]


# Targets


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen3"])
def test_transformers_reads_a_target_as_it_was(tmp_path: Path, kind: str, tied: bool) -> None:
    """Somebody else's reader: the same logits."""
    # transformers reads no width of heads in a Qwen3 file, and takes its default, 128
    config = Qwen3Config(**BASE, head_dim=128) if kind == "qwen3" else TARGETS[kind]()
    config.tie_word_embeddings = tied
    target = random_target(config)
    target.tokenizer = byte_level(SMOLLM)
    said = write_target_gguf(tmp_path / "target.gguf", target, FileChoices())
    assert "tensors read back" in said
    assert ("output.weight" in read_tensors(tmp_path / "target.gguf")) is not tied
    dense = GgufConfig(gguf_file="target.gguf", dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="target.gguf", quantization_config=dense, dtype=torch.float32
    )
    if kind == "llama3":  # transformers does not read these factors
        factors = read_tensors(tmp_path / "target.gguf")["rope_freqs.weight"]
        scaled = target.model.model.rotary_emb.inv_freq
        read.model.rotary_emb.inv_freq /= factors
        torch.testing.assert_close(read.model.rotary_emb.inv_freq, scaled)
    ids = torch.arange(40)[None]
    theirs, ours = read(ids).logits, target.model(ids).logits
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    assert json.loads(read_keys(tmp_path / "target.gguf")[MARK_KEY])["drafter"] == "target"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gemma2", "of type gemma2"),
        ("yarn", "with yarn rotary"),
        ("half of each head", "with partial rotary"),
    ],
)
def test_other_targets_are_left_to_llama_cpps_converter(
    tmp_path: Path, kind: str, said: str
) -> None:
    target = target_of(kind)
    target.tokenizer = byte_level(SMOLLM)
    with pytest.raises(UserError, match=rf"{said}.*convert_hf_to_gguf.py"):
        write_target_gguf(tmp_path / "target.gguf", target, FileChoices())
    assert not list(tmp_path.iterdir())
