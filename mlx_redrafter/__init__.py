"""ReDrafter speculative decoding on MLX: the same text, faster."""

__version__ = "0.1.0"
