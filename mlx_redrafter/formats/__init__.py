"""File formats: read and validate."""
