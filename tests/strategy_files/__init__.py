"""Tests of ``ckpttool.strategy_files``: strategy files, read and written."""
