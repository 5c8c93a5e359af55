"""Verify a checkpoint, describe it, and compare two of them."""
