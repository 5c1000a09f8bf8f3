"""The server's processes: supervisor, trainer, intake, and what their operator does."""
