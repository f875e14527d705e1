"""Paired measurement of drafting against plain decoding."""
