"""Who does it: plans are made, checked against the disk, and carried out on an executor."""
