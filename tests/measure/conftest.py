"""The target that the tests of measuring share."""

import pytest

from specdec.targets.target import Target
from tests.tiny import architectures, make_tokenizer, random_target


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = make_tokenizer()
    target = random_target(architectures(len(tokenizer), 4)["llama"])
    target.tokenizer = tokenizer
    return target
