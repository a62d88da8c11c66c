"""What the parts of a cluster say to each other: frames, steps, settings and ports. Imports no platform."""
