"""From a path to a catalog: which files make up a checkpoint, and what their headers say."""
