"""Strategy files: MindSpore's, read and written, and hand-written ones."""
