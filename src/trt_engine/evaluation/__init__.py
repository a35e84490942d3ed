"""Accuracy of an engine on a dataset."""
