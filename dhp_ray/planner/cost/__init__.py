"""Seconds of packs: the cost model, derived or measured costs, their origin and their refit."""
