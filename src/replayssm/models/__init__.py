"""Adapters from model code to the algebra, and the bundled tiny models."""
