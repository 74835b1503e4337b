"""`sync=micro_batch`: micro-batch after micro-batch, in each every rank runs once."""
