"""What every service of the federation shares: web, certificates, keys, logs and connection limits."""
