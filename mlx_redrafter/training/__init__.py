"""Distil a drafter: corpus -> hidden states of the frozen target -> soft labels -> drafter."""
