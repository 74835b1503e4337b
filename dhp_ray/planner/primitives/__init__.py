"""Compiled parts that every planner may use."""
