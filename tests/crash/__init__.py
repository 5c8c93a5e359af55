"""Tests of kills and faults."""
