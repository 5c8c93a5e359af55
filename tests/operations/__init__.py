"""Tests of ``ckpttool.operations``: what is wrong, what differs."""
