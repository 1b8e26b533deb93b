"""Folders whose weights others have put into few bits: a file a format, see format.py."""
