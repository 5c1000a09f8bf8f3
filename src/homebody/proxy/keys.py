"""Keys that sign reports, by the name under which a proxy's operator and its devices look for them."""

from __future__ import annotations

from homebody.runtime.report_keys import make_report_key, read_report_key, read_report_pub

__all__ = ["make_report_key", "read_report_key", "read_report_pub"]
