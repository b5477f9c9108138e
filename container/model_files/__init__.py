"""Finds, downloads and unpacks the model's files. Imports `container.configuration`."""
