"""The shuffling proxy: it takes sealed reports from devices, mixes those of many, and passes them on without a sender.

It reads no report. It knows who reports and when; whom it passes reports to reads them, and learns no sender.
"""
