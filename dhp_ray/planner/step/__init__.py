"""`sync=step`: the whole batch under one makespan, without barriers in between."""
