"""Server and devices as processes."""
