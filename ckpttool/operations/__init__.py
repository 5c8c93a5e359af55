"""What a person asks for: inspect, verify and diff, each with its answer."""
