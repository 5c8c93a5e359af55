"""The tests of ckpttool, and the readers and the oracle they judge by."""
