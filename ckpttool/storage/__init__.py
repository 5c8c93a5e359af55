"""Where the bytes are: finding the files of a checkpoint, and moving bytes between them."""
