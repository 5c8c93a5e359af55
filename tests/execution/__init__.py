"""Tests of ``ckpttool.execution``: a plan to files."""
