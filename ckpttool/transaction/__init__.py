"""Complete or resumable sets of outputs: manifest, journal, resuming, array jobs."""
