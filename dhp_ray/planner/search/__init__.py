"""The search of `dhp`: a target from the lower bound, one constructor for each mode, one improver for both."""
