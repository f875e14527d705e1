"""The machine underneath: BLAS, cache folder, default type, whole-folder writes."""
