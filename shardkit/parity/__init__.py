"""Say where two runs part, why, and since which version."""
