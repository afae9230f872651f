"""Many runs: a grid of settings here or on a cluster, and masking spaces at the same budget."""
