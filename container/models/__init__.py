"""The model's files: found, downloaded, unpacked. Imports `container.configuration`."""
