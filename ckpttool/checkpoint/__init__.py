"""The step from the files of a checkpoint and its strategy to full tensors."""
