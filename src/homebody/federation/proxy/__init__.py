"""The shuffling proxy: it collects sealed reports of many devices, mixes them, and passes them on without senders.

It knows who reports and when, but cannot read a report. The next hop reads reports, but does not learn who sent them.
"""
