"""What MLX computes on."""


def default_dtype() -> str:
    """The fast floating-point type: only float32 uses a BLAS on the CPU backend."""
    import mlx.core as mx

    return "bfloat16" if mx.default_device().type == mx.DeviceType.gpu else "float32"
