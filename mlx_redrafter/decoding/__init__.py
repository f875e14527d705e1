"""Tokens in, tokens out: knows no tokenizer and prints nothing."""
