"""What is set for a whole process is undone.

Run alone: python -m pytest tests/test_compat.py
"""

import warnings

import pytest
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.utils import logging

from specdec.compat import quiet_libraries


def test_libraries_are_quiet_for_a_while(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.get_logger("transformers.test")

    def speak() -> str:
        """What libraries print while they load a model."""
        list(logging.tqdm(range(2), desc="Loading weights"))
        list(gguf.tqdm(range(2), desc="Converting"))  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as warned:
            warnings.warn("this changes in version 6", FutureWarning, stacklevel=1)
        told = "some weights are new" if logger.isEnabledFor(logging.WARNING) else ""
        return capfd.readouterr().err + "".join(str(w.message) for w in warned) + told

    parts = ("Loading weights", "Converting", "some weights", "version 6")
    with pytest.raises(KeyError), quiet_libraries():
        assert speak() == ""
        raise KeyError
    said = speak()
    assert all(part in said for part in parts), said
