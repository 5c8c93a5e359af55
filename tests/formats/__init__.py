"""Tests of ``ckpttool.formats``: codecs of headers."""
