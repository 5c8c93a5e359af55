"""Tests of `ckpttool.checkpoint`."""
