"""The version of the Python package and of the dbt macros that belong to it."""

__version__ = "0.1.0"
