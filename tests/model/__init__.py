"""Tests of ``ckpttool.model``: nouns and arithmetic."""
