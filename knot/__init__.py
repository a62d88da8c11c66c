"""The `.knot` container and everything about a model file."""
