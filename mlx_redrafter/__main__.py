"""`python -m mlx_redrafter` and the `mlx-redrafter` script."""

from mlx_redrafter.cli.main import main

if __name__ == "__main__":
    main()
