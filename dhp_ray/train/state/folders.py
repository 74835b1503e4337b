"""Where a save lies in the run folder: known to the ranks that write it and, without torch, to the driver that writes its manifest."""


def files_of(step: int, generation: int) -> str:
    """The folder of the tensors of a save; generation 0 is of files from before each generation had its own folder."""
    return f"checkpoints/step_{step:06d}" + (f"/generation_{generation}" if generation else "")
