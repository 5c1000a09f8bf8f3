"""Server and devices as real processes."""
