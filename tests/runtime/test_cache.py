"""The keyword by which a model takes its cache, in the versions of transformers that are supported.

Run alone: python -m pytest tests/runtime/test_cache.py (about 3 s)
"""

from typing import Any

from torch import nn

from specdec.runtime.cache import cache_argument


def test_a_cache_is_given_by_the_keyword_that_the_model_takes() -> None:
    """`cache` since transformers 5.24; some models have another parameter of that name beside the
    older `past_key_values`."""

    class Old(nn.Module):
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class New(nn.Module):
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    class Both(nn.Module):
        def forward(
            self, input_ids: Any, cache: Any = None, past_key_values: Any = None
        ) -> None: ...

    class Wrapper(nn.Module):
        """Passes everything on to its part."""

        def __init__(self, *parts: nn.Module) -> None:
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    models = (Old(), New(), Both(), Wrapper(), Wrapper(New()))
    taken = ["past_key_values", "cache", "past_key_values", "past_key_values", "cache"]
    assert [cache_argument(model) for model in models] == taken
