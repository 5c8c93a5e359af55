"""Strategy files: how parameters are sharded, read from MindSpore's files or written by hand."""
