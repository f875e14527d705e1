"""Key-value caches that hold a tree of tokens until it is decided."""
