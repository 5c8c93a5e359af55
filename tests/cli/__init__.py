"""Tests of ``ckpttool.cli``: what people see."""
