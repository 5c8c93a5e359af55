"""Sets of outputs that are complete or can be resumed: states, record of a run, manifest."""
