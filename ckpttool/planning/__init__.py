"""The step from catalog and strategies to a plan: full shapes, owners, checks, targets."""
