"""Writes targets and drafters in the formats that others read."""
