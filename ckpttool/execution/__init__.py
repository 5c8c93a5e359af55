"""Execute plans: copying, limits of memory, and the executors that do the work."""
