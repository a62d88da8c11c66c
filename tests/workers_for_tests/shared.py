"""A module with a global of its own."""

values = []
