"""Tests of ``ckpttool.storage``: bytes: regions, hashes, files."""
