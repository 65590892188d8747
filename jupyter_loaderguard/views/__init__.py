"""Drawings of what model.py holds; they know nothing else."""
