"""Flower carries letters between the server and its devices."""
