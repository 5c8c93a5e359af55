"""Tests of ``ckpttool.planning``: catalog and strategies to a plan."""
