"""Checks and conversions of arguments that several doors of the package share."""
