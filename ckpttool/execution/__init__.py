"""From a plan to files: copying, memory, and the executors that do the work."""
