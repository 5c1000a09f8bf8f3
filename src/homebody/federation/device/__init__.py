"""The device's processes, and the home that keeps people's histories."""
