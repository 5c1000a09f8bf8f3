"""What notebooks and scripts call: one call from data to a model, tables that show themselves, files to keep.

Each mirrors a command: the same settings under the same names, the same checks, the same figures.
"""
