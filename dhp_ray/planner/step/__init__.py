"""`sync=step`: the whole batch under one makespan, without a barrier inside."""
