"""What is wrong with a checkpoint, and how two of them differ."""
