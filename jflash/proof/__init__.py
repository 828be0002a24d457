"""One table of cases and one rule of tolerance: for tests, the self-check and the benchmarks."""
