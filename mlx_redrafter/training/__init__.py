"""Distils a drafter from a target."""
