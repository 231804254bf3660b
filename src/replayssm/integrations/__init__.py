"""Bridges to the libraries that models live in."""
