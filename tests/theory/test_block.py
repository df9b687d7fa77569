"""Expected tokens by rejection and block, from the text alone, against the verification methods'
exact laws.

Run alone: python -m pytest tests/theory/test_block.py
"""

from itertools import product

import pytest
import torch

from specdec.context import Proposal
from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.theory.alpha import block_expected_tokens, expected_tokens
from tests.laws import FILLS, Tables, law

V, K = 3, 2


def tables(fill_p: int, fill_q: int, seed: int) -> tuple[Tables, Tables]:
    """p and q after every prefix, p one depth deeper than q."""
    torch.manual_seed(seed)

    def made(fill: int, depths: int) -> Tables:
        found = [FILLS[fill](V**k, V).double().clamp_min(0) for k in range(depths)]
        return [x / x.sum(-1, keepdim=True) for x in found]

    return made(fill_p, K + 1), made(fill_q, K)


def by_rejection(ratio_NK: torch.Tensor) -> torch.Tensor:
    return expected_tokens(ratio_NK.clamp_max(1))


def tokens_of_drafts(verification: str, p: Tables, q: Tables) -> float:
    """E[tokens of a speculation step], over every draft of q and the verification method's own law
    of what it keeps."""
    total = 0.0
    for draft in product(range(V), repeat=K):
        index = [sum(draft[j] * V ** (k - 1 - j) for j in range(k)) for k in range(K + 1)]
        probability = torch.stack([q[k][index[k], draft[k]] for k in range(K)]).prod()
        if probability == 0:
            continue
        q_BGV = torch.stack([q[k][index[k]] for k in range(K)])[None]
        p_BMV = torch.stack([p[k][index[k]] for k in range(K + 1)])[None]
        kept = law(
            VERIFICATION_METHODS[verification], Proposal(torch.tensor([draft]), q_BGV), p_BMV
        ).stop_BM[0]
        total += float(probability * (kept * torch.arange(1.0, K + 2)).sum())
    return total


def ratios(p: Tables, q: Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """q / p along every text that the target may write [N, K], and the text's probability [N]."""
    rows, weights = [], []
    for text in product(range(V), repeat=K):
        index = [sum(text[j] * V ** (k - 1 - j) for j in range(k)) for k in range(K)]
        p_K = torch.stack([p[k][index[k], text[k]] for k in range(K)])
        q_K = torch.stack([q[k][index[k], text[k]] for k in range(K)])
        if p_K.prod() > 0:
            rows.append(q_K / p_K)
            weights.append(p_K.prod())
    return torch.stack(rows), torch.stack(weights)


@pytest.mark.parametrize("fill_p", range(len(FILLS)))
@pytest.mark.parametrize("fill_q", range(len(FILLS)))
def test_text_of_the_target_gives_what_drafts_give(fill_p: int, fill_q: int) -> None:
    p, q = tables(fill_p, fill_q, seed=7 * fill_p + fill_q)
    ratio_NK, weight_N = ratios(p, q)
    for verification, expected in (
        ("rejection", by_rejection),
        ("block", block_expected_tokens),
    ):
        ours = float((weight_N * expected(ratio_NK)).sum())
        assert ours == pytest.approx(tokens_of_drafts(verification, p, q), abs=1e-9), verification


def test_hand_numbers_and_order() -> None:
    """s = 2, 1/2: rejection keeps min(1, 2) = 1, then 1 · 1/2; block min(1, 2) = 1, then min(1, 2,
    2 · 1/2) = 1. s = 1/2, 2: rejection 1/2, 1/2; block 1/2, 1/2 (a prefix once lost stays so)."""
    ratio_NK = torch.tensor([[2.0, 0.5], [0.5, 2.0], [0.0, 3.0], [1.0, 1.0]])
    assert by_rejection(ratio_NK).tolist() == [2.5, 2.0, 1.0, 3.0]
    assert block_expected_tokens(ratio_NK).tolist() == [3.0, 2.0, 1.0, 3.0]
    many = torch.rand(500, 5) * 3
    assert (block_expected_tokens(many) >= by_rejection(many) - 1e-6).all()
