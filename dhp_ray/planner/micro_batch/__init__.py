"""`sync=micro_batch`: one micro-batch after another; every rank runs at most one pack in each."""
