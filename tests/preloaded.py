"""What the process has whose forks run the scripts of a test session (`tests/processes.py`).

It imports what scripts import, and does what each of them would do again: the modules of all
drafters, the schema, the parser of overrides, the checksum of the code that measures.
"""

import gc

import transformers.models.llama.modeling_llama  # noqa: F401

from tests.tiny import compose
from train.measurement import measuring_code

compose(["target=model", "target.path=x", "data=conversations", "data.path=x"])
measuring_code()
# a fork would else copy the pages of all these objects when it collects garbage
gc.collect()
gc.freeze()
