"""The version of the application, as written into every delivery event."""

__version__ = "0.1.0"
