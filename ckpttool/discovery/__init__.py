"""The step from a path to a catalog: the files of a checkpoint, and what their headers say."""
