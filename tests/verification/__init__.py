"""Tests of ``ckpttool.verification``: what is wrong, what differs."""
