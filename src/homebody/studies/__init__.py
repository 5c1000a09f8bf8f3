"""Many runs that belong together: each is kept, none is done twice, and a kill costs little."""

from homebody.studies.cells import CellProgress, cell_key, code_version, commit, run_cells

__all__ = ["CellProgress", "cell_key", "code_version", "commit", "run_cells"]
