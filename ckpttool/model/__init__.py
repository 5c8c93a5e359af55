"""Nouns and arithmetic: regions, layouts, tensors, strategies, plans.  No disk."""
