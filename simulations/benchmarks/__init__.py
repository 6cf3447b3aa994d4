"""Benchmarks that others have published, and our own of which method to take: one module each."""
