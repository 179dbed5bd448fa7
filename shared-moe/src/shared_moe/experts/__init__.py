"""Expert networks: grouped weights, low-rank factors, adapters."""
