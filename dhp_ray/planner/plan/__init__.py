"""The cluster of a plan (`cluster.py`); samples, groups, plans, slices of ranks, checks, files (`types.py`)."""
