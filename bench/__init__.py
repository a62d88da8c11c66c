"""Measurements: ratios taken in one run, one JSON object on the last line."""
