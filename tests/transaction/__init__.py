"""Tests of ``ckpttool.transaction``: what makes a set of outputs whole."""
