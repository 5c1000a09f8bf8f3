"""One app of a person's on a device: it holds a view of them, and works on nothing else."""
