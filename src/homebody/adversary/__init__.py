"""Looking at ourselves as others would: what leaves a device, and what can be read from it."""
