"""The bytes of tensors and files: regions, comparisons, samples, checksums, staged files."""
