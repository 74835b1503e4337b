"""`sync=micro_batch`: one micro-batch after another; every rank runs one pack in each."""
