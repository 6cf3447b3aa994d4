"""Published benchmarks, and a benchmark of which method to choose: one module each."""
