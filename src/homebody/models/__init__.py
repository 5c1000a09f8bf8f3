"""Plain torch mathematics that methods share."""
