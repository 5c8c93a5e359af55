"""Tests of ``ckpttool.discovery``: a path to a catalog."""
