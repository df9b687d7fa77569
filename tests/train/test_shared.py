"""The target reads what the texts of one chat share once, and the hidden states are those of each
text alone.

Run alone: python -m pytest tests/train/test_shared.py (about 20 s)
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.context import HiddenStateSpec
from specdec.progress import bars, console
from specdec.sampling.sampler import Sampler
from specdec.targets.target import Target
from tests.tiny import (
    TEMPLATE,
    Tiny,
    architectures,
    conversations,
    random_target,
    save_target,
    write_jsonl,
)
from train.data.sequences import Document, pack_rows
from train.hidden_states import filling
from train.hidden_states.batches import OnlineBatches, StoredBatches
from train.hidden_states.store import HiddenStatesConfig, HiddenStateStore

NEEDS = HiddenStateSpec((1, 2), final_hidden=True)
# the responses of earlier turns lose their first word, as reasoning that a template leaves out
CUT = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'][:-1] + ' .' }}",
)


def chat(*lengths: tuple[int, int], name: str = "c", seed: int = 0) -> list[Document]:
    """Documents that share their first tokens with the one before: (shared, own) counts."""
    draw, ids, documents = np.random.default_rng(seed), np.zeros(0, np.int32), list[Document]()
    for common, own in lengths:
        ids = np.concatenate([ids[:common], draw.integers(5, 60, own).astype(np.int32)])
        mask = np.arange(len(ids)) >= len(ids) - 4
        documents.append(Document(f"{name}{len(documents)}", ids, mask, chat=name))
    return documents


GROUPS = {
    "a growing chat": chat((0, 30), (20, 30), (45, 10), (50, 40)),
    "one text is the beginning of another": chat((0, 20), (20, 10)),
    "a text that differs within what was shared": chat((0, 30), (25, 10), (10, 30)),
    "texts that are equal": chat((0, 30), (30, 0)),
}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("name", GROUPS)
def test_the_hidden_states_are_those_of_each_text_alone(
    tmp_path: Path, kind: str, name: str
) -> None:
    target = random_target(architectures(64, 3)[kind])
    group, store = (
        GROUPS[name],
        HiddenStateStore(HiddenStatesConfig(path=str(tmp_path)), target, NEEDS, Sampler()),
    )
    with bars(console, False) as quiet:
        read = filling.fill_chats(store, target, NEEDS, [group], quiet)
    total = sum(len(d.ids) for d in group)
    assert read == total - round(filling.shared_part(group) * total) < total
    store.refresh()
    rows = pack_rows(group, max(len(d.ids) for d in group))
    stored = StoredBatches(
        store, NEEDS, rows, target.device, lambda row: pytest.fail("not stored"), 0
    )
    online = OnlineBatches(target, NEEDS, Sampler(), rows)
    for i in range(len(rows)):
        ours, theirs = stored.batch([i]), online.batch([i])
        torch.testing.assert_close(ours.final_BTD, theirs.final_BTD, rtol=1e-4, atol=1e-4)
        assert ours.ctx.layers_BTF is not None and theirs.ctx.layers_BTF is not None
        torch.testing.assert_close(ours.ctx.layers_BTF, theirs.ctx.layers_BTF, rtol=1e-4, atol=1e-4)


def test_what_is_read_is_counted_by_hand() -> None:
    """30, then 50 of which 20 are known, 55 of which 45 are, 90 of which 50 are."""
    group = GROUPS["a growing chat"]
    assert [*filling.first_unread(group)] == [0, 20, 45, 50]
    assert filling.shared_part(group) == pytest.approx((20 + 45 + 50) / (30 + 50 + 55 + 90))
    within = GROUPS["a text that differs within what was shared"]
    assert [*filling.first_unread(within)] == [0, 25, 0]
    assert [*filling.first_unread(GROUPS["texts that are equal"])] == [0, 29]


def test_only_chats_in_several_texts_are_read_this_way(tmp_path: Path) -> None:
    target = random_target(architectures(64, 3)["llama"])
    store = HiddenStateStore(HiddenStatesConfig(path=str(tmp_path)), target, NEEDS, Sampler())
    several, alike = chat((0, 30), (20, 9)), chat((0, 30), (20, 9), name="", seed=1)
    little = chat((0, 30), (2, 90), name="d")
    assert filling.chats_to_read([*several, *alike, *little], store) == [several]
    with bars(console, False) as quiet:
        filling.fill_chats(store, target, NEEDS, [several], quiet)
    store.refresh()
    assert filling.chats_to_read(several, store) == []


def test_a_job_reads_the_chats_of_such_a_template_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = conversations(90)
    chats = [
        {"id": f"c{n}", "messages": [m for r in records[n : n + 3] for m in r["messages"]]}
        for n in range(0, 90, 3)
    ]
    target = save_target(tmp_path / "target", template=CUT)
    tiny = Tiny(tmp_path, target, write_jsonl(tmp_path / "chats.jsonl", chats))
    read: list[int] = []
    hidden_states = Target.hidden_states

    def counted(self: Target, ids_BT: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(ids_BT.numel() if kwargs.get("cache") is not None else 0)
        return hidden_states(self, ids_BT, *args, **kwargs)

    monkeypatch.setattr(Target, "hidden_states", counted)
    tiny.job(tmp_path / "run", "eagle3", "data.max_length=256")
    assert "share their beginnings: the target reads" in " ".join(capsys.readouterr().out.split())
    assert max(read) > 30
