"""What the server that ranks are forked from does last, once for all of them (`tests/ranks.py`)."""

from __future__ import annotations

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("")  # compiles the patterns of all model types
gc.freeze()  # what is imported lives as long as a rank: its collections need not walk through it
