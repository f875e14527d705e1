"""The command line: one file a verb; each parses, calls the library and renders."""
