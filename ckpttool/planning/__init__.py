"""From catalog and strategies to a plan: full shapes, owners, checks, targets."""
