"""Adapters to packages that run models, one for each."""
