"""Response templates: parsers of answers as data, from a checkpoint or from `formats.py`."""
