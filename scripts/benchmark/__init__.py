"""What `scripts/bench.py` is made of: model, files, cases, stopwatch and report."""
