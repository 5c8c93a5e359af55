"""What makes a set of outputs whole: manifest, journal, resuming, array jobs."""
